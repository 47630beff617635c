"""The DML path: renders and installs the capture function of a source (DESIGN section 4).

One function per source serves all its generations. `CREATE OR REPLACE FUNCTION` under the drain lock switches
modes and adds or removes generations, without the ACCESS EXCLUSIVE lock that dropping a trigger takes.

The *quick* path trusts an event's NEW where that is the row as it stands now: the tuple's `xmax` is 0. It isn't where
a trigger (a user's or a foreign key's) or a function that a statement calls wrote to the same row while that statement
still had events queued: the inner events then come first. There, where primary keys move among rows, and for a row
that is gone, the *careful* path asks the source itself, by primary key, whether the entry belongs, for the old and the
new entry alike. Neither depends on the order of events, and nothing is remembered between them that a session could
reset.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, select

from airflow_roir.definition import Scan, quote
from airflow_roir.engine import generation as physical
from airflow_roir.engine import tables
from airflow_roir.engine.catalog import TRIGGER, TRUNCATE_TRIGGER, Source
from airflow_roir.engine.database import execute
from airflow_roir.engine.entry import Entry, is_null
from airflow_roir.entry_state import EntryState

CAPTURE, DIRECT, ACTIVE = "capture", "direct", "active"


@dataclass(frozen=True)
class Target:
    """A generation that the capture function maintains, in its mode. scan: what it is built from."""

    generation_id: int
    entry: Entry
    mode: str
    scan: Scan = Scan.KEY


# 32 is TRIGGER_TYPE_TRUNCATE.
FOLLOWED = """
SELECT tgrelid::regclass::text FROM pg_trigger
 WHERE tgfoid = to_regprocedure(%(function)s) AND tgtype & 32 <> 0 ORDER BY tgrelid
"""


def function_name(source_oid: int) -> str:
    """The capture function of a source, named by its oid."""
    return f"{tables.DATA_SCHEMA}.capture_{source_oid}"


def targets(connection: Connection, source_oid: int) -> list[Target]:
    """The generations that a source's writes maintain, by the control tables. Read it under the drain lock."""
    generation, index = tables.generation, tables.index
    rows = connection.execute(
        select(generation.c.id, generation.c.entry, generation.c.capture_mode, generation.c.scan)
        .join(index, index.c.id == generation.c.index_id)
        .where(
            index.c.source_oid == source_oid,
            generation.c.status.in_(("building", "active", "retired")),
            generation.c.capture_mode.in_((CAPTURE, DIRECT, ACTIVE)),
        )
        .order_by(generation.c.id)
    )
    return [Target(row.id, Entry.from_json(row.entry), row.capture_mode, Scan(row.scan)) for row in rows]


def mode(connection: Connection, generation_id: int) -> str:
    """A generation's capture mode."""
    query = "SELECT capture_mode FROM roir.generation WHERE id = %(id)s"
    return str(execute(connection, query, {"id": generation_id}).scalar_one())


def refresh(connection: Connection, source: Source) -> None:
    """Make the source's writes maintain exactly the generations that the control tables name. Needs the drain lock.

    Leaves the triggers as they are: where one is missing writes were lost, and a warning must stay until a rebuild.
    """
    execute(connection, render(source, targets(connection, source.oid)))
    execute(connection, f"REVOKE ALL ON FUNCTION {function_name(source.oid)}() FROM PUBLIC")


