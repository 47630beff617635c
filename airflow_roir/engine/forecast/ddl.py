"""The DDL that an operation will send, in its order, for a review: none of it is carried out here.

For tables and indexes the phases' own code runs in a transaction that is rolled back, under a number that no generation
has, and the statements that it sends are recorded. Statements on the user's table aren't sent: their text is rendered
as in `capture/installation.py`. `tests/engine/test_forecast_ddl.py` compares all of this with the DDL of a build.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, event

from airflow_roir.definition import DATA_SCHEMA, quote
from airflow_roir.engine.capture import conflicts, installation, trigger_gaps
from airflow_roir.engine.capture.row_function import function_name, render, row_columns, row_function, undo
from airflow_roir.engine.capture.target import ACTIVE, CAPTURE, DIRECT, Target
from airflow_roir.engine.capture.truncate_function import render_truncate, truncate_function_name, truncate_trigger_name
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.cut import Bound
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.locks.locks import EXCLUSIVE, Attempts
from airflow_roir.engine.locks.table_lock import telling_of_names
from airflow_roir.engine.readers import view
from airflow_roir.engine.scan.findings import DryRun
from airflow_roir.engine.source import catalog, owner
from airflow_roir.engine.source.source import Source
from airflow_roir.options import BuildOptions

# No generation has a number of this size.
STAND_IN = 7_000_000_000_000_000_000
WORDS = ("CREATE", "ALTER", "DROP", "GRANT", "REVOKE", "COMMENT", "TRUNCATE", "VACUUM")
NEXT = """
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('roir.generation', 'id')::regclass), 0) + 1 AS generation,
       pg_backend_pid() AS pid, current_user::text AS role,
       has_schema_privilege(o.oid, 'roir_data', 'CREATE')
       OR (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) AS may_create,
       to_regprocedure(%(function)s) IS NOT NULL AS captured
  FROM pg_roles o WHERE o.rolname = %(owner)s
"""
LEAVES = """
SELECT t.relation::regclass::text FROM roir.partition_tree(%(source)s) t
 WHERE t.leaf AND NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = t.relation AND g.tgtype & 32 <> 0
                                 AND g.tgfoid = to_regprocedure(%(function)s))
 ORDER BY t.relation
