"""Statements on three rows, a, b and c, of which c isn't there; what interleavings are made of."""

from __future__ import annotations

from dataclasses import dataclass

# Rows of one play; its ids are `slot * 10` and these. All keys are equal, so that a row which takes another one's
# primary key takes its entry too.
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
    # What this or another transaction has written, not what was there before: an old snapshot shows both.
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
    # A negative value is put right by a trigger that writes to the row again, before the capture hears of it.
    "audited insert of c": "INSERT INTO {t} VALUES ({c}, 'k', -{v})",
    "audited update of b": "UPDATE {t} SET v = -{v} WHERE id = {b}",
    "audited upsert of b": _UPSERT.replace("{0}", "{b}").replace("{v}", "-{v}") + "v = excluded.v",
    "audited b to c": "UPDATE {t} SET id = {c}, v = -{v} WHERE id = {b}",
    # The key `d` makes a trigger delete row a first.
    "b, without a": "UPDATE {t} SET k = 'd' WHERE id = {b}",
    "swap a and b": "UPDATE {t} SET id = {a} + {b} - id WHERE id IN ({a}, {b})",
    "insert b, then delete all but it": (
        "INSERT INTO {t} VALUES ({b}, 'k', {v}); DELETE FROM {t} WHERE id = {b} AND v <> {v}"
    ),
}
# They ask for an index that isn't deferrable.
ARBITERS = frozenset(name for name, statement in MENU.items() if "ON CONFLICT" in statement)
# They fail at once where the primary key isn't deferrable.
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
    """What is on the menu of a table with such a primary key."""
    left_out = ARBITERS if deferrable else DUPLICATES
    return [name for name in MENU if name not in left_out]


@dataclass(frozen=True)
class Rows:
    """The rows of one slot of a table: where one play takes place."""

    table: str
    slot: int

    def sql(self, name: str, who: int, position: int) -> str:
        """A statement of the menu for a transaction's turn. Its value tells which."""
        ids = {letter: self.slot * 10 + row for letter, row in zip("abc", (A, B, C), strict=True)}
        return MENU[name].format(t=self.table, v=100 * (who + 1) + position, **ids)
