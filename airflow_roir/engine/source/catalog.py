"""Reads the shape of a source from the catalogs, and takes its fingerprint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import IndexDefinition, QualifiedName, argument, quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.locks.table_lock import lock_table
from airflow_roir.engine.source import refusals
from airflow_roir.engine.source.source import Column, Source
from airflow_roir.errors import NotFound, RoirError
from airflow_roir.nearest import meant, nearest_qualified

TREE, TREE_ALONE = "roir.partition_tree(c.oid) t", "pg_partition_tree(c.oid) t (relation)"
RELATION = f"""
SELECT c.oid, n.nspname, c.relname, c.relkind::text AS kind, c.relpersistence::text AS persistence,
       c.relrowsecurity, c.relispartition,
       -- relhassubclass stays true when the last child has gone, until an ANALYZE.
       c.relhassubclass AND EXISTS (SELECT FROM pg_inherits h WHERE h.inhparent = c.oid) AS has_children,
       pg_has_role(c.relowner, 'USAGE') AS owned,
       (SELECT pg_has_role(r.nspowner, c.relowner, 'USAGE') FROM pg_namespace r WHERE r.nspname = 'roir') AS by_builder,
       pg_get_userbyid(c.relowner) AS owner,
       (SELECT t.relation::regclass::text FROM {TREE} JOIN pg_class l ON l.oid = t.relation
         WHERE l.relpersistence = 'u' LIMIT 1) AS unlogged
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
"""
FIND_RELATION = f"""{RELATION}
 WHERE c.relname = %(name)s AND n.nspname = ANY (%(schemas)s)
 ORDER BY array_position(%(schemas)s::text[], n.nspname::text)
 LIMIT 1
"""
# Relations whose names are like one that doesn't exist, for `nearest_qualified`: the same in other case, then those
# with the same first or last letter whose length differs by at most 2. One look at pg_class; of 100,000 relations it
# returns at most 1,000, those with the same first half before others. Only such as our role may see.
NEAR_RELATIONS = """
SELECT x.schema, x.name
  FROM (SELECT c.oid, n.oid AS schema_oid, n.nspname::text AS schema, c.relname::text AS name
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         CROSS JOIN LATERAL (SELECT lower(c.relname::text) AS ours, lower(%(name)s::text) AS theirs) l
         WHERE c.relkind = ANY (%(kinds)s::"char"[]) AND (%(partitions)s OR NOT c.relispartition)
           AND n.nspname NOT IN ('roir', 'roir_data', 'information_schema') AND n.nspname !~ '^pg_'
           AND (l.ours = l.theirs
                OR abs(length(l.ours) - length(l.theirs)) <= 2
                   AND (left(l.ours, 1) = left(l.theirs, 1) OR right(l.ours, 1) = right(l.theirs, 1)))
         ORDER BY l.ours = l.theirs DESC, n.nspname = ANY (%(schemas)s) DESC,
                  left(l.ours, length(l.theirs) / 2) = left(l.theirs, length(l.theirs) / 2) DESC
         LIMIT 1000) x
 WHERE has_schema_privilege(x.schema_oid, 'USAGE') AND has_any_column_privilege(x.oid, 'SELECT')
