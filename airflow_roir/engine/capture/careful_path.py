"""The careful path: asks the source itself whether an entry belongs (docs/architecture.md#the-careful-path)."""

from __future__ import annotations

from collections.abc import Callable

from airflow_roir.engine.capture.plpgsql import indent, literal
from airflow_roir.engine.capture.target import Target
from airflow_roir.engine.generation import physical
from airflow_roir.engine.source.source import Source


def as_it_stands(source: Source, target: Target, record: str, belongs: list[str], gone: list[str]) -> list[str]:
    """`belongs` if a row now projects to the record's entry, which is then in `here`; else `gone`.

    A snapshot can show two versions of a row: our own, and one whose deletion it doesn't see yet. If the primary key is
    checked at once, a transaction that visits an entry has inserted or deleted a row of that key, so no other
    transaction has such a row: only our own version counts.

    If the key is `DEFERRABLE`, other transactions may have rows of the same key for a while, which count, too. They are
    read under a lock, which waits for a transaction that deletes them, and raises 40001 in a snapshot that is too old.
    A snapshot that is older than a rewrite of the table sees no rows at all; the table's file shows that. A writer may
    commit such a row between the look and the removal of the entry, so the source is asked again afterwards.
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
    """Puts a row of our own that projects to the record's entry into `here`, with `here.belongs` true."""
    return _look(source, target, record, True)


def _look(source: Source, target: Target, record: str, own: bool) -> list[str]:
    """Puts a row that projects to the record's entry into `here`: one of our own, or any row, locked."""
    entry = target.entry
    # The primary key includes the partition key, so the row is in the event's own leaf. A kept plan over the source
    # would lock all leaves, and wait for sessions that hold another one.
    given = [entry.columns[i].parameter(i + 1) for i in entry.identity_positions]
    where = entry.same_columns([column.of("s") for column in entry.columns], given)
    where += [] if entry.condition is None else [entry.satisfied("s")]
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
        # A writer needs no right on the leaves of a table; then the source is read. Planned for these values, the
        # statement locks one leaf.
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
    """SQL, true if our role may read the event's own leaf by its name. A row lock needs the right to update."""
    rights = ["SELECT", "UPDATE"] if source.pk_deferrable else ["SELECT"]
    return " AND ".join(
        ["has_schema_privilege(TG_TABLE_SCHEMA, 'USAGE')", *(f"has_table_privilege(TG_RELID, '{r}')" for r in rights)]
    )


def for_both(settle: Callable[[str], list[str]]) -> list[str]:
    """`settle` for the old entry of an event and for the new one, if the event has them."""
    return [
        "IF TG_OP <> 'INSERT' THEN",
        *indent(settle("OLD")),
        "END IF;",
        "",
        "IF TG_OP <> 'DELETE' THEN",
        *indent(settle("NEW")),
        "END IF;",
    ]
