-- A dump that is restored gives tables other oids, which the control schema and the names of capture functions keep.
-- What still tells a source is its capture trigger: it comes back with its table.

-- Sources by the oid that is recorded and by the one that they have. None where nothing was restored.
CREATE FUNCTION roir.restored_sources() RETURNS TABLE (recorded oid, present oid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT DISTINCT i.source_oid::oid, t.tgrelid
      FROM roir.index i
      JOIN pg_proc p ON p.proname = 'capture_' || i.source_oid AND p.pronamespace = 'roir_data'::regnamespace
      JOIN pg_trigger t ON t.tgfoid = p.oid AND t.tgname = 'roir_capture' AND t.tgparentid = 0
     WHERE i.dropped_at IS NULL AND t.tgrelid <> i.source_oid::oid
$$;

-- Called by a capture function before it asks for partitions by its source's oid.
CREATE FUNCTION roir.refuse_restored(source oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM roir.restored_sources() r WHERE r.recorded = source) THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = 'this database was restored from a dump, and its roir indexes don''t know their partitions yet',
            HINT = 'Run: roir init. Then truncate.';
    END IF;
END $$;

-- Makes the control schema name the tables that there are, sources by their triggers and partitions by their names.
-- A partition that was renamed since it was written down is then one that is gone and one that came: sync-partitions.
CREATE FUNCTION roir.adopt_restored() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' SET timezone = 'UTC'
SET intervalstyle = 'postgres' SET extra_float_digits = 3 SET bytea_output = 'hex' AS $$
DECLARE
    s record;
BEGIN
    CREATE TEMP TABLE restored ON COMMIT DROP AS
        SELECT r.recorded, r.present, i.id AS index FROM roir.restored_sources() r
          JOIN roir.index i ON i.source_oid = r.recorded::bigint AND i.dropped_at IS NULL;
    -- By way of another name, since one's new oid may be another one's old.
    FOR s IN SELECT DISTINCT recorded FROM pg_temp.restored LOOP
        EXECUTE format('ALTER FUNCTION roir_data.capture_%s() RENAME TO restored_%s', s.recorded, s.recorded);
    END LOOP;
    FOR s IN SELECT DISTINCT recorded, present FROM pg_temp.restored LOOP
        EXECUTE format('ALTER FUNCTION roir_data.restored_%s() RENAME TO capture_%s', s.recorded, s.present);
    END LOOP;
    UPDATE roir.index i SET source_oid = r.present::bigint FROM pg_temp.restored r WHERE i.id = r.index;
    UPDATE roir.source_partition p
       SET relation = t.relation, parent = t.parent, link = CASE WHEN p.status = 'present' THEN t.link END,
           condition = CASE WHEN p.status = 'present'
                            THEN coalesce(nullif(pg_get_partition_constraintdef(t.relation), ''), 'true')
                            ELSE p.condition END
      FROM pg_temp.restored r
      JOIN roir.generation g ON g.index_id = r.index
     CROSS JOIN LATERAL roir.partition_tree(r.present) t
     WHERE p.generation_id = g.id AND p.name = t.relation::regclass::text;
    -- What is on its way in or out isn't in the tree.
    UPDATE roir.source_partition p
       SET relation = coalesce(to_regclass(p.name)::oid::bigint, 0),
           -- A hash partition's constraint names its parent's oid. Wider bounds are right too: they are asked for rows.
           condition = CASE WHEN p.condition LIKE '%satisfies_hash_partition%' THEN 'true' ELSE p.condition END
      FROM pg_temp.restored r JOIN roir.generation g ON g.index_id = r.index
     WHERE p.generation_id = g.id AND p.status <> 'present';
    PERFORM roir.refresh_view(g.id)
       FROM pg_temp.restored r JOIN roir.generation g ON g.index_id = r.index AND g.status = 'active'
      WHERE EXISTS (SELECT FROM roir.source_partition p WHERE p.generation_id = g.id AND p.status <> 'present');
    -- Its ranges name leaves by their old oids, and what went on in the first database nobody knows here.
    UPDATE roir.operation o
       SET status = 'failed', error = 'the database was restored from a dump while it was unfinished',
           heartbeat_at = NULL, ticked_at = NULL
      FROM pg_temp.restored r WHERE o.index_id = r.index AND o.status IN ('running', 'paused');
    INSERT INTO roir.event (index_id, actor, action, detail)
    SELECT r.index, session_user, 'restored', format('%s has oid %s now, not %s', r.present::regclass, r.present, r.recorded)
      FROM pg_temp.restored r;
END $$;
