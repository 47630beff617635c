"""Statements on a few rows, some of which aren't there: the material of interleavings."""

from __future__ import annotations

from dataclasses import dataclass

# Rows of one play, a, b and c, of which c isn't there. Their ids are `slot * 10` and these numbers. All keys are equal,
# so that a row that takes another row's primary key takes its entry too.
A, B, C = 5, 6, 7
HELD = (A, B)

_UPSERT = "INSERT INTO {t} VALUES ({0}, 'k', {v}) ON CONFLICT (id) DO UPDATE SET "
_MERGE = (
    "MERGE INTO {t} USING (VALUES ({0})) n (id) ON {t}.id = n.id "
    "WHEN MATCHED THEN UPDATE SET v = {v} WHEN NOT MATCHED THEN INSERT VALUES (n.id, 'k', {v})"
)
_IN_VAIN = "SAVEPOINT s; {}; ROLLBACK TO s"
_OTHER_KEY = "k = CASE k WHEN 'k' THEN 'j' ELSE 'k' END"

MENU = {
    "insert b": "INSERT INTO {t} VALUES ({b}, 'k', {v})",
    "insert c": "INSERT INTO {t} VALUES ({c}, 'k', {v})",
    "insert c by another key": "INSERT INTO {t} VALUES ({c}, 'j', {v})",
    "upsert b": _UPSERT.replace("{0}", "{b}") + "v = excluded.v",
    "upsert b's key": _UPSERT.replace("{0}", "{b}") + "k = 'j', v = excluded.v",
    "upsert c": _UPSERT.replace("{0}", "{c}") + "v = excluded.v",
    "insert b or nothing": "INSERT INTO {t} VALUES ({b}, 'k', {v}) ON CONFLICT DO NOTHING",
    "insert c or nothing": "INSERT INTO {t} VALUES ({c}, 'k', {v}) ON CONFLICT DO NOTHING",
    "merge b": _MERGE.replace("{0}", "{b}"),
    "merge c": _MERGE.replace("{0}", "{c}"),
    "update b": "UPDATE {t} SET v = {v} WHERE id = {b}",
    "update c": "UPDATE {t} SET v = {v} WHERE id = {c}",
    "key of b": f"UPDATE {{t}} SET {_OTHER_KEY} WHERE id = {{b}}",
    "key of c": f"UPDATE {{t}} SET {_OTHER_KEY} WHERE id = {{c}}",
    "a to b": "UPDATE {t} SET id = {b} WHERE id = {a}",
    "b to a": "UPDATE {t} SET id = {a} WHERE id = {b}",
    "b to c": "UPDATE {t} SET id = {c} WHERE id = {b}",
    "c to b": "UPDATE {t} SET id = {b} WHERE id = {c}",
    "a to c": "UPDATE {t} SET id = {c} WHERE id = {a}",
    "b to c by another key": "UPDATE {t} SET id = {c}, k = 'j' WHERE id = {b}",
    "delete a": "DELETE FROM {t} WHERE id = {a}",
    "delete b": "DELETE FROM {t} WHERE id = {b}",
    "delete c": "DELETE FROM {t} WHERE id = {c}",
    # These touch rows that a transaction of the schedule has written, not the earlier rows: an old snapshot shows both.
    "delete the new b": "DELETE FROM {t} WHERE id = {b} AND v >= 100",
    "update the new b": "UPDATE {t} SET v = {v} WHERE id = {b} AND v >= 100",
    "lock the new b": "SELECT FROM {t} WHERE id = {b} AND v >= 100 FOR UPDATE",
    "lock b": "SELECT FROM {t} WHERE id = {b} FOR UPDATE",
    "share b": "SELECT FROM {t} WHERE id = {b} FOR SHARE",
    "share b's key": "SELECT FROM {t} WHERE id = {b} FOR KEY SHARE",
    "lock c": "SELECT FROM {t} WHERE id = {c} FOR UPDATE",
    "delete b in vain": _IN_VAIN.format("DELETE FROM {t} WHERE id = {b}"),
    "update b in vain": _IN_VAIN.format("UPDATE {t} SET v = {v} WHERE id = {b}"),
    "upsert c in vain": _IN_VAIN.format(_UPSERT.replace("{0}", "{c}") + "v = excluded.v"),
    "b to c in vain": _IN_VAIN.format("UPDATE {t} SET id = {c} WHERE id = {b}"),
    # A trigger corrects a negative value: it writes to the row again before the capture's trigger runs.
    "audited insert of c": "INSERT INTO {t} VALUES ({c}, 'k', -{v})",
    "audited update of b": "UPDATE {t} SET v = -{v} WHERE id = {b}",
    "audited upsert of b": _UPSERT.replace("{0}", "{b}").replace("{v}", "-{v}") + "v = excluded.v",
    "audited b to c": "UPDATE {t} SET id = {c}, v = -{v} WHERE id = {b}",
    # The key `d` lets a trigger delete row a first.
    "b, without a": "UPDATE {t} SET k = 'd' WHERE id = {b}",
    "swap a and b": "UPDATE {t} SET id = {a} + {b} - id WHERE id IN ({a}, {b})",
    "insert b, then delete all but it": (
        "INSERT INTO {t} VALUES ({b}, 'k', {v}); DELETE FROM {t} WHERE id = {b} AND v <> {v}"
    ),
}
# These need a primary key that isn't deferrable.
ARBITERS = frozenset(name for name, statement in MENU.items() if "ON CONFLICT" in statement)
# These fail at once if the primary key isn't deferrable.
DUPLICATES = frozenset(("swap a and b", "insert b, then delete all but it"))
TRIGGERS = """
CREATE FUNCTION {t}_audit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  UPDATE {t} SET v = -v, k = CASE k WHEN 'k' THEN 'j' ELSE 'k' END WHERE id = NEW.id AND v < 0; RETURN NULL; END $$;
CREATE FUNCTION {t}_first() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  DELETE FROM {t} WHERE id = NEW.id - 1; RETURN NEW; END $$;
CREATE TRIGGER audit AFTER INSERT OR UPDATE ON {t} FOR EACH ROW WHEN (NEW.v < 0) EXECUTE FUNCTION {t}_audit();
CREATE TRIGGER first BEFORE UPDATE ON {t} FOR EACH ROW WHEN (NEW.k = 'd' AND OLD.k <> 'd')
  EXECUTE FUNCTION {t}_first()
"""


