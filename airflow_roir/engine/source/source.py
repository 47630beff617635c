"""The description of a source: its name, columns, primary key and partitions."""

from __future__ import annotations

from dataclasses import dataclass, field

from airflow_roir.definition import QualifiedName, quote


@dataclass(frozen=True)
class Computed:
    """An expression over columns of the source, as a function of roir's own (`expressions.py`).

    call: the function's name, as SQL; arguments: the columns that it gets, in order. text: the expression, for users.
    """

    call: str
    arguments: tuple[str, ...]
    text: str = field(default="", compare=False)

    def of(self, alias: str | None) -> str:
        """SQL for the expression's value for a row of the source."""
        prefix = "" if alias is None else f"{alias}."
        return f"{self.call}({', '.join(prefix + quote(name) for name in self.arguments)})"


@dataclass(frozen=True)
class Column:
    """A column of the source, as far as an entry needs it; or an expression over such columns.

    type: the type in the entry: a domain's base type, with its modifier. cast: the same without the modifier, to read a
    value back from text. collation_version: the library's present version, if it has one. max_bytes: None if the type
    sets no bound. computed: None, but for an expression.
    """

    name: str
    type: str
    cast: str
    collation: str | None
    collation_version: str | None
    attnum: int
    not_null: bool
    virtual: bool
    max_bytes: int | None
    oid_alias: bool
    domain: bool
    computed: Computed | None = None

    def of(self, alias: str | None = None) -> str:
        """SQL for the column's value in a row of the source."""
        if self.computed is not None:
            return in_collation(self.computed.of(alias), self.collation)
        return quote(self.name) if alias is None else f"{alias}.{quote(self.name)}"

    @property
    def comparand(self) -> str:
        """The type to compare the column as; with its collation, since a literal of type `name` has one of its own."""
        return self.cast if self.collation is None else f"{self.cast} COLLATE {self.collation}"

    def text(self, alias: str | None = None) -> str:
        """SQL for this column's lossless text; the session's settings are pinned (docs/architecture.md#scan)."""
        name = self.of(alias)
        # regclass and its kin print names, which a rename changes; their order is that of the oid anyway.
        if self.oid_alias:
            return f"{name}::oid::text"
        # A user may have created a cast to text that loses information; concat gives text that the type's input reads.
        return f"concat({name})" if "." in self.cast else f"{name}::text"


def in_collation(value: str, collation: str | None) -> str:
    """SQL for the value of an expression in its own collation. A call has that of its arguments."""
    return value if collation is None else f"({value} COLLATE {collation})"


@dataclass(frozen=True)
class Source:
    """The table that is indexed.

    It is read without waiting for any lock, even an ACCESS EXCLUSIVE one: a worker that starts must not hang.
    """

    oid: int
    name: QualifiedName
    owner: str
    partitioned: bool
    columns: dict[str, Column]
    primary_key: tuple[str, ...]
    pk_deferrable: bool
    # Schemas, besides pg_catalog, of the operators that order the primary key: a scan's search_path needs them.
    operator_schemas: tuple[str, ...]
    # The oids of the source itself and all its partitions; of them, those that have rows.
    relations: tuple[int, ...]
    leaves: tuple[int, ...]
    # The condition of the index that is planned; None if it has entries of all rows.
    condition: Computed | None = None

    @property
    def sql(self) -> str:
        """The quoted, schema-qualified name."""
        return self.name.sql

    @property
    def comparands(self) -> list[str]:
        """The types to compare the primary key's columns as."""
        return [self.columns[name].comparand for name in self.primary_key]
