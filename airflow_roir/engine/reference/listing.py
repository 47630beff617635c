"""Lists the references to indexes, with what is wrong with each: for `roir status` and the clean-up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import QualifiedName, argument, quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.reference.reference import ReferenceStatus

# The child by its triggers; those that don't fire; whether the foreign key is there. 'O' and 'A' fire for users.
FOUND = """
SELECT r.id, r.index_id, r.name, r.status, r.on_delete, r.on_update, r.key_columns, i.schema_name, i.name AS index_name,
       t.child::regclass::text AS child, t.triggers, t.disabled, r.on_update = 'no-action' AS watches,
       EXISTS (SELECT FROM pg_constraint c
                WHERE c.conrelid = t.child AND c.conname = r.name AND c.contype = 'f') AS has_key
  FROM roir.reference r JOIN roir.index i ON i.id = r.index_id
 CROSS JOIN LATERAL (
       SELECT min(t.tgrelid::bigint) FILTER (WHERE p.proname = concat('r', r.id, '_fill'))::oid AS child,
              count(*) AS triggers,
              min(quote_ident(t.tgname) || ' on ' || t.tgrelid::regclass) FILTER (
                  WHERE t.tgenabled NOT IN ('O', 'A')) AS disabled
         FROM pg_proc p JOIN pg_depend d ON d.refclassid = 'pg_proc'::regclass AND d.refobjid = p.oid
         JOIN pg_trigger t ON d.classid = 'pg_trigger'::regclass AND t.oid = d.objid AND t.tgfoid = p.oid
        WHERE p.pronamespace = 'roir_data'::regnamespace AND t.tgparentid = 0
          AND p.proname = ANY (ARRAY[concat('r', r.id, '_fill'), concat('r', r.id, '_check'),
                                     concat('r', r.id, '_change')])) t
 WHERE r.index_id = ANY (%(indexes)s) ORDER BY r.id
"""
# Two fill rows of the child, two check them, one or two watch the parent.
TRIGGERS = 5


@dataclass(frozen=True)
class References:
    """The references to an index. lines: one for each, for people. problems: with their remedies."""

    lines: tuple[str, ...]
    problems: tuple[str, ...]


def references_to(connection: Connection, index_ids: Sequence[int]) -> dict[int, References]:
    """The references to each of these indexes; those that have none are left out."""
    found: dict[int, list[Row[Any]]] = defaultdict(list)
    for row in execute(connection, FOUND, {"indexes": list(index_ids)}):
        found[row.index_id].append(row)
    return {
        index: References(tuple(map(_line, rows)), tuple(said for row in rows if (said := _problem(row))))
        for index, rows in found.items()
    }


def _line(row: Row[Any]) -> str:
    of = f"{row.child or 'a dropped table'} ({', '.join(row.key_columns)})"
    more = "" if row.status == ReferenceStatus.ACTIVE else ", older rows aren't checked yet"
    return f"{of}, on delete {row.on_delete.replace('-', ' ')}{more}"


def _problem(row: Row[Any]) -> str | None:
    index = argument(str(QualifiedName(row.schema_name, row.index_name)))
    what = f"foreign key {quote(row.name)} of {row.child}"
    if row.child is None:
        return f"foreign key {quote(row.name)}: its table was dropped. Run: roir clean-up, which removes the rest"
    again = f"Remove it and make it again: roir reference --remove {argument(row.child)} {index}"
    if row.disabled is not None:
        return f"{what}: trigger {row.disabled} is disabled, so rows come in unchecked. Enable it, then: {again}"
    if not row.has_key or row.triggers < TRIGGERS + row.watches:
        lost = "its triggers" if row.has_key else "the constraint"
        return f"{what} has lost {lost}, so rows come in unchecked. {again}"
    return None
