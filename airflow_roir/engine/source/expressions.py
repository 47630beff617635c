"""Expressions and conditions of an index: the server judges them, and roir's own functions hold them.

An index can have each expression with which `CREATE INDEX` on an empty table like the source succeeds. It becomes the
body of a function, `roir_data.i<index>_<number>(columns)`, and the condition that of `roir_data.i<index>_where`. The
body is parsed once (`BEGIN ATOMIC`), so it is bound to functions, operators and types themselves: a rename of one of
them, or another search_path, changes nothing. All that reads the source calls these functions; the planner inlines
them.

The functions run with the rights of the caller: the source's owner in the capture and where the owner isn't trusted
(`owner.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import DATA_SCHEMA, IndexDefinition, quote
from airflow_roir.engine.database import execute, said, sqlstate, to_json
from airflow_roir.engine.source import owner
from airflow_roir.engine.source.catalog import columns_of
from airflow_roir.engine.source.source import Column, Computed, Source, in_collation
from airflow_roir.errors import InvalidInput

CONDITION = "where"
# The functions of a plan, which has no index yet; the session's own schema, by its true name.
PLANNED = "pg_temp"
# Classes of errors that don't judge an expression: locks, resources, lost connections, cancellations.
_NOT_OF_TEXT = ("40", "53", "55", "57", "58", "08")

USED = """
SELECT DISTINCT a.attname::text AS name, a.attnum
  FROM pg_depend d JOIN pg_rewrite r ON r.oid = d.objid
  JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
 WHERE d.classid = 'pg_rewrite'::regclass AND r.ev_class = to_regclass(%(view)s)
   AND d.refclassid = 'pg_class'::regclass AND d.refobjid = to_regclass(%(table)s) AND a.attnum > 0
 ORDER BY a.attnum
"""
# For a key as `(email)` or `email COLLATE "C"` an index has no expression: it has the column.
INDEXED = """
SELECT coalesce(pg_get_expr(coalesce(i.indpred, i.indexprs), i.indrelid),
                (SELECT quote_ident(a.attname) FROM pg_attribute a
                  WHERE a.attrelid = i.indrelid AND a.attnum = i.indkey[0]))
  FROM pg_index i WHERE i.indexrelid = to_regclass(%(of)s)
"""
COLLATED = """
SELECT format('%I.%I', n.nspname, c.collname)
  FROM pg_index i JOIN pg_collation c ON c.oid = i.indcollation[0] JOIN pg_namespace n ON n.oid = c.collnamespace
  JOIN pg_attribute own ON own.attrelid = 'pg_temp.roir_own'::regclass AND own.attcollation <> c.oid
 WHERE i.indexrelid = 'pg_temp.roir_index'::regclass
"""
# Functions that come with the server aren't listed as dependencies; all of them that are immutable are safe.
OF_USERS = """
SELECT count(*) AS used, count(*) FILTER (WHERE p.proparallel <> 's') AS unsafe
  FROM pg_depend d
  LEFT JOIN pg_operator o ON d.refclassid = 'pg_operator'::regclass AND o.oid = d.refobjid
  JOIN pg_proc p ON p.oid = CASE WHEN d.refclassid = 'pg_proc'::regclass THEN d.refobjid ELSE o.oprcode END
 WHERE d.classid = 'pg_proc'::regclass AND d.objid = to_regprocedure(%(function)s)
"""
# A function's result has its arguments' collation; a key's own is that of the newest generation's entries.
KEPT = """
SELECT c.value ->> 'source' AS name, g.base, 'c' || c.position AS stored
  FROM (SELECT g.entry, t.base::oid FROM roir.generation g, to_regclass(format('roir_data.g%%s', g.id)) t (base)
         WHERE g.index_id = %(index)s AND t.base IS NOT NULL ORDER BY g.id DESC LIMIT 1) g,
       jsonb_array_elements(g.entry -> 'columns') WITH ORDINALITY c (value, position)