"""
COLUMNS = """
SELECT a.attname AS name, a.attnum, a.attgenerated::text = 'v' AS virtual, t.typtype::text = 'd' AS domain,
       format_type(b.oid, b.typmod) AS type, format_type(b.oid, -1) AS cast,
       a.attnotnull AS not_null,
       CASE WHEN a.attcollation <> 0
            THEN quote_ident(cn.nspname) || '.' || quote_ident(co.collname) END AS collation,
       CASE WHEN co.oid = 'pg_catalog."default"'::regcollation
            THEN (SELECT pg_database_collation_actual_version(oid) FROM pg_database WHERE datname = current_database())
            ELSE pg_collation_actual_version(co.oid) END AS collation_version,
       bt.typlen, bt.typname AS base_name, b.typmod,
       bt.oid IN ('regclass'::regtype, 'regproc'::regtype, 'regprocedure'::regtype, 'regoper'::regtype,
                  'regoperator'::regtype, 'regtype'::regtype, 'regrole'::regtype, 'regnamespace'::regtype,
                  'regconfig'::regtype, 'regdictionary'::regtype, 'regcollation'::regtype) AS oid_alias
  FROM pg_attribute a
  JOIN pg_type t ON t.oid = a.atttypid
 CROSS JOIN LATERAL (
       WITH RECURSIVE up AS (
           SELECT t.oid, t.typtype, t.typbasetype, t.typtypmod, a.atttypmod AS typmod
           UNION ALL
           SELECT n.oid, n.typtype, n.typbasetype, n.typtypmod,
                  CASE WHEN up.typmod <> -1 THEN up.typmod ELSE up.typtypmod END
             FROM up JOIN pg_type n ON n.oid = up.typbasetype WHERE up.typtype = 'd')
       SELECT up.oid, up.typmod FROM up WHERE up.typtype <> 'd') b
  JOIN pg_type bt ON bt.oid = b.oid
  LEFT JOIN pg_collation co ON co.oid = a.attcollation
  LEFT JOIN pg_namespace cn ON cn.oid = co.collnamespace
 WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attnum
"""
PRIMARY_KEY = """
SELECT x.attname AS name, i.indimmediate, i.indisvalid, am.amname, onsp.nspname AS operator_schema,
       (SELECT coalesce(bool_and(so.oprname = (ARRAY['<', '<=', '=', '>=', '>'])[sa.amopstrategy]), false)
          FROM pg_amop sa JOIN pg_operator so ON so.oid = sa.amopopr
         WHERE sa.amopfamily = oc.opcfamily AND sa.amoplefttype = oc.opcintype AND sa.amoprighttype = oc.opcintype
       ) AS by_signs
  FROM pg_index i
  JOIN pg_class ic ON ic.oid = i.indexrelid JOIN pg_am am ON am.oid = ic.relam
 CROSS JOIN LATERAL unnest(i.indkey[0:i.indnkeyatts - 1], i.indclass[0:i.indnkeyatts - 1])
       WITH ORDINALITY AS k (attnum, opclass, position)
  JOIN pg_attribute x ON x.attrelid = i.indrelid AND x.attnum = k.attnum
  JOIN pg_opclass oc ON oc.oid = k.opclass
  LEFT JOIN pg_amop ao ON ao.amopfamily = oc.opcfamily AND ao.amoplefttype = oc.opcintype
        AND ao.amoprighttype = oc.opcintype AND ao.amopstrategy = 3
  LEFT JOIN pg_operator o ON o.oid = ao.amopopr
  LEFT JOIN pg_namespace onsp ON onsp.oid = o.oprnamespace
 WHERE i.indrelid = %(oid)s AND i.indisprimary
 ORDER BY k.position
"""
PARTITIONS = "SELECT relation::bigint, leaf FROM roir.partition_tree(%(oid)s) ORDER BY relation"
PARTITIONS_ALONE = """
SELECT relid::bigint AS relation, isleaf AS leaf FROM pg_partition_tree(%(oid)s) WHERE relid <> %(oid)s ORDER BY 1
"""


def default_schemas(connection: Connection) -> list[str]:
    """The schemas in which the role's unqualified names are looked up, in order.

    As psql does: by the role's own search_path, not by the pinned one of this session.
    """
    savepoint = connection.begin_nested()
    try:
        execute(connection, "SET LOCAL search_path TO DEFAULT")
        return list(execute(connection, "SELECT pg_catalog.current_schemas(false)::text[]").scalar_one())
    finally:
        savepoint.rollback()


def read_source(connection: Connection, name: QualifiedName) -> Source:
    """Read a source by name. Raises NotFound, or InvalidInput if such a relation can't be indexed."""
    row = _find(connection, name)
    return _checked(connection, row, row.owned)


def found(connection: Connection, name: QualifiedName) -> tuple[int, QualifiedName]:
    """The oid and full name of a relation of any kind. Raises NotFound."""
    row = _find(connection, name)
    return row.oid, QualifiedName(row.nspname, row.relname)


