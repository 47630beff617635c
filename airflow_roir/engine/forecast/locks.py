"""Every lock that an operation takes on the user's tables and views: when, for how long, and the sessions it holds up.

docs/reference/locks.md has the locks of all commands. `tests/engine/test_forecast_locks.py` compares this module with
the locks of a build's sessions, as the server lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from airflow_roir.definition import QualifiedName
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.source.source import Source
from airflow_roir.options import BuildOptions
from airflow_roir.quantity import counted, duration

ACCESS_SHARE = "ACCESS SHARE"
SHARE_ROW_EXCLUSIVE = "SHARE ROW EXCLUSIVE"
ACCESS_EXCLUSIVE = "ACCESS EXCLUSIVE"

SOURCE, LEAF, VIEW = "source", "leaf", "view"
EACH = "each phase"


@dataclass(frozen=True)
class Lock:
    """A lock of one phase. of: `source` (with its partitions), `leaf` (one at a time), or the index's `view`.

    wait_ms: the longest wait of one attempt, while other sessions queue behind it; patience_s: how long it is tried.
    held: how long it is held. holds_up: the sessions that wait for it meanwhile.
    """

    phase: str
    of: str
    on: str
    mode: str
    wait_ms: int
    patience_s: float
    held: str
    holds_up: str

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def foresee(source: Source, view: QualifiedName, kind: str, options: BuildOptions, limits: Limits) -> list[Lock]:
    """The locks of a build, in their order. kind: `create` or `rebuild`."""
    return list(_foreseen(source, view, kind, options, limits))


def lines(foreseen: Sequence[Lock]) -> list[str]:
    """Lines for the user: one for all locks of the same kind, the strongest first."""
    found = []
    strongest = [ACCESS_EXCLUSIVE, SHARE_ROW_EXCLUSIVE, ACCESS_SHARE]
    for mode in strongest:
        for of in (SOURCE, VIEW):
            # A lock on one partition at a time counts with those on the whole source.
            alike = [lock for lock in foreseen if lock.mode == mode and (lock.of == VIEW) == (of == VIEW)]
            if not alike:
                continue
            phases = ", ".join(dict.fromkeys(lock.phase for lock in alike if lock.phase != EACH))
            longest = max(alike, key=lambda lock: lock.patience_s)
            wait = max(lock.wait_ms for lock in alike)
            again = all(lock.patience_s for lock in alike)
            tried = f"in all {duration(longest.patience_s)}" if again else "then again"
            telling = [lock for lock in alike if lock.phase not in (EACH, "plan")] or alike
            held = " or ".join(dict.fromkeys(lock.held.split(",")[0] for lock in telling))
            found.append(
                f"{mode} on {alike[0].on} ({phases}), held {held}: holds up {longest.holds_up}; an attempt waits "
                f"{wait:,} ms at most, {tried}"
            )
    return found


def _foreseen(source: Source, view: QualifiedName, kind: str, options: BuildOptions, limits: Limits) -> Iterator[Lock]:
    partitions = len(source.relations) - 1
    whole = source.sql + (f" and {counted(partitions, 'partition')}" if partitions else "")
    leaf = f"a partition of {source.sql}" if partitions else source.sql
    attempt, patience = options.lock_timeout_ms, float(options.lock_patience_s)
    altering = "only ALTER, TRUNCATE, VACUUM FULL and the like"

    def reading(phase: str, of: str, held: str) -> Lock:
        on = whole if of == SOURCE else leaf
        return Lock(phase, of, on, ACCESS_SHARE, limits.table_lock_ms, 0.0, held, altering)

    def draining(phase: str, held: str) -> Lock:
        return Lock(phase, SOURCE, whole, SHARE_ROW_EXCLUSIVE, attempt, patience, held, "writers, no readers")

    moment = "for a short transaction"
    yield Lock("plan", SOURCE, whole, ACCESS_SHARE, attempt, 5.0, "while it is sampled", altering)
    yield reading(EACH, SOURCE, "for a moment, to see whether it was altered")
    yield draining("prepare", f"{moment}, which makes the triggers")
    yield reading("build", LEAF, "for each batch")
    yield draining("switch", moment)
    if options.verify in ("after", "both"):
        yield reading("verify", SOURCE, "for each unit")
    yield draining("publish", moment)
    if kind == "rebuild":
        yield Lock(
            "publish",
            VIEW,
            view.sql,
            ACCESS_EXCLUSIVE,
            attempt,
            patience,
            moment,
            "readers of the index; it waits for those that read",
        )
    yield Lock(
        "clean-up",
        VIEW,
        view.sql,
        ACCESS_EXCLUSIVE,
        limits.attempt_ms,
        limits.clean_up_s,
        moment,
        "readers of the index; it waits for those that read",
    )
    if kind == "rebuild":
        yield Lock(
            "clean-up",
            SOURCE,
            whole,
            SHARE_ROW_EXCLUSIVE,
            limits.attempt_ms,
            limits.clean_up_s,
            f"{moment}, which drops the former index",
            "writers, no readers",
        )
