"""The published indexes of a database, read from its catalogs with the rights of an application."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# The types that a key column may be compared with, so that the B-tree serves the comparison: those of its operator
# family, its own type, and these by the type of the operator class; the server casts a constant of them.
_CAST = """VALUES ('pg_catalog.text', 'pg_catalog.varchar'), ('pg_catalog.numeric', 'pg_catalog.int2'),
                  ('pg_catalog.numeric', 'pg_catalog.int4'), ('pg_catalog.numeric', 'pg_catalog.int8'),
                  ('pg_catalog.float8', 'pg_catalog.numeric'), ('pg_catalog.float4', 'pg_catalog.numeric')"""
LOOK_UP = "roir.look_up(bigint,oid,oid,text,text[],text[],text[],text[],integer,text[],text[])"
# One JSON text, or NULL in a database without indexes that can be looked up in.
INDEXES = f"""
WITH RECURSIVE found AS (
    SELECT DISTINCT v.oid AS view, v.relname AS view_name, n.nspname AS view_schema,
           pg_catalog.substr(b.relname, 2)::bigint AS generation, b.oid AS base, s.oid AS source,
           pg_catalog.to_regclass(pg_catalog.format('roir_data.%I', b.relname || '_key'))::oid AS tree
      FROM pg_catalog.pg_class b
      JOIN pg_catalog.pg_namespace bn ON bn.oid = b.relnamespace AND bn.nspname = 'roir_data'
      JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_rewrite'::regclass
                                 AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid = b.oid
      JOIN pg_catalog.pg_rewrite r ON r.oid = d.objid
      JOIN pg_catalog.pg_class v ON v.oid = r.ev_class AND v.relkind = 'v' AND v.relnamespace <> b.relnamespace
      JOIN pg_catalog.pg_namespace n ON n.oid = v.relnamespace
      -- The view of the source as entries.
      JOIN pg_catalog.pg_rewrite sr
        ON sr.ev_class = pg_catalog.to_regclass(pg_catalog.format('roir_data.%I', b.relname || '_source'))
      JOIN pg_catalog.pg_depend sd ON sd.classid = 'pg_catalog.pg_rewrite'::regclass AND sd.objid = sr.oid
                                  AND sd.refclassid = 'pg_catalog.pg_class'::regclass
      JOIN pg_catalog.pg_class s ON s.oid = sd.refobjid AND s.relkind = 'p'
     WHERE b.relkind = 'p' AND b.relname ~ '^g[0-9]+$'
       -- A partial index lacks rows: its view of the source calls the function of the condition.
       AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend cd JOIN pg_catalog.pg_proc p ON p.oid = cd.refobjid
                        WHERE cd.classid = 'pg_catalog.pg_rewrite'::regclass AND cd.objid = sr.oid
                          AND cd.refclassid = 'pg_catalog.pg_proc'::regclass
                          AND p.pronamespace = b.relnamespace AND p.proname ~ '^i[0-9]+_where$')
       AND pg_catalog.has_table_privilege(v.oid, 'SELECT')
       AND pg_catalog.to_regprocedure('{LOOK_UP}') > 0::oid
),
tree (source, relation, kind) AS (
    SELECT DISTINCT f.source, f.source, 'p'::"char" FROM found f
    UNION ALL
    SELECT t.source, i.inhrelid, c.relkind
      FROM tree t JOIN pg_catalog.pg_inherits i ON i.inhparent = t.relation
      JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
     WHERE t.kind = 'p'
),
cast_from (class_type, type) AS (
    SELECT pg_catalog.to_regtype(x.class_type)::oid, pg_catalog.to_regtype(x.type)::oid
      FROM ({_CAST}) x (class_type, type)
),
key AS (
    SELECT f.view, k.position, va.attname AS name,
           (SELECT pg_catalog.json_agg(t.oid ORDER BY t.oid)
              FROM (SELECT m.amoprighttype FROM pg_catalog.pg_amop m
                     WHERE m.amopfamily = o.opcfamily AND m.amoplefttype = o.opcintype AND m.amopstrategy = 3
                    -- That of a value without a type.
                    UNION VALUES (va.atttypid), (705)
                    UNION SELECT x.type FROM cast_from x WHERE x.class_type = o.opcintype) a (oid)
              JOIN pg_catalog.pg_type t ON t.oid = a.oid AND (t.typtype <> 'p' OR t.oid = 705)) AS accepts,
           coalesce(va.attcollation = sa.attcollation AND va.atttypid = coalesce(nullif(st.typbasetype, 0), st.oid),
                    false) AS alike
      FROM found f
      JOIN pg_catalog.pg_index i ON i.indexrelid = f.tree
     CROSS JOIN LATERAL ROWS FROM (pg_catalog.unnest(i.indkey[0:i.indnkeyatts - 1]),
                                   pg_catalog.unnest(i.indclass[0:i.indnkeyatts - 1]))
           WITH ORDINALITY AS k (attnum, class, position)
      JOIN pg_catalog.pg_opclass o ON o.oid = k.class
      -- The view has the columns of its base in their order.
      JOIN pg_catalog.pg_attribute va ON va.attrelid = f.view AND va.attnum = k.attnum
      LEFT JOIN pg_catalog.pg_attribute sa ON sa.attrelid = f.source AND sa.attname = va.attname AND NOT sa.attisdropped
      LEFT JOIN pg_catalog.pg_type st ON st.oid = sa.atttypid
)
SELECT pg_catalog.json_agg(pg_catalog.json_build_object(
           'view', f.view::bigint, 'schema', f.view_schema, 'name', f.view_name, 'generation', f.generation,
           'source', f.source::bigint, 'table_schema', sn.nspname, 'table_name', s.relname,
           'visible', pg_catalog.pg_table_is_visible(f.source),
           'key', (SELECT pg_catalog.json_agg(pg_catalog.json_build_object(
                              'name', k.name, 'accepts', k.accepts, 'alike', k.alike) ORDER BY k.position)
                     FROM key k WHERE k.view = f.view),
           'unique', (SELECT i.indnkeyatts FROM pg_catalog.pg_index i WHERE i.indexrelid = f.tree AND i.indisunique),
           'identity', (SELECT pg_catalog.json_agg(a.attname ORDER BY k.position)
                          FROM pg_catalog.pg_index i
                         CROSS JOIN LATERAL pg_catalog.unnest(i.indkey[0:i.indnkeyatts - 1])
                               WITH ORDINALITY AS k (attnum, position)
                          JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
                         WHERE i.indrelid = f.source AND i.indisprimary),
           'parts', (SELECT pg_catalog.json_agg(DISTINCT a.attname)
                       FROM pg_catalog.pg_partitioned_table p
                       JOIN pg_catalog.pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = ANY (p.partattrs)
                      WHERE p.partrelid = f.source),
           -- The planner prunes partitions by hash only if it knows all their columns' values together.
           'prunes', NOT EXISTS (SELECT FROM tree t JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = t.relation
                                  WHERE t.source = f.source AND p.partstrat = 'h' AND p.partnatts > 1),
           'partitions', (SELECT pg_catalog.count(*) FROM tree t WHERE t.source = f.source AND t.kind <> 'p')))::text
  FROM found f
  JOIN pg_catalog.pg_class s ON s.oid = f.source
  JOIN pg_catalog.pg_namespace sn ON sn.oid = s.relnamespace
