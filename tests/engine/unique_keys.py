"""Unique keys of all kinds, and random statements on them, for the twins of `twins.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

# So few keys that every other write meets another row's key.
IDS, PARTS, KEYS = 9, 3, 11
AWAY = 20


@dataclass(frozen=True)
class Kind:
    """A key of table `t (id, part, <columns>, v)`, which represents a number.

    number: SQL for the number of a row's key. values: SQL for the key's columns of the number {e}; {s}, 0 or 1, chooses
    between equal values that differ, if there are such. keys: the index's key, if it has more columns. single: a
    statement may change the key of one row only, as its primary key is checked row by row. needs: DDL that comes
    before.
    """

    name: str
    columns: str
    number: str
    values: str
    keys: str = ""
    nulls_not_distinct: bool = False
    primary_key: str = "id, part"
    single: bool = False
    needs: tuple[str, ...] = ()
    include: str | None = "v"
    where: str = ""

    @property
    def is_computed(self) -> bool:
        """True if the key is an expression, or only the rows that satisfy a condition have one."""
        return "(" in self.keys or bool(self.where)

    @property
    def names(self) -> str:
        """The key's columns in the table."""
        return ", ".join(column.split()[0] for column in self.columns.split(", "))

    @property
    def indexed(self) -> str:
        """The key columns of the index."""
        return self.keys or self.names

    def of(self, number: object, chance: random.Random) -> str:
        """SQL for the values of a number, which may be an expression."""
        return self.values.format(e=number, s=chance.randrange(2))

    def put(self, number: object, chance: random.Random) -> str:
        """SQL for the SET of an UPDATE."""
        values = self.of(number, chance)
        return f"({self.names}) = ROW({values})" if "," in self.names else f"{self.names} = {values}"


_TWO = "(({e}) / 4), "
KINDS = (
    Kind("int", "k int", "k", "({e})"),
    Kind("text", "k text", "k::int", "({e})::text", include=None),
    Kind("numeric", "k numeric", "k::int", "round(({e})::numeric, 1 + {s})"),
    Kind("float", "k float8", "k::int", "CASE WHEN ({e}) = 0 AND {s} = 1 THEN '-0' ELSE ({e})::float8 END"),
    Kind("NULLs", "k int", "k", "nullif(({e}), 1)"),
    Kind("equal NULLs", "k int", "k", "nullif(({e}), 1)", nulls_not_distinct=True),
    Kind("two columns", "a int, b text", "a * 4 + b::int", _TWO + "(({e}) % 4)::text"),
    Kind(
        "two columns and NULLs", "a int, b text", "a * 4 + coalesce(b::int, 0)", _TWO + "nullif((({e}) % 4)::text, '0')"
    ),
    Kind(
        "two columns and equal NULLs",
        "a int, b text",
        "a * 4 + coalesce(b::int, 0)",
        _TWO + "nullif((({e}) % 4)::text, '0')",
        nulls_not_distinct=True,
    ),
    Kind(
        "composite",
        "k pair",
        "(k).x * 4 + coalesce((k).y, 0)",
        "ROW((({e}) / 4), nullif(({e}) % 4, 0))::pair",
        needs=("CREATE TYPE pair AS (x int, y int)",),
    ),
    Kind("array", "k int[]", "k[1]", "ARRAY[({e})]"),
    Kind("domain", "k word", "k::text::int", "({e})::text", needs=("CREATE DOMAIN word AS text",)),
    Kind("with a column of the primary key", "k int", "k", "({e})", keys="k, part"),
    Kind("of the primary key", "k int", "k", "({e})", primary_key="k, part", single=True),
    Kind("the whole primary key and more", "k int", "k", "({e})", keys="part, k, id"),
)
# If the server has the extension or the collation.
CITEXT = Kind(
    "citext",
    "k citext",
    "ascii(upper(k::text)) - 64",
    "chr(64 + 32 * {s} + ({e}))::citext",
    needs=("CREATE EXTENSION citext",),
)
CASELESS = Kind(
    "nondeterministic",
    'k text COLLATE "caseless"',
    "ascii(upper(k)) - 64",
    "chr(64 + 32 * {s} + ({e}))",
    needs=("CREATE COLLATION caseless (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",),
)

