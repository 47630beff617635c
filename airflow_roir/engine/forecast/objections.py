"""All objections to a build at once: missing rights, and the reasons for which it would be refused.

`dry_run.run` and `prepare.prepare` raise the first objection. Here each check runs, whatever the others find; so
`lifecycle.prepare` and the commands raise all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition, QualifiedName
from airflow_roir.engine import dry_run
from airflow_roir.engine.apart import apart
from airflow_roir.engine.control import live_options
from airflow_roir.engine.control.new_operation import unfinished
from airflow_roir.engine.control.stored_definition import existing_index
from airflow_roir.engine.database import Database, execute, is_transient, said, sqlstate
from airflow_roir.engine.forecast import before_init, rights
from airflow_roir.engine.forecast.rights import MissingRight
from airflow_roir.engine.forecast.worth import Worth
from airflow_roir.engine.locks.table_lock import DENIED
from airflow_roir.engine.schema.schema import check_schema, check_writable
from airflow_roir.engine.source import catalog, checks
from airflow_roir.errors import Complaints, InvalidInput, NotFound, RightMissing, RoirError
from airflow_roir.options import BuildOptions
from airflow_roir.quantity import counted

T = TypeVar("T")

# The checks don't wait long for a table that is being altered.
PATIENCE_MS = 1_000
# `roir init` makes this schema; any role may ask for it.
ABSENT = "SELECT to_regnamespace('roir') IS NULL"


@dataclass(frozen=True)
class Objections:
    """The objections to a build. missing: rights; refused: sentences with their remedies.

    before_init: the control schema is missing, so that only some checks were made; that is the last of `refused`.
    worth: whether the index will pay; None if it isn't known. unsure: a check met an error that may pass.
    """

    missing: tuple[MissingRight, ...]
    refused: tuple[str, ...]
    before_init: bool = False
    worth: Worth | None = None
    unsure: bool = False

    def __bool__(self) -> bool:
        return bool(self.missing or self.refused)

    def verdict(self) -> str:
        """In one line: that the index can't be built yet, how much is against it, and what to do."""
        if self.before_init and not self.missing and len(self.refused) == 1:
            return "not yet: nothing is against it but the missing control schema. Run: roir init, then plan again"
        rights = f"{counted(len(self.missing), 'right')} missing" if self.missing else ""
        refused = f"{counted(len(self.refused), 'refusal')}" if self.refused else ""
        told = ", ".join(filter(None, (rights, refused)))
        return f"not yet: {told}. Do what each line says, then plan again"

    def errors(self) -> list[RoirError]:
        """Each objection as an error."""
        return [*(RightMissing(str(one)) for one in self.missing), *map(InvalidInput, self.refused)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "missing_rights": [{"what": one.what, "statement": one.statement} for one in self.missing],
            "refused": list(self.refused),
        }


def settle(
    complaints: Complaints, database: Database, definitions: Sequence[IndexDefinition], options: BuildOptions
) -> None:
    """Raises all that is wrong with a build's input, if `complaints` has anything: also what the database objects to.

    definitions, options: what can be read of them. If the database can't be asked, only `complaints` are raised.
    """
    if not complaints:
        return
    with suppress(RoirError, DBAPIError):
        for definition in definitions:
            complaints.add(*find(database, definition, options).errors())
    complaints.settle()


def raise_missing(database: Database, definition: IndexDefinition, options: BuildOptions) -> None:
    """Raises the rights that a build lacks, if it lacks any, each with the statement that grants it."""
    complaints = Complaints()
    with suppress(RoirError, DBAPIError):
        complaints.add(*(RightMissing(str(right)) for right in find(database, definition, options).missing))
    complaints.settle()


def refuse(database: Database, definition: IndexDefinition, options: BuildOptions) -> None:
    """Raises all objections to a build that `prepare.prepare` would refuse; looks into no shard, and changes nothing.

    Raises nothing for an index with an unfinished build, which prepare continues, or if an error hides what is wrong.
    """
    try:
        with database.transaction() as connection:
            check_schema(connection)
            existing, whole = dry_run.whole_definition(connection, definition)
            continues = unfinished(connection, existing) is not None
    except (InvalidInput, NotFound) as refusal:
        raise with_others(refusal, database, definition, options) from None
    if continues or whole.shards:
        return
    against = find(database, definition, options)
    if against.refused and not against.unsure:
        complaints = Complaints()
        complaints.add(*against.errors())
        complaints.settle()


