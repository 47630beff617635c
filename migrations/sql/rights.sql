-- What statements of ours run of others' code: to alter a table evaluates what is constant in the CHECKs and index
-- expressions of those that are compared, and to read partition bounds from text runs the checks of domains. ALTER TABLE
-- runs as whoever sends it. So what would be run is looked up in the catalogs before, and refused.

-- True where what a role has written may run as us: it may do all that we may, or is ourselves.
CREATE FUNCTION roir.trusts(author oid) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT o.rolsuper OR o.oid = n.nspowner OR o.rolname = current_user AND o.rolname = session_user
              FROM pg_roles o, pg_namespace n WHERE o.oid = author AND n.nspname = 'roir_data');
END $$;

-- Who owns a source and what else is to be read, by oids and by names as they are understood now, and whether he is
-- trusted. made: the function that reads the source as he is as we make it, with this body; other: a table that is
-- another's; named: the first name is the source's. In PL/pgSQL, which keeps the plan: it is asked in every batch.
CREATE FUNCTION roir.standing(source oid, others oid[], names text[], body text, OUT trusted boolean, OUT owners bigint,
                              OUT owner text, OUT made boolean, OUT may_create boolean, OUT other text, OUT named boolean)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    relations oid[] := source || others || ARRAY(SELECT to_regclass(n)::oid FROM unnest(names) n);
BEGIN
    SELECT bool_and(roir.trusts(o.owner)), count(*), min(pg_get_userbyid(o.owner)::text) INTO trusted, owners, owner
      FROM (SELECT DISTINCT c.relowner AS owner FROM pg_class c WHERE c.oid = ANY (relations)) o;
    named := to_regclass(names[1]) IS NOT DISTINCT FROM source::regclass;
    IF NOT trusted THEN
        SELECT p.prosecdef AND p.proconfig IS NULL AND p.proowner = c.relowner AND p.prosrc = body INTO made
          FROM pg_proc p, pg_class c
         WHERE p.oid = to_regprocedure(format('roir_data.read_%s(text)', source)) AND c.oid = source;
        SELECT bool_or(has_schema_privilege(c.relowner, 'roir_data', 'CREATE')) INTO may_create
          FROM pg_class c WHERE c.oid = ANY (relations);
        SELECT c.oid::regclass::text || ' to ' || pg_get_userbyid(c.relowner) INTO other FROM pg_class c, pg_class s
         WHERE c.oid = ANY (relations) AND s.oid = source AND c.relowner <> s.relowner LIMIT 1;
    END IF;
    made := coalesce(made, false);
END $$;

-- The first type within a type whose values, made from text, run somebody's code: a domain's checks. NULL where there
-- is none.
CREATE FUNCTION roir.type_of_others(type oid) RETURNS regtype
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    domain record;
BEGIN
    FOR domain IN SELECT x.oid, t.typowner AS owner FROM roir.type_tree(type) x (oid) JOIN pg_type t ON t.oid = x.oid
                   WHERE t.typtype = 'd' ORDER BY 1 LOOP
        IF NOT roir.trusts(domain.owner) THEN
            RETURN domain.oid::regtype;
        END IF;
    END LOOP;
    RETURN NULL;
END $$;

