"""The shape of entries: their columns of the source, the physical names, and how entries compare.

Physical columns are named by position (`c1`, `c2`, …), so names of users never collide with names of roir.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition, QualifiedName, quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.source.catalog import identity_columns
from airflow_roir.engine.source.source import Computed, Source, in_collation

# Room for covered columns in a B-tree tuple of about 2,700 bytes; the rest is for the key.
COVERED_BYTES = 1024
# The records of the capture's function.
CAPTURED = ("OLD", "NEW")


@dataclass(frozen=True)
class EntryColumn:
    """One column of an entry. equals: the operator of its own B-tree operator class, '' if it is only included.

    collation_version: that of the library by which the entries were sorted; None if it has none. attnum: the column's
    number in the source, which a rename doesn't change. call, arguments, text: of an expression, as in `Computed`; ''
    for a column of the source. An expression's `source` is its name in the index's view.
    """

    source: str
    type: str
    cast: str
    collation: str | None
    primary_key: bool
    covered: bool
    oid_alias: bool
    equals: str = ""
    domain: bool = True
    collation_version: str | None = None
    attnum: int = 0
    call: str = ""
    arguments: tuple[str, ...] = ()
    text: str = ""

    @property
    def label(self) -> str:
        """The name of a key column in the server's own errors: its expression, or the column's quoted name."""
        return self.text or str(QualifiedName(None, self.source))

    @property
    def held(self) -> str:
        """The name of this column in the rows that the capture gets: no other index's expression has it."""
        return self.call or self.source

    @property
    def computed(self) -> Computed | None:
        """The expression; None for a column of the source."""
        return Computed(self.call, self.arguments, self.text) if self.call else None

    @property
    def read(self) -> tuple[str, ...]:
        """The columns of the source that the value comes from."""
        return self.arguments if self.call else (self.source,)

    @property
    def to_base_type(self) -> str:
        """SQL for the cast that a domain's value needs to be compared: a domain over an enum isn't equal to the enum.

        '' for other types, since a cast names the type: after `ALTER TYPE … RENAME` every write would fail.
        """
        return f"::{self.cast}" if self.domain else ""

    def parameter(self, number: int) -> str:
        """SQL for a parameter of a dynamic statement that is compared with this column.

        A parameter of type `name` has a collation of its own, which would conflict with the column's (42P22).
        """
        if self.cast == "name" and self.collation not in (None, 'pg_catalog."C"'):
            return f"${number} COLLATE {self.collation}"
        return f"${number}"

    def of(self, record: str | None) -> str:
        """SQL for this column as its base type. record: the alias of the source, or OLD or NEW in the capture."""
        if self.call and record not in CAPTURED:
            return in_collation(Computed(self.call, self.arguments, self.text).of(record), self.collation)
        prefix = "" if record is None else f"{record}."
        return f"{prefix}{quote(self.held)}{self.to_base_type}"