"""
MADE = """
SELECT p.proname::text AS name, coalesce(p.proargnames, '{}')::text[] AS arguments
  FROM pg_proc p WHERE p.pronamespace = 'roir_data'::regnamespace AND p.proname ~ %(pattern)s
"""


# A user's function that is declared immutable may depend on these: each writer, and the build, would compute another
# value. Functions of the server don't, and are inlined; with settings a call takes 3 microseconds more.
PINNED = " ".join(
    f"SET {name} = {value}"
    for name, value in {
        "timezone": "'UTC'",
        "datestyle": "'ISO, YMD'",
        "intervalstyle": "'postgres'",
        "extra_float_digits": "3",
        "bytea_output": "'hex'",
        "xmloption": "'content'",
        "lc_monetary": "'C'",
        "lc_numeric": "'C'",
        "lc_time": "'C'",
    }.items()
)


@dataclass(frozen=True)
class Expression:
    """An expression as the server reads it. suffix: of its function, a number from 1, or `where` for the condition.

    text: canonical, with all names qualified that a search_path could change.
    """

    suffix: str
    name: str
    text: str
    column: Column
    arguments: tuple[Column, ...]


def judge(connection: Connection, source: Source, definition: IndexDefinition, alone: bool = False) -> list[Expression]:
    """The expressions of a definition and its condition, as the server reads them. Changes nothing.

    alone: the database has no control schema, and the source belongs to our role.
    Raises InvalidInput with the server's words for one that an index can't have.
    """
    asked = [(str(number), *one) for number, one in enumerate(definition.expressions, start=1)]
    if definition.where:
        asked.append((CONDITION, CONDITION, definition.where))
    savepoint = connection.begin_nested()
    try:
        table = _like(connection, source, alone)
        return [_judge_one(connection, table, definition, *one) for one in asked]
    finally:
        savepoint.rollback()


def check(connection: Connection, source: Source, definition: IndexDefinition, alone: bool = False) -> None:
    """Raises InvalidInput if an expression, its name or the condition can't be part of an index of the source.

    alone: as in `judge`.
    """
    _check_names(source, definition)
    judge(connection, source, definition, alone)


def _like(connection: Connection, source: Source, alone: bool) -> str:
    """Makes an empty table like the source, which belongs to the source's owner: `CREATE INDEX` runs code as it."""
    # It has the source's name, since an expression may name the table.
    table = f"{PLANNED}.{quote(source.name.name)}"
    execute(connection, f"CREATE TABLE {table} (LIKE {source.sql})")
    if not alone and not owner.is_trusted(connection, source):
        execute(connection, f"ALTER TABLE {table} OWNER TO {quote(source.owner)}")
    return table


def _judge_one(
    connection: Connection, table: str, definition: IndexDefinition, suffix: str, name: str, text: str
) -> Expression:
    is_condition = suffix == CONDITION
    what = "the condition" if is_condition else f"the expression {text}"
    savepoint = connection.begin_nested()
    try:
        # The user's own search_path finds what the user means.
        execute(connection, "SET LOCAL search_path TO DEFAULT")
        text = _canonical(connection, table, text, is_condition, name in definition.include)
    except DBAPIError as error:
        state = sqlstate(error) or ""
        if state.startswith(_NOT_OF_TEXT):
            raise
        savepoint.rollback()
        raise InvalidInput(f"index {definition.name}: {what} can't be part of an index: {said(error)}") from error
    savepoint.rollback()
    view = f"{PLANNED}.roir_x{suffix}"
    execute(connection, f"CREATE VIEW {view} AS SELECT {text} AS x FROM {table}")
    [column] = columns_of(connection, _oid(connection, view)).values()
    used = execute(connection, USED, {"view": view, "table": table}).scalars().all()
    of_table = columns_of(connection, _oid(connection, table))
    return Expression(suffix, name, text, replace(column, name=name), tuple(of_table[one] for one in used))


