"""The careful path: whether an entry belongs is asked of the source itself (docs/architecture.md#the-careful-path)."""

from __future__ import annotations

from collections.abc import Callable

from airflow_roir.engine.capture.plpgsql import indent, literal
from airflow_roir.engine.capture.target import Target
from airflow_roir.engine.generation import physical
from airflow_roir.engine.source.source import Source


def as_it_stands(source: Source, target: Target, record: str, belongs: list[str], gone: list[str]) -> list[str]:
    """`belongs` where a row projects to the record's entry now, which is then in `here`, else `gone`.

    A snapshot can show two versions of a row: one whose deletion it is too old for, and our own. Where the primary key
    is checked at once, whoever visits an entry has inserted or deleted a row of that key, so that no other transaction
    has one: only our own version answers. A `DEFERRABLE` key can be shared with others for a while: there somebody
    else's version answers too, under a lock, which waits for who deletes it and raises 40001 in a snapshot that is too
    old; one that is older than a rewrite sees no version, which the table's file tells. Between that look and the
    removal of an entry its writer may commit, so we look once more.
    """
    if not source.pk_deferrable:
        return [
            *look(source, target, record),
            "IF here.belongs THEN",
            *indent(belongs),
            "ELSE",
            *indent(gone),
            "END IF;",
        ]
    looked = [
        *look(source, target, record),
        "IF here.belongs IS NULL THEN",
        *indent(_look(source, target, record, False)),
        "END IF;",
    ]
    return [
        *looked,
        "IF here.belongs IS NULL THEN",
        "  -- A snapshot that is older than a rewrite of the table sees no row.",
        "  IF one_snapshot THEN",
        "    PERFORM roir.refuse_rewritten(TG_RELID);",
        "  END IF;",
        *indent(gone),
        "  -- A writer may have brought it meanwhile.",
        *indent(looked),
        "END IF;",
        "IF here.belongs THEN",
        *indent(belongs),
        "END IF;",
    ]


def look(source: Source, target: Target, record: str) -> list[str]:
    """Put a row of our own that projects to the record's entry into `here`, and that it `belongs`."""
    return _look(source, target, record, True)


def _look(source: Source, target: Target, record: str, own: bool) -> list[str]:
    """Put a row that projects to the record's entry into `here`, and that it `belongs`: our own, or any, locked."""
    entry = target.entry
    # The primary key holds the partition key, so the row is in the event's own leaf. A kept plan over the source would
    # lock all leaves, and wait for whoever holds another one.
    given = [entry.columns[i].parameter(i + 1) for i in entry.identity_positions]
    where = entry.same_columns([column.of("s") for column in entry.columns], given)
    which = "AND roir.is_mine(s.xmin) LIMIT 1" if own else "LIMIT 1 FOR SHARE"
    columns = ", ".join(f"{column.of('s')} AS c{i + 1}" for i, column in enumerate(entry.columns))
    question = (
        f"-- Has a row that this transaction wrote the entry of {record} now?"
        if own
        else f"-- Has anybody else's row the entry of {record}?"
    )
    of_the_leaf = [
        f"EXECUTE {literal(f'SELECT {columns}, true AS belongs FROM ONLY ')} || TG_RELID::regclass",
        f"  || {literal(' s WHERE ' + where[0])}",
        *(f"  {literal(' AND ' + condition)}" for condition in where[1:]),
        f"  {literal(' ' + which)} INTO here",
        f"  USING {', '.join(entry.columns[i].of(record) for i in entry.identity_positions)};",
    ]
    ours = [f"s.c{i + 1}" for i in entry.identity_positions]
    if source.partitioned:
        # The server asks who writes to a table for no right on its leaves. Planned for these values, it locks one leaf.
        where = entry.same_columns(ours, given)
        which = "AND roir.is_mine(s.written) LIMIT 1" if own else "LIMIT 1 FOR SHARE"
        columns = ", ".join(entry.physical(prefix="s."))
        view = physical.source_view(target.generation_id)
        return [
            question,
            f"IF {_may_read(source)} THEN",
            *indent(of_the_leaf),
            "ELSE",
            f"  EXECUTE {literal(f'SELECT {columns}, true AS belongs FROM {view} s')}",
            f"    {literal(' WHERE ' + where[0])}",
            *(f"    {literal(' AND ' + condition)}" for condition in where[1:]),
            f"    {literal(' ' + which)} INTO here",
            f"    USING {', '.join(entry.columns[i].of(record) for i in entry.identity_positions)};",
            "END IF;",
        ]
    where = entry.same_columns(ours, [column.of(record) for column in entry.columns])
    which = "AND roir.is_mine(s.written) LIMIT 1" if own else "LIMIT 1 FOR SHARE"
    return [
        question,
        f"IF TG_RELID = {source.oid} THEN",
        f"  SELECT {', '.join(entry.physical(prefix='s.'))}, true AS belongs INTO here",
        f"    FROM {physical.source_view(target.generation_id)} s",
        f"   WHERE {where[0]}",
        *(f"     AND {condition}" for condition in where[1:]),
        f"     {which};",
        "ELSE",
        "  -- Restored from a dump: under another oid, and, where it was restored alone, without our view.",
        *indent(of_the_leaf),
        "END IF;",
    ]


def _may_read(source: Source) -> str:
    """SQL that the event's own leaf can be read by its name. To lock a row takes the right to update it."""
    rights = ["SELECT", "UPDATE"] if source.pk_deferrable else ["SELECT"]
    return " AND ".join(
        ["has_schema_privilege(TG_TABLE_SCHEMA, 'USAGE')", *(f"has_table_privilege(TG_RELID, '{r}')" for r in rights)]
    )


def for_both(settle: Callable[[str], list[str]]) -> list[str]:
    """`settle` for the old entry of an event and for the new one, where it has these."""
    return [
        "IF TG_OP <> 'INSERT' THEN",
        *indent(settle("OLD")),
        "END IF;",
        "",
        "IF TG_OP <> 'DELETE' THEN",
        *indent(settle("NEW")),
        "END IF;",
    ]
