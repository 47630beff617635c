"""A dry run together with the expected time of the build: for `roir plan`, and for the first lines of prepare."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import dry_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.early import hashing
from airflow_roir.engine.forecast import trial as trials
from airflow_roir.engine.forecast import worth as worths
from airflow_roir.engine.forecast.expectation import Expectation, expect
from airflow_roir.engine.forecast.trial import Trial
from airflow_roir.engine.forecast.worth import Worth
from airflow_roir.engine.prepare import Foreseen
from airflow_roir.engine.scan.findings import DryRun
from airflow_roir.operation import Kind
from airflow_roir.options import BuildOptions


@dataclass(frozen=True, kw_only=True)
class Forecast(DryRun):
    """A dry run with its forecast. trial: None if none was wanted, a text with the reason if none was possible.

    worth: whether the index will pay for look-ups in general; None over shards.
    """

    expectation: Expectation
    worth: Worth | None
    trial: Trial | str | None


def run(
    database: Database,
    definition: IndexDefinition,
    options: BuildOptions,
    with_trial: bool = False,
    on_spark: bool = True,
) -> Forecast:
    """Does a dry run, and forecasts the time of the build. with_trial: copy some rows and roll them back.

    on_spark: False if threads of the command will do the work.

    Raises all that `dry_run.run` raises.
    """
    seen: list[tuple[Expectation, Trial | str | None, Worth | None]] = []

    def look(connection: Connection, dry: DryRun) -> None:
        tried: Trial | str | None = None
        if with_trial and dry.survey is not None:
            tried = "nothing of a shard's rows is tried"
        elif with_trial:
            tried = trials.attempt(connection, dry.source, dry.entry)
        expected = _expected(connection, dry, options, tried if isinstance(tried, Trial) else None, on_spark)
        seen.append((expected, tried, worths.of_index(connection, dry)))

    dry = dry_run.run(database, definition, options, also=look)
    # Each attempt for the lock has looked, also those that failed; the last look counts.
    expectation, trial, worth = seen[-1]
    found = {field.name: getattr(dry, field.name) for field in fields(dry)}
    return Forecast(**found, expectation=expectation, trial=trial, worth=worth)


def foresee(connection: Connection, dry: DryRun, options: BuildOptions, on_spark: bool = True) -> Foreseen:
    """The lines before a build begins: its time, whether a new index pays, whether duplicates can't be found early.

    on_spark: False if threads of the command do the work.
    """
    untold = hashing.untold(connection, dry.entry)
    is_new = dry.kind == Kind.CREATE and not options.census
    worth = worths.of_index(connection, dry) if is_new else None
    found = [f"expected: {_expected(connection, dry, options, on_spark=on_spark)}"]
    found += [] if worth is None else [f"will it pay: {worth}"]
    found += [] if untold is None else [untold]
    return Foreseen(found, None if worth is None else str(worth))


def _expected(
    connection: Connection, dry: DryRun, options: BuildOptions, trial: Trial | None = None, on_spark: bool = True
) -> Expectation:
    return expect(connection, dry.source, dry.plan, options, dry.index_id, trial, on_spark)
