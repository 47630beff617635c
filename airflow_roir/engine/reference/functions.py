"""The functions and views of a reference (docs/architecture.md#references).

`find` answers where the row with a key is, and locks it. A BEFORE trigger of the child calls it, and fills the row with
the answer, so that PostgreSQL's own foreign key can check the row. A row without an answer isn't wrong yet: the parent
may come in the same statement, or before the commit. So a constraint trigger asks again for rows that are left empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from airflow_roir.definition import quote
from airflow_roir.engine.capture.plpgsql import PINNED, indent, literal
from airflow_roir.engine.generation.entry import is_null
from airflow_roir.engine.reference.reference import Reference
from airflow_roir.engine.source.source import Column, Source

# How `find` looks for a row.
SKIP, WAIT, SEARCH = "skip", "wait", "search"

# The child, or its root, of a function that isn't a trigger's. By its trigger, so that it survives renames and dumps.
CHILD = """
SELECT t.tgrelid::regclass::text
  FROM pg_depend d JOIN pg_trigger t ON t.oid = d.objid AND t.tgparentid = 0
 WHERE d.classid = 'pg_trigger'::regclass AND d.refclassid = 'pg_proc'::regclass
   AND d.refobjid = {function}::regprocedure LIMIT 1
"""


def views(reference: Reference, parent: Source, index: str) -> list[str]:
    """The statements that make the views of index and parent, which survive renames. index: the index's view."""

    def select(alias: str) -> str:
        names = [f"{alias}.{quote(c.name)} AS k{n}" for n, c in enumerate(reference.parent_keys, start=1)]
        names += [f"{alias}.{quote(c.name)} AS f{n}" for n, c in enumerate(reference.parent_rest, start=1)]
        return ", ".join(names)

    return [
        f"CREATE VIEW {reference.object('index')} AS SELECT {select('v')} FROM {index} v",
        f"CREATE VIEW {reference.object('parent')} AS SELECT {select('s')} FROM {parent.sql} s",
    ]


def find(reference: Reference) -> str:
    """The function that finds and locks the parent's row with a key; NULLs if there is none. The parent's owner's.

    how: `skip` neither waits nor searches; `wait` waits for a transaction that moves or deletes the row; `search` then
    looks into the table itself, where a row may be whose entry is still to come.
    """
    keys, rest = reference.parent_keys, reference.parent_rest
    equals = reference.equals
    by_key = _conditions("{0}.k", keys, equals, 1)
    by_place = by_key + _conditions("{0}.f", rest, equals[len(keys) :], len(keys) + 1)
    places = [f"f{n}" for n in range(1, len(rest) + 1)]
    look = f"SELECT {', '.join(f'v.{p}' for p in places)} FROM {reference.object('index')} v WHERE {_all(by_key, 'v')}"
    lock = f"SELECT true FROM {reference.object('parent')} s WHERE {_all(by_place, 's')} FOR KEY SHARE"
    search = (
        f"SELECT {', '.join(f's.{p}' for p in places)} FROM {reference.object('parent')} s "
        f"WHERE {_all(by_key, 's')} FOR KEY SHARE"
    )
    using = ", ".join(f"k{n}" for n in range(1, len(keys) + 1))
    parameters = [f"k{n} {c.cast}" for n, c in enumerate(keys, start=1)]
    results = [f"OUT f{n} {c.cast}" for n, c in enumerate(rest, start=1)]
    found = f"ROW({', '.join(places)})::text"
    text = f"""
DECLARE
  one_snapshot boolean := current_setting('transaction_isolation') IN ('repeatable read', 'serializable');
  held boolean;
  place text;
BEGIN
  LOOP
    BEGIN
      EXECUTE {literal(look)} INTO {", ".join(places)} USING {using};
      -- Releases the locks of index and view: a publish doesn't wait for those who only write to the child.
      RAISE SQLSTATE 'RO001';
    EXCEPTION WHEN SQLSTATE 'RO001' THEN
      NULL;
    END;
    EXIT WHEN {" OR ".join(map(is_null, places))};
    -- From here on the row stays where it is until our transaction ends. Without a subtransaction, since each would
    -- take an id.
    EXECUTE {literal(lock + " SKIP LOCKED")} INTO held USING {using}, {", ".join(places)};
    IF held THEN
      RETURN;
    END IF;
    EXIT WHEN how = '{SKIP}';
    BEGIN
      EXECUTE {literal(lock)} INTO held USING {using}, {", ".join(places)};
      IF held THEN
        RETURN;
      END IF;
    EXCEPTION WHEN serialization_failure THEN
      -- The row was moved to another partition while we waited.
      IF one_snapshot THEN
        RAISE;
      END IF;
      CONTINUE;
    END;
    -- The entry is out of date if a second look shows the same.
    EXIT WHEN place = {found};
    place := {found};
  END LOOP;
  IF how = '{SEARCH}' THEN
    LOOP
      BEGIN
        EXECUTE {literal(search)} INTO {", ".join(places)} USING {using};
        RETURN;
      EXCEPTION WHEN serialization_failure THEN
        IF one_snapshot THEN
          RAISE;
        END IF;
      END;
    END LOOP;
  END IF;
  {" ".join(f"{place} := NULL;" for place in places)}
END"""
    returns = "RETURNS record" if len(rest) > 1 else f"RETURNS {rest[0].cast}"
    arguments = ", ".join([*parameters, "how text", *results])
    return _function(f"{reference.object('find')}({arguments}) {returns}", text)


