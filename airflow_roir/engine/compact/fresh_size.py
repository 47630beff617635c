"""The sizes of freshly built tables and B-trees, by the widths of their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# How full the leaves of a freshly built B-tree are, and how many pages one page of the level above points to.
FILLED = 0.9
FANOUT = 150
PAGE_HEADER = 24
BTREE_SPECIAL = 16
LINE_POINTER = 4
HEAP_HEADER = 23
INDEX_HEADER = 8
# The bitmap of NULLs in an entry of a B-tree always has 32 bits.
INDEX_NULLS = 4
# The longest value of varying length with a short header; a longer value has an aligned header of four bytes.
SHORT = 127
# The average padding of a tuple whose width varies.
HALF_PADDING = 3.5
_ALIGNED = {"c": 1, "s": 2, "i": 4, "d": 8}


@dataclass(frozen=True)
class Width:
    """The width of a column: bytes of an average value that isn't NULL, None if unknown; the share of NULLs, 0 to 1.

    fixed: True if each value has this width. alignment: as in `pg_attribute.attalign`.
    """

    bytes: float | None
    nulls: float
    fixed: bool
    alignment: str


def entry_bytes(columns: Sequence[Width], header: int) -> float:
    """The bytes that an average tuple takes in a page, with its line pointer. header: HEAP_HEADER or INDEX_HEADER.

    Statistics have the average width, not how much widths vary. If all are alike, each is padded like the average; if
    they vary, by half of the widest padding. The middle of both is wrong by at most two bytes a tuple.
    """
    bitmap = (len(columns) + 7) // 8 if header == HEAP_HEADER else INDEX_NULLS
    whole = 1.0
    for column in columns:
        whole *= 1.0 - column.nulls
    size = aligned(header) * whole + aligned(header + bitmap) * (1.0 - whole)
    # The offset in an average tuple, and whether it varies between tuples.
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


def aligned(size: int) -> int:
    """The size rounded up to a multiple of eight bytes."""
    return -(-size // 8) * 8


def heap_pages(rows: int, size: float, page: int, fillfactor: int) -> int:
    """The pages of a table. size: of a tuple with its line pointer; page: bytes of a page; fillfactor: in percent."""
    a_page = max(1, int((page - PAGE_HEADER) * fillfactor / 100 / size))
    return -(-rows // a_page)


def tree_pages(rows: int, size: float, page: int) -> int:
    """The pages of a B-tree, with the levels above its leaves and its first page. size: as for `heap_pages`."""
    a_leaf = max(1, int(leaf_room(page) * FILLED / size))
    pages, level = 1, -(-rows // a_leaf)
    while level > 1:
        pages += level
        level = -(-level // FANOUT)
    return pages + level


def leaf_room(page: int) -> int:
    """The bytes of a leaf that are free for entries."""
    return page - PAGE_HEADER - BTREE_SPECIAL


def leaves_of(pages: int) -> int:
    """About how many of a B-tree's pages are leaves; the others are its first page, and the levels above."""
    inner = pages - 1
    return inner if inner <= 1 else max(1, inner - 1 - inner // FANOUT)
