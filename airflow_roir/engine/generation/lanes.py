"""Lanes: what the core's own statements say of an index over shards, and what it asks when such a generation ends.

A generation of an index over shards has a lane for each of them. The control schema has the lanes, so the core reads
whether one is there, and whether its shard is away, like any other row. What is done in shards, and to the tables that
only such an index has, the package `airflow_roir.shards` does, behind `Ends` here and `engine.apart.Apart`. The core
imports nothing of it: `implementation` finds it by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from sqlalchemy import Connection

from airflow_roir.engine.database import Database, execute

# How long nobody tries again to reach a shard that was out of reach.
AWAY_S = 15.0
# SQL, of shard s. Later than that is no moment that was written down: the server's clock was set back since.
IS_AWAY = f"s.away_until BETWEEN clock_timestamp() AND clock_timestamp() + interval '{AWAY_S} seconds'"
# SQL, of index i: the table and its shards, where it is apart from them; else NULL.
TABLE_OF = """
(i.shard_table || coalesce(' in ' || (
    SELECT string_agg(s.name, ', ' ORDER BY s.name) FROM roir.lane l JOIN roir.shard s ON s.id = l.shard_id
     WHERE l.generation_id = (SELECT max(x.id) FROM roir.generation x
                               WHERE x.index_id = i.id AND x.status <> 'dropped')), ''))
"""
# The operation's shards that can't be read now, and why.
AWAY = """
SELECT s.name, s.problem FROM roir.operation o
  JOIN roir.lane l ON l.generation_id = o.generation_id JOIN roir.shard s ON s.id = l.shard_id
 WHERE o.id = %(operation)s AND s.problem IS NOT NULL ORDER BY s.name
"""
# SQL: whether no worker may claim a range now: its shard is out of reach, or has as many readers as it is to have. One
# of these readers keeps its range.
NOT_NOW = f"""
scan_range.shard_id IS NOT NULL AND (
    scan_range.shard_id = ANY (ARRAY(SELECT s.id FROM roir.shard s WHERE {IS_AWAY}))
    OR claim_epoch IS DISTINCT FROM %(epoch)s AND scan_range.shard_id = ANY (ARRAY(
        SELECT h.shard_id FROM roir.scan_range h JOIN roir.operation o ON o.id = h.operation_id
         WHERE o.id = %(operation)s AND NOT h.done AND h.claim_epoch = %(epoch)s
         GROUP BY h.shard_id, o.shard_parallelism HAVING count(*) >= o.shard_parallelism)))
"""
# SQL: whether the holder of range r is a reader too many of its shard, since fewer are wanted now.
TOO_MANY = """
o.shard_parallelism <= (SELECT count(*) FROM roir.scan_range h
                         WHERE h.operation_id = o.id AND h.shard_id = r.shard_id AND NOT h.done
                           AND h.claim_epoch = o.epoch AND h.id < r.id)
"""
HAS_LANES = "SELECT EXISTS (SELECT FROM roir.lane WHERE generation_id = %(generation)s)"


def is_apart(connection: Connection, generation_id: int) -> bool:
    """True if the generation's rows are in shards."""
    return bool(execute(connection, HAS_LANES, {"generation": generation_id}).scalar_one())


class Ends:
    """What is asked when a generation, or an index, comes to its end. Without the package there is nothing to do."""

    def retire(self, connection: Connection, generation_id: int, actor: str) -> None:
        """In the transaction by which a generation isn't shipped any more: its build failed or is aborted, or it is
        dropped. Nothing may be refused by its keys from then on: they would never be free again.
        """

    def release(
        self,
        database: Database,
        index_id: int | None,
        patience_s: float,
        report: Callable[[str], None] = lambda line: None,
    ) -> list[str]:
        """After that, once its tables are dropped: end the capture of dropped generations in their shards, then drop
        what only an index over shards has, since writers that announce need it until then.

        index_id: of one index; None, as a clean-up asks: of all, and whatever else was left undone in a shard that was
        away. Safe to repeat. Returns a line for each shard that still has some: the next clean-up tries again.
        """
        return []


@cache
def implementation() -> Any:
    """What answers the hooks: the one place that names the package, by a string, when something is first asked."""
    return import_module("airflow_roir.shards.hooks").HOOKS


def ends() -> Ends:
    """See `Ends`."""
    found: Ends = implementation()
    return found