def install(connection: Connection, source: Source) -> None:
    """As `refresh`, and see to it that every write fires the capture triggers, from now on. Needs the drain lock."""
    name = function_name(source.oid)
    refresh(connection, source)
    # What follows needn't be looked at by the guard: that is us.
    execute(connection, "SET LOCAL roir.own_ddl = 'on'")
    present = set(
        execute(
            connection,
            "SELECT tgname FROM pg_trigger WHERE tgrelid = %(oid)s AND NOT tgisinternal",
            {"oid": source.oid},
        ).scalars()
    )
    if TRIGGER not in present:
        execute(
            connection,
            f"CREATE TRIGGER {TRIGGER} AFTER INSERT OR UPDATE OR DELETE ON {source.sql} "
            f"FOR EACH ROW EXECUTE FUNCTION {name}()",
        )
        # ALWAYS: the changes of a logical-replication apply worker are changes too.
        execute(connection, f"ALTER TABLE {source.sql} ENABLE ALWAYS TRIGGER {TRIGGER}")
    if TRUNCATE_TRIGGER not in present:
        execute(
            connection,
            f"CREATE TRIGGER {TRUNCATE_TRIGGER} AFTER TRUNCATE ON {source.sql} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {name}()",
        )
        execute(connection, f"ALTER TABLE {source.sql} ENABLE ALWAYS TRIGGER {TRUNCATE_TRIGGER}")
    execute(connection, "SELECT roir.watch_truncate(%(oid)s)", {"oid": source.oid})
    for gap in gaps(connection, source.oid):
        execute(connection, f"ALTER TABLE {gap.relation} ENABLE ALWAYS TRIGGER {gap.trigger}")


@dataclass(frozen=True)
class Gap:
    """A capture trigger that doesn't fire for every write. relation: its quoted name."""

    relation: str
    trigger: str
    state: str

    @property
    def missing(self) -> bool:
        """True where there is no such trigger at all."""
        return self.state == "missing"

    def __str__(self) -> str:
        return f"{self.trigger} on {self.relation} is {self.state}"


# A leaf that no generation holds yet may lack the trigger for TRUNCATE: it gets that when it is taken in.
GAPS = """
WITH relation AS (
    SELECT %(source)s::oid AS oid, true AS followed
    UNION ALL
    SELECT t.relation, t.leaf AND EXISTS (
             SELECT FROM roir.source_partition p
              WHERE p.relation = t.relation AND p.link = t.link AND p.status = 'present')
      FROM roir.partition_tree(%(source)s) t)
SELECT r.oid::regclass::text AS relation, wanted.name AS trigger,
       CASE coalesce(t.tgenabled, ' ') WHEN ' ' THEN 'missing' WHEN 'D' THEN 'disabled' ELSE 'not ENABLE ALWAYS' END
       AS state
  FROM relation r
 CROSS JOIN LATERAL (VALUES (%(row)s, true), (%(truncate)s, r.followed)) AS wanted (name, here)
  LEFT JOIN pg_trigger t
    ON t.tgrelid = r.oid AND t.tgname = wanted.name AND t.tgfoid = to_regprocedure(%(function)s)
 WHERE wanted.here AND t.tgenabled IS DISTINCT FROM 'A'
 ORDER BY r.oid <> %(source)s::oid, 1, 2
"""


def gaps(connection: Connection, source_oid: int) -> list[Gap]:
    """The capture triggers of a source and its partitions that are missing or disabled. Waits for no lock."""
    values = {
        "source": source_oid,
        "row": TRIGGER,
        "truncate": TRUNCATE_TRIGGER,
        "function": f"{function_name(source_oid)}()",
    }
    return [Gap(row.relation, row.trigger, row.state) for row in execute(connection, GAPS, values)]


def uninstall(connection: Connection, source: Source) -> None:
    """Drop the capture triggers and function of a source without generations. Takes an ACCESS EXCLUSIVE lock."""
    execute(connection, f"DROP TRIGGER IF EXISTS {TRIGGER} ON {source.sql}")
    drop_function(connection, source.oid)


def drop_function(connection: Connection, source_oid: int) -> None:
    """Drop a source's capture function, and the triggers for TRUNCATE: they stay on partitions that were detached."""
    name = function_name(source_oid)
    for relation in execute(connection, FOLLOWED, {"function": f"{name}()"}).scalars().all():
        execute(connection, f"DROP TRIGGER {TRUNCATE_TRIGGER} ON {relation}")
    execute(connection, f"DROP FUNCTION IF EXISTS {name}()")


# The event's new version of the row has been written to again since, by this very transaction (or only locked).
_IS_TOUCHED_AGAIN = "NEW.xmax <> '0'::xid"


