"""Feeds of shards: the core's own statements about indexes over shards, and its hooks for the end of a generation.

A generation of an index over shards has a feed (a row of `roir.feed`) for each of them. The feeds are in the control
schema, so the core reads them, and whether their shards are out of reach, like any other rows. The package
`airflow_roir.shards` does all work in shards, and on tables that only such an index has, behind `Ends` here and
`engine.apart.Apart`. The core imports nothing of it: `implementation` loads it by its name, at the first call, when all
modules of the core are complete. So each process has it: commands, tasks, pages, Spark's driver, and executors, which
get the package's sources without the metadata that an entry point needs. With a registration at the start of each of
them, one that forgot it would treat an index over shards as any other, and lose writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from sqlalchemy import Connection

from airflow_roir.engine.database import Database, execute

# How long no worker tries to reach a shard after it was out of reach.
AWAY_S = 15.0
# SQL, true if shard s is out of reach. A moment later than that can only mean that the server's clock was set back.
IS_AWAY = f"s.away_until BETWEEN clock_timestamp() AND clock_timestamp() + interval '{AWAY_S} seconds'"
# SQL for the table and the shards of index i, if it is over shards; else NULL.
TABLE_OF = """
(i.shard_table || coalesce(' in ' || (
    SELECT string_agg(s.name, ', ' ORDER BY s.name) FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id
     WHERE l.generation_id = (SELECT max(x.id) FROM roir.generation x
                               WHERE x.index_id = i.id AND x.status <> 'dropped')), ''))
"""
# The operation's shards that can't be read now, and why.
AWAY = """
SELECT s.name, s.problem FROM roir.operation o
  JOIN roir.feed l ON l.generation_id = o.generation_id JOIN roir.shard s ON s.id = l.shard_id
 WHERE o.id = %(operation)s AND s.problem IS NOT NULL ORDER BY s.name
"""
# SQL, true if no worker may claim a range now: its shard is out of reach, or has as many readers as it may have. One of
# these readers keeps its range.
NOT_NOW = f"""
scan_range.shard_id IS NOT NULL AND (
    scan_range.shard_id = ANY (ARRAY(SELECT s.id FROM roir.shard s WHERE {IS_AWAY}))
    OR claim_epoch IS DISTINCT FROM %(epoch)s AND scan_range.shard_id = ANY (ARRAY(
        SELECT h.shard_id FROM roir.scan_range h JOIN roir.operation o ON o.id = h.operation_id
         WHERE o.id = %(operation)s AND NOT h.done AND h.claim_epoch = %(epoch)s
         GROUP BY h.shard_id, o.shard_parallelism HAVING count(*) >= o.shard_parallelism)))
"""
# SQL, true if the holder of range r is one reader too many of its shard, since the limit was lowered.
TOO_MANY = """
o.shard_parallelism <= (SELECT count(*) FROM roir.scan_range h
                         WHERE h.operation_id = o.id AND h.shard_id = r.shard_id AND NOT h.done
                           AND h.claim_epoch = o.epoch AND h.id < r.id)
"""
HAS_FEEDS = "SELECT EXISTS (SELECT FROM roir.feed WHERE generation_id = %(generation)s)"


def is_apart(connection: Connection, generation_id: int) -> bool:
    """True if the generation's rows are in shards."""
    return bool(execute(connection, HAS_FEEDS, {"generation": generation_id}).scalar_one())


class Ends:
    """The hooks for the end of a generation, or of an index. Without the package they do nothing."""

    def retire(self, connection: Connection, generation_id: int, actor: str) -> None:
        """Called in the transaction that ends the shipping of a generation: its build fails or is aborted, or it is
        dropped. From then on its keys must refuse no write: they would never be free again.
        """

    def release(
        self,
        database: Database,
        index_id: int | None,
        patience_s: float,
        report: Callable[[str], None] = lambda line: None,
    ) -> list[str]:
        """Called after that, once its tables are dropped: ends the capture of dropped generations in their shards, then
        drops the tables that only an index over shards has, since writers that announce need them until then.

        index_id: that of one index; None, for a clean-up: all indexes, and other work that was left in a shard that was
        out of reach. Safe to repeat. Returns a line for each shard that still has a capture: the next clean-up tries
        again.
        """
        return []


@cache
def implementation() -> Any:
    """The implementation of all hooks, imported at the first call. Only this line names the package, by a string."""
    return import_module("airflow_roir.shards.hooks").HOOKS


def ends() -> Ends:
    """The implementation of the hooks of `Ends`."""
    found: Ends = implementation()
    return found