def choices(deferrable: bool) -> list[str]:
    """The statements on the menu of a table with such a primary key."""
    left_out = ARBITERS if deferrable else DUPLICATES
    return [name for name in MENU if name not in left_out]


@dataclass(frozen=True)
class Rows:
    """The rows of one slot of a table, for one play."""

    table: str
    slot: int

    def sql(self, name: str, who: int, position: int) -> str:
        """The text of a statement for a transaction's turn. Its value identifies the turn."""
        ids = {letter: self.slot * 10 + row for letter, row in zip("abc", (A, B, C), strict=True)}
        return MENU[name].format(t=self.table, v=100 * (who + 1) + position, **ids)


# -- a unique index

# A slot's keys: those of its rows a and b, and one that no row has.
FREE = 2
WIDTH = 1000

_INSERT = "INSERT INTO {t} VALUES "
_UPSERT = " ON CONFLICT (id, part) DO UPDATE SET k = excluded.k, v = excluded.v"
# Rows a (part 0, key k0) and b (part 1, key k1) are there; c and d aren't, and no row has key k2.
KEYS = {
    "insert c with a's key": _INSERT + "({c}, 0, {k0}, {v})",
    "insert c with b's key": _INSERT + "({c}, 0, {k1}, {v})",
    "insert c with k2": _INSERT + "({c}, 0, {k2}, {v})",
    "insert d with k2": _INSERT + "({d}, 1, {k2}, {v})",
    "insert d with a's key": _INSERT + "({d}, 1, {k0}, {v})",
    "insert c and d": _INSERT + "({c}, 0, {k2}, {v}), ({d}, 1, {k0}, {v})",
    "insert c with k2, or nothing": _INSERT + "({c}, 0, {k2}, {v}) ON CONFLICT (id, part) DO NOTHING",
    "insert c with a's key, or catch": (
        "DO $$ BEGIN INSERT INTO {t} VALUES ({c}, 0, {k0}, {v}); EXCEPTION WHEN unique_violation THEN "
        "INSERT INTO {t} VALUES ({c}, 0, {k2}, {v}); END $$"
    ),
    "upsert c with a's key": _INSERT + "({c}, 0, {k0}, {v})" + _UPSERT,
    "upsert a with b's key": _INSERT + "({a}, 0, {k1}, {v})" + _UPSERT,
    "upsert a with k2": _INSERT + "({a}, 0, {k2}, {v})" + _UPSERT,
    "merge c with k2": (
        "MERGE INTO {t} USING (VALUES ({c})) n (id) ON {t}.id = n.id WHEN MATCHED THEN UPDATE SET k = {k2} "
        "WHEN NOT MATCHED THEN INSERT VALUES (n.id, 0, {k2}, {v})"
    ),
    "a takes k2": "UPDATE {t} SET k = {k2} WHERE id = {a}",
    "b takes k2": "UPDATE {t} SET k = {k2} WHERE id = {b}",
    "a takes b's key": "UPDATE {t} SET k = {k1} WHERE id = {a}",
    "b takes a's key": "UPDATE {t} SET k = {k0} WHERE id = {b}",
    "a takes its key back": "UPDATE {t} SET k = {k0} WHERE id = {a}",
    "swap keys": "UPDATE {t} SET k = {k0} + {k1} - k WHERE id IN ({a}, {b})",
    "shift keys": "UPDATE {t} SET k = k + 1 WHERE id IN ({a}, {b})",
    "touch a": "UPDATE {t} SET v = {v} WHERE id = {a}",
    "touch b": "UPDATE {t} SET v = {v} WHERE id = {b}",
    "touch both": "UPDATE {t} SET v = {v} WHERE id IN ({a}, {b})",
    "delete a": "DELETE FROM {t} WHERE id = {a}",
    "delete b": "DELETE FROM {t} WHERE id = {b}",
    "delete c": "DELETE FROM {t} WHERE id = {c}",
    "delete a's key": "DELETE FROM {t} WHERE k = {k0}",
    "delete k2": "DELETE FROM {t} WHERE k = {k2}",
    "move a": "UPDATE {t} SET part = 2 WHERE id = {a}",
    "move a and b": "UPDATE {t} SET part = 2 WHERE id IN ({a}, {b})",
    "move b, with a's key": "UPDATE {t} SET part = 2, k = {k0} WHERE id = {b}",
    "a becomes c": "UPDATE {t} SET id = {c} WHERE id = {a}",
    "a becomes c, with k2": "UPDATE {t} SET id = {c}, k = {k2} WHERE id = {a}",
    "c instead of a": "DELETE FROM {t} WHERE id = {a}; INSERT INTO {t} VALUES ({c}, 0, {k0}, {v})",
    "c instead of a, at once": (
        "WITH gone AS (DELETE FROM {t} WHERE id = {a} RETURNING k) INSERT INTO {t} SELECT {c}, 0, k, {v} FROM gone"
    ),
    "a takes k2 in vain": "SAVEPOINT s; UPDATE {t} SET k = {k2} WHERE id = {a}; ROLLBACK TO s",
    "delete a in vain": "SAVEPOINT s; DELETE FROM {t} WHERE id = {a}; ROLLBACK TO s",
}
MOVES = frozenset(name for name in KEYS if name.startswith("move"))
# All other statements find rows by primary key. Another transaction may have moved such a row, which PostgreSQL refuses
# with 40001.
INSERTS = frozenset(name for name in KEYS if name.startswith("insert"))


@dataclass(frozen=True)
class KeyRows(Rows):
    """The rows of one slot of a table."""

    def sql(self, name: str, who: int, position: int) -> str:
        ids = {letter: self.slot * 10 + row for letter, row in zip("abcd", (1, 2, 3, 4), strict=True)}
        keys = {f"k{i}": self.slot * WIDTH + i for i in range(3)}
        return KEYS[name].format(t=self.table, v=100 * (who + 1) + position, **ids, **keys)
