"""The command `plan`: shows what a build will need and do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from airflow_roir.cli.app import (
    AsJson,
    Index,
    WithoutSpark,
    app,
    database_of,
    print_json,
    say,
    show,
    show_as_it_is,
)
from airflow_roir.cli.defined import Defined, definition_of
from airflow_roir.cli.given import Given, Wrong, in_flags, takes
from airflow_roir.definition import IndexDefinition, key_list
from airflow_roir.errors import InvalidInput
from airflow_roir.options import BuildOptions
from airflow_roir.quantity import counted, size

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database
    from airflow_roir.engine.forecast.forecast import Forecast
    from airflow_roir.engine.forecast.locks import Lock
    from airflow_roir.engine.forecast.space import Space
    from airflow_roir.engine.generation.entry import Entry
    from airflow_roir.engine.sessions.limits import Limits
    from airflow_roir.shards.copy.survey import Survey

# To count writes for longer, use other tools.
MOST_MEASURED_S = 3_600


@app.command()
@takes(BuildOptions, lambda option: option.planned)
def plan(
    context: typer.Context,
    index: Index,
    *,
    defined: Defined,
    given: Given,
    wrong: Wrong,
    measure: Annotated[
        int, typer.Option(help="Count the table's writes for this many seconds; 0 asks the server's statistics.")
    ] = 0,
    query: Annotated[
        str | None, typer.Option(help="A SELECT that the index is meant for: says whether the index serves it.")
    ] = None,
    run_query: Annotated[
        bool, typer.Option("--run-query", help="Also run the query, read only, for 5 s at most, and time lookups.")
    ] = False,
    without_spark: WithoutSpark = False,
    sql: Annotated[bool, typer.Option("--sql", help="Print the DDL of all phases, for review.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a build will do, take and lack. Changes nothing."""
    from sqlalchemy.exc import DBAPIError

    from airflow_roir.engine.forecast import ddl, forecast, locks, objections, signals, worth
    from airflow_roir.engine.governor.surroundings import Surroundings

    if not 0 <= measure <= MOST_MEASURED_S:
        wrong.add(
            InvalidInput(f"--measure is {measure}; it must be a whole number from 0 to {MOST_MEASURED_S}, in seconds")
        )
    if run_query and query is None:
        wrong.add(InvalidInput("--run-query runs the query that --query names: give both"))
    if sql and query is not None:
        wrong.add(InvalidInput("--sql prints the DDL alone: leave --query out, or --sql"))
    definition = definition_of(index, defined, wrong)
    options = BuildOptions.asked(**given)
    database = database_of(context)
    try:
        against = objections.find(database, definition, options, wrong)
    except DBAPIError:
        # The database can't be asked.
        wrong.settle()
        raise
    if against:
        pays = against.worth
        if as_json:
            print_json(against.as_dict() | (pays.as_dict() if pays is not None else {}))
        say(against.verdict())
        for right in against.missing:
            say(f"missing: {right}")
        for refused in against.refused:
            say(in_flags(f"refused: {refused}"))
        if pays is not None:
            say(f"will it pay: {pays}")
        raise typer.Exit(InvalidInput.exit_code)
    dry = forecast.run(database, definition, options, with_trial=not sql, on_spark=not without_spark)
    if sql and dry.survey is not None:
        raise InvalidInput("the plan can't print the DDL of an index over shards: leave --sql out")
    if sql:
        show_as_it_is(ddl.as_script(ddl.foresee(database, dry, options)))
        return
    pays = dry.worth
    if query is not None:
        pays = worth.of_query(database, dry, pays, query, run_query)
    foreseen = _locks(dry, options, database.limits)
    space = _space(database, dry, options, measure)
    # Replicas with DSNs of their own are read, too.
    seen = signals.look(database, Surroundings.of_environment())
    facts = _facts(database, dry, options, as_json)
    if as_json:
        room = space.as_dict() if space is not None else {}
        told = {"trial": _trial(dry), **room, "locks": [lock.as_dict() for lock in foreseen]}
        told |= pays.as_dict() if pays is not None else {"worth": None}
        print_json(facts | dry.expectation.as_dict() | told | seen.as_dict() | against.as_dict())
        return
    # As in the output of the seal.
    facts["segments"] = f"{facts['segments']}, and one for keys that are NULL"
    facts |= space.lines() if space is not None else {"space": f"unknown: {_trial(dry)}"}
    facts["throttle"] = seen.line() if dry.survey is None else f"of the index server: {seen.line()}"
    # The verdict comes first, then its reasons.
    for name, lines in (pays.lines() if pays is not None else {}).items():
        _show_lines(name, lines)
    for name, value in facts.items():
        shown = ", ".join(value) or "none" if isinstance(value, list) else value
        show(f"{name.replace('_', ' '):16} {shown}")
    _show_lines("locks", locks.lines(foreseen))