def fill(reference: Reference) -> str:
    """The function of the child's BEFORE triggers. The child's owner's."""
    added = reference.added
    asked = _call(reference, "NEW", WAIT)
    fill_in = f"SELECT {', '.join(_places(reference, 'f.'))} INTO {', '.join(_of('NEW', added))} FROM {asked} f;"
    given = " AND ".join(f"NOT {is_null(name)}" for name in _of("NEW", added))
    return _trigger_function(
        reference,
        "fill",
        [
            f"IF {_any_null('NEW', reference.keys)} THEN",
            *indent([f"{name} := NULL;" for name in _of("NEW", added)]),
            "  RETURN NEW;",
            "END IF;",
            "-- The statement gives the place, or a change of the parent's row brings it: the foreign key checks it.",
            f"IF {given} AND (TG_OP = 'INSERT' OR {_differ(added)}) THEN",
            "  RETURN NEW;",
            "END IF;",
            fill_in,
            "RETURN NEW;",
        ],
    )


def check(reference: Reference) -> str:
    """The function of the child's constraint triggers: fills a row that is still empty, or refuses it."""
    keys, added = reference.keys, reference.added
    sets = ", ".join(f"{quote(name)} = ${n}" for n, name in enumerate(added, start=2))
    values = ", ".join(f"{name}::text" for name in _of("NEW", keys))
    names = ", ".join(map(literal, keys))
    update = literal(f"UPDATE ONLY %s c SET {_percent(sets)} WHERE c.ctid = $1")
    return _trigger_function(
        reference,
        "check",
        [
            "-- Of a row that was there before the reference, only a new key is checked. A version that our own",
            "-- transaction wrote has an event, which finds only that version.",
            f"IF TG_OP = 'UPDATE' AND NOT ({_differ(keys)} OR {_differ(added)} OR roir.is_mine(OLD.xmin)) THEN",
            "  RETURN NULL;",
            "END IF;",
            "-- The row may have been changed or deleted since.",
            "EXECUTE format('SELECT true FROM ONLY %s c WHERE c.ctid = $1', TG_RELID::regclass)",
            "  INTO here USING NEW.ctid;",
            "IF here IS NULL THEN",
            "  RETURN NULL;",
            "END IF;",
            "spot := NEW.ctid;",
            f"SELECT {', '.join(_places(reference, 'f.'))} INTO {', '.join(_of('NEW', added))} "
            f"FROM {_call(reference, 'NEW', SEARCH)} f;",
            f"IF {_any_null('NEW', added)} THEN",
            f"  PERFORM roir.refuse_orphan(TG_RELID, {literal(reference.name)}, ARRAY[{names}], ARRAY[{values}]);",
            "END IF;",
            f"EXECUTE format({update}, TG_RELID::regclass) USING spot, {', '.join(_of('NEW', added))};",
            "RETURN NULL;",
        ],
        ["  here boolean;", "  spot tid;"],
    )