-- ANALYZE of a range calls the function that tells its length: of these tables, which are ours, it leaves out the columns
-- for which that is somebody's. A partitioned table's segments with it.
CREATE FUNCTION roir.leave_statistics_out(relations oid[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    c record;
BEGIN
    FOR c IN
        SELECT a.attrelid::regclass AS relation, a.attname FROM pg_attribute a
          JOIN pg_range r ON a.atttypid IN (r.rngtypid, r.rngmultitypid)
          JOIN pg_proc p ON p.oid = r.rngsubdiff
         WHERE a.attrelid = ANY (relations) AND a.attnum > 0 AND NOT a.attisdropped AND NOT roir.trusts(p.proowner)
    LOOP
        EXECUTE format('ALTER TABLE %s ALTER %I SET STATISTICS 0', c.relation, c.attname);
    END LOOP;
END $$;

-- An error where the bounds of partitions of these tables, the levels above a partition, can't be read without running
-- somebody's code. To look at such a key at all evaluates what is constant in it, so only the catalogs are asked. No key
-- of a table with a primary key is an expression; who drops the one may make the other.
CREATE FUNCTION roir.check_levels(levels oid[]) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    level record;
    part oid;
    foreign_type regtype;
BEGIN
    -- Key by key: in one query a planner that is told odd costs asks of every column of the database.
    FOR level IN SELECT p.partrelid::regclass AS name, p.partattrs AS numbers, p.partexprs IS NOT NULL AS by_expression
                   FROM pg_partitioned_table p WHERE p.partrelid = ANY (levels) LOOP
        IF level.by_expression THEN
            RAISE feature_not_supported USING
                MESSAGE = format('%s is partitioned by an expression, which no entry of an index knows', level.name),
                HINT = 'Give the whole table a primary key; its partitions are made by columns of that only.';
        END IF;
        FOR part IN SELECT a.atttypid FROM pg_attribute a
                     WHERE a.attrelid = level.name::oid AND a.attnum = ANY (level.numbers) LOOP
            foreign_type := roir.type_of_others(part);
            IF foreign_type IS NOT NULL THEN
                RAISE insufficient_privilege USING
                    MESSAGE = format('the bounds of partitions of %s can''t be read without running code of the owner of '
                                     'type %s as role %I', level.name, foreign_type, current_user),
                    HINT = format('Make a superuser the owner of type %s, or let the table''s owner build its indexes.',
                                  foreign_type);
            END IF;
        END LOOP;
    END LOOP;
END $$;

-- The same of all levels of a source.
CREATE FUNCTION roir.check_source(source oid) RETURNS void
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT roir.check_levels(ARRAY(SELECT a.relid::oid FROM pg_partition_ancestors(source) a
                                   UNION SELECT t.relation FROM roir.partition_tree(source) t))
$$;

-- A partition's constraint as a text, NULL where it has none.
CREATE FUNCTION roir.bounds_of(partition oid) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' SET timezone = 'UTC'
SET intervalstyle = 'postgres' SET extra_float_digits = 3 SET bytea_output = 'hex' AS $$
BEGIN
    PERFORM roir.check_levels(ARRAY(SELECT a.relid::oid FROM pg_partition_ancestors(partition) a));
    RETURN nullif(pg_get_partition_constraintdef(partition), '');
END $$;

-- These tables, and those that they refer to, or that refer to them: where a partition comes or goes foreign keys are
-- looked at by queries over both, which run as whoever attaches or detaches.
CREATE FUNCTION roir.with_partners(relations oid[]) RETURNS SETOF oid
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT unnest(relations)
    UNION SELECT k.confrelid FROM pg_constraint k WHERE k.contype = 'f' AND k.conrelid = ANY (relations)
    UNION SELECT k.conrelid FROM pg_constraint k WHERE k.contype = 'f' AND k.confrelid = ANY (relations)
$$;

-- What is somebody's code in the CHECKs, indexes, statistics and partition keys of these tables, and in the casts of their
-- foreign keys; NULL where there is none.
CREATE FUNCTION roir.code_of_others(relations oid[]) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH expression (classid, objid) AS (
        SELECT 'pg_constraint'::regclass, k.oid FROM pg_constraint k WHERE k.contype = 'c' AND k.conrelid = ANY (relations)
        UNION ALL
        SELECT 'pg_class'::regclass, i.indexrelid FROM pg_index i
         WHERE i.indrelid = ANY (relations) AND (i.indexprs IS NOT NULL OR i.indpred IS NOT NULL)
        UNION ALL
        SELECT 'pg_statistic_ext'::regclass, s.oid FROM pg_statistic_ext s
         WHERE s.stxrelid = ANY (relations) AND s.stxexprs IS NOT NULL
        UNION ALL
        SELECT 'pg_class'::regclass, p.partrelid FROM pg_partitioned_table p
         WHERE p.partrelid = ANY (relations) AND p.partexprs IS NOT NULL),
    called (classid, objid, refclassid, refobjid, author) AS (
        -- An operator and the function behind it have owners of their own.
        SELECT d.classid, d.objid, d.refclassid, d.refobjid, a.author
          FROM expression e
          JOIN pg_depend d ON d.classid = e.classid AND d.objid = e.objid AND d.objsubid = 0
         CROSS JOIN LATERAL (
               SELECT p.proowner AS author FROM pg_proc p WHERE d.refclassid = 'pg_proc'::regclass AND p.oid = d.refobjid
               UNION ALL
               SELECT unnest(ARRAY[o.oprowner, p.proowner]) FROM pg_operator o LEFT JOIN pg_proc p ON p.oid = o.oprcode
                WHERE d.refclassid = 'pg_operator'::regclass AND o.oid = d.refobjid
               UNION ALL
               SELECT t.typowner FROM pg_type t
                WHERE d.refclassid = 'pg_type'::regclass AND t.oid = roir.type_of_others(d.refobjid)) a),
    compared (classid, objid, refclassid, refobjid, author) AS (
        -- By a cast of one of the types, where they aren't the same.
        SELECT 'pg_constraint'::regclass, k.oid, 'pg_type'::regclass, t.oid, t.typowner
          FROM pg_constraint k
         CROSS JOIN LATERAL unnest(k.conkey, k.confkey) AS c (one, other)
          JOIN pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = c.one
          JOIN pg_attribute b ON b.attrelid = k.confrelid AND b.attnum = c.other
          JOIN pg_type t ON t.oid IN (a.atttypid, b.atttypid)
         WHERE k.contype = 'f' AND a.atttypid <> b.atttypid
           AND (k.conrelid = ANY (relations) OR k.confrelid = ANY (relations)))
    SELECT format('%s has %s of %I', pg_describe_object(x.classid, x.objid, 0),
                  pg_describe_object(x.refclassid, x.refobjid, 0), pg_get_userbyid(x.author))
      FROM (SELECT * FROM called UNION ALL SELECT * FROM compared) x
     WHERE x.author IS NOT NULL AND NOT roir.trusts(x.author)
     ORDER BY 1 LIMIT 1
$$;

-- Locks what a partition that comes or goes is compared with, against changes of its constraints and indexes, and raises
-- an error where the comparison would run somebody's code as us. parent: with its default partition. comes: the partition is
-- attached, so that all of it is looked at; where it is detached, foreign keys to it alone bring such a look.
CREATE FUNCTION roir.check_code(parent regclass, partition regclass, comes boolean) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' AS $$
DECLARE
    tables oid[];
    one oid;
    said text;
BEGIN
    PERFORM roir.check_levels(ARRAY(SELECT a.relid::oid FROM pg_partition_ancestors(parent) a
                                    UNION SELECT t.relation FROM roir.partition_tree(partition) t
                                    UNION SELECT parent::oid UNION SELECT partition::oid));
    -- Again until nothing is new: what came before the lock was had is looked at too.
    LOOP
        said := tables::text;
        tables := ARRAY(
            WITH these AS (
                SELECT partition::oid AS oid
                UNION SELECT t.relation FROM roir.partition_tree(partition) t
                UNION SELECT parent::oid
                UNION SELECT d.oid FROM pg_partitioned_table p
                       CROSS JOIN LATERAL (SELECT p.partdefid AS oid
                                           UNION SELECT t.relation FROM roir.partition_tree(p.partdefid) t) d
                       WHERE comes AND p.partrelid = parent AND p.partdefid <> 0)
            SELECT w.oid FROM roir.with_partners(ARRAY(SELECT t.oid FROM these t)) w (oid)
             WHERE comes OR EXISTS (SELECT FROM pg_constraint k, these t WHERE k.contype = 'f' AND k.confrelid = t.oid)
             ORDER BY 1);
        EXIT WHEN said = tables::text;
        FOREACH one IN ARRAY tables LOOP
            EXECUTE format('LOCK TABLE ONLY %s IN SHARE UPDATE EXCLUSIVE MODE', one::regclass);
        END LOOP;
    END LOOP;
    SELECT format('%s belongs to %s, %s to %s', partition, pg_get_userbyid(p.relowner), parent, pg_get_userbyid(c.relowner))
      INTO said FROM pg_class p, pg_class c
     WHERE comes AND p.oid = partition AND c.oid = parent AND p.relowner <> c.relowner
       AND NOT (roir.trusts(p.relowner) AND roir.trusts(c.relowner));
    IF said IS NOT NULL THEN
        RAISE insufficient_privilege USING MESSAGE = said || '; what reads the one must be allowed to read the other',
            HINT = format('ALTER TABLE %s OWNER TO the other one', partition);
    END IF;
    said := roir.code_of_others(tables);
    IF said IS NOT NULL THEN
        RAISE insufficient_privilege USING
            MESSAGE = format('%s, which %s %s %s would run as role %I', said, CASE WHEN comes THEN 'to attach' ELSE 'to detach' END,
                             partition, CASE WHEN comes THEN 'to' ELSE 'from' END || ' ' || parent, current_user),
            HINT = 'Drop that before, and make it anew afterwards; or attach the table empty and insert its rows.';
    END IF;
END $$;

-- The scan that spares the attach its own. Its constraint is looked at first: somebody else may have made it since.
CREATE FUNCTION roir.validate_attach(parent regclass, partition regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM roir.check_code(parent, partition, true);
    IF EXISTS (SELECT FROM pg_constraint k WHERE k.conrelid = partition AND k.conname = 'roir_bounds' AND k.contype = 'c') THEN
        EXECUTE format('ALTER TABLE %s VALIDATE CONSTRAINT roir_bounds', partition);
    END IF;
END $$;

-- Writes down that a generation holds the rows of these leaves, of all leaves by default, and all levels above them.
-- Texts under settings that make them read back as the same, whoever calls.
CREATE OR REPLACE FUNCTION roir.register_partitions(generation bigint, source oid, leaves oid[] DEFAULT NULL) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' SET timezone = 'UTC'
SET intervalstyle = 'postgres' SET extra_float_digits = 3 SET bytea_output = 'hex' AS $$
    SELECT roir.check_source(register_partitions.source);
    INSERT INTO roir.source_partition (generation_id, relation, parent, leaf, link, name, condition, status)
    SELECT register_partitions.generation, t.relation, t.parent, t.leaf, t.link, t.relation::regclass::text,
           -- No constraint: the only partition is the default one.
           coalesce(nullif(pg_get_partition_constraintdef(t.relation), ''), 'true'), 'present'
      FROM roir.partition_tree(register_partitions.source) t
     WHERE leaves IS NULL OR t.relation = ANY (leaves) OR NOT t.leaf
    ON CONFLICT DO NOTHING
$$;
-- TRUNCATE of one leaf, called by the truncate function, which runs as ours.
CREATE OR REPLACE FUNCTION roir.forget_leaf(generation bigint, store text, leaf oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' SET timezone = 'UTC'
SET intervalstyle = 'postgres' SET extra_float_digits = 3 SET bytea_output = 'hex' SET lc_monetary = 'C' AS $$
DECLARE
    any_entry boolean;
BEGIN
    -- A TRUNCATE of the whole source tells of every leaf, when all entries have gone already.
    EXECUTE format('SELECT EXISTS (SELECT FROM %s)', store) INTO any_entry;
    IF any_entry THEN
        EXECUTE format('DELETE FROM %s x WHERE %s', store, roir.entry_condition(
            (SELECT g.entry FROM roir.generation g WHERE g.id = generation),
            coalesce(roir.bounds_of(leaf), 'true'), 'x'));
    END IF;
END $$;
-- What capture functions of an older version call.
CREATE OR REPLACE FUNCTION roir.forget_partition(source oid, leaf oid) RETURNS void
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
            condition := coalesce(roir.bounds_of(leaf), 'true');
            EXECUTE format('DELETE FROM %s x WHERE %s', entries, roir.entry_condition(target.entry, condition, 'x'));
        END LOOP;
    END LOOP;
END $$;
-- Makes the control schema name the tables that there are, where the database was restored from a dump.
CREATE OR REPLACE FUNCTION roir.adopt_restored() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' SET timezone = 'UTC'
SET intervalstyle = 'postgres' SET extra_float_digits = 3 SET bytea_output = 'hex' AS $$
DECLARE
    s record;
BEGIN
    CREATE TEMP TABLE restored ON COMMIT DROP AS
        SELECT r.recorded, r.present, i.id AS index FROM roir.restored_sources() r
          JOIN roir.index i ON i.source_oid = r.recorded::bigint AND i.dropped_at IS NULL;
    -- By way of another name, since one's new oid may be another one's old.
    FOR s IN SELECT DISTINCT r.recorded, f.kind FROM pg_temp.restored r, unnest(ARRAY['capture', 'truncate']) AS f (kind)
              WHERE to_regprocedure(format('roir_data.%s_%s()', f.kind, r.recorded)) IS NOT NULL LOOP
        EXECUTE format('ALTER FUNCTION roir_data.%s_%s() RENAME TO restored_%s_%s', s.kind, s.recorded, s.kind, s.recorded);
    END LOOP;
    FOR s IN SELECT DISTINCT r.recorded, r.present, f.kind FROM pg_temp.restored r, unnest(ARRAY['capture', 'truncate']) AS f (kind)
              WHERE to_regprocedure(format('roir_data.restored_%s_%s()', f.kind, r.recorded)) IS NOT NULL LOOP
        EXECUTE format('ALTER FUNCTION roir_data.restored_%s_%s() RENAME TO %s_%s', s.kind, s.recorded, s.kind, s.present);
    END LOOP;
    -- What reads a source as its owner names it by its oid; it is made again where it is needed.
    FOR s IN SELECT DISTINCT r.recorded FROM pg_temp.restored r LOOP
        EXECUTE format('DROP FUNCTION IF EXISTS roir_data.read_%s(text)', s.recorded);
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
-- What differs where DDL has given the columns of a table that takes no writes other values: its file, or their names.
CREATE FUNCTION roir.values_of(relation regclass) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT concat_ws(' ', pg_relation_filenode(relation), md5(string_agg(a.attnum || ' ' || a.attname, ',' ORDER BY a.attnum)))
      FROM pg_attribute a WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
$$;

-- bounds: as in ATTACH PARTITION, from FOR VALUES on, or DEFAULT. It is run with the rights of the caller. To be
-- repeated where an index has begun to be built meanwhile.
CREATE OR REPLACE FUNCTION roir.begin_attach(parent regclass, partition regclass, bounds text, actor text DEFAULT session_user)
RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' SET timezone = 'UTC' SET intervalstyle = 'postgres'
SET extra_float_digits = 3 SET bytea_output = 'hex' SET lock_timeout = '500ms' AS $$
DECLARE
    source oid := coalesce(pg_partition_root(parent), parent);
    condition text;
    g record;
BEGIN
    IF NOT EXISTS (SELECT FROM roir.index i WHERE i.source_oid = source::bigint AND i.dropped_at IS NULL) THEN
        RAISE no_data_found USING MESSAGE = format('%s has no roir index', parent),
            HINT = 'Use ALTER TABLE … ATTACH PARTITION.';
    ELSIF NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = partition AND c.relkind = 'r' AND NOT c.relispartition) THEN
        RAISE object_in_use USING MESSAGE = format('%s is a partition, or no plain table', partition);
    ELSIF NOT EXISTS (SELECT FROM pg_index x WHERE x.indrelid = partition AND x.indisprimary) THEN
        RAISE object_in_use USING MESSAGE = format('%s has no primary key; the attach would build it under its lock', partition),
            HINT = 'Give it the primary key of the table that it is attached to.';
    END IF;
    PERFORM roir.check_code(parent, partition, true);
    IF NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = partition AND t.tgname = 'roir_joining') THEN
        EXECUTE format('CREATE TRIGGER roir_joining BEFORE INSERT OR UPDATE OR DELETE ON %s '
                       'FOR EACH STATEMENT EXECUTE FUNCTION roir.refuse_write()', partition);
        EXECUTE format('CREATE TRIGGER roir_joining_truncate BEFORE TRUNCATE ON %s '
                       'FOR EACH STATEMENT EXECUTE FUNCTION roir.refuse_write()', partition);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER roir_joining', partition);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER roir_joining_truncate', partition);
    END IF;
    -- What the bounds mean is told by an empty partition that has them, which is taken back at once.
    BEGIN
        EXECUTE format('CREATE TABLE roir_data.joining_%s PARTITION OF %s %s', partition::oid, parent, bounds);
        condition := coalesce(nullif(pg_get_partition_constraintdef(
            to_regclass(format('roir_data.joining_%s', partition::oid))), ''), 'true');
        RAISE SQLSTATE 'RO001';
    EXCEPTION WHEN SQLSTATE 'RO001' THEN
        NULL;
    END;
    IF NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conrelid = partition AND k.conname = 'roir_bounds') THEN
        -- The attach needn't look at its rows then; NOT VALID, since to look at them is for a weaker lock.
        EXECUTE format('ALTER TABLE %s ADD CONSTRAINT roir_bounds CHECK (%s) NOT VALID', partition, condition);
    END IF;
    FOR g IN
        SELECT x.id, x.index_id FROM roir.generation x JOIN roir.index i ON i.id = x.index_id
         WHERE i.source_oid = source::bigint AND x.status IN ('building', 'active', 'retired') ORDER BY x.id
    LOOP
        INSERT INTO roir.source_partition (generation_id, relation, parent, leaf, link, name, condition, status)
        VALUES (g.id, partition::oid::bigint, parent::oid::bigint, true, roir.values_of(partition), partition::text, condition,
                'joining')
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            INSERT INTO roir.event (index_id, actor, action, detail)
            VALUES (g.index_id, actor, 'attach partition', concat_ws(' ', partition::text, bounds));
            PERFORM roir.refresh_view(g.id);
        END IF;
    END LOOP;