@dataclass(frozen=True)
class Entry:
    """The shape of a generation's entries: the first `identity` columns are `(key, pk)`, the first `key` ones the key.

    unique: '' if several entries may have the same key, as over shards; else how a unique index treats NULLs,
    `distinct` or `not distinct` (docs/architecture.md#uniqueness).
    """

    columns: tuple[EntryColumn, ...]
    key: int
    identity: int
    partition: int
    unique: str = ""
    condition: Computed | None = None

    @classmethod
    def of(cls, source: Source, definition: IndexDefinition, covering: str, partition: int) -> Entry:
        """Derive the shape from source and definition; `partition`: by how many columns the segments are cut."""
        identity = identity_columns(source, definition)
        room = COVERED_BYTES
        columns = []
        for position, name in enumerate((*identity, *definition.include)):
            column = source.columns[name]
            covered = False
            if position >= len(identity):
                fits = column.max_bytes is not None and column.max_bytes <= room
                covered = covering == "all" or (covering == "auto" and fits)
                room -= (column.max_bytes or 0) if covered else 0
            columns.append(
                EntryColumn(
                    source=name,
                    type=column.type,
                    cast=column.cast,
                    collation=column.collation,
                    primary_key=name in source.primary_key,
                    covered=covered,
                    oid_alias=column.oid_alias,
                    domain=column.domain,
                    collation_version=column.collation_version,
                    attnum=column.attnum,
                    call=column.computed.call if column.computed else "",
                    arguments=column.computed.arguments if column.computed else (),
                    text=column.computed.text if column.computed else "",
                )
            )
        unique = "not distinct" if definition.nulls_not_distinct else "distinct"
        unique = unique if definition.unique_here else ""
        return cls(tuple(columns), len(definition.key), len(identity), partition, unique, source.condition)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Entry:
        """Read the result of `as_json`."""
        condition = value.get("condition")
        return cls(
            tuple(
                EntryColumn(**{**column, "arguments": tuple(column.get("arguments", ()))})
                for column in value["columns"]
            ),
            value["key"],
            value["identity"],
            value["partition"],
            value.get("unique", ""),
            Computed(condition["call"], tuple(condition["arguments"]), condition["text"]) if condition else None,
        )

    def as_json(self) -> dict[str, Any]:
        """The shape as `generation.entry` has it."""
        return asdict(self)

    def physical(self, columns: Sequence[int] | None = None, prefix: str = "") -> list[str]:
        """Physical names of the columns at these positions (all by default)."""
        return [f"{prefix}c{i + 1}" for i in (range(len(self.columns)) if columns is None else columns)]

    def definitions(self) -> str:
        """SQL for the columns of a table of entries: names, types, collations."""
        return self.definitions_of(range(len(self.columns)))

    def definitions_of(self, positions: Sequence[int]) -> str:
        """As `definitions`, for the columns at these positions."""
        return ", ".join(
            f"c{i + 1} {self.columns[i].type}"
            + (f" COLLATE {self.columns[i].collation}" if self.columns[i].collation else "")
            for i in positions
        )

    def comparing_by(self, operators: Sequence[str]) -> Entry:
        """The entry with its equality operators, as an index on `(key, pk)` has them."""
        columns = (
            replace(column, equals=operators[i]) if i < self.identity else column
            for i, column in enumerate(self.columns)
        )
        return replace(self, columns=tuple(columns))

    def calling(self, calls: Mapping[str, Computed]) -> Entry:
        """The entry with other functions for its expressions. calls: the functions by those that it has now."""
        columns = (replace(c, call=calls[c.call].call) if c.call else c for c in self.columns)
        condition = self.condition and calls[self.condition.call]
        return replace(self, columns=tuple(columns), condition=condition)

    @property
    def identity_positions(self) -> range:
        """Positions of `(key, pk)`."""
        return range(self.identity)

    @property
    def included_positions(self) -> range:
        """Positions of the included columns."""
        return range(self.identity, len(self.columns))

    def fingerprinted(self, source: Source) -> list[str]:
        """The source's columns that a fingerprint covers."""
        return list(dict.fromkeys((*self.read, *source.primary_key)))

    @property
    def read(self) -> tuple[str, ...]:
        """The columns of the source that entries come from, each once."""
        of_condition = self.condition.arguments if self.condition else ()
        return tuple(dict.fromkeys((*(name for column in self.columns for name in column.read), *of_condition)))

    def satisfied(self, row: str | None) -> str:
        """SQL, true if a row of the source has an entry: `true`, unless the index is partial. row: its alias."""
        return "true" if self.condition is None else f"{self.condition.of(row)}"

    def and_satisfied(self, row: str | None) -> str:
        """As `satisfied`, to follow other conditions: '' if all rows have an entry."""
        return "" if self.condition is None else f" AND {self.condition.of(row)}"

    def source_columns(self, alias: str) -> list[str]:
        """The columns of a row that the capture has got, in entry order, as `alias."name"`."""
        return [f"{alias}.{quote(column.held)}" for column in self.columns]

    @property
    def nullable_positions(self) -> list[int]:
        """Positions of `(key, pk)` that may be NULL: NOT NULL may be dropped from a key column at any time."""
        return [i for i in self.identity_positions if not self.columns[i].primary_key]

    def same(self, ours: Sequence[str], theirs: Sequence[str], nulls: Mapping[int, bool] | None = None) -> str:
        """SQL, true if two rows are the same entry (docs/architecture.md#equality); `roir.is_same` does that in SQL.

        ours, theirs: SQL for their columns, at least those of `(key, pk)`, as base types. nulls: as in `same_column`.
        """
        return " AND ".join(self.same_columns(ours, theirs, nulls))

    def same_columns(
        self, ours: Sequence[str], theirs: Sequence[str], nulls: Mapping[int, bool] | None = None
    ) -> list[str]:
        """As `same`, as a list with a condition for each column of `(key, pk)`."""
        known = nulls or {}
        return [self.same_column(i, ours[i], theirs[i], known.get(i)) for i in self.identity_positions]

    def same_column(self, i: int, ours: str, theirs: str, null: bool | None = None) -> str:
        """As `same`, for one column of `(key, pk)`.

        null: whether `theirs` is NULL, if that is known: only such a condition can use the index of entries.
        """
        if null:
            return is_null(ours)
        equal = f"{ours} {self.columns[i].equals} {theirs}"
        if self.columns[i].primary_key or null is not None:
            return equal
        return f"({equal} OR {is_null(ours)} AND {is_null(theirs)})"

    def equal(self, left: str, right: str, nulls: Mapping[int, bool] | None = None) -> str:
        """As `same`, for rows of two relations with physical columns. left, right: `alias.` prefixes."""
        return self.same(self.physical(prefix=left), self.physical(prefix=right), nulls)

    def has_row(self, row: str, prefix: str) -> str:
        """As `same`, for a row of the source and an entry. row: the source's alias; prefix: `alias.` of the entry."""
        same = self.same([column.of(row) for column in self.columns], self.physical(prefix=prefix))
        return same + self.and_satisfied(row)

    def on_conflict(self, state: bool = False, by_key: bool = False) -> str:
        """SQL for an upsert's clause. It writes every column, also those of the key: equal values may differ.

        state: also that of a delta's row. by_key: replaces the entry with the same key, of any row (a unique index).
        """
        assignments = ", ".join(f"{name} = EXCLUDED.{name}" for name in self.physical() + (["state"] if state else []))
        arbiter = self.key_positions if by_key else self.identity_positions
        return f"ON CONFLICT ({', '.join(self.physical(arbiter))}) DO UPDATE SET {assignments}"

    def null_pattern(self, positions: Sequence[int], prefix: str) -> str:
        """SQL for which of these columns are NULL, as a string of 0s and 1s."""
        return " || ".join(f"({is_null(name)})::int::text" for name in self.physical(positions, prefix=prefix))

    @property
    def key_positions(self) -> range:
        """Positions of the key."""
        return range(self.key)

    @property
    def rest_positions(self) -> range:
        """Positions of the primary key's columns that aren't in the key, by which rows with the same key differ."""
        return range(self.key, self.identity)

    @property
    def apart_positions(self) -> list[int]:
        """Positions in a unique index's key at which a NULL makes the entry differ from all others."""
        return (
            [i for i in self.nullable_positions if i < self.key] if self.enforced and self.unique == "distinct" else []
        )

    @property
    def enforced(self) -> bool:
        """True if the index must enforce a unique key; False also if the key includes the primary key."""
        return bool(self.unique) and self.identity > self.key