def children(reference: Reference) -> str:
    """The function that tells whether the child has rows with a key. The child's owner's.

    It locks one, so it waits for a transaction that deletes the row or gives it another key.
    """
    names = [quote(name) for name in reference.keys]
    where = " AND ".join(_child_has_key(reference))
    query = literal(f"SELECT true FROM %s c WHERE {_percent(where)} LIMIT 1 FOR KEY SHARE")
    parameters = ", ".join(f"k{n} {c.cast}" for n, c in enumerate(reference.parent_keys, start=1))
    using = ", ".join(f"k{n}" for n in range(1, len(names) + 1))
    text = f"""
DECLARE
  here boolean;
BEGIN
  EXECUTE format({query}, ({_child(reference)}))
    INTO here USING {using};
  RETURN here IS NOT NULL;
END"""
    return _function(f"{reference.object('children')}({parameters}) RETURNS boolean", text)


def adopt(reference: Reference) -> str:
    """The function that fills a key's rows in the child that were there before the reference. The child's owner's."""
    keys, added, parent = reference.keys, reference.added, (*reference.parent_keys, *reference.parent_rest)
    parameters = ", ".join(f"p{n} {column.cast}" for n, column in enumerate(parent, start=1))
    where = _child_has_key(reference)
    where.append("(" + " OR ".join(is_null(f"c.{quote(name)}") for name in added) + ")")
    sets = ", ".join(f"{quote(name)} = ${n}" for n, name in enumerate(added, start=len(keys) + 1))
    update = literal(f"UPDATE %s c SET {_percent(sets)} WHERE {_percent(' AND '.join(where))}")
    text = f"""
BEGIN
  EXECUTE format({update}, ({_child(reference)})) USING {", ".join(f"p{n}" for n in range(1, len(parent) + 1))};
END"""
    return _function(f"{reference.object('adopt')}({parameters}) RETURNS void", text)


def change(reference: Reference, filling: bool) -> str:
    """The function of the parent's BEFORE triggers, the parent's owner's.

    It refuses a change of a key that the child has. filling: it first fills the child's rows of a deleted row, so that
    the foreign key finds them.
    """
    keys = [c.name for c in reference.parent_keys]
    rest = [c.name for c in reference.parent_rest]
    lines = [
        "IF TG_OP = 'DELETE' THEN",
        *([f"  PERFORM {reference.object('adopt')}({', '.join(_of('OLD', (*keys, *rest)))});"] if filling else []),
        "  RETURN OLD;",
        "END IF;",
    ]
    if reference.on_update == "no-action":
        place = _conditions("s.k", reference.parent_keys, reference.equals, 1)
        place += _conditions("s.f", reference.parent_rest, reference.equals[len(keys) :], len(keys) + 1)
        lock = f"SELECT FROM {reference.object('parent')} s WHERE {' AND '.join(place)} FOR UPDATE"
        values = ", ".join(f"{name}::text" for name in _of("OLD", keys))
        pairs = zip(_of("OLD", keys), reference.equals, _of("NEW", keys), strict=False)
        same = " AND ".join(f"{old} {equals} {new}" for old, equals, new in pairs)
        lines += [
            f"IF {same} THEN",
            "  RETURN NEW;",
            "END IF;",
            "-- The update itself has no such lock yet if another trigger changed the key.",
            f"EXECUTE {literal(lock)} USING {', '.join(_of('OLD', (*keys, *rest)))};",
            f"IF {reference.object('children')}({', '.join(_of('OLD', keys))}) THEN",
            f"  PERFORM roir.refuse_referenced(TG_RELID, ({_child(reference)})::regclass, {literal(reference.name)},",
            f"    ARRAY[{', '.join(map(literal, keys))}], ARRAY[{values}]);",
            "END IF;",
        ]
    return _trigger_function(reference, "change", [*lines, "RETURN NEW;"])


