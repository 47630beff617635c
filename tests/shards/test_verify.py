"""A verification across servers: what is found, named and repaired; what isn't wrong is never reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from airflow_roir.engine.lifecycle import verify
from airflow_roir.options import VerifyOptions
from tests.shards.conftest import Make
from tests.shards.verified import FILL, TABLE, build


def test_an_index_that_is_right_is_found_right(shards: Make) -> None:
    one = build(shards(3, TABLE, FILL))
    report = verify(one.made.database, "ix")
    assert (report.rows, report.entries, report.found, report.complete) == (1203, 1203, 0, True)


@pytest.mark.by_hand("sweeps")
def test_each_kind_of_damage_is_found_named_and_repaired(shards: Make) -> None:
    one = build(shards(2, TABLE, FILL))
    one.run(
        "DELETE FROM {base} WHERE c2 = 's0' AND c3 IN (7, 10)",
        "UPDATE {base} SET c4 = -1 WHERE c2 = 's1' AND c3 = 1005",
        "INSERT INTO {base} VALUES ('6', 's1', 7, 7), ('6', 'nobody', 1, 1)",
    )
    report = verify(one.made.database, "ix")
    assert (report.missing, report.different, report.extra) == (2, 1, 2)
    assert {(found["kind"], found["primary_key"]["shard"]) for found in report.first} == {
        ("missing", "s0"),
        ("different", "s1"),
        ("extra", "s1"),
        ("extra", "nobody"),
    }
    with one.shipping():
        report = verify(one.made.database, "ix", VerifyOptions(repair=True))
    assert (report.found, report.repaired) == (5, 5)
    assert one.is_exact()


@pytest.mark.by_hand("sweeps")
def test_on_spark_it_finds_and_repairs_the_same(shards: Make) -> None:
    one = build(shards(2, TABLE, FILL))
    one.run("DELETE FROM {base} WHERE c3 % 100 = 7", "UPDATE {base} SET c4 = -1 WHERE c3 = 1005")
    command = ["verify", "ix", "--repair", "--parallelism", "3", "--master", "local[3]", "--json"]
    with one.shipping():
        told = subprocess.run(
            [sys.executable, "-m", "airflow_roir.cli", *command],
            env=os.environ | {"ROIR_DSN": one.made.index},
            capture_output=True,
            text=True,
            check=False,
        )
    assert told.returncode == 0, told.stderr
    report = json.loads(told.stdout)
    assert (report["missing"], report["different"], report["repaired"], report["complete"]) == (8, 1, 9, True)
    assert one.is_exact()
