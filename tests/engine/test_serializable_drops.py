"""SERIALIZABLE transactions beside the drop of what one of them has read: what PostgreSQL refuses stays refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import psycopg2.errors
import pytest

from airflow_roir.engine import clean_up, drop, revert
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot import index
from airflow_roir.engine.verify import record
from airflow_roir.errors import InvalidInput, LockNotAcquired, NotFound
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)


def reverted(database: Database) -> None:
    """Retires the generation that was read; its revert window is over."""
    revert.revert(database, "ix", "test")
    report = clean_up.clean_up(database)
    assert report.generations_dropped == 0
    assert any("SERIALIZABLE" in line for line in report.waiting), report


def dropped(database: Database) -> None:
    """Drops the index: the view is gone at once."""
    with pytest.raises(LockNotAcquired, match="SERIALIZABLE"):
        drop.drop_index(database, "ix", "test", patience_s=0)
    report = clean_up.clean_up(database)
    assert (report.generations_dropped, report.warnings) == (1, []), "the older one, which nobody has read"
    [one] = index.indexes(database)
    assert (one.state, one.revert_until) == ("not published", None), "nothing shows it again"
    assert any("its view is dropped" in line and "roir clean-up" in line for line in one.warnings)
    with pytest.raises(LockNotAcquired, match="SERIALIZABLE"):
        drop.drop_index(database, "ix", "test", patience_s=0)
    # Seen to advise roir resume, and to speak of a revert window.
    commands: list[Callable[[], object]] = [
        lambda: record.begin(database, "ix", VerifyOptions(), "test"),
        lambda: revert.revert(database, "ix", "test"),
    ]
    for command in commands:
        with pytest.raises(NotFound, match="its entries are kept, and maintained"):
            command()
    # Seen to bring the index back.
    for definition in (("ix", None, None), ("ix", "t", "k")):
        with pytest.raises(InvalidInput, match=r"its entries are kept, and maintained.*Then build the index"):
            steps.begin(database, *definition)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("go", [reverted, dropped], ids=["revert", "drop"])
def test_a_write_that_a_reader_of_a_dropped_generation_has_missed_is_refused(
    database: Database, dsn: str, go: Callable[[Database], None]
) -> None:
    """Each of two transactions misses the other one's writes. Seen to commit both."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT i, i::text, i FROM generate_series(1, 1000) i",
        "CREATE TABLE notes (note text)",
    )
    for table in ("t", None):
        keys = None if table is None else "k"
        steps.make_index(database, table=table, keys=keys, revert_window_s=0)
    with closing(steps.session(dsn, "SERIALIZABLE")) as writer, closing(steps.session(dsn, "SERIALIZABLE")) as reader:
        assert sql(writer, "SELECT * FROM notes") == []
        assert sql(reader, "SELECT * FROM ix WHERE k = 'new'") == []
        sql(reader, "INSERT INTO notes VALUES ('there is no new one')")
        reader.commit()
        go(database)
        with pytest.raises(psycopg2.errors.SerializationFailure):
            sql(writer, "INSERT INTO t VALUES (0, 'new', 0)")
    for _ in range(2):
        clean_up.clean_up(database)
    shown = 1 if go is reverted else 0
    with closing(steps.session(dsn)) as user:
        bases = "SELECT count(*) FROM pg_class WHERE relkind = 'p' AND relnamespace = 'roir_data'::regnamespace"
        assert sql(user, bases) == [(shown,)]
        assert sql(user, "SELECT count(*) FROM pg_trigger WHERE tgrelid = 't'::regclass") == [(2 * shown,)]
