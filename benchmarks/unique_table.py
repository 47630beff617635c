"""The table of `make bench-unique`: customers in partitions by day, whose number is to be unique over all of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from airflow_roir.definition import IndexDefinition

INDEX = "public.customer_number"
# Multiples of one prime modulo another: all different, in no order.
FACTOR, PRIME = 7919, 99_999_989
# Each so-many-th number is NULL, and never a duplicate.
NULL_EVERY = 50
CREATE = """
CREATE TABLE customer (day int, id bigint, number bigint, name text, PRIMARY KEY (day, id)) PARTITION BY RANGE (day);
DO $$ BEGIN FOR n IN 0..{partitions} - 1 LOOP
  EXECUTE format('CREATE TABLE customer_%s PARTITION OF customer FOR VALUES FROM (%s) TO (%s)', n, n, n + 1);
END LOOP; END $$;
INSERT INTO customer
SELECT i % {partitions}, i, CASE WHEN i % {null} > 0 THEN i * {factor} % {prime} END, 'customer number ' || i
  FROM generate_series(1, {rows}::bigint) i;
"""
SAME = (
    "UPDATE customer c SET number = v.key FROM unnest(%s, %s, %s) AS v(day, id, key) "
    "WHERE (c.day, c.id) = (v.day, v.id)"
)
GROUPS = """
SELECT number, array_agg(ARRAY[day, id] ORDER BY day, id) FROM customer
 WHERE number IN (SELECT number FROM customer WHERE number IS NOT NULL GROUP BY number HAVING count(*) > 1)
 GROUP BY number
"""


@dataclass(frozen=True)
class Table:
    """The table, with its number of rows and of partitions."""

    rows: int
    partitions: int

    def day(self, row: int) -> int:
        """A row's partition."""
        return row % self.partitions

    def key(self, row: int) -> int:
        """A row's number, as it was loaded."""
        return row * FACTOR % PRIME

    def definition(self, unique: bool = True) -> IndexDefinition:
        """The index on the number."""
        return IndexDefinition.parse(INDEX, "public.customer", "number", "name", unique=unique)

    def load(self, cursor: Any) -> None:
        """Creates and fills the table."""
        cursor.execute(
            CREATE.format(partitions=self.partitions, rows=self.rows, null=NULL_EVERY, factor=FACTOR, prime=PRIME)
        )

    def some_rows(self, chance: random.Random, count: int) -> list[int]:
        """Different rows that have a number."""
        found = chance.sample(range(1, self.rows + 1), min(self.rows, count + count // 10 + 50))
        return [row for row in found if row % NULL_EVERY > 0][:count]

    def make_groups(self, cursor: Any, chance: random.Random, rows: list[int], groups: int) -> list[list[int]]:
        """Lets rows share their keys: mostly two, a tenth of the groups three; a quarter within one partition.

        rows: to choose from, which they leave. Returns each group's rows, the first one with its own key.
        """
        used: set[int] = set()
        made: list[list[int]] = []

        def another() -> int:
            while (row := rows.pop()) in used:
                pass
            return row

        for number in range(groups):
            group = [another()]
            used.add(group[0])
            while len(group) < (3 if number % 10 == 0 else 2):
                near = group[0] + self.partitions * chance.randrange(1, 50)
                fits = near <= self.rows and near % NULL_EVERY > 0 and near not in used
                row = near if fits and chance.random() < 0.25 else another()
                used.add(row)
                group.append(row)
            made.append(group)
        rows[:] = [row for row in rows if row not in used]
        values = [(self.day(row), row, self.key(group[0])) for group in made for row in group[1:]]
        cursor.execute(SAME, [list(column) for column in zip(*values, strict=True)])
        return made
