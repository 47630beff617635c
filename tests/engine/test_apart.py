"""The seam to indexes over shards: an index over a table of this database needs nothing of their package."""

from __future__ import annotations

import pytest

from airflow_roir.engine import abort, apart, clean_up, drop, lifecycle
from airflow_roir.engine.database import Database
from airflow_roir.engine.generation import feeds
from airflow_roir.engine.verify import apart as verify_apart
from airflow_roir.options import VerifyOptions
from airflow_roir.shards.hooks import Shards
from tests.engine import steps


@pytest.mark.sample(0)
def test_a_core_without_the_package_builds_verifies_aborts_and_drops(
    database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asks in (feeds, apart, verify_apart):
        monkeypatch.setattr(asks, "implementation", verify_apart.ComparedApart)
    steps.make_table(dsn, 200)
    steps.make_index(database, verify="after")
    steps.make_index(database, table=None, keys=None)
    assert lifecycle.verify(database, "ix", VerifyOptions()).is_exact
    _, run = steps.begin(database, table=None, keys=None)
    steps.build_all(database, run)
    abort.abort(database, "ix", "test")
    steps.assert_exact(database)
    drop.drop_index(database, "ix", "test")
    assert clean_up.clean_up(database).waiting == []


def test_the_package_answers_all_that_is_asked() -> None:
    asked = {name for one in Shards.__mro__[1:] for name in vars(one) if not name.startswith("_")}
    assert asked == {name for name in vars(Shards) if not name.startswith("_")}