def is_stale(connection: Connection, source: Source) -> bool:
    """True where the capture function isn't the one that `refresh` would make: the source has another name or primary
    key now, or other code made it.
    """
    query = "SELECT prosrc FROM pg_proc WHERE oid = to_regprocedure(%(name)s)"
    made = execute(connection, query, {"name": f"{function_name(source.oid)}()"}).scalar()
    return made is not None and made.strip() != _body(source, targets(connection, source.oid))


def render(source: Source, generations: list[Target]) -> str:
    """The whole CREATE FUNCTION statement, pure text of its arguments."""
    body = _body(source, generations)
    tag = "roir"
    while f"${tag}$" in body:  # a column may be called anything, `$roir$` too
        tag += "_"
    return (
        f"CREATE OR REPLACE FUNCTION {function_name(source.oid)}() RETURNS trigger\n"
        # Without rows that a policy hides the careful path would take entries away: then rather an error.
        "LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off\n"
        f"AS ${tag}$\n{body}\n${tag}$"
    )


def _body(source: Source, generations: list[Target]) -> str:
    declarations = ["DECLARE", "  careful boolean := true;"]
    if any(target.mode != CAPTURE for target in generations):
        declarations += [
            "  one_snapshot boolean :=",
            "    current_setting('transaction_isolation') IN ('repeatable read', 'serializable');",
            "  found_entries bigint;",
        ]
    statements = _indent(_statements(source, generations))
    return "\n".join([*declarations, "BEGIN", *statements, "  RETURN NULL;", "END"])


def _statements(source: Source, generations: list[Target]) -> list[str]:
    if not generations:
        return ["-- No generation is maintained at present."]
    # In one statement, bases first: the fold locks in that order too, so the two can't deadlock.
    truncated = [physical.base(g.generation_id) for g in generations]
    truncated += [physical.delta(g.generation_id) for g in generations if g.mode != ACTIVE]
    truncate = [
        "IF TG_OP = 'TRUNCATE' THEN",
        *(_indent(_truncated_leaf(source, generations)) if source.partitioned else []),
        f"  TRUNCATE {', '.join(truncated)};",
        *(_indent(_emptied(generations))),
        "  RETURN NULL;",
        "END IF;",
    ]
    lines = truncate
    if not source.pk_deferrable:
        # The update first: each question costs an event a microsecond or two, and most writes are updates.
        lines = [
            "IF TG_OP = 'UPDATE' THEN",
            f"  careful := {_IS_TOUCHED_AGAIN}",
            f"    OR {_image('OLD', source.primary_key)} *<> {_image('NEW', source.primary_key)};",
            "ELSIF TG_OP = 'INSERT' THEN",
            f"  careful := {_IS_TOUCHED_AGAIN};",
            f"ELS{truncate[0]}",
            *truncate[1:],
        ]
    for target in generations:
        lines += [f"-- generation {target.generation_id}, {target.mode} mode"]
        if target.mode == CAPTURE:
            lines += _capture_mode(source, target)
        else:
            lines += _maintain_mode(source, target)
    return lines


def _emptied(generations: list[Target]) -> list[str]:
    """What their blocks were planned for is gone, so that nothing is left to be scanned."""
    scanned = [f"({g.generation_id}, TG_RELID)" for g in generations if g.mode == CAPTURE and g.scan.by_blocks]
    return [f"INSERT INTO roir.emptied (generation_id, relation) VALUES {', '.join(scanned)};"] if scanned else []


def _truncated_leaf(source: Source, generations: list[Target]) -> list[str]:
    return [
        f"IF TG_RELID <> {source.oid} THEN",
        f"  PERFORM roir.refuse_restored({source.oid});",
        f"  PERFORM roir.forget_partition({source.oid}, TG_RELID);",
        *_indent(_emptied(generations)),
        "  RETURN NULL;",
        "END IF;",
    ]


