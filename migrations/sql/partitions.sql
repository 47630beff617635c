-- The partitions of a source, as a generation's entries know them. The primary key of a partitioned table holds all of
-- its partition key, and every entry holds the primary key: so a partition's constraint can be asked of an entry.

-- All partitions below a table, whole levels too; none for an ordinary table. One that is being detached concurrently
-- has gone already. link: the transaction that attached it; another one means that it was out meanwhile. Not
-- pg_partition_tree(), which locks every one of them.
CREATE FUNCTION roir.partition_tree(source oid) RETURNS TABLE (relation oid, parent oid, leaf boolean, link text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH RECURSIVE tree AS (
        SELECT i.inhrelid, i.inhparent, i.xmin::text AS link, c.relkind
          FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
         WHERE i.inhparent = partition_tree.source AND NOT i.inhdetachpending
        UNION ALL
        SELECT i.inhrelid, i.inhparent, i.xmin::text AS link, c.relkind
          FROM tree t JOIN pg_inherits i ON i.inhparent = t.inhrelid JOIN pg_class c ON c.oid = i.inhrelid
         WHERE t.relkind = 'p' AND NOT i.inhdetachpending)
    SELECT t.inhrelid, t.inhparent, t.relkind <> 'p', t.link FROM tree t
$$;

-- Writes down that a generation holds the rows of these leaves, of all leaves by default, and all levels above them.
-- Texts under settings that make them read back as the same, whoever calls.
CREATE FUNCTION roir.register_partitions(generation bigint, source oid, leaves oid[] DEFAULT NULL) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' SET timezone = 'UTC'
SET intervalstyle = 'postgres' SET extra_float_digits = 3 SET bytea_output = 'hex' AS $$
    INSERT INTO roir.source_partition (generation_id, relation, parent, leaf, link, name, condition, status)
    SELECT register_partitions.generation, t.relation, t.parent, t.leaf, t.link, t.relation::regclass::text,
           -- No constraint: the only partition is the default one.
           coalesce(nullif(pg_get_partition_constraintdef(t.relation), ''), 'true'), 'present'
      FROM roir.partition_tree(register_partitions.source) t
     WHERE leaves IS NULL OR t.relation = ANY (leaves) OR NOT t.leaf
    ON CONFLICT DO NOTHING
$$;

-- Gives every leaf the trigger that tells of its TRUNCATE: unlike row triggers it isn't cloned from the parent.
CREATE FUNCTION roir.watch_truncate(source oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    unwatched oid;
    before text := coalesce(current_setting('roir.own_ddl', true), '');
BEGIN
    -- Not by SET in the head, which only a superuser may write for a setting that no extension knows.
    PERFORM set_config('roir.own_ddl', 'on', true);
    FOR unwatched IN
        SELECT t.relation FROM roir.partition_tree(source) t
         WHERE t.leaf AND NOT EXISTS (SELECT FROM pg_trigger g
                                       WHERE g.tgrelid = t.relation AND g.tgname = 'roir_capture_truncate')
         ORDER BY t.relation
    LOOP
        EXECUTE format('CREATE TRIGGER roir_capture_truncate AFTER TRUNCATE ON %s '
                       'FOR EACH STATEMENT EXECUTE FUNCTION roir_data.capture_%s()', unwatched::regclass, source);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER roir_capture_truncate', unwatched::regclass);
    END LOOP;
    PERFORM set_config('roir.own_ddl', before, true);
END $$;

-- Takes leaves in that came without a trigger for their TRUNCATE. One that was truncated (or rewritten) since it was made
-- has another file: whatever entries it left behind are to be removed.
CREATE FUNCTION roir.adopt_partitions(generation bigint, source oid, leaves oid[]) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT roir.register_partitions(generation, source, leaves);
    SELECT roir.watch_truncate(source);
    INSERT INTO roir.source_partition (generation_id, relation, parent, leaf, name, condition, status)
    SELECT p.generation_id, p.relation, p.parent, p.leaf, p.name, p.condition, 'leaving'
      FROM roir.source_partition p JOIN pg_class c ON c.oid = p.relation::oid
     WHERE p.generation_id = generation AND p.status = 'present' AND p.relation::oid = ANY (leaves)
       AND c.relfilenode <> c.oid;
$$;

-- SQL that an entry, a row `alias` of a base or delta, belongs to a partition: its constraint, over the entry's primary
-- key under the source's own names.
CREATE FUNCTION roir.entry_condition(entry jsonb, condition text, alias text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('(SELECT %s FROM (SELECT %s) e)', condition,
                  string_agg(format('%s.c%s AS %I', alias, c.position, c.value ->> 'source'), ', '))
      FROM jsonb_array_elements(entry -> 'columns') WITH ORDINALITY AS c (value, position)
     WHERE (c.value ->> 'primary_key')::boolean
$$;

-- TRUNCATE of one leaf, called by the capture function: its entries go in the same transaction. No batch of that leaf
-- is under way, since TRUNCATE has the leaf for itself, and no writer of it. Delta before base, as the fold locks rows.
CREATE FUNCTION roir.forget_partition(source oid, leaf oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    condition text;
    target record;
    entries text;
    any_entry boolean;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_partition_ancestors(leaf) a WHERE a.relid = source) THEN
        RETURN;  -- it was detached, and kept the trigger
    END IF;
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE feature_not_supported USING
            MESSAGE = format('partition %s can''t be truncated in a %s transaction', leaf::regclass,
                             current_setting('transaction_isolation')),
            DETAIL = 'Its table has a roir index, with entries that this transaction''s snapshot may not see.',
            HINT = 'Truncate it in a READ COMMITTED transaction.';
    END IF;
    FOR target IN
        SELECT g.id, g.entry FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
         WHERE i.source_oid = source AND g.status IN ('building', 'active', 'retired') AND g.capture_mode <> 'none'
         ORDER BY g.id
    LOOP
        FOREACH entries IN ARRAY ARRAY['_delta', ''] LOOP
            entries := format('roir_data.g%s%s', target.id, entries);
            CONTINUE WHEN to_regclass(entries) IS NULL;
            -- A TRUNCATE of the whole source tells of every leaf, when all entries have gone already.
            EXECUTE format('SELECT EXISTS (SELECT FROM %s)', entries) INTO any_entry;
            CONTINUE WHEN NOT any_entry;
            condition := coalesce(nullif(pg_get_partition_constraintdef(leaf), ''), 'true');
            EXECUTE format('DELETE FROM %s x WHERE %s', entries, roir.entry_condition(target.entry, condition, 'x'));
        END LOOP;
    END LOOP;
END $$;