def _locks(dry: Forecast, options: BuildOptions, limits: Limits) -> list[Lock]:
    """The locks on the user's table and the view."""
    from airflow_roir.engine.forecast import locks

    if dry.survey is None:
        return locks.foresee(dry.source, dry.index, dry.kind, options, limits)
    from airflow_roir.shards.copy import dry_run

    return dry_run.foresee(_surveyed(dry).any_source, dry.index, dry.kind, options, limits)


def _surveyed(dry: Forecast) -> Survey:
    from airflow_roir.shards.copy.survey import Survey

    assert isinstance(dry.survey, Survey)
    return dry.survey


def _shards(found: Survey, as_json: bool) -> Any:
    plans = {one.shard.name: one.plan for one in found.shards}
    if as_json:
        return {
            name: {"rows_estimate": plan.rows, "source_bytes": plan.source_bytes, "ranges": plan.ranges}
            for name, plan in plans.items()
        }
    return [
        f"{name}: about {counted(plan.rows, 'row')}, {size(plan.source_bytes)}, {counted(plan.ranges, 'range')}"
        for name, plan in plans.items()
    ]


def _sessions(options: BuildOptions, as_json: bool) -> dict[str, Any]:
    """The sessions that a build and its shipping use on each server."""
    if as_json:
        return {"sessions_per_shard": options.parallelism}
    return {
        "sessions": f"{counted(options.parallelism, 'worker')} of the build at most in a shard (roir build "
        "--shard-parallelism: fewer); later one of roir ship there, and one for it on this server"
    }


def _strict(database: Database, found: Survey, as_json: bool) -> dict[str, Any]:
    """The requirements of strict reads, which `roir announce` turns on later."""
    from airflow_roir.shards.announce import foreign

    needed_by = foreign.needs_by_server(database, found)
    if as_json:
        return {"announce_by_server_needs": needed_by}
    if any(one.source.partitioned for one in found.shards):
        return {"strict_reads": "not possible: the table has partitions"}
    lacking = {name: needed for name, needed in needed_by.items() if needed}
    if not lacking:
        return {
            "strict_reads": "possible later, by roir announce --by server or client: nothing is missing in the shards"
        }
    first, *rest = lacking.values()
    more = f"; and something in {counted(len(rest), 'more shard')} (--json)" if rest else ""
    told = f"{'; '.join(first)}{more}"
    return {"strict_reads": f"possible later, by roir announce --by client; --by server needs more: {told}"}


def _space(database: Database, dry: Forecast, options: BuildOptions, measure: int) -> Space | None:
    from airflow_roir.engine.forecast import space, writes

    if dry.trial is None or isinstance(dry.trial, str):
        return None
    rate = writes.counted(database, dry.source, measure) if measure else None
    with database.transaction() as connection:
        rate = rate or writes.by_statistics(connection, dry.source)
        return space.foresee(connection, dry.plan, options, dry.trial, rate, dry.index_id)


def _trial(dry: Forecast) -> Any:
    """The measured values, or why nothing was measured, for JSON."""
    trial = dry.trial
    if trial is None or isinstance(trial, str):
        return trial
    return {"rows": trial.rows, "row_microseconds": round(trial.row_s * 1e6, 2)}


