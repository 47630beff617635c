"""Broken variants of the engine, each with one mistake that the state machine must find. The docstring says the mistake
in words; the mistakes that the model knows too are in `tests/model/state.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection

from airflow_roir.engine import apply_delta, build, claims, prepare, publish, switch
from airflow_roir.engine.apply_delta import Folding
from airflow_roir.engine.build import BuildWorker
from airflow_roir.engine.capture import installation, row_function, segment_writes
from airflow_roir.engine.capture.target import Target
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.readers import view
from airflow_roir.engine.scan.copier import Claim, Copier, SourceCopier
from airflow_roir.engine.source.source import Source
from airflow_roir.engine.work.phase_work import Step

Variant = Callable[[pytest.MonkeyPatch], None]
VARIANTS: list[Variant] = []
# The machine's messages about a variant: rows differ, an invariant is broken, an entry is there twice, or the build
# waits.
FOUND = r"generation \d|\(I\d\)|duplicate|lock timeout"


def variant(broken: Variant) -> Variant:
    """Lists a variant. It patches the engine."""
    VARIANTS.append(broken)
    return broken


def _undrained(body: Callable[..., Any]) -> Callable[..., Any]:
    """A step under the drain lock, without that lock. For other locks it waits 20 ms at most."""

    def broken(connection: Connection, lock: Callable[[], None], *rest: Any) -> Any:
        return body(connection, lambda: execute(connection, "SET LOCAL lock_timeout = '20ms'"), *rest)

    return broken


def _render(patch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Replaces a text in the capture function."""
    render = row_function.render

    def broken(source: Source, generations: list[Target], kept: bool = False) -> list[str]:
        return [statement.replace(old, new) for statement in render(source, generations, kept)]

    patch.setattr(installation, "render", broken)


# -- the drains


@variant
def prepares_without_a_drain(patch: pytest.MonkeyPatch) -> None:
    """Prepare installs the capture without waiting for the writers in flight."""
    patch.setattr(prepare, "_prepare", _undrained(prepare._prepare))


@variant
def switches_without_a_drain(patch: pytest.MonkeyPatch) -> None:
    """The switch renders direct mode without waiting for the writers in flight."""
    sound, drain = switch.switch, switch.drain

    def broken(*arguments: Any) -> None:
        with patch.context() as inner:
            inner.setattr(
                switch, "drain", lambda database, job, body, *rest: drain(database, job, _undrained(body), *rest)
            )
            sound(*arguments)

    patch.setattr(switch, "switch", broken)


@variant
def publishes_without_a_drain(patch: pytest.MonkeyPatch) -> None:
    """Publish neither waits for the writers in flight nor looks at what is left in the delta."""
    patch.setattr(publish, "_publish", _undrained(publish._publish))
    patch.setattr(publish, "_only_ghosts", lambda connection, job: 0)


# -- the batch


@variant
def commits_the_watermark_first(patch: pytest.MonkeyPatch) -> None:
    """A batch commits its watermark, and then its rows."""
    batch, insert = BuildWorker._batch, SourceCopier.insert

    def broken(self: BuildWorker, claim: Claim, copier: Copier) -> Step | Stop:
        late: list[Any] = []
        with patch.context() as inner:
            inner.setattr(SourceCopier, "insert", lambda self, *arguments: late.append(arguments) or 0)
            outcome = batch(self, claim, copier)
        with self.connection.begin():
            self.standing(claim)
            for arguments in late:
                insert(self.source, *arguments)
        return outcome

    patch.setattr(BuildWorker, "_batch", broken)


@variant
def forgets_the_fence(patch: pytest.MonkeyPatch) -> None:
    """A batch commits, whichever worker holds its range by now."""
    patch.setattr(claims, "HELD", "o.id = %(operation)s")
    patch.setattr(build, "BATCH_STOOD", "true")


@variant
def begins_a_range_anew(patch: pytest.MonkeyPatch) -> None:
    """A worker that claims a range that another one has begun copies it from its lower bound."""
    patch.setattr(
        build, "RANGES", replace(build.RANGES, columns="lower, upper, NULL AS watermark, filenode, shard_id, mark")
    )
    patch.setattr(build, "BATCH_STOOD", "NOT p.done")


# -- the fold


@variant
def folds_without_locks(patch: pytest.MonkeyPatch) -> None:
    """The fold applies what it has read, without FOR UPDATE SKIP LOCKED."""
    _fold_text(patch, "FOR UPDATE SKIP LOCKED", "")


@variant
def folds_without_skipping(patch: pytest.MonkeyPatch) -> None:
    """The fold waits for the delta rows that writers hold."""
    _fold_text(patch, "FOR UPDATE SKIP LOCKED", "FOR UPDATE")