LETTERS = "chr(64 + 32 * {s} + ({e}))"
COMPUTED = (
    Kind("expression", "k text", "ascii(upper(k)) - 64", LETTERS, keys="lower(k)"),
    Kind("expression that may be NULL", "k text", "ascii(upper(k)) - 64", LETTERS, keys="nullif(lower(k), 'c')"),
    Kind("condition", "k int, d int", "k", "({e}), nullif((({e}) + {s}) % 3, 0)", keys="k", where="d IS NULL"),
    Kind(
        "expression and condition",
        "k text, d int",
        "ascii(upper(k)) - 64",
        LETTERS + ", nullif((({e}) + {s}) % 3, 0)",
        keys="lower(k)",
        where="d IS NULL AND k <> 'x'",
    ),
    Kind("condition on the key and an included column", "k int", "k", "({e})", keys="k", where="k > 3 AND v % 4 < 3"),
)

Template = Callable[["Menu"], str]


@dataclass(frozen=True)
class Menu:
    """Random statements on the keys of one kind."""

    kind: Kind
    chance: random.Random
    # ON CONFLICT can't use a deferrable key.
    deferrable: bool = False
    more: tuple[Template, ...] = ()

    def id(self) -> int:
        return 1 + self.chance.randrange(IDS)

    def part(self) -> int:
        return self.chance.randrange(PARTS)

    def number(self) -> int:
        return self.chance.randrange(KEYS)

    def key(self) -> str:
        return self.kind.of(self.number(), self.chance)

    def row(self) -> str:
        return f"({self.id()}, {self.part()}, {self.key()}, {self.chance.randrange(100)})"

    def span(self) -> str:
        """A condition on some ids."""
        first = self.id()
        return f"id BETWEEN {first} AND {first + self.chance.randrange(1, 5)}"

    def put(self, number: object) -> str:
        return self.kind.put(number, self.chance)

    @property
    def columns(self) -> str:
        return f"id, part, {self.kind.names}, v"

    def statement(self) -> str:
        """A random statement."""
        templates = [one for one in TEMPLATES if not (self.kind.single and one in SEVERAL)]
        if self.deferrable:
            templates = [one for one in templates if one not in ARBITERS] + list(SWAPS) * 2
        if self.more and self.chance.random() < 0.5:
            templates = list(self.more)
        return self.chance.choice(templates)(self)


# Without this, rows of one id in several partitions would move there in the order of the scan.
ALONE = "NOT EXISTS (SELECT FROM t o WHERE o.id = t.id AND o.part <> t.part)"


def insert(m: Menu) -> str:
    return f"INSERT INTO t ({m.columns}) VALUES {m.row()}"


def insert_several(m: Menu) -> str:
    return f"INSERT INTO t ({m.columns}) VALUES {', '.join(m.row() for _ in range(m.chance.randrange(2, 5)))}"


def _series(m: Menu) -> str:
    first = m.id()
    numbers = m.kind.of(f"i + {m.chance.randrange(4)}", m.chance)
    last = first + m.chance.randrange(4)
    return f"INSERT INTO t ({m.columns}) SELECT i, i % {PARTS}, {numbers}, i FROM generate_series({first}, {last}) i"


def insert_a_query(m: Menu) -> str:
    return _series(m)


def insert_or_nothing(m: Menu) -> str:
    return f"{_series(m)} ON CONFLICT ({m.kind.primary_key}) DO NOTHING"


def upsert(m: Menu) -> str:
    excluded = ", ".join(f"{name} = excluded.{name}" for name in (*m.kind.names.split(", "), "v"))
    return f"INSERT INTO t ({m.columns}) VALUES {m.row()} ON CONFLICT ({m.kind.primary_key}) DO UPDATE SET {excluded}"


def upsert_another_key(m: Menu) -> str:
    return (
        f"{_series(m)} ON CONFLICT ({m.kind.primary_key}) DO UPDATE SET {m.put(m.number())}, v = t.v + 1 "
        f"WHERE t.id <> {m.id()}"
    )


def upsert_what_is_included(m: Menu) -> str:
    return f"{_series(m)} ON CONFLICT ({m.kind.primary_key}) DO UPDATE SET v = t.v + 1"


def delete(m: Menu) -> str:
    return f"DELETE FROM t WHERE id = {m.id()}"


def delete_by_key(m: Menu) -> str:
    return f"DELETE FROM t WHERE {m.kind.number} IN ({m.number()}, {m.number()})"


def delete_several(m: Menu) -> str:
    return f"DELETE FROM t WHERE {m.span()}"


