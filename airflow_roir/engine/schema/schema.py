"""Checks that the control schema has the version of this code. `install` creates and upgrades the schema."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from sqlalchemy import Connection

import airflow_roir
from airflow_roir.definition import QualifiedName, argument, quote
from airflow_roir.engine.database import execute
from airflow_roir.errors import ReadOnlyServer, RightMissing, SchemaMissing, SchemaVersionMismatch

VERSION_TABLE = "schema_version"
# Revisions from before 0.1.0, which were never released; one migration replaces them all. Releases use these numbers
# again, one by one.
UNRELEASED = frozenset(f"{number:04}" for number in range(2, 22))
# `0001` was their first number, too, and was edited several times: its unreleased forms lack the table `home`, the
# table `feed`, or at least the function `options_in_effect`.
# whole: the section post-data of a dump has the keys and triggers.
COMPLETENESS = """
SELECT to_regclass('roir.home') IS NOT NULL AND to_regclass('roir.feed') IS NOT NULL
       AND to_regprocedure('roir.options_in_effect(roir.operation)') IS NOT NULL AS released,
       EXISTS (SELECT FROM pg_index WHERE indrelid = to_regclass('roir.operation') AND indisprimary)
       AND EXISTS (SELECT FROM pg_trigger WHERE tgrelid = to_regclass('roir.operation') AND NOT tgisinternal) AS whole
"""
RESTORED = "SELECT recorded, present, present::regclass::text AS name FROM roir.restored_sources() ORDER BY 1"
UPGRADED = "SELECT source::regclass::text FROM roir.upgraded_sources() ORDER BY 1 LIMIT 1"
# made_by: '' if the build kept none (to_jsonb: its schema lacks the column); NULL if a dump lacked the row.
STANDING = """
SELECT (SELECT coalesce(to_jsonb(h) ->> 'made_by', '') FROM roir.home h) AS made_by,
       to_regnamespace('roir_data') IS NULL AS lost
"""
OWNER = """
SELECT current_user::text AS role, o.rolname::text AS owner, o.rolsuper AS super
  FROM pg_namespace n JOIN pg_roles o ON o.oid = n.nspowner WHERE n.nspname = 'roir'
"""
IS_GUARDED = "SELECT EXISTS (SELECT FROM pg_event_trigger WHERE evtname = 'roir_refuse_ddl' AND evtenabled <> 'D')"


def migrations_folder() -> Path:
    """The folder of the migrations: inside the installed package, or beside it in a source checkout."""
    package = Path(airflow_roir.__file__).parent
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


@functools.cache
def revisions() -> tuple[str, ...]:
    """The revisions that this code knows, oldest first, by the numbers that their files are named after.

    Not by Alembic: each command calls this, and Alembic takes longer to import than most commands take to answer.
    """
    files = (migrations_folder() / "versions").glob("[0-9]*_*.py")
    found = tuple(sorted(file.name.split("_", 1)[0] for file in files))
    assert found, f"the migrations are missing from {migrations_folder()}"
    return found


def head() -> str:
    """The newest revision that this code knows."""
    return revisions()[-1]


@functools.cache
def build_of_code() -> str:
    """A checksum of the SQL by which this code makes the control schema, without its comments and blanks."""
    found = hashlib.sha256(head().encode())
    for file in sorted((migrations_folder() / "sql").glob("*.sql")):
        if file.name != "comments.sql":
            bare = re.sub(r"--[^\n]*", "", file.read_text(encoding="utf-8"))
            found.update(" ".join([file.name, *bare.split()]).encode())
    return found.hexdigest()[:16]


def check_build(made_by: str | None) -> None:
    """Raise SchemaVersionMismatch if other SQL than this code's made a control schema of this code's version."""
    if made_by is not None and made_by != build_of_code():
        raise SchemaVersionMismatch(
            f"the control schema was made by another build of airflow-roir: its version is {head()}, too, but its "
            "tables or functions differ. Use that build again. Or stop its runs, then DROP SCHEMA roir, roir_data "
            "CASCADE, which removes its indexes (tables keep their rows), then: roir init"
        )


def made_by(connection: Connection) -> str | None:
    """The checksum of the SQL that made the control schema; '' if that build kept none, None if it is lost."""
    found = execute(connection, STANDING).one().made_by
    return None if found is None else str(found)


def is_guarded(connection: Connection) -> bool:
    """True if event triggers refuse DDL that no capture sees; without them such DDL is only detected."""
    return bool(execute(connection, IS_GUARDED).scalar_one())


def is_unguarded(connection: Connection) -> bool:
    """True if somebody has removed these event triggers (`roir.unguard`): no `init` installs them again."""
    return bool(execute(connection, "SELECT NOT guarded FROM roir.setting").scalar_one())


def is_absent(connection: Connection) -> bool:
    """True if `roir init` has never run here."""
    return bool(execute(connection, f"SELECT to_regclass('roir.{VERSION_TABLE}') IS NULL").scalar_one())


def is_lost(connection: Connection) -> bool:
    """True if the control schema exists without the schema of entries (`install.give_up`)."""
    query = "SELECT to_regnamespace('roir') IS NOT NULL AND to_regnamespace('roir_data') IS NULL"
    return bool(execute(connection, query).scalar_one())


def current(connection: Connection) -> str | None:
    """The database's revision of the control schema, None if there is none. Raises InvalidInput."""
    table = f"to_regclass('roir.{VERSION_TABLE}')"
    may = execute(connection, f"SELECT has_table_privilege({table}, 'SELECT')").scalar_one()
    if may is None:
        return None
    if not may:
        raise no_rights(connection)
    revision = execute(connection, f"SELECT version_num FROM roir.{VERSION_TABLE}").scalar()
    return None if revision is None else str(revision)