END $$;
-- One short transaction. False where an index has begun to be built meanwhile: begin_attach, copy, and try again.
CREATE OR REPLACE FUNCTION roir.finish_attach(parent regclass, partition regclass, bounds text) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' SET timezone = 'UTC' SET intervalstyle = 'postgres'
SET extra_float_digits = 3 SET bytea_output = 'hex' SET lock_timeout = '500ms' AS $$
DECLARE
    source oid := coalesce(pg_partition_root(parent), parent);
    g record;
    joining bigint[];
BEGIN
    -- As a drain: no generation begins, is switched or published meanwhile.
    EXECUTE format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', source::regclass);
    IF EXISTS (SELECT FROM roir.generation x JOIN roir.index i ON i.id = x.index_id
                WHERE i.source_oid = source::bigint AND x.status IN ('building', 'active', 'retired')
                  AND NOT EXISTS (SELECT FROM roir.source_partition p WHERE p.generation_id = x.id
                                     AND p.relation = partition::oid::bigint AND p.status = 'joining')) THEN
        RETURN false;
    END IF;
    PERFORM roir.check_code(parent, partition, true);
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', partition);
    -- Its values are others now than those that were copied: what was copied leaves, and the copy begins anew.
    UPDATE roir.source_partition p SET status = 'leaving'
     WHERE p.relation = partition::oid::bigint AND p.status = 'joining' AND p.link <> roir.values_of(partition);
    IF FOUND THEN
        RETURN false;
    END IF;
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s %s', parent, partition, bounds);
    PERFORM roir.release_table(partition);
    SELECT array_agg(p.generation_id ORDER BY p.generation_id) INTO joining
      FROM roir.source_partition p WHERE p.relation = partition::oid::bigint AND p.status = 'joining';
    DELETE FROM roir.source_partition p WHERE p.relation = partition::oid::bigint AND p.status = 'joining';
    FOR g IN SELECT unnest(joining) AS id LOOP
        PERFORM roir.register_partitions(g.id, source, ARRAY[partition::oid]);
        PERFORM roir.refresh_view(g.id);
    END LOOP;
    PERFORM roir.watch_truncate(source);
    RETURN true;