def _fold_text(patch: pytest.MonkeyPatch, old: str, new: str) -> None:
    def broken(connection: Connection, sql: str, values: Any = None) -> Any:
        return execute(connection, sql.replace(old, new), values)

    patch.setattr(apply_delta, "execute", broken)


@variant
def forgets_the_base(patch: pytest.MonkeyPatch) -> None:
    """The fold marks all antimatter as ghosts: deleted rows come back to life."""

    patch.setattr(Folding, "_annihilate", lambda *arguments: 0)


@variant
def forgets_the_delta(patch: pytest.MonkeyPatch) -> None:
    """The fold takes regular entries away without writing them."""

    def drop(self: Folding, nulls: str, where: str, values: dict[str, str]) -> int:
        taking = f"DELETE FROM {self.delta} WHERE ctid = ANY (%(tids)s::tid[])"
        return execute(self.connection, taking, values).rowcount

    patch.setattr(Folding, "_upsert", drop)


@variant
def lets_the_base_win(patch: pytest.MonkeyPatch) -> None:
    """The fold leaves a base entry as it is if the delta has a newer one."""

    def broken(connection: Connection, sql: str, values: Any = None) -> Any:
        head, found, _ = sql.partition("DO UPDATE SET")
        return execute(connection, head + "DO NOTHING" if found else sql, values)

    patch.setattr(apply_delta, "execute", broken)


@variant
def deletes_the_delta_unconditionally(patch: pytest.MonkeyPatch) -> None:
    """The fold takes all rows of the delta, not only those that it has locked."""
    _fold_text(patch, "AND d.ctid = ANY (%(tids)s::tid[]) RETURNING", "RETURNING")


# -- the capture


@variant
def drops_antimatter_at_insert(patch: pytest.MonkeyPatch) -> None:
    """An insert removes its entry's antimatter instead of writing a regular row."""
    capture_mode = row_function._capture_mode

    def broken(source: Source, target: Target) -> list[str]:
        lines, delta = capture_mode(source, target), physical.delta(target.generation_id)
        inserted = lines.index("ELSIF TG_OP = 'INSERT' THEN")
        antimatter = f"SELECT FROM {delta} WHERE state = 'antimatter' AND c1 = NEW.k AND c2 = NEW.id"
        forgetting = [f"ELSIF TG_OP = 'INSERT' AND EXISTS ({antimatter}) THEN"]
        forgetting += [segment_writes._delete(target.entry, delta, "NEW")]
        return lines[:inserted] + forgetting + lines[inserted:]

    patch.setattr(row_function, "_capture_mode", broken)


@variant
def forgets_the_delta_in_direct_mode(patch: pytest.MonkeyPatch) -> None:
    """In direct mode a write doesn't take its entry out of the delta."""
    maintain = row_function._maintain_mode

    def broken(source: Source, target: Target) -> list[str]:
        return [
            line.replace("WHERE", "WHERE false AND") if "DELETE FROM" in line and "_delta" in line else line
            for line in maintain(source, target)
        ]

    patch.setattr(row_function, "_maintain_mode", broken)


@variant
def forgets_moved_keys(patch: pytest.MonkeyPatch) -> None:
    """The capture trusts every event, whatever the transaction has done to the row since."""
    patch.setattr(row_function, "_IS_TOUCHED_AGAIN", "false")


@variant
def forgets_the_mode(patch: pytest.MonkeyPatch) -> None:
    """A transaction whose snapshot is older than the switch or the publish is not refused for that."""
    _render(patch, "AND NOT roir.is_in_mode(", "AND false AND NOT roir.is_in_mode(")


@variant
def forgets_the_active_generation(patch: pytest.MonkeyPatch) -> None:
    """While a rebuild is under way its generation is the only one that is maintained."""
    _only(patch, lambda status, all_statuses: "building" not in all_statuses or status == "building")


@variant
def forgets_the_retired_generation(patch: pytest.MonkeyPatch) -> None:
    """A generation that was replaced is not maintained; a revert shows it again."""
    _only(patch, lambda status, all_statuses: status != "retired")


def _only(patch: pytest.MonkeyPatch, maintained: Callable[[str, set[str]], bool]) -> None:
    targets = installation.targets

    def broken(connection: Connection, source_oid: int) -> list[Target]:
        rows = execute(connection, "SELECT id, status FROM roir.generation")
        statuses = {row.id: row.status for row in rows}
        found = targets(connection, source_oid)
        here = {statuses[target.generation_id] for target in found}
        return [target for target in found if maintained(statuses[target.generation_id], here)]

    patch.setattr(installation, "targets", broken)


# -- the view


@variant
def forgets_old_readers(patch: pytest.MonkeyPatch) -> None:
    """The view shows a generation to snapshots that can't see it."""
    show: Any = view.show
    patch.setattr(view, "show", lambda *arguments: show(*arguments, guarded=False))