def _canonical(connection: Connection, table: str, text: str, is_condition: bool, is_included: bool) -> str:
    """The text as the server keeps it, in an index or a generated column that is undone. Colons and per cents stay."""
    # psycopg2 takes a per cent sign for a placeholder only if there are values.
    if is_included:
        kind = f"{PLANNED}.roir_type"
        execute(connection, f"CREATE VIEW {kind} AS SELECT ({text}) AS x FROM {table}")
        [column] = columns_of(connection, _oid(connection, kind)).values()
        execute(connection, f"ALTER TABLE {table} ADD COLUMN roir_x {column.type} GENERATED ALWAYS AS ({text}) STORED")
        query = """SELECT pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef d JOIN pg_attribute a
                       ON a.attrelid = d.adrelid AND a.attnum = d.adnum AND a.attname = 'roir_x'
                    WHERE d.adrelid = to_regclass(%(of)s)"""
        of = table
    else:
        of = f"{PLANNED}.roir_index"
        what = f"((1)) WHERE ({text})" if is_condition else f"(({text}))"
        execute(connection, f"CREATE INDEX roir_index ON {table} {what}")
        query = INDEXED
    execute(connection, "SET LOCAL search_path = pg_catalog, pg_temp")
    canonical = str(execute(connection, query, {"of": of}).scalar_one())
    return canonical if is_included or is_condition else _collated(connection, table, canonical)


def _collated(connection: Connection, table: str, text: str) -> str:
    """The text with the collation of its index, if that isn't its own: an index keeps an outer COLLATE by itself."""
    execute(connection, f"CREATE VIEW {PLANNED}.roir_own AS SELECT ({text}) AS x FROM {table}")
    collation = execute(connection, COLLATED).scalar_one_or_none()
    if collation is None:
        return text
    return f"{text if text.isidentifier() else f'({text})'} COLLATE {collation}"


def _oid(connection: Connection, name: str) -> int:
    return int(execute(connection, "SELECT to_regclass(%(name)s)::oid", {"name": name}).scalar_one())


def create(connection: Connection, index_id: int | None, expressions: Sequence[Expression]) -> dict[str, Computed]:
    """Makes the functions of expressions: an index's, or for a plan. Returns their calls by suffix."""
    made = {}
    for one in expressions:
        call = planned_name(one.suffix) if index_id is None else function_name(index_id, one.suffix)
        execute(connection, _render(call, one))
        function = f"{call}({', '.join(column.cast for column in one.arguments)})"
        # A hardening script may have taken it; the functions run with the caller's rights.
        execute(connection, f"GRANT EXECUTE ON FUNCTION {call} TO PUBLIC")
        of_users = execute(connection, OF_USERS, {"function": function}).one()
        if of_users.unsafe == 0:
            execute(connection, f"ALTER FUNCTION {call} PARALLEL SAFE")
        if of_users.used > 0:
            execute(connection, f"ALTER FUNCTION {call} {PINNED}")
        made[one.suffix] = Computed(call, tuple(column.name for column in one.arguments), one.text)
    return made


def kept(expressions: Sequence[Expression]) -> dict[str, str]:
    """The expressions and the condition of a new index, for the columns of `roir.index`."""
    pairs = [[one.name, one.text] for one in expressions if one.suffix != CONDITION]
    condition = next((one.text for one in expressions if one.suffix == CONDITION), "")
    return {"expressions": to_json(pairs), "condition": condition}


def create_of_index(connection: Connection, index_id: int, expressions: Sequence[Expression]) -> dict[str, Computed]:
    """Makes the functions of a new index; returns them by the calls that the plan's entry has."""
    made = create(connection, index_id, expressions)
    return {planned_name(suffix): computed for suffix, computed in made.items()}


def planned_name(suffix: str) -> str:
    """The function of a plan's expression."""
    return f"{PLANNED}.roir_{suffix}"


def function_name(index_id: int, suffix: str) -> str:
    """The function of an index's expression."""
    return f"{DATA_SCHEMA}.i{index_id}_{suffix}"


