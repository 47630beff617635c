"""Broken variants of the engine, as in `variants.py`: the mistakes that a unique index can make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection

from airflow_roir.engine import switch
from airflow_roir.engine.capture import row_function, segment_writes, unique_put
from airflow_roir.engine.capture.target import Target
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.source.source import Source
from airflow_roir.engine.unique import duplicates, shared_keys

Variant = Callable[[pytest.MonkeyPatch], None]
VARIANTS: list[Variant] = []
# The unique machine's messages about a variant.
FOUND = r"\(U\d\)|generation \d|\(I\d\)|lock timeout|duplicate key"


def variant(broken: Variant) -> Variant:
    """Lists a variant. It patches the engine."""
    VARIANTS.append(broken)
    return broken


def _members(patch: pytest.MonkeyPatch, change: Callable[[Entry, str], str]) -> None:
    """Finds the members of groups by another query."""
    members = shared_keys.members_of

    def broken(job: Job, *arguments: Any) -> str:
        return change(job.entry, members(job, *arguments))

    patch.setattr(shared_keys, "members_of", broken)


@variant
def reports_stale_base_copies(patch: pytest.MonkeyPatch) -> None:
    """Entries that the delta touches count as a row's entry."""
    _members(patch, lambda entry, query: query.replace("WHERE NOT EXISTS", "WHERE true OR NOT EXISTS"))


@variant
def lets_antimatter_hide_a_pair(patch: pytest.MonkeyPatch) -> None:
    """A deleted row's antimatter hides every entry of its key."""

    def by_key(entry: Entry, query: str) -> str:
        nulls = dict.fromkeys(entry.key_positions, False)
        whole = entry.equal("x.", "t.", nulls)
        assert whole in query
        return query.replace(whole, "x.c1 = t.c1")

    _members(patch, by_key)


@variant
def seals_over_touched_entries(patch: pytest.MonkeyPatch) -> None:
    """A segment's unique index also covers entries that the delta touches."""
    patch.setattr(physical, "remove_touched", lambda *arguments: None)


@variant
def switches_without_the_last_look(patch: pytest.MonkeyPatch) -> None:
    """Writes after the look without the lock aren't looked at."""
    look = duplicates.look
    under = {"lock": False}
    drain = switch.drain

    def drained(database: Any, job: Any, body: Callable[..., Any], *rest: Any) -> Any:
        def marked(connection: Connection, lock: Callable[[], None]) -> Any:
            under["lock"] = True
            try:
                return body(connection, lock)
            finally:
                under["lock"] = False

        return drain(database, job, marked, *rest)

    patch.setattr(switch, "drain", drained)
    patch.setattr(duplicates, "look", lambda *some, **more: 0 if under["lock"] else look(*some, **more))


@variant
def forgets_writers_in_flight_at_the_look(patch: pytest.MonkeyPatch) -> None:
    """The mark of a look is the present, not the oldest transaction that it couldn't see."""
    patch.setattr(duplicates, "SEEN", "SELECT pg_current_xact_id()::text")


@variant
def takes_what_was_found_for_healed(patch: pytest.MonkeyPatch) -> None:
    """A resume looks at new duplicates alone."""
    all_of_it = "UPDATE roir.duplicate SET healed_at = clock_timestamp() WHERE healed_at IS NULL"
    patch.setattr(duplicates, "_heal", lambda connection, job, values, *rest: execute(connection, all_of_it, values))


def _of_put(patch: pytest.MonkeyPatch, name: str, change: Callable[[list[str]], list[str]]) -> None:
    original = getattr(unique_put, name)
    patch.setattr(unique_put, name, lambda *arguments: change(original(*arguments)))


@variant
def takes_over_without_asking(patch: pytest.MonkeyPatch) -> None:
    """A writer takes a key over, whether or not a row holds it."""
    _of_put(patch, "ask", lambda lines: [])


@variant
def refuses_without_asking(patch: pytest.MonkeyPatch) -> None:
    """A stale entry is a duplicate: swaps and shifts fail."""
    _of_put(patch, "ask", lambda lines: [line.replace("IF held THEN", "IF true THEN") for line in lines])


@variant
def asks_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """The question doesn't wait for a transaction that is changing the holder's row."""
    _of_put(patch, "ask", lambda lines: [line.replace(" FOR SHARE", "") for line in lines])


@variant
def forgets_the_delta_of_others(patch: pytest.MonkeyPatch) -> None:
    """In direct mode only the base is asked for the holder of a key."""
    patch.setattr(unique_put, "_of_delta", lambda *arguments: [])


@variant
def removes_what_was_taken_over(patch: pytest.MonkeyPatch) -> None:
    """A removal goes by the key, even if another row has taken it over."""
    same = segment_writes._same

    def by_key(entry: Entry, record: str) -> str:
        return " AND ".join(same(entry, record).split(" AND ")[: entry.key])

    patch.setattr(segment_writes, "_same", by_key)


@variant
def enforces_in_capture_mode(patch: pytest.MonkeyPatch) -> None:
    """Writers are refused before the switch, because of rows in the delta."""
    capture_mode = row_function._capture_mode

    def broken(source: Source, target: Target) -> list[str]:
        refused = [
            f"IF TG_OP <> 'DELETE' AND EXISTS (SELECT FROM {physical.delta(target.generation_id)} d "
            "WHERE d.state = 'regular' AND d.c1 = NEW.k AND d.c2 <> NEW.id) THEN",
            f"  RAISE unique_violation USING CONSTRAINT = '{target.constraint}', MESSAGE = 'too early';",
            "END IF;",
        ]
        return refused + capture_mode(source, target)

    patch.setattr(row_function, "_capture_mode", broken)
