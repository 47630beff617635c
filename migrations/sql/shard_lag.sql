-- The lag of each shard's part of each generation.

CREATE VIEW roir.shard_lag AS
SELECT i.schema_name, i.name AS index, s.name AS shard, g.status AS generation,
       -- All that the shard had committed before this time is in the index; NULL: not shipped to its end yet.
       l.fresh_at, clock_timestamp() - l.fresh_at AS lag,
       l.pending, l.pending_bytes, clock_timestamp() - l.oldest_at AS oldest_age, l.shipped,
       CASE WHEN abs(extract(epoch FROM clock_timestamp() - l.heartbeat_at)) < 10 THEN l.owner END AS shipper,
       s.problem, l.doubt, l.id AS feed_id, g.id AS generation_id, i.id AS index_id, s.id AS shard_id
  FROM roir.feed l
  JOIN roir.generation g ON g.id = l.generation_id
  JOIN roir.index i ON i.id = g.index_id
  JOIN roir.shard s ON s.id = l.shard_id
 WHERE l.removed_at IS NULL AND i.dropped_at IS NULL AND g.status <> 'dropped';