def _capture_mode(source: Source, target: Target) -> list[str]:
    """Touched wins: every entry that a write touches goes to the delta, whatever the base holds."""
    entry, delta = target.entry, physical.delta(target.generation_id)

    def write(record: str, state: EntryState) -> list[str]:
        values = [
            f"{record}.{quote(column.source)}" if i < entry.identity or state == EntryState.REGULAR else "NULL"
            for i, column in enumerate(entry.columns)
        ]
        return [
            f"INSERT INTO {delta} ({_columns(entry)}, state)",
            f"VALUES ({', '.join(values)}, '{state.value}')",
            f"{entry.on_conflict(state=True)};",
        ]

    def settle(record: str) -> list[str]:
        return [
            f"INSERT INTO {delta} ({_columns(entry)}, state)",
            f"SELECT {', '.join(entry.source_columns('s'))}, '{EntryState.REGULAR.value}'",
            f"  FROM {source.sql} s WHERE {_row_of(source, entry, record)} LIMIT 1",
            f"{entry.on_conflict(state=True)};",
            "IF NOT FOUND THEN",
            *_indent(write(record, EntryState.ANTIMATTER)),
            "END IF;",
        ]

    everything = [column.source for column in entry.columns]
    identity = everything[: entry.identity]
    moved = []
    if target.scan is Scan.BLOCK:
        # Else a batch could meet the row twice, or not at all. Within a block one snapshot sees it once.
        moved = [f"ELSIF {_block_of('OLD')} <> {_block_of('NEW')} THEN", *_indent(write("NEW", EntryState.REGULAR))]
    return [
        "IF careful THEN",
        *_indent(_for_both(settle)),
        "ELSIF TG_OP = 'INSERT' THEN",
        *_indent(write("NEW", EntryState.REGULAR)),
        f"ELSIF {_image('OLD', everything)} *<> {_image('NEW', everything)} THEN",
        f"  IF {_image('OLD', identity)} *<> {_image('NEW', identity)} THEN",
        *_indent(write("OLD", EntryState.ANTIMATTER), 2),
        "  END IF;",
        *_indent(write("NEW", EntryState.REGULAR)),
        *moved,
        "END IF;",
    ]


def _block_of(record: str) -> str:
    """SQL for the number of the block that a version of a row is in."""
    return f"({record}.ctid::text::point)[0]"


def _maintain_mode(source: Source, target: Target) -> list[str]:
    """Direct and active mode: the base itself is kept right; in direct mode the delta shrinks on the way (I5)."""
    entry, base = target.entry, physical.base(target.generation_id)
    delta = physical.delta(target.generation_id) if target.mode == DIRECT else None

    def forget(record: str) -> list[str]:
        return _delete(entry, delta, record) if delta else []

    def put(record: str) -> list[str]:
        values = [f"{record}.{quote(column.source)}" for column in entry.columns]
        return [
            *forget(record),
            f"INSERT INTO {base} ({_columns(entry)})",
            f"VALUES ({', '.join(values)})",
            f"{entry.on_conflict()};",
        ]

    def take_out(record: str) -> list[str]:
        # Nothing there, or only nothing that this snapshot sees: an insert tells, it raises 40001 at what it can't see.
        identity = ", ".join(entry.physical(entry.identity_positions))
        values = ", ".join(f"{record}.{quote(entry.columns[i].source)}" for i in entry.identity_positions)
        return [
            *_delete(entry, base, record),
            "GET DIAGNOSTICS found_entries = ROW_COUNT;",
            "IF found_entries = 0 AND one_snapshot THEN",
            f"  INSERT INTO {base} ({identity}) VALUES ({values}) ON CONFLICT ({identity}) DO NOTHING;",
            *_indent(_delete(entry, base, record)),
            "END IF;",
        ]

    # The delta before the base, always: a fold step takes rows in that order too.
    def remove(record: str) -> list[str]:
        return [*forget(record), *take_out(record)]

    def settle(record: str) -> list[str]:
        return [
            *forget(record),
            f"INSERT INTO {base} ({_columns(entry)})",
            f"SELECT {', '.join(entry.source_columns('s'))}",
            f"  FROM {source.sql} s WHERE {_row_of(source, entry, record)} LIMIT 1",
            f"{entry.on_conflict()};",
            "IF NOT FOUND THEN",
            *_indent(take_out(record)),
            "END IF;",
        ]

    everything = [column.source for column in entry.columns]
    identity = everything[: entry.identity]
    # An old snapshot is told by the row that says this mode, which it must see: a removal may find the entry in the
    # delta and miss the base's younger copy, a write may miss a younger antimatter, a lookup the row itself.
    return [
        "IF one_snapshot THEN",
        "  IF NOT EXISTS (SELECT FROM roir.generation g",
        f"                  WHERE g.id = {target.generation_id} AND g.capture_mode = '{target.mode}') THEN",
        *_indent(_serialization_failure(target), 2),
        "  END IF;",
        "END IF;",
        "IF careful THEN",
        *_indent(_for_both(settle)),
        "ELSIF TG_OP = 'INSERT' THEN",
        *_indent(put("NEW")),
        f"ELSIF {_image('OLD', everything)} *<> {_image('NEW', everything)} THEN",
        f"  IF {_image('OLD', identity)} *<> {_image('NEW', identity)} THEN",
        *_indent(remove("OLD"), 2),
        "  END IF;",
        *_indent(put("NEW")),
        "END IF;",
    ]