"""
ACTIVE_ONE = "SELECT id FROM roir.generation WHERE index_id = %(index)s AND status = 'active'"


@dataclass(frozen=True)
class Part:
    """The statements of a phase. whole: True if they are one transaction."""

    phase: str
    says: str
    statements: tuple[str, ...]
    whole: bool = True


def is_ddl(statement: str) -> bool:
    """True for a statement that creates, alters, removes or grants something."""
    return statement.lstrip().startswith(WORDS)


@contextmanager
def recorded(target: Any) -> Iterator[list[str]]:
    """Records the DDL that a session, or an engine's sessions, send in the block, with its values."""
    sent: list[str] = []

    def note(_connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if is_ddl(statement):
            sent.append(cursor.query.decode().strip())

    event.listen(target, "after_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(target, "after_cursor_execute", note)


def foresee(
    database: Database, dry: DryRun, options: BuildOptions, report: Callable[[str], None] = lambda line: None
) -> list[Part]:
    """The DDL of all phases, with the number of the next generation. Changes nothing.

    Raises LockNotAcquired if a session locks the source exclusively.
    """
    source = dry.source

    def attempt(connection: Connection) -> list[Part]:
        catalog.hold(connection, source)
        savepoint = connection.begin_nested()
        try:
            return list(_parts(connection, dry))
        finally:
            savepoint.rollback()

    attempts = Attempts(database, source.sql, source.relations, options.lock_timeout_ms, 5.0, EXCLUSIVE)
    with telling_of_names():
        return attempts.run(attempt, report)


def as_script(parts: Sequence[Part]) -> str:
    """The statements for psql, with a comment before each phase."""
    lines: list[str] = []
    for part in parts:
        lines += [f"-- {part.phase}: {part.says}", *(["BEGIN;"] if part.whole else [])]
        lines += [f"{statement};" for statement in part.statements]
        lines += [*(["COMMIT;"] if part.whole else []), ""]
    return "\n".join(lines).rstrip()


def _parts(connection: Connection, dry: DryRun) -> Iterator[Part]:
    source, plan = dry.source, dry.plan
    asked = {"function": f"{function_name(source.oid)}()", "owner": source.owner}
    standing = execute(connection, NEXT, asked).one()
    stand_in = STAND_IN + int(standing.pid)
    number = int(standing.generation)

    def named(statements: Sequence[str]) -> tuple[str, ...]:
        return tuple(statement.replace(str(stand_in), str(number)) for statement in statements)

    with recorded(connection) as made:
        entry = physical.create(connection, stand_in, dry.entry, plan)
    # The order in which workers claim the segments.
    ordinals = [*range(1, plan.segments + 1), physical.DEFAULT_SEGMENT]
    seals: list[str] = []
    with recorded(connection) as sealed:
        for ordinal in ordinals:
            physical.seal_segment(connection, stand_in, ordinal, entry)
            seals += [*sealed, f"VACUUM (ANALYZE) {physical.segment(stand_in, ordinal)}"]
            sealed.clear()
    former = installation.targets(connection, source.oid)
    bounds = tuple(tuple(lower) for lower in plan.segment_bounds)
    capture = _Capture(connection, source, entry, stand_in, former, standing, dry, bounds)
    yield Part("prepare", "in one transaction; from the LOCK on writers wait", named([*made, *capture.install()]))
    yield Part("seal", "each segment by itself, when all is copied", named(seals), whole=False)
    lock = f"LOCK TABLE {source.sql} IN SHARE ROW EXCLUSIVE MODE"
    yield Part("switch", "writes maintain the new tables themselves", named([lock, *capture.functions(DIRECT)]))
    replace = view.lock_statement(dry.index)
    shown = view.statement(dry.index, stand_in, entry, dry.kind == "rebuild")
    guard = f" WHERE (SELECT roir.published({stand_in}))"
    yield Part(
        "publish",
        "readers see the new entries; the view refuses transactions that are older",
        named([lock, *([replace] if dry.kind == "rebuild" else []), shown + guard, *capture.functions(ACTIVE)]),
    )
    plain = view.statement(dry.index, stand_in, entry, replace=True)
    yield Part("clean-up", "when no transaction is older", named([replace, plain]))
    yield Part("clean-up", "what writers left in the delta is in the entries", named([_drop(physical.delta(stand_in))]))
    if (old := _active(connection, dry.index_id)) is not None:
        left = [target for target in former if target.generation_id != old]
        yield Part(
            "clean-up",
            "the former entries, when their revert window has ended",
            named(
                [
                    lock,
                    *capture.functions(ACTIVE, left),
                    f"DROP VIEW IF EXISTS {physical.source_view(old)}",
                    f"LOCK TABLE ONLY {physical.base(old)} IN ACCESS EXCLUSIVE MODE",
                    f"DROP VIEW IF EXISTS {physical.shown(old)}",
                    f"DROP TABLE IF EXISTS {physical.base(old)}, {physical.delta(old)}",
                ]
            ),
        )


def _active(connection: Connection, index_id: int | None) -> int | None:
    if index_id is None:
        return None
    found: int | None = execute(connection, ACTIVE_ONE, {"index": index_id}).scalar()
    return found


def _drop(table: str) -> str:
    return f"DROP TABLE {table}"


@dataclass(frozen=True)
class _Capture:
    """The DDL of the capture of a source with a new generation, as `installation` sends it."""

    connection: Connection
    source: Source
    entry: Entry
    number: int
    former: Sequence[Target]
    standing: Any
    dry: DryRun
    bounds: tuple[Bound, ...]

    def functions(self, mode: str, former: Sequence[Target] | None = None) -> list[str]:
        """Both functions, with the new generation in this mode."""
        new = Target(self.number, self.entry, mode, self.dry.choice.scan, self.bounds, self.dry.definition.name.name)
        targets = [*(self.former if former is None else former), new]
        before = self.former if mode == CAPTURE else [*self.former, new]
        made = self.standing.captured or mode != CAPTURE
        # The functions of triggers are replaced; with another type, the one that they call is dropped and created.
        kept = made and row_columns(before) == row_columns(targets)
        found = undo(self.source.oid) if made and not kept else []
        found += [*render(self.source, targets, kept), render_truncate(self.source, targets)]
        fresh = [] if made else [f"{name}()" for name in self._of_triggers()]
        fresh += [] if kept else [row_function(self.source.oid)]
        found += [f"REVOKE ALL ON FUNCTION {name} FROM PUBLIC CASCADE" for name in fresh]
        if execute(self.connection, conflicts.VIEWS_MAY_BE_BARRED).scalar_one():
            found += [
                f"ALTER FUNCTION {name}() SET restrict_nonsystem_relation_kind = ''" for name in self._of_triggers()
            ]
        if self.source.owner != self.standing.role and not kept:
            found += self._to_owner(row_function(self.source.oid))
        if any(target.entry.enforced for target in targets):
            found.append(installation.grant_note(self.source))
        return found

    def _of_triggers(self) -> tuple[str, str]:
        return function_name(self.source.oid), truncate_function_name(self.source.oid)

    def install(self) -> list[str]:
        """The statements from the lock on: the view of the source, the functions with their rights, the triggers."""
        source = self.source
        with recorded(self.connection) as viewed:
            physical.create_source_view(self.connection, self.number, source, self.entry)
        made = self.functions(CAPTURE)
        lock = f"LOCK TABLE {source.sql} IN SHARE ROW EXCLUSIVE MODE"
        return [lock, *viewed, *made, *self._hand_over(), *self._triggers()]

    def _hand_over(self) -> list[str]:
        if self.source.owner == self.standing.role:
            return []
        found = [] if self.standing.captured else self._to_owner(f"{function_name(self.source.oid)}()")
        reader = f"{owner.function_name(self.source.oid)}(text)"
        if not owner.is_trusted(self.connection, self.source) and not self._is_there(reader):
            found += [
                owner.render(self.source),
                f"REVOKE ALL ON FUNCTION {reader} FROM PUBLIC CASCADE",
                *self._to_owner(reader),
            ]
        new = [Target(self.number, self.entry, CAPTURE)]
        told = installation.grant_note(self.source)
        return [*found, *(one for one in installation.grants(self.connection, self.source, new) if one != told)]

    def _is_there(self, function: str) -> bool:
        return bool(execute(self.connection, "SELECT to_regprocedure(%(f)s) IS NOT NULL", {"f": function}).scalar_one())

    def _to_owner(self, function: str) -> list[str]:
        owner_ = quote(self.source.owner)
        alter = f"ALTER FUNCTION {function} OWNER TO {owner_}"
        if self.standing.may_create:
            return [alter]
        return [
            f"GRANT CREATE ON SCHEMA {DATA_SCHEMA} TO {owner_}",
            alter,
            f"REVOKE CREATE ON SCHEMA {DATA_SCHEMA} FROM {owner_}",
        ]

    def _triggers(self) -> list[str]:
        source = self.source
        gaps = [
            gap
            for gap in trigger_gaps.gaps(self.connection, source.oid)
            if gap.kind == installation.ROWS or gap.oid == source.oid
        ]
        missing = {gap.kind for gap in gaps if gap.missing and gap.oid == source.oid}
        found = [
            statement
            for kind, statement in (
                (installation.ROWS, installation.rows_trigger(source)),
                (installation.TRUNCATE, installation.truncate_trigger(source)),
            )
            if kind in missing
        ]
        name = truncate_trigger_name(source.oid)
        function = f"{truncate_function_name(source.oid)}()"
        for leaf in self._unwatched(function):
            found += [
                f"CREATE TRIGGER {name} AFTER TRUNCATE ON {leaf} FOR EACH STATEMENT EXECUTE FUNCTION {function}",
                f"ALTER TABLE {leaf} ENABLE ALWAYS TRIGGER {name}",
            ]
        return found + [f"ALTER TABLE {gap.relation} ENABLE ALWAYS TRIGGER {gap.trigger}" for gap in gaps]

    def _unwatched(self, function: str) -> list[str]:
        if not self.source.partitioned:
            return []
        return list(execute(self.connection, LEAVES, {"source": self.source.oid, "function": function}).scalars())
