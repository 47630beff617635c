"""The data sets of `make bench`: each a table, the index to build on it, and what a steady writer does to it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_roir.definition import IndexDefinition
from benchmarks.steady_writer import Write
from demo.dataset import LINEITEM

# The rows of TPC-H's lineitem at scale factor 1, give or take a few thousand.
ROWS_PER_SCALE = 6_000_000


@dataclass(frozen=True)
class Dataset:
    """A table, and its columns as the index has them.

    load: fills it with about this many rows. write: returns the n-th write's statement, given the number of rows.
    """

    name: str
    title: str
    table: str
    key: tuple[str, ...]
    pk: tuple[str, ...]
    include: tuple[str, ...]
    load: Callable[[Any, int], None]
    write: Callable[[int], Write]
    partitioned: bool = False

    @property
    def columns(self) -> str:
        """The columns of an entry, in its order."""
        return ", ".join([*self.key, *self.pk, *self.include])

    @property
    def identity(self) -> str:
        """The columns by which an entry is unique."""
        return ", ".join([*self.key, *self.pk])

    def definition(self, index: str = "bench_index") -> IndexDefinition:
        """The index that is built."""
        return IndexDefinition.parse(index, self.table, self.key, self.include)


def _load_lineitem(cursor: Any, rows: int) -> None:
    scale = f"{rows / ROWS_PER_SCALE:.4g}"
    folder = Path(tempfile.gettempdir()) / "roir-bench-tpch" / scale
    file = folder / "lineitem.csv"
    if not file.exists():
        # It takes as long as loading it: kept, since every run needs it.
        half = folder.with_name(f"{scale}.incomplete")
        generator = Path(sys.executable).parent / "tpchgen-cli"
        subprocess.run(
            [generator, "csv", "-s", scale, "--tables=lineitem", f"--output-dir={half}"],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        half.rename(folder)
    cursor.execute(LINEITEM)
    with file.open() as text:
        cursor.copy_expert("COPY public.lineitem FROM STDIN (FORMAT csv, HEADER)", text)
    cursor.execute("ALTER TABLE public.lineitem ADD PRIMARY KEY (l_orderkey, l_linenumber)")


def _write_lineitem(rows: int) -> Write:
    # Four rows each, on the average.
    orders = int(rows / 4.2)

    def write(n: int) -> tuple[str, Any]:
        order = n * 104_729 % orders + 1
        # TPC-H uses the first eight of each 32 order keys.
        values = {"order": order // 8 * 32 + order % 8, "move": n % 2}
        return (
            "UPDATE lineitem SET l_quantity = l_quantity + 1, l_partkey = l_partkey + %(move)s "
            "WHERE l_orderkey = %(order)s AND l_linenumber = 1",
            values,
        )

    return write


def _by_id(table: str, key: str, moved: str) -> Callable[[int], Write]:
    """Writes to rows whose id is their number; every second one changes the key."""

    def of_rows(rows: int) -> Write:
        return lambda n: (
            f"UPDATE {table} SET {moved} = {moved} + 1, {key} = {key} + %(move)s WHERE id = %(id)s",
            {"id": n * 104_729 % rows + 1, "move": n % 2},
        )

    return of_rows


def _statement(text: str) -> Callable[[Any, int], None]:
    return lambda cursor, rows: cursor.execute(text.replace("ROWS", str(rows)))


ITEM = """
CREATE TABLE item (id bigint PRIMARY KEY, part int NOT NULL, supplier int, quantity numeric(12, 2),
                   price numeric(12, 2), shipped date, mode varchar(10), comment text);
INSERT INTO item SELECT i, i * 7919 % 200003, i % 10007, i % 50, (i % 100000) / 7.0,
                        date '2020-01-01' + (i % 2000)::int, 'mode ' || i % 7, 'the comment of item number ' || i
  FROM generate_series(1, ROWS::bigint) i
"""
UUID = """
CREATE TABLE event (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), account int NOT NULL, kind int NOT NULL,
                    at timestamptz NOT NULL, body text);
INSERT INTO event (account, kind, at, body)
SELECT i * 7919 % 200003, i % 17, timestamptz '2020-01-01 00:00Z' + i * interval '3 seconds', 'body of event ' || i
  FROM generate_series(1, ROWS::bigint) i
"""
# Digests don't compress, and PLAIN keeps them in the row: the scan reads all of that kilobyte.
WIDE = """
CREATE TABLE wide (id bigint PRIMARY KEY, account int NOT NULL, amount int NOT NULL, filler text NOT NULL);
ALTER TABLE wide ALTER COLUMN filler SET STORAGE PLAIN;
INSERT INTO wide SELECT i, i * 7919 % 200003, i % 1000,
       (SELECT string_agg(encode(sha512(convert_to(i || ':' || n, 'UTF8')), 'hex'), '') FROM generate_series(1, 8) n)
  FROM generate_series(1, ROWS::bigint) i
"""
PARTITIONS = """
CREATE TABLE orders (day int, id bigint, customer int NOT NULL, amount int NOT NULL, note text, PRIMARY KEY (day, id))
  PARTITION BY RANGE (day);
DO $$ BEGIN FOR n IN 0..199 LOOP
  EXECUTE format('CREATE TABLE orders_%s PARTITION OF orders FOR VALUES FROM (%s) TO (%s)', n, n * 10, n * 10 + 10);
END LOOP; END $$;
INSERT INTO orders SELECT i % 2000, i, i * 7919 % 200003, i % 1000, repeat('x', 60)
  FROM generate_series(1, ROWS::bigint) i
"""


def _write_uuid(rows: int) -> Write:
    # Whose id it is only the table knows: that of the first row behind a random one, chosen once.
    return lambda n: (
        "UPDATE event SET kind = kind + 1, account = account + %(move)s WHERE id = "
        "(SELECT id FROM event WHERE id >= (SELECT gen_random_uuid()) ORDER BY id LIMIT 1)",
        {"move": n % 2},
    )


def _write_partitions(rows: int) -> Write:
    def write(n: int) -> tuple[str, Any]:
        row = n * 104_729 % rows + 1
        return (
            "UPDATE orders SET amount = amount + 1, customer = customer + %(move)s WHERE day = %(day)s AND id = %(id)s",
            {"day": row % 2000, "id": row, "move": n % 2},
        )

    return write


LINEITEM_SET = Dataset(
    "lineitem",
    "TPC-H lineitem",
    "public.lineitem",
    ("l_partkey",),
    ("l_orderkey", "l_linenumber"),
    ("l_quantity", "l_extendedprice", "l_shipdate"),
    _load_lineitem,
    _write_lineitem,
)
ITEM_SET = Dataset(
    "item",
    "items in the order of their ids",
    "public.item",
    ("part",),
    ("id",),
    ("quantity", "price", "shipped", "mode"),
    _statement(ITEM),
    _by_id("item", "part", "price"),
)
DATASETS = {
    one.name: one
    for one in (
        LINEITEM_SET,
        ITEM_SET,
        Dataset(
            "uuid",
            "events by random UUID",
            "public.event",
            ("account",),
            ("id",),
            ("kind", "at"),
            _statement(UUID),
            _write_uuid,
        ),
        Dataset(
            "wide",
            "rows of 1 KB",
            "public.wide",
            ("account",),
            ("id",),
            ("amount",),
            _statement(WIDE),
            _by_id("wide", "account", "amount"),
        ),
        Dataset(
            "partitions",
            "orders in 200 partitions",
            "public.orders",
            ("customer",),
            ("day", "id"),
            ("amount",),
            _statement(PARTITIONS),
            _write_partitions,
            partitioned=True,
        ),
    )
}