END $$;
-- Takes a partition out of an indexed source: one short transaction. roir clean-up then removes the entries.
CREATE OR REPLACE FUNCTION roir.detach_partition(partition regclass, reason text DEFAULT NULL, and_drop boolean DEFAULT false,
                                      actor text DEFAULT session_user)
RETURNS text LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' SET timezone = 'UTC' SET intervalstyle = 'postgres'
SET extra_float_digits = 3 SET bytea_output = 'hex'
-- Below the server's deadlock_timeout: it is always this that gives way.
SET lock_timeout = '500ms' AS $$
DECLARE
    parent regclass;
    sources oid[];
    bounds text;
    below oid[];
    g record;
    watch record;
BEGIN
    SELECT array_agg(DISTINCT a.relid::oid) INTO sources
      FROM pg_partition_ancestors(partition) a JOIN roir.index i ON i.source_oid = a.relid::oid
     WHERE i.dropped_at IS NULL AND a.relid <> partition;
    IF sources IS NULL THEN
        RAISE no_data_found USING MESSAGE = format('%s is no partition of a table with a roir index', partition),
            HINT = 'Use ALTER TABLE … DETACH PARTITION, or DROP TABLE.';
    END IF;
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE feature_not_supported USING
            MESSAGE = 'roir.detach_partition needs a READ COMMITTED transaction: it must see all that is committed';
    END IF;
    SELECT i.inhparent INTO parent FROM pg_inherits i WHERE i.inhrelid = partition;
    EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', parent);
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', partition);
    PERFORM roir.check_code(parent, partition, false);
    bounds := coalesce(roir.bounds_of(partition), 'true');
    SELECT array_agg(t.relid::oid) INTO below FROM pg_partition_tree(partition) t;
    IF EXISTS (SELECT FROM roir.source_partition p WHERE p.status = 'joining' AND p.parent = ANY (below)) THEN
        RAISE object_in_use USING MESSAGE = format('a table is being attached to %s', partition),
            HINT = 'Finish that first: roir attach-partition.';
    END IF;
    -- Those of the tables above only: a partition may have an index of its own.
    FOR watch IN
        SELECT x.tgrelid::regclass AS leaf, x.tgname AS name FROM pg_trigger x
         WHERE x.tgrelid = ANY (below) AND x.tgtype & 32 <> 0
           AND x.tgfoid IN (SELECT c.function FROM unnest(sources) AS s (oid), roir.captures(s.oid) c)
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', watch.name, watch.leaf);
    END LOOP;
    FOR g IN
        SELECT x.id, x.index_id FROM roir.generation x JOIN roir.index i ON i.id = x.index_id
         WHERE i.source_oid::oid = ANY (sources) AND x.status IN ('building', 'active', 'retired') ORDER BY x.id
    LOOP
        PERFORM roir.forget_gone(g.id, partition, bounds);
        INSERT INTO roir.event (index_id, actor, action, detail)
        VALUES (g.index_id, actor, 'detach partition', concat_ws(': ', partition::text, reason));
    END LOOP;
    EXECUTE format('ALTER TABLE %s DETACH PARTITION %s', parent, partition);
    IF and_drop THEN
        EXECUTE format('DROP TABLE %s', partition);
    END IF;
    RETURN format('%s; its entries are hidden, roir clean-up removes them',
                  CASE WHEN and_drop THEN 'detached and dropped' ELSE 'detached' END);
