"""Reads the bounds of a shard's partitions as values: no SQL of a shard is run on the index server.

A shard sends its bounds as its catalog prints them. Only exact lists of literals are accepted. They become values of
the index server's own types, compared by its own operators. So only types with the same order on every server are
accepted: the order of texts depends on the collation's library, the order of an enum on its labels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from airflow_roir.definition import quote
from airflow_roir.engine.generation.entry import Entry

_LITERAL = r"'(?:[^']|'')*'|[0-9]+(?:\.[0-9]*)?|true|false|NULL|MINVALUE|MAXVALUE"
_LISTED = rf"\(((?:{_LITERAL})(?:, (?:{_LITERAL}))*)\)"
_RANGE = re.compile(rf"FOR VALUES FROM {_LISTED} TO {_LISTED}")
_LIST = re.compile(rf"FOR VALUES IN {_LISTED}")
_ONE = re.compile(_LITERAL)
# Types that every server orders alike, and those whose equality alone is the same everywhere.
_ORDERED = re.compile(
    r"(smallint|integer|bigint|numeric|real|double precision|boolean|date|uuid|bytea|inet|cidr|money|oid|interval"
    r"|time(stamp)?( with(out)? time zone)?)(\(.*\))?"
)
_EQUAL = re.compile(r"(text|character varying|character|name)(\(.*\))?")
# The open ends of a range.
LEAST, GREATEST = "MINVALUE", "MAXVALUE"


class Unreadable(Exception):
    """Bounds that mean nothing on this server, or aren't bounds."""


def within(entry: Entry, shards_entry: Entry, levels: object, alias: str, values: dict[str, Any]) -> str:
    """A condition in SQL, true if an entry belongs to a partition; puts the values to bind into `values`. Raises
    Unreadable.

    entry: the index server's; shards_entry: the outbox's, whose numbers of columns the levels use. levels: as
    `roir_shard.bounds` returns them, of the partition and of each level above it but the topmost table.
    """
    if not isinstance(levels, list):
        raise Unreadable("no list of levels")
    terms = [_of_level(entry, shards_entry, level, alias, values) for level in levels]
    return " AND ".join(terms) or "true"


def _of_level(entry: Entry, shards_entry: Entry, level: object, alias: str, values: dict[str, Any]) -> str:
    if not isinstance(level, Mapping) or level.get("plain") is not True:
        raise Unreadable("cut by an order or a hash that is the shard's own")
    numbers = {column.attnum: column.source for column in shards_entry.columns if column.primary_key}
    given = level.get("columns")
    names = [numbers.get(one) for one in given] if isinstance(given, list) else []
    places = [i for name in names for i, column in enumerate(entry.columns) if column.source == name]
    if not places or len(places) != len(names):
        raise Unreadable("cut by columns that aren't the primary key's")
    if level.get("bound") != "DEFAULT":
        return _of_bound(entry, places, level.get("bound"), alias, values)
    others = level.get("others")
    if not isinstance(others, list):
        raise Unreadable("a default partition without those that it has the rest of")
    return f"NOT ({' OR '.join(_of_bound(entry, places, one, alias, values) for one in others) or 'false'})"


def _of_bound(entry: Entry, places: Sequence[int], bound: object, alias: str, values: dict[str, Any]) -> str:
    text = bound if isinstance(bound, str) else ""
    if found := _LIST.fullmatch(text):
        (place,) = places[:1]
        wanted = [one for one in _read(found[1]) if one is not None]
        return f"({' OR '.join(_compared(entry, place, '=', one, alias, values) for one in wanted) or 'false'})"
    found = _RANGE.fullmatch(text)
    if found is None:
        raise Unreadable(f"bounds of another kind: {text[:200]}")
    lower, upper = _read(found[1]), _read(found[2])
    if not len(lower) == len(upper) == len(places):
        raise Unreadable(f"bounds of other columns: {text[:200]}")
    above = _beyond(entry, places, ">", lower, alias, values)
    return f"({above} AND {_beyond(entry, places, '<', upper, alias, values)})"


def _beyond(
    entry: Entry, places: Sequence[int], sign: str, ends: Sequence[str | None], alias: str, values: dict[str, Any]
) -> str:
    """SQL that the columns are beyond an end, column by column; a lower end itself belongs to the partition."""
    if not places:
        return "true" if sign == ">" else "false"
    end = ends[0]
    if end in (LEAST, GREATEST):
        return "true" if (end == LEAST) == (sign == ">") else "false"
    further = _compared(entry, places[0], sign, end, alias, values)
    equal = _compared(entry, places[0], "=", end, alias, values)
    return f"({further} OR {equal} AND {_beyond(entry, places[1:], sign, ends[1:], alias, values)})"


def _compared(entry: Entry, place: int, sign: str, value: str | None, alias: str, values: dict[str, Any]) -> str:
    column = entry.columns[place]
    # Its operators are called by these signs, which a source is checked for.
    if value is None or value in (LEAST, GREATEST) or not column.equals.endswith(".=)"):
        raise Unreadable(f"no value to compare {quote(column.source)} with")
    if not _ORDERED.fullmatch(column.cast) and not (sign == "=" and _EQUAL.fullmatch(column.cast)):
        raise Unreadable(f"{quote(column.source)} is ordered by rules that are the shard's own")
    operator = f"{column.equals.removesuffix('=)')}{sign})"
    bound = f"end{len(values)}"
    values[bound] = value[1:-1].replace("''", "'") if value.startswith("'") else value
    collation = f" COLLATE {column.collation}" if column.collation else ""
    return f"{alias}.c{place + 1} {operator} CAST(%({bound})s AS {column.cast}){collation}"


def _read(listed: str) -> list[str | None]:
    return [None if one == "NULL" else one for one in _ONE.findall(listed)]