def triggers(reference: Reference, child: str, parent: str, fill_name: str, name: str) -> list[str]:
    """The statements that create the triggers. child, parent: quoted names of the tables."""
    keys, added = reference.keys, reference.added
    known = " AND ".join(f"NOT {is_null(n)}" for n in _of("NEW", keys))
    empty = f"{known} AND ({_any_null('NEW', added)})"
    to_clear = f"({_any_null('NEW', keys)}) AND NOT ({' AND '.join(is_null(n) for n in _of('NEW', added))})"
    when = "DEFERRABLE INITIALLY DEFERRED " if reference.deferred else ""
    fill_in, ask = f"EXECUTE FUNCTION {reference.object('fill')}()", f"EXECUTE FUNCTION {reference.object('check')}()"
    change_ = f"EXECUTE FUNCTION {reference.object('change')}()"
    made = [
        f"CREATE TRIGGER {quote(fill_name + '_i')} BEFORE INSERT ON {child} FOR EACH ROW {fill_in}",
        f"CREATE TRIGGER {quote(fill_name + '_u')} BEFORE UPDATE ON {child} FOR EACH ROW "
        f"WHEN ({_distinct(keys)} OR {empty} OR {to_clear}) {fill_in}",
        f"CREATE CONSTRAINT TRIGGER {quote(name + '_i')} AFTER INSERT ON {child} {when}FOR EACH ROW "
        f"WHEN ({empty}) {ask}",
        f"CREATE CONSTRAINT TRIGGER {quote(name + '_u')} AFTER UPDATE ON {child} {when}FOR EACH ROW "
        f"WHEN ({empty}) {ask}",
        f"CREATE TRIGGER {quote(fill_name + '_d')} BEFORE DELETE ON {parent} FOR EACH ROW {change_}",
    ]
    if reference.on_update == "no-action":
        moved = _distinct([c.name for c in reference.parent_keys])
        made.append(
            f"CREATE TRIGGER {quote(fill_name + '_k')} BEFORE UPDATE ON {parent} FOR EACH ROW WHEN ({moved}) {change_}"
        )
    return made


def _trigger_function(reference: Reference, what: str, lines: list[str], declared: Sequence[str] = ()) -> str:
    text = "\n".join([*(["DECLARE", *declared] if declared else []), "BEGIN", *indent(lines), "END"])
    return _function(f"{reference.object(what)}() RETURNS trigger", text)


def _function(head: str, text: str) -> str:
    tag = "roir"
    while f"${tag}$" in text:
        tag += "_"
    pinned = f"{PINNED} SET datestyle = 'ISO, YMD'"
    return f"CREATE OR REPLACE FUNCTION {head}\nLANGUAGE plpgsql SECURITY DEFINER {pinned}\nAS ${tag}$\n{text}\n${tag}$"


def _call(reference: Reference, record: str, how: str) -> str:
    return f"{reference.object('find')}({', '.join(_of(record, reference.keys))}, '{how}')"


def _places(reference: Reference, prefix: str) -> list[str]:
    return [f"{prefix}f{n}" for n in range(1, len(reference.added) + 1)]


def _child(reference: Reference) -> str:
    return CHILD.format(function=literal(f"{reference.object('fill')}()")).strip()


def _conditions(name: str, columns: Sequence[Column], equals: Sequence[str], first: int) -> list[str]:
    return [f"{name}{n} {equals[n - 1]} ${first + n - 1}" for n in range(1, len(columns) + 1)]


def _all(conditions: Iterable[str], alias: str) -> str:
    return " AND ".join(conditions).replace("{0}", alias)


def _of(record: str, names: Iterable[str]) -> list[str]:
    return [f"{record}.{quote(name)}" for name in names]


def _any_null(record: str, names: Iterable[str]) -> str:
    return " OR ".join(map(is_null, _of(record, names)))


def _differ(names: Sequence[str]) -> str:
    """By their images, since an operator would be looked up in some search_path."""
    return f"ROW({', '.join(_of('OLD', names))})::record *<> ROW({', '.join(_of('NEW', names))})::record"


def _distinct(names: Sequence[str]) -> str:
    """For a condition of a trigger: a dump shows `ROW(…)::record` without its type, and can't be restored."""
    return " OR ".join(f"OLD.{quote(name)} IS DISTINCT FROM NEW.{quote(name)}" for name in names)


def _child_has_key(reference: Reference) -> list[str]:
    return [f"c.{quote(k)} {reference.equals[n]} ${n + 1}" for n, k in enumerate(reference.keys)]


def _percent(sql: str) -> str:
    return sql.replace("%", "%%")
