"""Names that the shell completes, by the variables that a shell sets, and by a real bash."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.conftest import run_sql
from tests.test_cli import ROIR


@pytest.fixture(autouse=True)
def names(dsn: str) -> None:
    run_sql(
        dsn,
        'CREATE SCHEMA "Weird S"',
        """CREATE TABLE "Weird S"."T'1" (id int PRIMARY KEY)""",
        "CREATE TABLE orders (id int PRIMARY KEY) PARTITION BY HASH (id)",
        "CREATE TABLE orders_0 PARTITION OF orders FOR VALUES WITH (MODULUS 1, REMAINDER 0)",
        "INSERT INTO roir.index (schema_name, name, source_oid, key_columns, included_columns) "
        """SELECT 'Weird S', n, 'orders'::regclass::oid, '["id"]', '[]' """
        "FROM unnest('{By Day,by_id}'::text[]) n",
    )


def completed(dsn: str | None, line: str, shell: str = "zsh") -> list[str]:
    """The words for the last word of a line."""
    environment = {name: value for name, value in os.environ.items() if name != "ROIR_DSN"}
    if dsn is not None:
        environment["ROIR_DSN"] = dsn
    words = line.split(" ")
    done = subprocess.run(
        [ROIR],
        env={
            **environment,
            "_ROIR_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", ["status", "pause", "drop", "build"])
def test_indexes_are_completed(dsn: str, command: str) -> None:
    assert completed(dsn, f"roir {command} by") == ['"Weird S"."By Day"', '"Weird S".by_id']
    assert completed(dsn, f"roir {command} By_") == ['"Weird S".by_id']


@pytest.mark.parametrize("command", ["build ix", "plan ix", "doctor"])
def test_tables_are_completed_without_partitions_and_roirs_own(dsn: str, command: str) -> None:
    assert completed(dsn, f"roir {command} --table ") == ["""\"Weird S"."T'1\"""", "public.orders"]


def test_commands_are_completed(dsn: str) -> None:
    assert completed(dsn, "roir doc") == ["doctor"]


@pytest.mark.parametrize("dsn_", [None, "host=/nowhere dbname=x", "no dsn", "host=192.0.2.1 dbname=x"])
def test_a_database_that_does_not_answer_completes_nothing_and_says_nothing(dsn_: str | None) -> None:
    assert completed(dsn_, "roir status b") == []


@pytest.mark.sample(1)
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("roir status by_", ["""'"Weird S".by_id'"""]),
        ("roir status '\"Weird", ['"Weird S"."By Day"', '"Weird S".by_id']),
        ("roir doctor --table T", ["""'"Weird S"."T'"'"'1"'"""]),
        ("roir doctor --table ord", ["public.orders"]),
    ],
)
def test_bash_is_given_names_that_it_reads_as_one_word(dsn: str, line: str, completions: list[str]) -> None:
    script = r"""
eval "$(_ROIR_COMPLETE=source_bash roir)"
IFS=" " read -ra COMP_WORDS <<< "$1"
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_roir roir
printf '%s\n' "${COMPREPLY[@]}"
"""
    path = f"{Path(ROIR).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", line],
        env={**os.environ, "ROIR_DSN": dsn, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == completions


def test_a_server_that_hangs_lets_the_prompt_go() -> None:
    """It takes the connection and says nothing: without an end of its own the command would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dsn = f"host=127.0.0.1 port={silent.getsockname()[1]} dbname=x sslmode=disable"
        assert completed(dsn, "roir status b") == []