"""


@dataclass(frozen=True)
class KeyColumn:
    """A column of an index's B-tree. accepts: oids of the types that it can be compared with."""

    name: str
    accepts: tuple[int, ...]


@dataclass(frozen=True)
class Index:
    """A published index of a partitioned table.

    view, source: oids of the index's view and of the table. key: the columns of its B-tree, which begin with the key.
    unique: how many of them determine the row. identity: the table's primary key. parts: the columns of the
    table's own partition key. partitions: how many leaves the table has.
    """

    view: int
    name: str
    generation: int
    source: int
    key: tuple[KeyColumn, ...]
    unique: int
    identity: tuple[str, ...]
    parts: frozenset[str]
    partitions: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Registry:
    """The indexes by the name of their table: with its schema, or with None if the session finds it without one."""

    by_table: Mapping[tuple[str | None, str], tuple[Index, ...]] = field(default_factory=dict)

    def of(self, schema: str | None, table: str) -> tuple[Index, ...]:
        """The indexes of a table."""
        return self.by_table.get((schema, table), ())

    def __len__(self) -> int:
        return len({index.view for indexes in self.by_table.values() for index in indexes})


def read(fetch: Callable[[str], str | None], least_partitions: int = 1) -> Registry:
    """The registry of a database.

    fetch: runs a statement without parameters, and gives the only value of its result. least_partitions: leaves out
    the indexes of tables with fewer partitions.
    """
    text = fetch(INDEXES)
    found: dict[tuple[str | None, str], list[Index]] = {}
    for row in json.loads(text) if text else []:
        index = _index(row)
        if index is None or index.partitions < least_partitions:
            continue
        found.setdefault((row["table_schema"], row["table_name"]), []).append(index)
        if row["visible"]:
            found.setdefault((None, row["table_name"]), []).append(index)
    return Registry({name: tuple(indexes) for name, indexes in found.items()})


def _index(row: Mapping[str, object]) -> Index | None:
    """None if rows can't be found by it."""
    key = []
    for column in _rows(row["key"]):
        # A leading column whose values compare otherwise in the index ends the part that can be used.
        if not column["alike"]:
            break
        accepts: Any = column["accepts"]
        key.append(KeyColumn(str(column["name"]), tuple(map(int, accepts))))
    identity = _names(row["identity"])
    if not key or not identity or not row["prunes"]:
        return None
    return Index(
        view=int(str(row["view"])),
        name=f"{row['schema']}.{row['name']}",
        generation=int(str(row["generation"])),
        source=int(str(row["source"])),
        key=tuple(key),
        unique=int(str(row["unique"] or len(key) + 1)),
        identity=identity,
        parts=frozenset(_names(row["parts"])),
        partitions=int(str(row["partitions"])),
    )


def _rows(value: object) -> Iterable[Mapping[str, object]]:
    return value if isinstance(value, list) else ()


def _names(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()