def _render(call: str, one: Expression) -> str:
    parameters = ", ".join(f"{quote(column.name)} {column.cast}" for column in one.arguments)
    # The type of a parameter has a collation of its own: without this, `lower` would ignore the column's.
    collated = [column for column in one.arguments if column.collation not in (None, 'pg_catalog."default"')]
    around = ""
    if collated:
        columns = [in_collation(quote(column.name), column.collation) for column in one.arguments]
        listed = ", ".join(f"{value} AS {quote(c.name)}" for value, c in zip(columns, one.arguments, strict=True))
        around = f" FROM (SELECT {listed}) x"
    return (
        f"CREATE FUNCTION {call}({parameters}) RETURNS {one.column.cast} LANGUAGE sql IMMUTABLE "
        f"BEGIN ATOMIC SELECT {one.text}{around}; END"
    )


def applied(source: Source, expressions: Sequence[Expression], calls: dict[str, Computed]) -> Source:
    """The source with expressions as more columns, by their names, and with the condition."""
    columns = dict(source.columns)
    condition = calls.get(CONDITION)
    for one in expressions:
        if one.suffix != CONDITION:
            columns[one.name] = replace(one.column, name=one.name, attnum=0, not_null=False, computed=calls[one.suffix])
    return replace(source, columns=columns, condition=condition)


@contextmanager
def planned(
    connection: Connection, source: Source, definition: IndexDefinition, index_id: int | None
) -> Iterator[tuple[Source, list[Expression]]]:
    """The source with an index's expressions: of an index that exists, or of one that is planned.

    The functions of a plan are gone after the block. Raises InvalidInput.
    """
    if not definition.expressions and not definition.where:
        yield source, []
        return
    if index_id is not None:
        yield of_index(connection, source, definition, index_id), []
        return
    expressions = judge(connection, source, definition)
    calls = create(connection, None, expressions)
    yield applied(source, expressions, calls), expressions
    # After an error the rollback drops them.
    drop(connection, list(calls.values()))


def of_index(connection: Connection, source: Source, definition: IndexDefinition, index_id: int) -> Source:
    """The source with the expressions of an index that exists, by its own functions."""
    rows = execute(connection, MADE, {"pattern": f"^i{index_id}_"})
    texts = {str(number): text for number, (_, text) in enumerate(definition.expressions, start=1)}
    texts[CONDITION] = definition.where
    calls = {}
    for row in rows:
        suffix = row.name.removeprefix(f"i{index_id}_")
        calls[suffix] = Computed(f"{DATA_SCHEMA}.{row.name}", tuple(row.arguments), texts[suffix])
    kept = {row.name: row for row in execute(connection, KEPT, {"index": index_id})}
    found = []
    savepoint = connection.begin_nested()
    try:
        for number, (name, text) in enumerate(definition.expressions, start=1):
            view = f"{PLANNED}.roir_x{number}"
            value = calls[str(number)].of("s")
            if name in kept:
                value = in_collation(value, columns_of(connection, kept[name].base)[kept[name].stored].collation)
            execute(connection, f"CREATE VIEW {view} AS SELECT {value} AS x FROM {source.sql} s")
            [column] = columns_of(connection, _oid(connection, view)).values()
            found.append(Expression(str(number), name, text, column, ()))
    finally:
        savepoint.rollback()
    return applied(source, found, calls)


def drop(connection: Connection, calls: Sequence[Computed]) -> None:
    """Drops functions of expressions."""
    for one in calls:
        execute(connection, f"DROP FUNCTION IF EXISTS {one.call}")


def drop_of_index(connection: Connection, index_id: int) -> None:
    """Drops the functions of an index's expressions, after the views and functions that call them."""
    rows = execute(connection, MADE, {"pattern": f"^i{index_id}_"})
    drop(connection, [Computed(f"{DATA_SCHEMA}.{row.name}", ()) for row in rows])


def _check_names(source: Source, definition: IndexDefinition) -> None:
    for name, text in definition.expressions:
        if name in source.columns:
            raise InvalidInput(
                f"index {definition.name}: {text} would be named {quote(name)} in the index's view, as a column of "
                f"{source.sql} is. Give it another name: {text} AS {quote(name + '_key')}"
            )