def is_null(expression: str) -> str:
    """SQL, true if a value is NULL for an index: `IS NULL` would also be true for ROW(NULL, NULL)."""
    return f"{expression} IS NOT DISTINCT FROM NULL"


EQUALITY = """
SELECT 'OPERATOR(' || quote_ident(n.nspname) || '.' || o.oprname || ')' AS equals
  FROM pg_index i
 CROSS JOIN LATERAL unnest(i.indclass) WITH ORDINALITY AS k (opclass, position)
  JOIN pg_opclass oc ON oc.oid = k.opclass
  JOIN pg_amop ao ON ao.amopfamily = oc.opcfamily AND ao.amoplefttype = oc.opcintype
       AND ao.amoprighttype = oc.opcintype AND ao.amopstrategy = 3
  JOIN pg_operator o ON o.oid = ao.amopopr
  JOIN pg_namespace n ON n.oid = o.oprnamespace
 WHERE i.indexrelid = %(index)s::regclass
 ORDER BY k.position
"""


def equality_operators(connection: Connection, index: str) -> list[str]:
    """The equality operators of an index's operator classes, schema-qualified, in column order."""
    return list(execute(connection, EQUALITY, {"index": index}).scalars())


COLUMN_TYPES = """
SELECT format_type(atttypid, -1) FROM pg_attribute
 WHERE attrelid = to_regclass(%(base)s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""


def recorded_identity(entry: Entry, alias: str, types: Sequence[str]) -> list[str]:
    """SQL for the identity of a discrepancy, as values of the entry's columns. types: their types' present names."""
    primary_key = [i for i in entry.identity_positions if entry.columns[i].primary_key]
    values = []
    for i in entry.identity_positions:
        part = f"{alias}.key ->> {i}" if i < entry.key else f"{alias}.primary_key ->> {primary_key.index(i)}"
        collation = entry.columns[i].collation
        # The cast from text to regclass reads only names.
        part = f"({part})::oid" if entry.columns[i].oid_alias else f"({part})"
        values.append(f"{part}::{types[i]}" + (f" COLLATE {collation}" if collation else ""))
    return values
