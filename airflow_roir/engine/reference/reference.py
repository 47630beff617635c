"""A reference: a foreign key of a child table to the key of a unique index of its parent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from airflow_roir.definition import DATA_SCHEMA
from airflow_roir.engine.source.source import Column

# The actions of the foreign key, by the values of options.
ACTIONS = {
    "no-action": "NO ACTION",
    "restrict": "RESTRICT",
    "cascade": "CASCADE",
    "set-null": "SET NULL",
    "set-default": "SET DEFAULT",
}
ON_UPDATE = ("no-action", "cascade")


class ReferenceStatus(str, Enum):
    """The status of a reference.

    FILLING: new writes are checked, and rows that were there before are being filled. ACTIVE: PostgreSQL has checked
    all rows.
    """

    FILLING = "filling"
    ACTIVE = "active"


@dataclass(frozen=True)
class Reference:
    """A reference, as its functions and triggers are made from it.

    name: the foreign key's, in the child. keys, added: the child's columns that hold the parent's key, and those that
    hold the rest of its primary key. parent_keys, parent_rest: these columns in the parent, in the same order. equals:
    the equality operator of each of these. on_delete, on_update: of `ACTIONS`.
    deferred: the check comes at the commit.
    """

    id: int
    name: str
    keys: tuple[str, ...]
    added: tuple[str, ...]
    parent_keys: tuple[Column, ...]
    parent_rest: tuple[Column, ...]
    equals: tuple[str, ...]
    on_delete: str = "no-action"
    on_update: str = "no-action"
    deferred: bool = False

    def object(self, what: str) -> str:
        """The name of one of the reference's own functions or views."""
        return object_name(self.id, what)

    @property
    def key_types(self) -> str:
        """The types of the parent's key, as parameters of a function."""
        return ", ".join(column.cast for column in self.parent_keys)


def object_name(reference_id: int, what: str) -> str:
    """The name of a function or view of a reference. Named by id, never by user text."""
    return f"{DATA_SCHEMA}.r{reference_id}_{what}"


def trigger_name(reference_id: int) -> str:
    """The name of the triggers that check the child's rows, and watch the parent's."""
    return f"roir_reference_{reference_id}"


def fill_trigger_name(reference_id: int) -> str:
    """The name of the triggers that fill the child's rows. They fire by name, and ~ sorts behind all letters."""
    return f"~roir_reference_{reference_id}"
