"""The reasons why a relation can't be the source of an index: its kind, its owner, its primary key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Row

from airflow_roir.definition import QualifiedName
from airflow_roir.errors import InvalidInput, RightMissing, RoirError

KINDS = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "S": "a sequence",
    "i": "an index",
    "I": "an index",
    "c": "a composite type",
    "t": "a TOAST table",
}


def key_problems(full: QualifiedName, key: Sequence[Row[Any]]) -> Iterator[RoirError]:
    """Why a table's primary key, its rows of `catalog.PRIMARY_KEY`, can't identify the rows for an index."""
    if not key:
        yield InvalidInput(
            f"table {full} has no primary key; an index needs one to identify rows. Add one: ALTER TABLE {full} "
            "ADD PRIMARY KEY (…)"
        )
        return
    if key[0].amname != "btree":
        yield InvalidInput(f"table {full} has a temporal primary key, which is no B-tree; roir doesn't support that")
    elif not all(k.by_signs for k in key):
        yield InvalidInput(
            f"table {full} has a primary key of a type that < and > don't order (hstore), so roir can't scan it"
        )
    if not key[0].indisvalid:
        yield InvalidInput(
            f"table {full} has a primary key that is not valid: not every partition has it (ALTER TABLE ONLY … ADD "
            "PRIMARY KEY), so there may be duplicates. Add it to each partition, and attach their indexes: "
            "ALTER INDEX … ATTACH PARTITION"
        )


def relation_problems(name: QualifiedName, row: object, owned: bool) -> Iterator[RoirError]:
    """Why a relation, a row of `catalog.RELATION`, can't be a source. owned: by a role that may capture its writes."""
    kind = getattr(row, "kind", "")
    if kind not in ("r", "p"):
        what = KINDS.get(kind, "no table")
        yield InvalidInput(f"{name} is {what}; an index needs an ordinary or partitioned table")
    # Only those of roir's own tables that stand for tables in shards can be sources.
    ours = name.schema == "roir_data" and not name.name.startswith("shape_")
    if (
        ours
        or name.schema in ("pg_catalog", "information_schema", "roir")
        or (name.schema or "").startswith("pg_toast")
    ):
        yield InvalidInput(f"{name} is a system table; it can't be indexed")
    if getattr(row, "persistence", "p") == "t":
        yield InvalidInput(f"table {name} is temporary: no other session sees its rows. Make it an ordinary table")
    if getattr(row, "persistence", "p") == "u":
        yield InvalidInput(
            f"table {name} is unlogged; a crash would empty it, and the index wouldn't notice. Use ALTER TABLE "
            f"{name} SET LOGGED"
        )
    if unlogged := getattr(row, "unlogged", None):
        yield InvalidInput(
            f"partition {unlogged} of table {name} is unlogged; a crash would empty it, and the index wouldn't "
            f"notice. Use ALTER TABLE {unlogged} SET LOGGED"
        )
    if kind == "p" and getattr(row, "relispartition", False):
        yield InvalidInput(f"table {name} is a partition and has partitions of its own; index the whole table instead")
    if kind == "r" and getattr(row, "has_children", False):
        yield InvalidInput(
            f"table {name} has inheritance children; its triggers don't see their rows, so it can't be indexed"
        )
    if not owned:
        yield RightMissing(
            f"table {name} belongs to {getattr(row, 'owner', '?')}; only a member of that role can capture its "
            "writes. Connect as one"
        )