END $$;

-- Gives leaves, all of them for NULL, the trigger that tells of their TRUNCATE: unlike row triggers it isn't cloned.
CREATE FUNCTION roir.watch_leaves(source oid, leaves oid[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    unwatched oid;
    name text := 'roir_truncate_' || source;
    before text := coalesce(current_setting('roir.own_ddl', true), '');
BEGIN
    -- Not by SET in the head, which only a superuser may write for a setting that no extension knows.
    PERFORM set_config('roir.own_ddl', 'on', true);
    FOR unwatched IN
        SELECT t.relation FROM roir.partition_tree(source) t
         WHERE t.leaf AND (leaves IS NULL OR t.relation = ANY (leaves))
           AND NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = t.relation AND g.tgtype & 32 <> 0
                              AND g.tgfoid IN (SELECT function FROM roir.captures(source)))
         ORDER BY t.relation
    LOOP
        EXECUTE format('CREATE TRIGGER %I AFTER TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION roir_data.truncate_%s()',
                       name, unwatched::regclass, source);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', unwatched::regclass, name);
    END LOOP;
    PERFORM set_config('roir.own_ddl', before, true);
END $$;

CREATE OR REPLACE FUNCTION roir.watch_truncate(source oid) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT roir.watch_leaves(source, NULL)
$$;

-- These leaves only: whoever makes one waits for nobody who writes to another one.
CREATE OR REPLACE FUNCTION roir.adopt_partitions(generation bigint, source oid, leaves oid[], from_birth boolean DEFAULT false)
RETURNS void LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT roir.register_partitions(generation, source, leaves);
    SELECT roir.watch_leaves(source, leaves);
    INSERT INTO roir.source_partition (generation_id, relation, parent, leaf, name, condition, status)
    SELECT p.generation_id, p.relation, p.parent, p.leaf, p.name, p.condition, 'leaving'
      FROM roir.source_partition p JOIN pg_class c ON c.oid = p.relation::oid
     WHERE p.generation_id = generation AND p.status = 'present' AND p.relation::oid = ANY (leaves)
       AND NOT (from_birth AND c.relfilenode = c.oid);
$$;

-- Those that there are.
SELECT roir.leave_statistics_out(ARRAY(
    SELECT c.oid FROM roir.generation g
      JOIN pg_class c ON c.oid IN (to_regclass(format('roir_data.g%s', g.id)), to_regclass(format('roir_data.g%s_delta', g.id)))
     WHERE g.status <> 'dropped'));
