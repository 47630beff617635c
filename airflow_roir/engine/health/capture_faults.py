"""Finds faults of an index's capture: of its triggers, its functions, and the rights that it runs by."""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.definition import argument, quote
from airflow_roir.engine.capture import alterations, installation, trigger_gaps
from airflow_roir.engine.capture.plpgsql import literal
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.source.source import Source

# The most gaps that one warning names: one statement can disable the triggers of a thousand leaves.
MOST_NAMED = 3
# Enables all of them, in one transaction.
ENABLE_ALL = """
DO $$ DECLARE t record; BEGIN FOR t IN SELECT tgrelid::regclass AS of, tgname FROM pg_trigger
 WHERE tgfoid IN (SELECT function FROM roir.captures({source}::regclass)) AND tgenabled <> 'A'
 LOOP EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', t.of, t.tgname); END LOOP; END $$
"""
# Owners can revoke their own rights. Rows are locked for a unique key, and for a deferrable primary key.
READER = """
SELECT o.rolname::text AS role,
       concat_ws(', ', CASE WHEN NOT has_table_privilege(o.oid, s.oid, 'SELECT') THEN 'SELECT' END, CASE
                 WHEN %(locks)s AND NOT has_any_column_privilege(o.oid, s.oid, 'UPDATE') THEN 'UPDATE' END) AS lacks,
       s.relrowsecurity AND s.relforcerowsecurity AND NOT (o.rolsuper OR o.rolbypassrls) AS restricted
  FROM pg_class v JOIN pg_roles o ON o.oid = v.relowner, pg_class s
 WHERE v.oid = to_regclass(%(view)s) AND s.oid = %(source)s
"""
# 29: AFTER INSERT OR UPDATE OR DELETE, for each row; 32: AFTER TRUNCATE.
ALTERED_TRIGGERS = """
SELECT format('%%I on %%s', tgname, tgrelid::regclass) AS trigger, tgrelid::regclass::text AS relation,
       quote_ident(tgname) AS name
  FROM roir.captures(%(source)s::oid) c
  -- A trigger depends on its function; no index of pg_trigger has the function.
  JOIN pg_depend d ON d.refclassid = 'pg_proc'::regclass AND d.refobjid = c.function
   AND d.classid = 'pg_trigger'::regclass
  JOIN pg_trigger t ON t.oid = d.objid AND t.tgfoid = c.function
 WHERE (tgtype NOT IN (29, 32) OR tgqual IS NOT NULL OR tgattr <> '' OR tgnargs > 0)
 ORDER BY tgrelid <> %(source)s::oid, 1 LIMIT 1
"""


def capture_problems(connection: Connection, name: str, source: Source) -> list[str]:
    """A line, with the remedy, for each fault by which writes are missed or captured wrongly."""
    found = []
    gaps = trigger_gaps.gaps(connection, source.oid)
    if gaps:
        missing = any(gap.missing for gap in gaps)
        more = len(gaps) - MOST_NAMED
        named = ", ".join(map(str, gaps[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
        enabled = (
            "; ".join(f"ALTER TABLE {gap.relation} ENABLE ALWAYS TRIGGER {gap.trigger}" for gap in gaps)
            if more <= 0
            else " ".join(ENABLE_ALL.format(source=literal(source.sql)).split())
        )
        remedy = (
            f"rebuild the index, which creates the triggers again: roir build {argument(name)}"
            if missing
            else f"{enabled}; then roir verify {argument(name)}, and if it finds a difference, "
            f"roir build {argument(name)}"
        )
        found.append(f"index {name}: not every write to {source.sql} is captured: {named}. Remedy: {remedy}")
    altered = execute(connection, ALTERED_TRIGGERS, {"source": source.oid}).first()
    if altered is not None:
        found.append(
            f"index {name}: {altered.trigger} was replaced by a trigger that doesn't fire for every write. Remedy: "
            f"DROP TRIGGER {altered.name} ON {altered.relation}; then rebuild the index, which restores the trigger: "
            f"roir build {argument(name)}"
        )
    if alterations.is_altered(connection, source):
        found.append(
            f"index {name}: the capture functions of {source.sql} were altered, or belong to a former owner of the "
            "table, so writes may fail or be missed. Run: roir clean-up, which replaces them; then roir "
            f"verify {argument(name)}, and if it finds a difference, roir build {argument(name)}"
        )
    if former := installation.former_owners(connection, source.oid):
        found.append(
            f"index {name}: {', '.join(former)} may still write its entries, as only the owner of {source.sql} may "
            f"({quote(source.owner)}). Run: roir clean-up, which takes these rights back; then roir "
            f"verify {argument(name)}, and if it finds a difference, roir verify --repair {argument(name)}"
        )
    return found


def why_missed(connection: Connection, source_oid: int) -> str | None:
    """Why the capture may miss writes of rows now, in a clause; None if it misses none."""
    gaps = [gap for gap in trigger_gaps.gaps(connection, source_oid) if gap.kind == "rows"]
    if gaps:
        return f"trigger {gaps[0]}" + (f", and {len(gaps) - 1} more" if len(gaps) > 1 else "")
    altered = execute(connection, ALTERED_TRIGGERS, {"source": source_oid}).first()
    if altered is not None:
        return f"trigger {altered.trigger} was replaced by one that doesn't fire for every write"
    return "its capture function was replaced" if alterations.is_replaced(connection, source_oid) else None


def lacking(connection: Connection, name: str, source: Source, generation_id: int, entry: Entry) -> list[str]:
    """A line for each missing right of the owner of the capture's view of the source, without which writes fail."""
    locks = entry.enforced or source.pk_deferrable
    asked = {"view": physical.source_view(generation_id), "source": source.oid, "locks": locks}
    reader = execute(connection, READER, asked).first()
    if reader is None:
        return []
    role = quote(reader.role)
    found = []
    if reader.lacks:
        found.append(
            f"index {name}: role {role}, by whose rights the capture reads {source.sql}, has lost {reader.lacks} on "
            f"it, so writes fail. Run: GRANT {reader.lacks} ON {source.sql} TO {role}"
        )
    if reader.restricted:
        found.append(
            f"index {name}: row-level security of {source.sql} applies to role {role}, too, by whose rights the "
            f"capture reads it, so writes fail. Run: ALTER TABLE {source.sql} NO FORCE ROW LEVEL SECURITY"
        )
    return found
