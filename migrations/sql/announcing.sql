-- Strict reads of an index over shards (docs/architecture-shards.md).

-- A text of the server, its database and its timeline; a promotion, or a recovery to an earlier moment, begins a new
-- timeline. NULL on a standby.
CREATE FUNCTION roir.server_history() RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN NOT pg_is_in_recovery()
                THEN concat_ws('/', s.system_identifier, d.oid, left(pg_walfile_name(pg_current_wal_lsn()), 8)) END
      FROM pg_control_system() s, pg_database d WHERE d.datname = current_database()
$$;

-- Why a generation can't be read strictly; NULL if it can.
CREATE FUNCTION roir.strict_problem(generation bigint, reads boolean DEFAULT true) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    who text;
    found text;
BEGIN
    SELECT i.announced_by INTO who FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
     WHERE g.id = strict_problem.generation;
    IF who IS NULL THEN
        RETURN 'the writes are not announced: roir announce INDEX --by server';
    ELSIF pg_is_in_recovery() THEN
        RETURN 'this server is a standby, and may not have every announcement yet: ask its primary';
    END IF;
    SELECT CASE
           WHEN l.captured_at IS NULL OR l.strict_from IS NULL
           THEN format('writers of shard %I don''t announce: roir announce INDEX --by %s', s.name, who)
           WHEN l.strict_history IS DISTINCT FROM roir.server_history()
           THEN format('this server was promoted or recovered, and may have lost announcements: '
                        'roir announce INDEX --by %s', who)
           WHEN reads AND l.strict_start IS DISTINCT FROM pg_postmaster_start_time()
           THEN format('this server was started since shard %I was shipped, and may be an older copy without its last '
                       'announcements: roir ship, which waits for the shard''s earlier transactions', s.name)
           WHEN l.doubtful_at IS NOT NULL
           THEN format('entries of shard %I may be wrong: %s', s.name, l.doubt)
           WHEN reads AND (l.fresh_at IS NULL OR l.fresh_at <= l.strict_from)
           THEN format('not all that was written in shard %I before its writers announced has come yet: roir ship',
                       s.name)
           END INTO found
      FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id
     WHERE l.generation_id = strict_problem.generation AND l.removed_at IS NULL
     ORDER BY 1 NULLS LAST LIMIT 1;
    RETURN found;
END $$;

-- Why two shards may have rows with one key of a unique index; NULL if they can't, or if the index isn't unique over
-- shards.
CREATE FUNCTION roir.unique_problem(generation bigint) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    g record;
BEGIN
    SELECT x.unique_mode, x.unique_history, x.unique_lost INTO g
      FROM roir.generation x WHERE x.id = unique_problem.generation;
    IF g.unique_mode IS NULL THEN
        RETURN NULL;
    ELSIF g.unique_mode = 'count' THEN
        RETURN 'roir announce is checking its keys; if that was killed, run it again';
    ELSIF g.unique_mode = 'off' THEN
        RETURN coalesce(roir.strict_problem(generation), concat(g.unique_lost || '; when that is repaired: ',
                        'roir announce INDEX --by server, which checks the keys'));
    -- A standby has no history of its own.
    ELSIF NOT pg_is_in_recovery() AND g.unique_history IS DISTINCT FROM roir.server_history() THEN
        RETURN 'this server was promoted or recovered, and may have lost keys: roir announce INDEX --by server';
    END IF;
    -- A restart of this server alone keeps reads waiting, and loses no key.
    RETURN roir.strict_problem(generation, false);
END $$;
