"""What tables and B-trees take that were just built, by the widths of their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What a freshly built B-tree leaves free in its leaves, and how many of its leaves one page of the level above names.
FILLED = 0.9
FANOUT = 150
PAGE_HEADER = 24
BTREE_SPECIAL = 16
LINE_POINTER = 4
HEAP_HEADER = 23
INDEX_HEADER = 8
# The bitmap of NULLs in an entry of a B-tree: for 32 columns, always.
INDEX_NULLS = 4
# What a varlena column takes at the most before its length takes four bytes, which are aligned.
SHORT = 127
# Of a tuple whose width varies, on average.
HALF_PADDING = 3.5
_ALIGNED = {"c": 1, "s": 2, "i": 4, "d": 8}


@dataclass(frozen=True)
class Width:
    """Of a column: bytes of an average value that isn't NULL, None if unknown; the share of NULLs, 0 to 1.

    fixed: each value takes that much. alignment: as in `pg_attribute.attalign`.
    """

    bytes: float | None
    nulls: float
    fixed: bool
    alignment: str


def entry_bytes(columns: Sequence[Width], header: int) -> float:
    """The bytes that an average tuple takes in a page, with its line pointer. header: HEAP_HEADER or INDEX_HEADER.

    Statistics know the average of widths, not how much these vary: all alike they are padded like the average, else by
    half of what may be. Half-way between both neither is missed by more than two bytes a tuple.
    """
    bitmap = (len(columns) + 7) // 8 if header == HEAP_HEADER else INDEX_NULLS
    whole = 1.0
    for column in columns:
        whole *= 1.0 - column.nulls
    size = aligned(header) * whole + aligned(header + bitmap) * (1.0 - whole)
    # Where an average tuple is, and whether all are there.
    at, varies = float(round(size / 8) * 8), False
    for column in columns:
        width, share = column.bytes or 0.0, 1.0 - column.nulls
        alignment = _ALIGNED.get(column.alignment, 8) if column.fixed or width > SHORT else 1
        size += share * (_padding(at, alignment, varies) + width)
        at += share * (-at % alignment + width)
        varies = not column.fixed or column.nulls > 0 or (varies and alignment < 8)
    return size + _padding(at, 8, varies) + LINE_POINTER


def _padding(at: float, alignment: int, varies: bool) -> float:
    padding = -at % alignment
    return (padding + (alignment - 1) / 2) / 2 if varies else padding


def aligned(size: int, alignment: int = 8) -> int:
    """The next multiple."""
    return -(-size // alignment) * alignment


def heap_pages(rows: int, size: float, page: int, fillfactor: int) -> int:
    """Of a table. size: of a tuple with its line pointer; page: bytes of a page; fillfactor: in percent."""
    a_page = max(1, int((page - PAGE_HEADER) * fillfactor / 100 / size))
    return -(-rows // a_page)


def tree_pages(rows: int, size: float, page: int) -> int:
    """Of a B-tree, with the levels above its leaves and its first page. size: as of `heap_pages`."""
    a_leaf = max(1, int(leaf_room(page) * FILLED / size))
    pages, level = 1, -(-rows // a_leaf)
    while level > 1:
        pages += level
        level = -(-level // FANOUT)
    return pages + level


def leaf_room(page: int) -> int:
    """Bytes of a leaf that entries may take."""
    return page - PAGE_HEADER - BTREE_SPECIAL


def leaves_of(pages: int) -> int:
    """How many of a B-tree's pages are leaves, about: the rest is its first page, and the levels above."""
    inner = pages - 1
    return inner if inner <= 1 else max(1, inner - 1 - inner // FANOUT)