def no_rights(connection: Connection) -> RightMissing:
    """The error of a role without rights on the control schema, with what gives it these rights."""
    found = execute(connection, OWNER).one()
    role, owner = quote(found.role), quote(found.owner)
    if found.super:
        return RightMissing(
            f"role {role} has no rights on the control schema, which the superuser {owner} owns. Connect as {owner}. "
            f"Or, as long as there is no index, let {owner} run the SQL that a command prints, which hands the schema "
            f"to this role: roir role-sql {argument(QualifiedName(None, found.role))}"
        )
    return RightMissing(
        f"role {role} has no rights on the control schema. Connect as {owner}, which owns it, or make this role its "
        f"member: GRANT {owner} TO {role}"
    )


def check_writable(connection: Connection) -> None:
    """Raise ReadOnlyServer on a standby."""
    found = execute(connection, "SELECT pg_is_in_recovery() AS standby, current_database() AS name").one()
    if found.standby:
        raise ReadOnlyServer(
            f"this server of database {found.name} is a standby, which takes no writes; nothing was changed. Give the "
            "primary's address, or that of both and target_session_attrs=read-write: "
            "postgresql://user@one,two/database?target_session_attrs=read-write"
        )


def check_schema(connection: Connection, writes: bool = False) -> None:
    """Raise SchemaVersionMismatch if the control schema is older or newer than this code, SchemaMissing without one.

    Raises SchemaVersionMismatch also if the database was restored or upgraded, and `roir init` hasn't adopted it.
    writes: raise ReadOnlyServer on a standby.
    """
    if writes:
        check_writable(connection)
    present = current(connection)
    if present is None:
        raise SchemaMissing("this database has no control schema yet; create it with: roir init")
    check_known(connection, present)
    if present != head():
        raise SchemaVersionMismatch(
            f"the control schema is at version {present}, this code needs version {head()}; upgrade the schema "
            "with: roir init"
        )
    standing = execute(connection, STANDING).one()
    check_build(standing.made_by)
    if standing.lost:
        raise SchemaMissing(
            "schema roir_data was dropped, with the entries of all indexes and the capture of writes. Run: roir init, "
            "which creates the schema and names the indexes to build again"
        )
    moved = moved_database(connection)
    if moved is not None:
        raise SchemaVersionMismatch(f"{moved}; run: roir init")


def moved_database(connection: Connection) -> str | None:
    """Says that the database was restored or upgraded and not adopted yet (`install.adopt`); None if it wasn't."""
    restored = execute(connection, RESTORED).first()
    if restored is not None:
        return (
            f"this database was restored from a dump: the oid of table {restored.name} isn't the one that its "
            "indexes know"
        )
    upgraded = execute(connection, UPGRADED).scalar()
    if upgraded is not None:
        return (
            f"this database was upgraded by pg_upgrade: the partitions of {upgraded} aren't linked as its indexes know"
        )
    return None


def check_known(connection: Connection, revision: str) -> None:
    """Raise SchemaVersionMismatch if this code can't upgrade a schema of that revision."""
    known = revision in revisions()
    standing = execute(connection, COMPLETENESS).one()
    if (not known and revision in UNRELEASED) or not standing.released:
        raise SchemaVersionMismatch(
            f"the control schema is at version {revision}, from before 0.1.0, the first release; this code can't "
            "upgrade it. Stop its runs, then DROP SCHEMA roir, roir_data CASCADE, which removes its indexes "
            "(tables keep their rows), then: roir init"
        )
    if not standing.whole:
        raise SchemaVersionMismatch(
            "this database was restored without the section post-data of its dump: the control schema has no keys, or "
            "no triggers. Restore that section, too (pg_restore --section=post-data), then run: roir init"
        )
    if not known:
        raise SchemaVersionMismatch(
            f"the control schema is at version {revision}, which is newer than this code "
            f"({airflow_roir.__version__}). Upgrade airflow-provider-roir"
        )
