"""The indexes of each database for the page Indexes, with the moment of the look if that is a while ago."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import is_transient, sqlstate
from airflow_roir.errors import RoirError, SchemaMissing
from airflow_roir.page import databases, lookups
from airflow_roir.page.cache import Looks, NoAnswer
from airflow_roir.page.lack import lack_of

# Several times the interval of the page's requests.
AGED = timedelta(seconds=30)
# A look at names and states alone, which is asked for if a whole look takes too long.
STATES_S = 2.0
# A statement took too long.
CANCELLED = "57014"
# The fields of an index without an operation.
NO_OPERATION: dict[str, Any] = {"operation": None, "run": None, "state_of_operation": None, "continues": None}


@dataclass(frozen=True)
class Listing:
    """The indexes of a database. at: when the look at them began."""

    at: datetime
    indexes: list[dict[str, Any]]


class Listings:
    """Asks databases for their indexes. Keeps the last answers, which are shown while a look takes long."""

    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self._last: dict[str, Listing] = {}

    async def of(self, connection_id: str) -> dict[str, Any]:
        """A database with its indexes, for JSON.

        trouble: why the indexes aren't up to date, or not known. remedy: what helps, if that is known. lacks: what a
        connection needs before it can have an index, as `lack.Lack` names it. as_of: when the database was asked, None
        if that was a moment ago.
        """
        one: dict[str, Any] = {"connection": connection_id, "indexes": [], "as_of": None}
        one |= {"trouble": None, "remedy": "", "lacks": None}
        found = self._last.get(connection_id)
        try:
            found = self._last[connection_id] = await self._looks.look(
                connection_id, "indexes", lambda: _look(connection_id), lookups.SEVERAL_S
            )
            one["indexes"] = found.indexes
        except NoAnswer as reason:
            one["trouble"] = f"{reason}. This page keeps looking"
            one["indexes"] = await self._as_far_as_known(connection_id, found)
        except DBAPIError as error:
            one["trouble"] = databases.trouble(connection_id, error)
            if is_transient(error) or sqlstate(error) == CANCELLED:
                one["indexes"] = await self._as_far_as_known(connection_id, found)
            if not one["indexes"]:
                one["remedy"] = databases.remedy(error)
        except (SchemaMissing, databases.NoConnection, databases.NotPostgres) as reason:
            lack = lack_of(connection_id, reason)
            one |= {"trouble": lack.says, "remedy": lack.remedy, "lacks": lack.what}
        except RoirError as reason:
            one["trouble"] = str(reason)
        if one["indexes"] and found is not None and datetime.now(timezone.utc) - found.at > AGED:
            one["as_of"] = found.at.isoformat()
        return one

    async def _as_far_as_known(self, connection_id: str, found: Listing | None) -> list[dict[str, Any]]:
        """The last indexes, without those that are dropped by now, and with their present states."""
        if found is None or not found.indexes:
            return []
        try:
            now = await self._looks.look(connection_id, "states", lambda: lookups.states_now(connection_id), STATES_S)
        except (NoAnswer, DBAPIError, RoirError):
            # Their states are as old as their figures.
            return [index | {"aged": True} for index in found.indexes]
        return [_with_state(index, *now[index["index"]]) for index in found.indexes if index["index"] in now]


def _look(connection_id: str) -> Listing:
    at = datetime.now(timezone.utc)
    return Listing(at, lookups.indexes_of(connection_id))


def _with_state(index: dict[str, Any], state: str, operation: int | None) -> dict[str, Any]:
    now = index | {"state": state}
    return now if operation == index["operation"] else now | NO_OPERATION | {"operation": operation}
