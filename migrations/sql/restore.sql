-- Adapts the control schema after a restore from a dump. All tables have other oids then, but the control schema and
-- the names of capture functions contain the old ones. A source is still known by its capture trigger, which comes back
-- with its table.

-- The tables with a source's capture function as their row trigger: the source itself, or the table that a restored
-- dump has in its place.
CREATE FUNCTION roir.sources_by_trigger() RETURNS TABLE (index bigint, recorded oid, present oid, since xid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT i.id, i.source_oid::oid, t.tgrelid, t.xmin
      FROM roir.index i
      JOIN pg_proc p ON p.proname = 'capture_' || i.source_oid AND p.pronamespace = 'roir_data'::regnamespace
      -- By its function, since any trigger may have the name. 1: for each row, unlike a trigger that is left on a
      -- detached partition.
      JOIN pg_trigger t ON t.tgfoid = p.oid AND t.tgparentid = 0 AND t.tgtype & 1 = 1
     WHERE i.dropped_at IS NULL
$$;

-- The sources with the recorded oid and the present one, if the whole database was restored.
CREATE FUNCTION roir.restored_sources() RETURNS TABLE (recorded oid, present oid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT DISTINCT c.recorded, c.present FROM roir.sources_by_trigger() c
     WHERE c.recorded <> c.present AND roir.moved() = 'restored'
$$;

-- The indexes whose source is gone, with the table that has its capture trigger now: only the table was dropped and
-- restored. That brought rows that no capture saw, so only a new build makes such an index right.
CREATE FUNCTION roir.replaced_sources() RETURNS TABLE (index bigint, recorded oid, present oid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.index, c.recorded, c.present FROM roir.sources_by_trigger() c
     WHERE c.recorded <> c.present AND roir.moved() IS DISTINCT FROM 'restored'
       AND NOT EXISTS (SELECT FROM pg_class k WHERE k.oid = c.recorded)
$$;

-- The sources whose partitions have new links since pg_upgrade.
CREATE FUNCTION roir.upgraded_sources() RETURNS TABLE (source oid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT DISTINCT i.source_oid::oid FROM roir.index i JOIN roir.generation g ON g.index_id = i.id
      JOIN roir.source_partition p ON p.generation_id = g.id AND p.status = 'present'
     WHERE i.dropped_at IS NULL AND roir.moved() = 'upgraded'
$$;

-- Records the new links of partitions that a restore or pg_upgrade has attached: these links are older than the capture
-- trigger, which is created last. A partition that was taken out and brought back since has a younger link; it is left
-- for sync-partitions to find.
CREATE FUNCTION roir.link_again(source oid) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE roir.source_partition p
       SET link = CASE WHEN (SELECT min(age(l::xid)) FROM string_to_table(t.link, '.') l)
                            >= (SELECT max(age(c.since)) FROM roir.sources_by_trigger() c WHERE c.present = source)
                       THEN t.link ELSE '0' END
      FROM roir.generation g, roir.index i, roir.partition_tree(link_again.source) t
     WHERE g.id = p.generation_id AND i.id = g.index_id AND i.source_oid = link_again.source::bigint
       AND p.relation = t.relation::bigint AND p.status = 'present'
$$;

-- Keeps, from now on, the links and marks of the objects that pg_upgrade has created.
CREATE FUNCTION roir.adopt_upgraded() RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT roir.link_again(u.source) FROM roir.upgraded_sources() u;
    UPDATE roir.generation g SET shape = jsonb_set(g.shape, '{marks}', roir.marks(g.id))
      FROM roir.index i JOIN pg_class c ON c.oid = i.source_oid::oid
     WHERE i.id = g.index_id AND g.status IN ('building', 'active', 'retired') AND g.shape ? 'marks'
       AND roir.moved() = 'upgraded';
    INSERT INTO roir.event (index_id, actor, action, detail)
    SELECT i.id, session_user, 'upgraded', 'by pg_upgrade; its partitions are known again'
      FROM roir.upgraded_sources() u JOIN roir.index i ON i.source_oid = u.source::bigint AND i.dropped_at IS NULL
$$;

-- Replaces the oids in the control schema by the present ones: of sources by their triggers, of partitions by their
-- names. A partition that was renamed since it was registered then counts as gone and as new: sync-partitions.
CREATE FUNCTION roir.adopt_restored() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s record;
BEGIN
    CREATE TEMP TABLE restored ON COMMIT DROP AS
        SELECT r.recorded, r.present, i.id AS index FROM roir.restored_sources() r
          JOIN roir.index i ON i.source_oid = r.recorded::bigint AND i.dropped_at IS NULL;
    -- By a temporary name, since the new oid of one source may be the old oid of another.
    FOR s IN SELECT DISTINCT r.recorded, f.kind
               FROM pg_temp.restored r, unnest(ARRAY['capture', 'truncate', 'conflict']) AS f (kind)
              WHERE to_regprocedure(format('roir_data.%s_%s()', f.kind, r.recorded)) IS NOT NULL LOOP
        EXECUTE format('ALTER FUNCTION roir_data.%s_%s() RENAME TO restored_%s_%s',
                       s.kind, s.recorded, s.kind, s.recorded);
    END LOOP;
    FOR s IN SELECT DISTINCT r.recorded, r.present, f.kind
               FROM pg_temp.restored r, unnest(ARRAY['capture', 'truncate', 'conflict']) AS f (kind)
              WHERE to_regprocedure(format('roir_data.restored_%s_%s()', f.kind, r.recorded)) IS NOT NULL LOOP
        EXECUTE format('ALTER FUNCTION roir_data.restored_%s_%s() RENAME TO %s_%s',
                       s.kind, s.recorded, s.kind, s.present);
    END LOOP;
    -- These have the old oid in their names, too. The first is created again when it is needed, the others when the
    -- capture is refreshed, before any write.
    FOR s IN SELECT DISTINCT r.recorded FROM pg_temp.restored r LOOP
        EXECUTE format('DROP FUNCTION IF EXISTS roir_data.read_%s(text)', s.recorded);
        EXECUTE format('DROP FUNCTION IF EXISTS roir_data.capture_row_%s', s.recorded);
        EXECUTE format('DROP TYPE IF EXISTS roir_data.row_%s', s.recorded);
    END LOOP;
    UPDATE roir.index i SET source_oid = r.present::bigint FROM pg_temp.restored r WHERE i.id = r.index;
    UPDATE roir.source_partition p
       SET relation = t.relation, parent = t.parent,
           condition = CASE WHEN p.status = 'present'
                            THEN coalesce(roir.bounds_of(t.relation), 'true')
                            ELSE p.condition END
      FROM pg_temp.restored r
      JOIN roir.generation g ON g.index_id = r.index
     CROSS JOIN LATERAL roir.partition_tree(r.present) t
     WHERE p.generation_id = g.id AND p.name = t.relation::regclass::text;
    PERFORM roir.link_again(r.present) FROM (SELECT DISTINCT present FROM pg_temp.restored) r;
    -- A partition that is joining or leaving isn't in the tree.
    UPDATE roir.source_partition p
       SET relation = coalesce(to_regclass(p.name)::oid::bigint, 0),
           -- A hash partition's constraint contains its parent's oid. Wider bounds are right, too: then more entries
           -- are checked for their row.
           condition = CASE WHEN p.condition LIKE '%satisfies_hash_partition%' THEN 'true' ELSE p.condition END,
           -- A transaction of another server.
           removed_xid = NULL, removed_at = NULL
      FROM pg_temp.restored r JOIN roir.generation g ON g.index_id = r.index
     WHERE p.generation_id = g.id AND p.status <> 'present';
    PERFORM roir.refresh_view(g.id)
       FROM pg_temp.restored r JOIN roir.generation g ON g.index_id = r.index AND g.status = 'active'
      WHERE EXISTS (SELECT FROM roir.source_partition p WHERE p.generation_id = g.id AND p.status <> 'present');
    -- A transaction of another server.
    UPDATE roir.generation g SET looked_xid = NULL FROM pg_temp.restored r
     WHERE g.index_id = r.index AND g.looked_xid IS NOT NULL;
    -- Its ranges name leaves by their old oids, and this database doesn't know what went on in the first one.
    UPDATE roir.operation o
       SET status = 'failed', error = 'the database was restored from a dump while it was unfinished',
           heartbeat_at = NULL, ticked_at = NULL
      FROM pg_temp.restored r WHERE o.index_id = r.index AND o.status IN ('running', 'paused');
    INSERT INTO roir.event (index_id, actor, action, detail)
    SELECT r.index, session_user, 'restored',
           format('%s has oid %s now, not %s', r.present::regclass, r.present, r.recorded)
      FROM pg_temp.restored r;
END $$;

-- Called by a capture function before it asks for partitions by its source's oid.
CREATE FUNCTION roir.refuse_restored(source oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM roir.restored_sources() r WHERE r.recorded = source) THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = 'this database was restored from a dump, and its roir indexes don''t know their partitions yet',
            HINT = 'Run roir init, then truncate.';
    END IF;
END $$;