def _for_both(settle: object) -> list[str]:
    assert callable(settle)
    return [
        "IF TG_OP <> 'INSERT' THEN",
        *_indent(settle("OLD")),
        "END IF;",
        "IF TG_OP <> 'DELETE' THEN",
        *_indent(settle("NEW")),
        "END IF;",
    ]


def _serialization_failure(target: Target) -> list[str]:
    return [
        "RAISE EXCEPTION USING ERRCODE = 'serialization_failure',",
        "  MESSAGE = 'could not serialize access: an index entry of this row was written after the "
        "transaction''s snapshot',",
        f"  DETAIL = 'roir generation {target.generation_id}', HINT = 'Retry the transaction.';",
    ]


def _delete(entry: Entry, table: str, record: str) -> list[str]:
    """Delete the entry of a record by its own equality. Only an entry with a NULL in it pays for a dynamic plan."""
    values = [entry.columns[i].of(record) for i in entry.identity_positions]
    plain = " AND ".join(f"c{i + 1} {entry.columns[i].equals} {values[i]}" for i in entry.identity_positions)
    # NOT NULL may be dropped from a key column at any time; a primary key's column can never hold NULL.
    nullable = [i for i in entry.identity_positions if not entry.columns[i].primary_key]
    if not nullable:
        return [f"DELETE FROM {table} WHERE {plain};"]
    any_null = " OR ".join(is_null(values[i]) for i in nullable)
    terms = []
    for i in entry.identity_positions:
        equal = _literal(f"c{i + 1} {entry.columns[i].equals} ${i + 1}")
        terms.append(
            f"CASE WHEN {is_null(values[i])} THEN '{is_null(f'c{i + 1}')}' ELSE {equal} END" if i in nullable else equal
        )
    using = ", ".join(values)
    joined = " || ' AND ' || ".join(terms)
    return [
        f"IF {any_null} THEN",
        f"  EXECUTE 'DELETE FROM {table} WHERE ' || {joined}",
        f"    USING {using};",
        "ELSE",
        f"  DELETE FROM {table} WHERE {plain};",
        "END IF;",
    ]


def _row_of(source: Source, entry: Entry, record: str) -> str:
    """SQL: the row `s` of the source has the record's primary key and still projects to the record's entry."""
    terms = []
    for column in entry.columns[: entry.identity]:
        ours, theirs = column.of("s"), column.of(record)
        same = f"{ours} {column.equals} {theirs}"
        terms.append(same if column.primary_key else f"({same} OR {is_null(ours)} AND {is_null(theirs)})")
    return " AND ".join(terms)


def _image(record: str, columns: list[str] | tuple[str, ...]) -> str:
    # ::record, or PostgreSQL would take `ROW(…) *<> ROW(…)` for a comparison of the columns one by one.
    return f"ROW({', '.join(f'{record}.{quote(column)}' for column in columns)})::record"


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _columns(entry: Entry) -> str:
    return ", ".join(entry.physical())


def _indent(lines: list[str], levels: int = 1) -> list[str]:
    return ["  " * levels + line for line in lines]