def delete_nothing(m: Menu) -> str:
    return "DELETE FROM t WHERE id = -5"


def change_a_key(m: Menu) -> str:
    return f"UPDATE t SET {m.put(m.number())} WHERE id = {m.id()}"


def shift_up(m: Menu) -> str:
    return f"UPDATE t SET {m.put(m.kind.number + ' + 1')} WHERE {m.span()}"


def shift_down(m: Menu) -> str:
    return f"UPDATE t SET {m.put(m.kind.number + ' - 1')}, v = v + 1 WHERE {m.kind.number} > {m.chance.randrange(1, 4)}"


def shift_all(m: Menu) -> str:
    return f"UPDATE t SET {m.put(f'({m.kind.number} + {m.chance.randrange(1, 4)}) % {KEYS + 4}')}"


def swap(m: Menu) -> str:
    a, b = m.chance.sample(range(KEYS), 2)
    return f"UPDATE t SET {m.put(f'{a + b} - ({m.kind.number})')} WHERE {m.kind.number} IN ({a}, {b})"


def rotate(m: Menu) -> str:
    a, b, c = m.chance.sample(range(KEYS), 3)
    turned = f"CASE {m.kind.number} WHEN {a} THEN {b} WHEN {b} THEN {c} ELSE {a} END"
    return f"UPDATE t SET {m.put(turned)} WHERE {m.kind.number} IN ({a}, {b}, {c})"


def one_key_for_several(m: Menu) -> str:
    return f"UPDATE t SET {m.put(m.number())} WHERE {m.span()}"


def change_what_is_included(m: Menu) -> str:
    return f"UPDATE t SET v = v + 1 WHERE {m.span()}"


def write_the_same_key(m: Menu) -> str:
    """An equal value, maybe a different one."""
    return f"UPDATE t SET {m.put(m.kind.number)} WHERE {m.span()}"


def nothing_changes(m: Menu) -> str:
    return "UPDATE t SET id = id, v = v"


def move(m: Menu) -> str:
    return f"UPDATE t SET part = (part + 1) % {PARTS} WHERE {m.span()} AND {ALONE}"


def move_and_change_the_key(m: Menu) -> str:
    return f"UPDATE t SET part = (part + 1) % {PARTS}, {m.put(m.number())} WHERE id = {m.id()} AND {ALONE}"


def move_and_shift(m: Menu) -> str:
    return f"UPDATE t SET part = (part + 1) % {PARTS}, {m.put(m.kind.number + ' + 1')} WHERE {m.span()} AND {ALONE}"


def change_the_primary_key(m: Menu) -> str:
    return f"UPDATE t SET id = id + {AWAY} WHERE id = {m.id()}"


def change_the_primary_key_back(m: Menu) -> str:
    return f"UPDATE t SET id = id - {AWAY} WHERE id > {AWAY}"


def change_both_keys(m: Menu) -> str:
    return f"UPDATE t SET id = id + {AWAY}, {m.put(m.kind.number + ' + 1')} WHERE {m.span()}"


def merge(m: Menu) -> str:
    ids = m.chance.sample(range(1, IDS + 1), 3)
    rows = ", ".join(f"({i}, {m.part()}, {m.number()})" for i in ids)
    return (
        f"MERGE INTO t USING (VALUES {rows}) s (i, p, n) ON t.id = s.i AND t.part = s.p "
        f"WHEN MATCHED AND t.v % 3 = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET {m.put('s.n')}, v = v + 1 "
        f"WHEN NOT MATCHED THEN INSERT ({m.columns}) VALUES (s.i, s.p, {m.kind.of('s.n', m.chance)}, 1)"
    )


def insert_what_is_deleted(m: Menu) -> str:
    return (
        f"WITH gone AS (DELETE FROM t WHERE {m.span()} AND {ALONE} RETURNING *) "
        f"INSERT INTO t ({m.columns}) SELECT id + {AWAY}, (part + 1) % {PARTS}, {m.kind.names}, v FROM gone"
    )


def update_and_insert(m: Menu) -> str:
    i, j = m.chance.sample(range(1, IDS + 1), 2)
    return (
        f"WITH a AS (UPDATE t SET {m.put(m.number())} WHERE id = {i} RETURNING id) "
        f"INSERT INTO t ({m.columns}) VALUES ({j}, {m.part()}, {m.key()}, 0)"
    )