def with_others(
    refusal: RoirError, database: Database, definition: IndexDefinition, options: BuildOptions
) -> RoirError:
    """The error that refuses a build, with all other objections if there are any."""
    complaints = Complaints()
    with suppress(RoirError, DBAPIError):
        against = find(database, definition, options)
        # Each missing right has its statement.
        if not (against.missing and isinstance(refusal, RightMissing)):
            complaints.add(refusal)
        complaints.add(*against.errors())
    try:
        if len(complaints.found) > 1:
            complaints.settle()
    except InvalidInput as whole:
        return whole
    return refusal


class _Notes:
    """Calls checks, and notes the errors that they raise; those about rights are noted apart."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.refused: list[str] = []
        self.rights: list[str] = []
        self.unsure = False

    def __call__(self, check: Callable[[], T]) -> T | None:
        savepoint = self.connection.begin_nested()
        try:
            return check()
        except RoirError as error:
            self.add(error)
        except DBAPIError as error:
            if error.connection_invalidated:
                raise
            self.unsure = self.unsure or is_transient(error)
            self.add((RightMissing if sqlstate(error) == DENIED else InvalidInput)(said(error)))
        finally:
            if not self.connection.invalidated:
                # Removes the function that a read as the table's owner creates.
                savepoint.rollback()
        return None

    def add(self, error: RoirError) -> None:
        for one in getattr(error, "parts", ()) or (error,):
            notes = self.rights if isinstance(one, RightMissing) else self.refused
            if str(one) not in notes:
                notes.append(str(one))


def find(
    database: Database, definition: IndexDefinition, options: BuildOptions, complaints: Complaints | None = None
) -> Objections:
    """The objections to a build that can be found without reading rows. complaints: further ones, which come first.

    Errors about rights count only if `rights.missing` finds none.
    """
    with database.transaction() as connection:
        execute(connection, f"SET LOCAL lock_timeout = {PATIENCE_MS}")
        notes = _Notes(connection)
        absent = bool(execute(connection, ABSENT).scalar_one())
        pays = None
        missing = notes(lambda: rights.missing(connection, definition, catalog.default_schemas(connection))) or []
        whole = None
        if absent:
            _look_at_server(connection, options, notes)
            pays = before_init.look(connection, definition, options, notes, notes.add)
        else:
            whole = _look(connection, definition, options, notes)
        if whole is not None:
            for error in notes(lambda: apart().objections(database, whole, options)) or ():
                notes.add(error)
        if not missing:
            notes.refused += notes.rights
        before = [] if complaints is None else list(map(str, complaints.found))
        if absent:
            notes(lambda: check_schema(connection))
        refused = (*before, *(one for one in notes.refused if one not in before))
        return Objections(tuple(missing), refused, absent, pays, notes.unsure)


def _look(
    connection: Connection, definition: IndexDefinition, options: BuildOptions, notes: _Notes
) -> IndexDefinition | None:
    """Runs the checks in this database. Returns the whole definition of an index over shards, else None."""
    _look_at_server(connection, options, notes)
    if not _passes(notes, lambda: check_schema(connection)):
        return None
    # An unsound definition is not that of an index that exists.
    found = notes(lambda: dry_run.whole_definition(connection, definition)) if definition.is_sound else None
    existing, whole = found or (notes(lambda: existing_index(connection, definition)), definition)
    notes(lambda: dry_run.check_options(whole, options, existing))
    notes(lambda: live_options.columns(connection, options))
    name = whole.source
    # An index of that name has another definition.
    if name is None or (found is None and existing is not None):
        return None
    if whole.shards:
        view = QualifiedName(whole.name.schema or name.schema, whole.name.name)
        if existing is None and view.schema is not None:
            notes(lambda: dry_run.check_name_is_free(connection, view))
        return whole
    source, problems = notes(lambda: catalog.look(connection, name)) or (None, [])
    for problem in problems:
        notes.add(problem)
    if source is not None:
        for check in dry_run.of_source(connection, source, options, existing, whole.unique):
            notes(check)
        for check in checks.of_definition(connection, source, whole, existing is not None):
            notes(check)
    schema = whole.name.schema or (source and source.name.schema)
    if existing is None and schema:
        notes(lambda: dry_run.check_name_is_free(connection, QualifiedName(schema, whole.name.name)))
    return None


def _look_at_server(connection: Connection, options: BuildOptions, notes: _Notes) -> None:
    notes(lambda: checks.check_server(connection))
    notes(lambda: dry_run.check_lock_timeout(connection, options))
    notes(lambda: check_writable(connection))
    notes(lambda: checks.check_rights(connection))


def _passes(notes: _Notes, check: Callable[[], None]) -> bool:
    before = len(notes.refused) + len(notes.rights)
    notes(check)
    return len(notes.refused) + len(notes.rights) == before
