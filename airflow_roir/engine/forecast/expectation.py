"""The expected time of a build, before it begins: seconds of work, and seconds before and after Spark's work.

Both are ranges: the server's other load can't be known. They come from earlier builds of this database, if there are
any; else the work comes from a trial, or from the time of the plan's sample, and the start from usual times.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import DATA_SCHEMA
from airflow_roir.engine.database import execute
from airflow_roir.engine.forecast.trial import Trial
from airflow_roir.engine.generation.cut import Plan
from airflow_roir.engine.source.source import Source
from airflow_roir.options import BuildOptions
from airflow_roir.quantity import counted, expected

# The last builds that ended in one run, without a limit and little throttled. Older builds would tell about a server
# that has changed since.
EARLIER = """
SELECT coalesce(o.index_id = %(index)s, false) AS same, o.rows_estimate AS rows, o.parallelism,
       coalesce((o.phase_seconds ->> 'prepare')::float8, 0) AS prepare, s.worked,
       extract(epoch FROM o.finished_at - o.started_at)::float8 - s.worked AS beside
  FROM roir.operation o
 CROSS JOIN LATERAL (SELECT coalesce(sum(e.value::float8), 0) AS worked FROM jsonb_each_text(o.phase_seconds) e) s
 WHERE o.kind IN ('create', 'rebuild') AND o.status = 'completed' AND roir.slowed_by(o) = '{}'
   AND NOT EXISTS (SELECT FROM roir.event x
                    WHERE x.operation_id = o.id
                      AND (x.action IN ('pause', 'resume', 'error', 'adopt') OR x.action LIKE 'change %%'))
   AND (SELECT coalesce(sum(l.seconds), 0) FROM roir.throttle_time l WHERE l.operation_id = o.id) <= 0.1 * s.worked
 ORDER BY o.id DESC LIMIT %(most)s
"""
MOST_EARLIER = 20
# The most builds of the same index that count.
MOST_SAME = 3
# A build of another index tells the time of a row if it had this many; with fewer most of the time is constant.
TELLING_ROWS = 50_000
# A build of the same index counts if the table has grown or shrunk since by at most this factor.
MOST_GROWTH = 8.0

# Without earlier builds. Worker-seconds, with the verification. The time of a row is from `make bench` and
# `make bench-curves ARGS="--curves size"`, the rest from `make bench-curves ARGS="--curves control"` and small tables.
CONSTANT_S = 1.0
ROW_S = 3e-6
BYTE_S = 1e-9
# A range's claim and commits, and a leaf's unit of the verification.
RANGE_S = 0.006
LEAF_S = 0.008
# The time of a sampled row on the server where ROW_S was measured: it is read, and sorted for ranges and segments. A
# sample is short: it tells a slow server from a fast one, no more.
SAMPLED_ROW_S = 5.5e-6
FEWEST_SAMPLED = 5_000
SLOWEST, FASTEST = 4.0, 0.7
# A row of a trial is copied and indexed; a build also vacuums it, compares it and commits.
BESIDE = 1.6
# More workers help only if they have cores; the server doesn't say how many it has.
SURE_WORKERS = 2
# More workers than this mostly wait for each other: a build with more counts as one with this many.
MOST_TELLING_WORKERS = 8

# Until the first row, and after the last one: the JVM, its session, the Python workers (`make bench-start`).
START_S = (4.0, 15.0)


@dataclass(frozen=True)
class Span:
    """Seconds: between these in most builds, no promise. by: the source of the figures."""

    low: float
    high: float
    by: str

    def __str__(self) -> str:
        return expected(self.low, self.high)


@dataclass(frozen=True)
class Expectation:
    """work: of all phases, as `phase_seconds` counts it. start: of Spark, with all other time that isn't work; None if
    threads of the command do the work.
    """

    work: Span
    start: Span | None
    advice: str | None = None

    def __str__(self) -> str:
        """One sentence, with advice if the start takes most of the time."""
        if self.start is None:
            return f"{self.work} of work (by {self.work.by}); more on a busy server"
        by = f"by {self.work.by}" if self.work.by == self.start.by else f"by {self.work.by}; {self.start.by}"
        said = f"{self.work} of work, {self.start} of start on Spark ({by}); more on a busy server"
        return f"{said}. {self.advice}" if self.advice else said

    def as_dict(self) -> dict[str, float | str | None]:
        """For JSON."""
        return {
            "expects": str(self),
            "work_seconds_low": round(self.work.low, 1),
            "work_seconds_high": round(self.work.high, 1),
            "work_by": self.work.by,
            "start_seconds_low": None if self.start is None else round(self.start.low, 1),
            "start_seconds_high": None if self.start is None else round(self.start.high, 1),
            "start_by": None if self.start is None else self.start.by,
            "advice": self.advice,
        }


def expect(
    connection: Connection,
    source: Source,
    plan: Plan,
    options: BuildOptions,
    index_id: int | None,
    trial: Trial | None = None,
    on_spark: bool = True,
) -> Expectation:
    """The expected time of a plan's build. index_id: None if the index is new. on_spark: False for threads."""
    earlier = execute(connection, EARLIER, {"index": index_id, "most": MOST_EARLIER}).all()
    work = _as_before(earlier, plan.rows, options.parallelism) or _as_others(earlier, source, plan, options)
    work = work or (by_trial(source, plan, options, trial) if trial is not None else None)
    work = work or by_sample(source, plan, options)
    if options.max_rows_per_second:
        limited = plan.rows / options.max_rows_per_second
        work = replace(work, low=max(work.low, limited), high=max(work.high, limited * 1.2))
    if not on_spark:
        return Expectation(work, None)
    start = _start(earlier)
    return Expectation(work, start, _advice(work, start, source, options))