def swap_by_two_updates(m: Menu) -> str:
    i, j = m.chance.sample(range(1, IDS + 1), 2)
    return (
        f"WITH a AS (UPDATE t SET {m.put(m.number())} WHERE id = {i} RETURNING id), "
        f"b AS (DELETE FROM t WHERE id = {j + AWAY} RETURNING id) UPDATE t SET {m.put(m.number())} WHERE id = {j}"
    )


def copy(m: Menu) -> str:
    """A COPY of the rows of this query (`twins.Side.run`)."""
    rows = " UNION ALL ".join(f"SELECT {m.id()}, {m.part()}, {m.key()}, 5" for _ in range(2))
    return f"COPY t ({m.columns}) FROM {rows}"


def catch(m: Menu) -> str:
    """The statement that is caught is undone, and the one in its place counts."""
    tried, instead = (m.chance.choice(IN_BLOCKS)(m) for _ in range(2))
    return f"DO $$ BEGIN {tried}; EXCEPTION WHEN unique_violation OR exclusion_violation THEN {instead}; END $$"


def several_in_a_block(m: Menu) -> str:
    return f"DO $$ BEGIN {'; '.join(m.chance.choice(IN_BLOCKS)(m) for _ in range(3))}; END $$"


def lock(m: Menu) -> str:
    return f"SELECT FROM t WHERE {m.span()} FOR UPDATE"


def truncate(m: Menu) -> str:
    return f"TRUNCATE t; {_series(m)}"


def swap_primary_keys(m: Menu) -> str:
    i, j = m.chance.sample(range(1, IDS + 1), 2)
    return f"UPDATE t SET id = {i + j} - id WHERE id IN ({i}, {j})"


def shift_primary_keys(m: Menu) -> str:
    return f"UPDATE t SET id = id + 1, {m.put(m.kind.number + ' + 1')} WHERE {m.span()}"


# Statements on the table p (n), to which the first column of a key refers.


def move_a_parent(m: Menu) -> str:
    return f"UPDATE p SET n = n + 50 WHERE n = {m.chance.randrange(3)}"


def move_parents_back(m: Menu) -> str:
    return "UPDATE p SET n = n - 50 WHERE n >= 50"


def delete_a_parent(m: Menu) -> str:
    return f"DELETE FROM p WHERE n = {m.chance.randrange(1, 4)}"


def insert_parents(m: Menu) -> str:
    return "INSERT INTO p SELECT generate_series(0, 30) ON CONFLICT DO NOTHING"


def child_and_parent_at_once(m: Menu) -> str:
    parent = f"UPDATE p SET n = n + 50 WHERE n = {m.chance.randrange(3)} RETURNING n"
    return f"WITH a AS ({parent}) UPDATE t SET {m.put(m.number())} WHERE id = {m.id()}"


OF_PARENTS: tuple[Template, ...] = (
    move_a_parent, move_parents_back, delete_a_parent, insert_parents, insert_parents, child_and_parent_at_once,
)  # fmt: skip
SEVERAL = (
    shift_up, shift_down, shift_all, swap, rotate, one_key_for_several, write_the_same_key, move_and_shift,
    change_both_keys, merge, insert_what_is_deleted, swap_by_two_updates, update_and_insert, move, upsert_another_key,
    change_a_key, move_and_change_the_key,
)  # fmt: skip
ARBITERS = (insert_or_nothing, upsert, upsert_another_key, upsert_what_is_included)
SWAPS = (swap_primary_keys, shift_primary_keys)
IN_BLOCKS = (
    insert,
    insert_several,
    upsert,
    delete,
    change_a_key,
    shift_up,
    swap,
    move_and_change_the_key,
    delete_by_key,
)
TEMPLATES: tuple[Template, ...] = (
    insert, insert, insert, insert_several, insert_a_query, insert_or_nothing, upsert, upsert, upsert_another_key,
    upsert_what_is_included, delete, delete, delete_by_key, delete_several, delete_nothing, change_a_key, change_a_key,
    shift_up, shift_up, shift_down, shift_all, swap, swap, rotate, one_key_for_several, change_what_is_included,
    write_the_same_key, nothing_changes, move, move, move_and_change_the_key, move_and_shift, change_the_primary_key,
    change_the_primary_key_back, change_both_keys, merge, merge, insert_what_is_deleted, update_and_insert,
    swap_by_two_updates, copy, catch, catch, several_in_a_block, lock, truncate,
)  # fmt: skip
