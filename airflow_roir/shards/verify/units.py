"""Cuts a verification of an index over shards into units: pieces of tables in shards, and of segments."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.cut import Piece, cut_source
from airflow_roir.engine.generation.physical import segments_of
from airflow_roir.engine.retry.trouble import reason_of, trouble_of
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.verify import units
from airflow_roir.engine.verify.units import Units
from airflow_roir.errors import NotFound, RoirError, ShardUnreachable
from airflow_roir.options import VerifyOptions
from airflow_roir.shards import home, sources
from airflow_roir.shards.shard import Feed, feeds_of, set_away
from airflow_roir.shards.verify import sums

# A unit of a part costs a round trip to a shard and more: fewer rows aren't worth it.
LEAST_OF_PARTS = 50

REMOVED = """
SELECT l.id FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id
 WHERE l.generation_id = %(generation)s AND (l.removed_at IS NOT NULL OR s.removed_at IS NOT NULL)
"""


@dataclass(frozen=True)
class Tables:
    """The tables that a verification will read in the shards. pieces: by feed; a table that was dropped has none."""

    generation_id: int
    rows: int
    pieces: tuple[tuple[int, Piece], ...]

    def plan(
        self, connection: Connection, index_id: int, operation_id: int, options: VerifyOptions, mode: str
    ) -> tuple[int, int]:
        """As `units.plan`, for an index over shards."""
        generation_id = self.generation_id
        verification_id = units.write_down(connection, index_id, operation_id, generation_id, options, mode, self.rows)
        walking = 0
        if options.slices is not None:
            walking = units.walk_on(connection, verification_id, index_id, generation_id)
        if not walking:
            listed = [
                {"feed_id": None, **unit} for unit in units.entry_units(connection, generation_id, options.in_parts)
            ]
            listed += [
                {
                    "side": "source",
                    "relation": piece.relation,
                    "lower": piece.lower,
                    "upper": piece.upper,
                    "feed_id": feed,
                }
                for feed, piece in self.pieces
            ]
            if options.sample is not None:
                listed = random.sample(listed, max(1, math.ceil(len(listed) * options.sample / 100)))
            segments = [] if options.is_partial else [("reach", one) for one in segments_of(connection, generation_id)]
            if options.amcheck:
                segments += [("tree", one) for one in segments_of(connection, generation_id)]
            listed += [
                {"side": side, "relation": one, "lower": None, "upper": None, "feed_id": None} for side, one in segments
            ]
            units.write_units(connection, verification_id, "check" if options.is_partial else "total", listed)
            walking = len(listed)
        if options.slices is not None:
            units.set_quota(connection, verification_id, walking, options.slices)
        return verification_id, self.rows


def read_tables(database: Database, generation_id: int, options: VerifyOptions) -> Tables | None:
    """Cuts the shards' tables by primary key; None if the index isn't over shards.

    Raises ShardUnreachable, which names all shards out of reach, and other errors for which a shard can't be read.
    """
    with database.transaction() as connection:
        feeds = live_feeds(connection, generation_id)
        if not feeds_of(connection, generation_id):
            return None
    rows, pieces, away = 0, list[tuple[int, Piece]](), dict[str, str]()
    for feed in feeds:
        try:
            counted, cut = _cut(database, feed, options)
        except DBAPIError as error:
            if trouble_of(error) is None:
                raise
            away[feed.shard.name] = reason_of(error)
            with database.transaction() as connection:
                set_away(connection, feed.shard.id, away[feed.shard.name])
            continue
        except RoirError as error:
            where = f"shard {quote(feed.shard.name)}"
            if where in str(error):
                raise
            raise type(error)(f"{where}: {error}") from error
        rows += counted
        pieces += [(feed.id, piece) for piece in cut]
    if away:
        listed = "; ".join(f"shard {quote(name)} can't be reached: {problem}" for name, problem in away.items())
        raise ShardUnreachable(
            f"the verification can't begin: {listed}. Nothing was changed. Begin it once all shards answer, or "
            "correct the DSN: roir shard add NAME --dsn …",
            next(iter(away)),
        )
    return Tables(generation_id, rows, tuple(pieces))


def _cut(database: Database, feed: Feed, options: VerifyOptions) -> tuple[int, list[Piece]]:
    with feed.shard.database(database.application_name, database.limits).transaction() as connection:
        home.check(connection, feed.shard)
        try:
            source = sources.read_by_oid(connection, feed)
        except NotFound:
            return 0, []
        most = units.UNITS_OF_PARTS if options.in_parts else units.MOST_UNITS
        least = LEAST_OF_PARTS if options.in_parts else limits_of(connection).unit_rows
        counted, cut = cut_source(connection, source, partial(_rows_per_unit, least, most))
        return counted, list(cut)


def _rows_per_unit(least: int, most: int, rows: int) -> int:
    return max(least, rows // most)


def live_feeds(connection: Connection, generation_id: int) -> list[Feed]:
    """The feeds of a generation whose shards weren't removed."""
    removed = set(execute(connection, REMOVED, {"generation": generation_id}).scalars())
    return [feed for feed in feeds_of(connection, generation_id) if feed.id not in removed]


# The same units again: of all entries, and of the rows in the given feeds' shards.
NEXT_UNITS = """
INSERT INTO roir.verification_unit (verification_id, stage, ordinal, side, relation, lower, upper, feed_id)
SELECT verification_id, %(new)s, ordinal, side, relation, lower, upper, feed_id FROM roir.verification_unit
 WHERE verification_id = %(id)s AND stage = %(old)s AND side IN ('source', 'entry')
   AND (side = 'entry' OR feed_id = ANY (%(feeds)s))
"""
LOOKS_DUE = """
INSERT INTO roir.verification_unit (verification_id, stage, ordinal, side, relation, feed_id)
SELECT %(id)s, 'whole', row_number() OVER (ORDER BY feed_id), 'both', 0, feed_id
  FROM (SELECT DISTINCT feed_id FROM roir.suspect WHERE verification_id = %(id)s) s
"""


SUMMED = """
SELECT feed_id FROM roir.verification_unit WHERE verification_id = %(id)s AND stage = 'total' AND side = 'source'
EXCEPT
SELECT feed_id FROM roir.verification_unit WHERE verification_id = %(id)s AND stage = 'sum' AND side = 'source'
"""


class UnitsApart(Units):
    """The units of a verification over shards. A feed's place is the first part of its buckets' numbers."""

    def summed(self, differ: list[int]) -> list[int]:
        """The buckets that differ, without those of unreachable shards, of which only one side was summed."""
        left_out = set(execute(self.connection, SUMMED, {"id": self.verification.id}).scalars())
        places = {place for place, feed in enumerate(self._feeds()) if feed in left_out}
        return [one for one in differ if one // sums.MOST_BUCKETS not in places]

    def again(self, old: str, new: str, differ: Sequence[int]) -> None:
        """Plans the next stage's units; for shards without a suspicious bucket none."""
        # In stage total a feed's bucket is its place.
        places = set(differ) if old == "total" else {one // sums.MOST_BUCKETS for one in differ}
        feeds = [feed for place, feed in enumerate(self._feeds()) if place in places]
        execute(self.connection, NEXT_UNITS, {"id": self.verification.id, "old": old, "new": new, "feeds": feeds})

    def plan_last(self) -> bool:
        """Plans a unit for each shard with suspects; True if there is any."""
        return execute(self.connection, LOOKS_DUE, {"id": self.verification.id}).rowcount > 0

    def _feeds(self) -> list[int]:
        return sorted(feed.id for feed in feeds_of(self.connection, self.verification.generation_id))