def near(
    connection: Connection, name: QualifiedName, schemas: Sequence[str], kinds: str = "rp", partitions: bool = False
) -> QualifiedName | None:
    """The relation that a user probably meant by a name that none has in these schemas; None if none is like it.

    kinds: the relations that may be meant, as in pg_class; partitions: those of tables, too.
    """
    values = {"name": name.name, "schemas": list(schemas), "kinds": list(kinds), "partitions": partitions}
    names = [QualifiedName(row.schema, row.name) for row in execute(connection, NEAR_RELATIONS, values)]
    return nearest_qualified(name, names, schemas)


def how_to_name(meant_table: QualifiedName | None) -> str:
    """The end of the refusal of a table's name: the table that was probably meant, or how to check the name."""
    return meant(meant_table) or "; check the name, and quote it if it has capitals"


def _find(connection: Connection, name: QualifiedName, query: str = FIND_RELATION) -> Row[Any]:
    schemas = [name.schema] if name.schema is not None else default_schemas(connection)
    row = execute(connection, query, {"name": name.name, "schemas": schemas}).first()
    if row is None:
        listed = ", ".join(map(quote, schemas)) or "that search_path names (there is none)"
        where = "" if name.schema else f" in schemas {listed}"
        raise NotFound(f"table {name} doesn't exist{where}{how_to_name(near(connection, name, schemas))}")
    return row


def read_source_by_oid(connection: Connection, oid: int, check: bool = True, only_look: bool = False) -> Source:
    """Read a source by its oid. Raises NotFound if it was dropped.

    check: raise InvalidInput if the source can't be indexed any more, by this role; or, with only_look, by the owner of
        the control schema.
    """
    row = execute(connection, f"{RELATION} WHERE c.oid = %(oid)s", {"oid": oid}).first()
    if row is None:
        raise _dropped(connection, oid)
    if not check:
        return _read(connection, row, _primary_key(connection, row))
    return _checked(connection, row, row.by_builder if only_look else row.owned)


def look(connection: Connection, name: QualifiedName, alone: bool = False) -> tuple[Source | None, list[RoirError]]:
    """As `read_source`, but returns all problems at once. The source is None if the relation is no table.

    alone: the database has no control schema.
    """
    row = _find(connection, name, FIND_RELATION.replace(TREE, TREE_ALONE) if alone else FIND_RELATION)
    key = _primary_key(connection, row)
    full = QualifiedName(row.nspname, row.relname)
    problems = [*refusals.relation_problems(full, row, row.owned), *refusals.key_problems(full, key)]
    if row.kind not in ("r", "p"):
        return None, problems[:1]
    return _read(connection, row, key, PARTITIONS_ALONE if alone else PARTITIONS), problems


def _checked(connection: Connection, row: Row[Any], owned: bool) -> Source:
    full = QualifiedName(row.nspname, row.relname)
    for problem in refusals.relation_problems(full, row, owned):
        raise problem
    key = _primary_key(connection, row)
    for problem in refusals.key_problems(full, key):
        raise problem
    return _read(connection, row, key)


def _primary_key(connection: Connection, row: Row[Any]) -> Sequence[Row[Any]]:
    return execute(connection, PRIMARY_KEY, {"oid": row.oid}).all()


def _read(connection: Connection, row: Row[Any], key: Sequence[Row[Any]], query: str = PARTITIONS) -> Source:
    partitions = execute(connection, query, {"oid": row.oid}).all()
    return Source(
        oid=row.oid,
        name=QualifiedName(row.nspname, row.relname),
        owner=row.owner,
        partitioned=row.kind == "p",
        columns=columns_of(connection, row.oid),
        primary_key=tuple(k.name for k in key),
        pk_deferrable=bool(key) and not key[0].indimmediate,
        operator_schemas=tuple(
            sorted({k.operator_schema for k in key if k.operator_schema not in (None, "pg_catalog")})
        ),
        relations=(row.oid, *(p.relation for p in partitions)),
        leaves=tuple(p.relation for p in partitions if p.leaf) if row.kind == "p" else (row.oid,),
    )


def columns_of(connection: Connection, oid: int) -> dict[str, Column]:
    """The columns of a relation by name, in their order."""
    return {
        c.name: Column(
            name=c.name,
            type=c.type,
            cast=c.cast,
            collation=c.collation,
            collation_version=c.collation_version,
            attnum=c.attnum,
            not_null=c.not_null,
            virtual=c.virtual,
            max_bytes=_max_bytes(c.typlen, c.base_name, c.typmod),
            oid_alias=c.oid_alias,
            domain=c.domain,
        )
        for c in execute(connection, COLUMNS, {"oid": oid})
    }


