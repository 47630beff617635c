"""A hostile team has a shard: its code runs there as itself, and nowhere on the index server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import psycopg2
import pytest
from psycopg2.extensions import make_dsn, parse_dsn
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import drop, lifecycle
from airflow_roir.errors import InvalidInput, RoirError
from airflow_roir.options import VerifyOptions
from airflow_roir.shards.ship.shipping import Shipper, ship_once
from servers.shards import Shards, run_sql
from tests.engine.hostile import DOORS, HIS, PLAIN, QUIET, ROWS, SCENE
from tests.shards import apart
from tests.shards.conftest import Make

SONG = "1); SELECT evil.who(); --"
# Statements that the hostile owner runs once the table is captured.
LATER: dict[str, tuple[str, ...]] = {
    "triggers on what captures": (
        "CREATE FUNCTION evil.also() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM evil.try(); RETURN NEW; END $$",
        *(
            f"CREATE TRIGGER also BEFORE INSERT OR UPDATE ON roir_shard.{name} FOR EACH ROW "
            "EXECUTE FUNCTION evil.also()"
            for name in ("home", "outbox", "mark")
        ),
    ),
    "what captures says another thing": (
        "CREATE OR REPLACE FUNCTION roir_shard.capture_problem(outbox text) RETURNS text LANGUAGE plpgsql AS "
        f"$$ BEGIN PERFORM evil.try(); RETURN '{SONG}'; END $$",
        "CREATE OR REPLACE FUNCTION roir_shard.check_owners(outbox text) RETURNS void LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM evil.try(); END $$",
        "CREATE OR REPLACE FUNCTION roir_shard.leaves(source oid) RETURNS jsonb LANGUAGE sql AS "
        f"$$ SELECT jsonb_build_object('1', evil.try(), source::text, '{SONG}') $$",
    ),
    "names that are statements": (
        f"UPDATE roir_shard.outbox SET index_name = '{SONG}', server = '{SONG}', announced_by = 'client', "
        f"announcing = '{SONG}', leaves = '{{\"1\": \"{SONG}\"}}', bounds = "
        f'\'{{"1": {{"condition": "evil.try()", "levels": "evil.try()"}}}}\'',
    ),
    "a view in place of the table": (
        "ALTER TABLE evil.t RENAME TO hidden",
        "CREATE VIEW evil.t AS SELECT * FROM evil.hidden WHERE evil.any(k)",
    ),
    "a rule": ("CREATE RULE r AS ON INSERT TO evil.t DO ALSO SELECT evil.try()",),
    "functions and operators of the same names": (
        "CREATE FUNCTION public.unnest(text[]) RETURNS SETOF text LANGUAGE sql AS 'SELECT evil.try()::text'",
        "CREATE FUNCTION public.equal(int, int) RETURNS bool LANGUAGE sql AS 'SELECT evil.try()'",
        "CREATE OPERATOR public.= (LEFTARG = int, RIGHTARG = int, FUNCTION = public.equal)",
    ),
}


@pytest.fixture
def scene(shards: Make) -> Iterator[tuple[Shards, str]]:
    """Shard s0 belongs to the hostile owner, whose role also exists, without rights, on the index server. Also the
    superuser's DSN of s0."""
    made = shards(2, "SELECT 1")
    [(database,)] = made.ask("SELECT current_database()", shard="s0")
    names = {"owner": f"owner_{database}", "victim": f"victim_{database}"}
    superuser = made.dsns["s0"]
    run_sql(superuser, *(f"CREATE ROLE {name} LOGIN" for name in names.values()))
    run_sql(
        superuser,
        f"ALTER DATABASE {database} SET constraint_exclusion = on",
        f"GRANT ALL ON DATABASE {database} TO {names['owner']}",
        f"GRANT ALL ON SCHEMA public TO {names['owner']}",
    )
    for dsn in (superuser, made.index):
        run_sql(dsn, *(one.format(**names) for one in SCENE))
        his = make_dsn(**{**parse_dsn(dsn), "user": names["owner"]})
        run_sql(his, *(one.replace("{owner}", names["owner"]) for one in HIS))
    own = make_dsn(**{**parse_dsn(superuser), "user": names["owner"]})
    yield Shards(made.index, {"s0": own, "s1": made.dsns["s1"]}), superuser
    for dsn in (made.index, superuser):
        run_sql(dsn, *(f"DROP OWNED BY {name} CASCADE" for name in names.values()))
    run_sql(superuser, *(f"DROP ROLE {name}" for name in names.values()))


def heard(made: Shards, superuser: str) -> list[str]:
    """The places where the owner's code ran and must not have."""
    asked = f"SELECT {', '.join(f'(SELECT is_called FROM evil.{one})' for one in ('as_owner', 'as_another', 'gains'))}"
    [(index, another, gains)] = made.ask(asked)
    [(_, other, more)] = Shards(superuser, {}).ask(asked)
    told = {"index server": index or another or gains, "as another": other, "gains": more}
    return [name for name, one in told.items() if one]


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("door", [*DOORS, *LATER])
def test_his_code_runs_as_himself_and_nowhere_else(scene: tuple[Shards, str], door: str) -> None:
    made, superuser = scene
    made.run(*DOORS.get(door, (PLAIN, ROWS)), only="s0")
    apart.add(made, "s0")
    refused = False
    try:
        _, run = apart.begin(made, table="evil.t", shards=["s0"], ranges=2)
        apart.finish_all(made, run)
    except InvalidInput:
        refused = True
    with suppress(psycopg2.Error):
        made.run(*LATER.get(door, ()), only="s0")
    if not refused:
        for step in (
            lambda: made.run("UPDATE evil.t SET v = v WHERE id < 5; DELETE FROM evil.t WHERE id = 7", only="s0"),
            lambda: ship_once(Shipper(made.database)),
            lambda: lifecycle.verify(made.database, "public.ix", VerifyOptions(), "test"),
            lambda: made.run("ALTER TABLE evil.t DETACH PARTITION evil.t1", only="s0"),
            lambda: ship_once(Shipper(made.database)),
            lambda: apart.begin(made, keys=None, include=None, table=None),
            lambda: drop.drop_index(made.database, "public.ix", "test"),
        ):
            with suppress(RoirError, DBAPIError, psycopg2.Error):
                step()
    assert heard(made, superuser) == []
    [(ran,)] = Shards(superuser, {}).ask("SELECT is_called FROM evil.as_owner")
    assert ran or refused or door in (*QUIET, *LATER)