def _as_before(earlier: Sequence[Row[Any]], rows: int, parallelism: int) -> Span | None:
    """The work by earlier builds of the same index; None without comparable ones."""
    spans = [
        _scaled(one, rows / one.rows, parallelism)
        for one in [one for one in earlier if one.same and one.rows][:MOST_SAME]
        if 1 / MOST_GROWTH <= rows / one.rows <= MOST_GROWTH
    ]
    if not spans:
        return None
    by = f"the last {counted(len(spans), 'build')} of this index" if len(spans) > 1 else "the last build of this index"
    return Span(0.7 * min(low for low, _ in spans), 1.5 * max(high for _, high in spans), by)


def _scaled(one: Row[Any], growth: float, parallelism: int) -> tuple[float, float]:
    """The bounds of an earlier build's work, scaled: more workers may help or not, fewer may hurt or not."""
    seconds = one.prepare + (one.worked - one.prepare) * growth
    fewer = _telling(one.parallelism) / _telling(parallelism)
    return seconds * min(1.0, fewer), seconds * max(1.0, fewer)


def _telling(parallelism: int) -> int:
    return min(parallelism, MOST_TELLING_WORKERS)


def _as_others(earlier: Sequence[Row[Any]], source: Source, plan: Plan, options: BuildOptions) -> Span | None:
    """The work by the time of a row in builds of other indexes of the database; None without large ones."""
    telling = [one for one in earlier if one.rows >= TELLING_ROWS]
    if not telling:
        return None
    row = statistics.median((one.worked - one.prepare) * _telling(one.parallelism) / one.rows for one in telling)
    low, high = _of_rows(source, plan, options, row * plan.rows)
    return Span(0.5 * low, 2 * high, f"{counted(len(telling), 'build')} of other indexes")


def by_trial(source: Source, plan: Plan, options: BuildOptions, trial: Trial) -> Span | None:
    """The work by a trial, which copied and indexed some rows; None if these were too few."""
    if trial.timed < FEWEST_SAMPLED:
        return None
    low, high = _of_rows(source, plan, options, plan.rows * trial.row_s * BESIDE)
    return Span(0.6 * low, 2 * high, f"a trial of {counted(trial.timed, 'row')}")


def by_sample(source: Source, plan: Plan, options: BuildOptions) -> Span:
    """The work by the time of a row in the plan's sample."""
    pace, by = 1.0, "what is usual"
    if plan.sampled >= FEWEST_SAMPLED and plan.sample_seconds:
        pace = min(max(plan.sample_seconds / plan.sampled / SAMPLED_ROW_S, FASTEST), SLOWEST)
        by = "the plan's sample"
    low, high = _of_rows(source, plan, options, pace * (plan.rows * ROW_S + plan.source_bytes * BYTE_S))
    return Span(0.6 * low, 2 * high, by)


def _of_rows(source: Source, plan: Plan, options: BuildOptions, seconds: float) -> tuple[float, float]:
    """The bounds of the work with the cost of each range and leaf. seconds: of one worker, for the rows."""
    seconds += plan.ranges * RANGE_S + len(source.leaves) * LEAF_S
    return (
        CONSTANT_S + seconds / options.parallelism,
        CONSTANT_S + seconds / min(options.parallelism, SURE_WORKERS),
    )


def _start(earlier: Sequence[Row[Any]]) -> Span:
    beside = [max(0.0, one.beside) for one in earlier[:MOST_SAME]]
    if not beside:
        return Span(*START_S, "the start as usual")
    # The median, not the longest: a run that was killed and began again later may be among them.
    by = "the start by the last " + (counted(len(beside), "build") if len(beside) > 1 else "build")
    return Span(0.8 * min(beside), 1.5 * statistics.median(beside), by)


def _advice(work: Span, start: Span, source: Source, options: BuildOptions) -> str | None:
    """The advice if the start takes longer than the work; else None."""
    if start.low + start.high <= work.low + work.high:
        return None
    # With so little work a second worker saves less time than its own process takes.
    ways = ["one worker does (--parallelism 1)"] if options.parallelism > 1 and work.high <= start.low else []
    ways.append("roir build --without-spark begins at once")
    # Not for an index over shards, whose source is a table in a schema of roir's.
    if not source.partitioned and source.name.schema != DATA_SCHEMA:
        ways.append("an index by CREATE INDEX CONCURRENTLY needs no Spark")
    return f"The start takes longer than the work: {', '.join(ways)}"