def hold(connection: Connection, source: Source) -> None:
    """Lock a source with its partitions in ACCESS SHARE mode, so that its name keeps meaning that table.

    Raises LockNotAcquired if another table, or none, has the name by now.
    """
    lock_table(connection, source.sql, source.oid, "ACCESS SHARE")


def name_of(connection: Connection, oid: int) -> QualifiedName:
    """The present name of a relation. Raises NotFound if it was dropped."""
    row = execute(
        connection,
        "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE c.oid = %(oid)s",
        {"oid": oid},
    ).first()
    if row is None:
        raise _dropped(connection, oid)
    return QualifiedName(row.nspname, row.relname)


OF_DROPPED = """
SELECT i.schema_name, i.name,
       EXISTS (SELECT FROM roir.generation g WHERE g.index_id = i.id AND g.status = 'active') AS published,
       EXISTS (SELECT FROM roir.operation o
                WHERE o.index_id = i.id AND o.status IN ('running', 'paused', 'failed')) AS live
  FROM roir.index i WHERE i.source_oid = %(oid)s AND i.dropped_at IS NULL ORDER BY 1, 2
"""


def _dropped(connection: Connection, oid: int) -> NotFound:
    """The error with the remedy for each index of a dropped source: an abort if its first build is unfinished.

    In a shard it names no index: the control schema is on another server.
    """
    dropped = f"the source (oid {oid}) was dropped"
    if execute(connection, "SELECT to_regclass('roir.index') IS NULL").scalar_one():
        return NotFound(dropped)
    remedies = []
    for row in execute(connection, OF_DROPPED, {"oid": oid}):
        index = argument(QualifiedName(row.schema_name, row.name))
        remedies += [f"roir abort {index}"] * row.live + [f"roir drop {index}"] * row.published
    return NotFound(f"{dropped}; drop its indexes, too: {'; '.join(remedies)}")


def source_of_index(connection: Connection, index_id: int, check: bool = True) -> Source:
    """The source of an index by the index's id. Raises NotFound, InvalidInput; check: as in `read_source_by_oid`."""
    oid = execute(connection, "SELECT source_oid FROM roir.index WHERE id = %(id)s", {"id": index_id}).scalar_one()
    return read_source_by_oid(connection, oid, check)


def source_if_there(connection: Connection, index_id: int, check: bool = False) -> Source | None:
    """The source of an index, None if the source was dropped.

    check: raise InvalidInput if the source can't be indexed any more, which doesn't matter for a drop of the index.
    """
    try:
        return source_of_index(connection, index_id, check)
    except NotFound:
        return None


def _max_bytes(typlen: int, base_name: str, typmod: int) -> int | None:
    if typlen > 0:
        return typlen
    if typmod < 0:
        return None
    if base_name in ("varchar", "bpchar"):
        return (typmod - 4) * 4 + 4  # UTF-8 takes up to four bytes a character
    if base_name == "numeric":
        return (((typmod - 4) >> 16) & 0xFFFF) // 2 + 12
    if base_name in ("bit", "varbit"):
        return typmod // 8 + 9
    return None


def identity_columns(source: Source, definition: IndexDefinition) -> tuple[str, ...]:
    """The columns `(key, pk)` that identify an entry, each once, the key's first."""
    return (*definition.key, *(c for c in source.primary_key if c not in definition.key))


def fingerprint(connection: Connection, source_oid: int, columns: list[str]) -> str:
    """A digest of the source's shape, as far as a build depends on it, with the capture triggers."""
    values = {"oid": source_oid, "columns": columns}
    return str(execute(connection, "SELECT roir.fingerprint(%(oid)s, %(columns)s)", values).scalar_one())


def stamp(connection: Connection, source_oid: int) -> str:
    """A text that changes whenever the server has written to rows that the fingerprint and partition changes read."""
    return str(execute(connection, "SELECT roir.stamp(%(oid)s)", {"oid": source_oid}).scalar_one())