def _show_lines(name: str, lines: Sequence[str]) -> None:
    for place, line in enumerate(lines):
        show(f"{'' if place else name:16} {line}")


def _columns(names: Sequence[str], entry: Entry, as_json: bool) -> list[str]:
    """Key or included columns; for people, expressions with their names."""
    texts = {column.source: column.text for column in entry.columns if column.text}
    return list(names) if as_json else [key_list([name], texts) for name in names]


def _facts(database: Database, dry: Forecast, options: BuildOptions, as_json: bool) -> dict[str, Any]:
    from airflow_roir.engine.control import slow_options
    from airflow_roir.engine.early import hashing
    from airflow_roir.engine.readers import view
    from airflow_roir.engine.schema import schema
    from airflow_roir.engine.sessions.room import room_of
    from airflow_roir.engine.source import checks

    with database.transaction() as connection:
        guarded = schema.is_guarded(connection)
        untried = checks.untried_server(connection)
        untold = hashing.untold(connection, dry.entry)
        crowded = room_of(connection).warning(options.parallelism)
    entry = dry.entry
    uncovered = [entry.columns[i].source for i in entry.included_positions if not entry.columns[i].covered]
    facts: dict[str, Any] = {
        "index": str(dry.index),
        "kind": dry.kind,
        "source": str(dry.source.name),
        "key": _columns(dry.definition.key, dry.entry, as_json),
        "primary_key": list(dry.source.primary_key),
        "include": _columns(dry.definition.include, dry.entry, as_json),
        **({"where": dry.entry.condition.text} if dry.entry.condition else {}),
        "not_covered": uncovered,
        **_uniqueness(dry.definition, options, as_json),
        "entry_size": str(dry.entry_size),
        "rows_estimate": dry.plan.rows,
        "source_bytes": dry.plan.source_bytes,
        "ranges": dry.plan.ranges,
        "segments": dry.plan.segments,
        "scan": f"{dry.choice.scan.value}: {dry.choice.why}",
        "parallelism": options.parallelism,
        "expects": str(dry.expectation),
        # DDL that removes or brings rows, past every trigger.
        "uncaptured_ddl": "refused" if guarded else "detected; a superuser can have it refused: SELECT roir.guard()",
        "view": view.statement(dry.index, 0, entry, dry.kind == "rebuild").replace("g0", "g<id>"),
    }
    if dry.survey is not None:
        found = _surveyed(dry)
        facts |= {
            "source": str(found.table),
            "shards": _shards(found, as_json),
            **_sessions(options, as_json),
            **_strict(database, found, as_json),
        }
        # Each poll looks at the capture there.
        del facts["uncaptured_ddl"]
    if untold:
        facts["early"] = untold
    if untried:
        facts["server"] = untried
    if warnings := slow_options.slow(options, dry.plan.rows, dry.plan.ranges) + ([crowded] if crowded else []):
        facts["slow"] = warnings
    return facts


def _uniqueness(definition: IndexDefinition, options: BuildOptions, as_json: bool) -> dict[str, Any]:
    """The facts about uniqueness: whether the index is unique, and if so, its options."""
    facts: dict[str, Any] = {"unique": definition.unique}
    if definition.unique and not definition.shards:
        facts |= {
            "nulls_not_distinct": definition.nulls_not_distinct,
            "on_duplicate": options.on_duplicate,
            "census": options.census,
        }
    if as_json:
        return facts
    if not definition.unique:
        return {"unique": "no"}
    if definition.shards:
        return {"unique": "over all shards, once roir announce --by server has looked the keys over"}
    nulls = "NULLs are equal, too" if definition.nulls_not_distinct else "NULLs are never equal"
    return {"unique": f"over all partitions; {nulls}", "on_duplicate": _ON_DUPLICATE[_then(options)]}


_ON_DUPLICATE = {
    "pause": "pauses once all rows that share a key are listed; no write is refused until none does",
    "stop": "pauses at the first rows that share a key; no write is refused until none does",
    "census": "a census: lists all rows that share a key, then removes what was built",
}


def _then(options: BuildOptions) -> str:
    return "census" if options.census else options.on_duplicate
