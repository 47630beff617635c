-- Refuses to run other roles' code as us. The tables and functions of our schemas have rights of their own; a source's
-- owner, as which the capture runs, needs USAGE on both schemas.
--
-- Some of our statements would run code of others. To alter a table evaluates the constants in the CHECKs and index
-- expressions of the tables that are compared, and to read partition bounds from text runs the checks of domains. ALTER
-- TABLE runs as the role that sends it. So these functions look such code up in the catalogs first, and refuse it.
GRANT USAGE ON SCHEMA roir, roir_data TO PUBLIC;

-- True if a role's code may run as us: the role may do all that we may, or is our own.
CREATE FUNCTION roir.trusts(author oid) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT o.rolsuper OR o.oid = n.nspowner OR o.rolname = current_user AND o.rolname = session_user
              FROM pg_roles o, pg_namespace n WHERE o.oid = author AND n.nspname = 'roir_data');
END $$;

-- An error if a catalog's row that the transaction's one snapshot shows has been replaced since, by its xmax. The
-- object may have another owner by now, whose code would run, since locks and plans use the present row. A row that is
-- only locked, or whose change was rolled back, has an xmax, too.
CREATE FUNCTION roir.refuse_replaced(replaced_by xid, what text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    us CONSTANT numeric := pg_snapshot_xmax(pg_current_snapshot())::text::numeric;
    ahead numeric;
    id xid8;
BEGIN
    IF replaced_by = '0' OR current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable') THEN
        RETURN;
    END IF;
    ahead := mod(4294967296 + replaced_by::text::numeric - mod(us, 4294967296), 4294967296);
    id := greatest(us + CASE WHEN ahead < 2147483648 THEN ahead ELSE ahead - 4294967296 END, 3)::text::xid8;
    IF id >= pg_snapshot_xmin(pg_current_snapshot()) AND pg_xact_status(id) = 'committed' THEN
        RAISE serialization_failure USING
            MESSAGE = format('could not serialize access: %s was altered after the transaction''s snapshot', what),
            HINT = 'Retry the transaction.';
    END IF;
END $$;

-- The owners of a source and of the other tables to be read, by oids and by names as they resolve now. trusted: all
-- owners are trusted; made: the function that reads the source as its owner is as we create it, with this body; other:
-- a table of another owner; named: the first name is the source's. In PL/pgSQL, which keeps the plan: it is called in
-- every batch.
CREATE FUNCTION roir.standing(source oid, others oid[], names text[], body text, OUT trusted boolean, OUT owners bigint,
                              OUT owner text, OUT made boolean, OUT may_create boolean, OUT other text,
                              OUT named boolean)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    relations oid[] := source || others || ARRAY(SELECT to_regclass(n)::oid FROM unnest(names) n);
BEGIN
    SELECT bool_and(roir.trusts(o.owner)), count(*), min(pg_get_userbyid(o.owner)::text) INTO trusted, owners, owner
      FROM (SELECT DISTINCT c.relowner AS owner FROM pg_class c WHERE c.oid = ANY (relations)) o;
    named := to_regclass(names[1]) IS NOT DISTINCT FROM source::regclass;
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        PERFORM roir.refuse_replaced(c.xmax, format('table %s', c.oid::regclass))
           FROM pg_class c WHERE c.oid = ANY (relations) AND c.xmax <> '0';
    END IF;
    IF NOT trusted THEN
        SELECT p.prosecdef AND p.proconfig IS NULL AND p.proowner = c.relowner AND p.prosrc = body INTO made
          FROM pg_proc p, pg_class c
         WHERE p.oid = to_regprocedure(format('roir_data.read_%s(text)', source)) AND c.oid = source;
        SELECT bool_or(has_schema_privilege(c.relowner, 'roir_data', 'CREATE')) INTO may_create
          FROM pg_class c WHERE c.oid = ANY (relations);
        SELECT c.oid::regclass::text INTO other FROM pg_class c, pg_class s
         WHERE c.oid = ANY (relations) AND s.oid = source AND c.relowner <> s.relowner LIMIT 1;
    END IF;
    made := coalesce(made, false);
END $$;

-- The first domain within a type whose checks would run code of others when a value is made from text; NULL if there is
-- none.
CREATE FUNCTION roir.type_of_others(type oid) RETURNS regtype
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    domain record;
BEGIN
    FOR domain IN SELECT x.oid, t.typowner AS owner, t.xmax AS replaced_by
                    FROM roir.type_tree(type) x (oid) JOIN pg_type t ON t.oid = x.oid
                   WHERE t.typtype = 'd' ORDER BY 1 LOOP
        PERFORM roir.refuse_replaced(domain.replaced_by, format('type %s', domain.oid::regtype));
        IF NOT roir.trusts(domain.owner) THEN
            RETURN domain.oid::regtype;
        END IF;
    END LOOP;
    RETURN NULL;
END $$;

-- ANALYZE calls a range type's function for the length of ranges. Leaves the columns of our tables, and of their
-- segments, out of ANALYZE if that function belongs to others.
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

-- An error if the bounds of partitions of these tables, the levels above a partition, can't be read without running
-- code of others. Even to look at such a key evaluates the constants in it, so only the catalogs are read. A table with
-- a primary key has no expression in its partition key; but without its primary key it can get one.
CREATE FUNCTION roir.check_levels(levels oid[]) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    level record;
    part oid;
    foreign_type regtype;
BEGIN
    -- Key by key: in one query, odd planner costs can lead to a check of every column of the database.
    FOR level IN SELECT p.partrelid::regclass AS name, p.partattrs AS numbers, p.partexprs IS NOT NULL AS by_expression
                   FROM pg_partitioned_table p WHERE p.partrelid = ANY (levels) LOOP
        IF level.by_expression THEN
            RAISE feature_not_supported USING
                MESSAGE = format('%s is partitioned by an expression; '
                                 'roir can''t tell which partition an entry belongs to',
                                 level.name),
                HINT = 'Partition the table by columns, and give all of it a primary key, which contains them.';
        END IF;
        FOR part IN SELECT a.atttypid FROM pg_attribute a
                     WHERE a.attrelid = level.name::oid AND a.attnum = ANY (level.numbers) LOOP
            foreign_type := roir.type_of_others(part);
            IF foreign_type IS NOT NULL THEN
                RAISE insufficient_privilege USING
                    MESSAGE = format('the bounds of partitions of %s can''t be read '
                                     'without running code of the owner of '
                                     'type %s as role %I', level.name, foreign_type, current_user),
                    HINT = format('Make a superuser the owner of type %s, or let the table''s owner build its indexes.',
                                  foreign_type);
            END IF;
        END LOOP;
    END LOOP;
END $$;

-- The same for all levels of a source, also those that came after the index. An error also if a level is partitioned
-- by the hash of a domain: then the partition of an entry can't be found, since the server hashes values of the key's
-- very type, and an entry has them as the domain's base type.
CREATE FUNCTION roir.check_source(source oid) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    hashed record;
BEGIN
    PERFORM roir.check_levels(ARRAY(SELECT a.relid::oid FROM pg_partition_ancestors(source) a
                                    UNION SELECT t.relation FROM roir.partition_tree(source) t));
    SELECT x.partrelid::regclass AS level, a.attname AS name INTO hashed
      FROM (SELECT source AS oid UNION ALL SELECT t.relation FROM roir.partition_tree(source) t) l
      JOIN pg_partitioned_table x ON x.partrelid = l.oid AND x.partstrat = 'h'
      JOIN pg_attribute a ON a.attrelid = x.partrelid AND a.attnum = ANY (x.partattrs)
      JOIN pg_type y ON y.oid = a.atttypid AND y.typtype = 'd' LIMIT 1;
    IF FOUND THEN
        RAISE feature_not_supported USING
            MESSAGE = format('%s is partitioned by the hash of %I, which is of a domain; '
                             'roir can''t tell which partition an entry belongs to',
                             hashed.level, hashed.name),
            HINT = format('Partition it by a column of the domain''s base type, or detach it: '
                          'SELECT roir.detach_partition(%L).',
                          hashed.level);
    END IF;
END $$;

-- A partition's constraint as a text, NULL if it has none.
CREATE FUNCTION roir.bounds_of(partition oid) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM roir.check_levels(ARRAY(SELECT a.relid::oid FROM pg_partition_ancestors(partition) a));
    RETURN nullif(pg_get_partition_constraintdef(partition), '');
END $$;

-- These tables, and the tables to or from which they have foreign keys: when a partition comes or goes, the server
-- checks foreign keys by queries over both tables, as the role that attaches or detaches.
CREATE FUNCTION roir.with_partners(relations oid[]) RETURNS SETOF oid
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT unnest(relations)
    UNION SELECT k.confrelid FROM pg_constraint k WHERE k.contype = 'f' AND k.conrelid = ANY (relations)
    UNION SELECT k.conrelid FROM pg_constraint k WHERE k.contype = 'f' AND k.confrelid = ANY (relations)
$$;

-- A description of code of others in the CHECKs, indexes, statistics and partition keys of these tables, or in the
-- casts of their foreign keys; NULL if there is none.
CREATE FUNCTION roir.code_of_others(relations oid[]) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH expression (classid, objid) AS (
        SELECT 'pg_constraint'::regclass, k.oid FROM pg_constraint k
         WHERE k.contype = 'c' AND k.conrelid = ANY (relations)
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
               SELECT p.proowner AS author FROM pg_proc p
                WHERE d.refclassid = 'pg_proc'::regclass AND p.oid = d.refobjid
               UNION ALL
               SELECT unnest(ARRAY[o.oprowner, p.proowner]) FROM pg_operator o LEFT JOIN pg_proc p ON p.oid = o.oprcode
                WHERE d.refclassid = 'pg_operator'::regclass AND o.oid = d.refobjid
               UNION ALL
               SELECT t.typowner FROM pg_type t
                WHERE d.refclassid = 'pg_type'::regclass AND t.oid = roir.type_of_others(d.refobjid)) a),
    compared (classid, objid, refclassid, refobjid, author) AS (
        -- If the types differ, values are compared by a cast of one of them.
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

-- Locks the tables with which a partition that comes or goes is compared, against changes of their constraints and
-- indexes; raises an error if the comparison would run code of others as us. parent: with its default partition. comes:
-- the partition is attached, so all tables are checked; for a detach, only if a foreign key refers to one of them.
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
    -- Again until no table is new: a table that came before the lock was granted is checked, too.
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
    SELECT format('%s belongs to %s, %s to %s', partition, pg_get_userbyid(p.relowner),
                  parent, pg_get_userbyid(c.relowner))
      INTO said FROM pg_class p, pg_class c
     WHERE comes AND p.oid = partition AND c.oid = parent AND p.relowner <> c.relowner
       AND NOT (roir.trusts(p.relowner) AND roir.trusts(c.relowner));
    IF said IS NOT NULL THEN
        RAISE insufficient_privilege USING MESSAGE = said || '; one role must be allowed to read both',
            HINT = format('ALTER TABLE %s OWNER TO %I', partition,
                          (SELECT pg_get_userbyid(c.relowner) FROM pg_class c WHERE c.oid = parent));
    END IF;
    said := roir.code_of_others(tables);
    IF said IS NOT NULL THEN
        RAISE insufficient_privilege USING
            MESSAGE = format(CASE WHEN comes THEN '%s; attaching %s to %s would run that as role %I'
                                  ELSE '%s; detaching %s from %s would run that as role %I' END,
                             said, partition, parent, current_user),
            HINT = 'Drop that first and create it again afterwards; or attach the table empty and insert its rows.';
    END IF;
END $$;

-- Restricts roles that may update operations but don't work for indexes. By whatever statement, they can only do what
-- our functions do: pause, resume, abort, change options. If they could write another index's generation, a later phase
-- or a former run's epoch, an abort, a clean-up or a worker would destroy what isn't theirs.
CREATE FUNCTION roir.refuse_change() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    free text[] := ARRAY['status', 'paused_at', 'paused_by', 'pause_reason', 'queued_at', 'queued_seen_at', 'notice',
                         'phase_seconds', 'ticked_at', 'heartbeat_at', 'working_since', 'granted', 'granted_at',
                         'awaited_until', 'run_ended_at'];
    changed text;
BEGIN
    IF has_schema_privilege('roir_data', 'CREATE') THEN
        RETURN NEW;
    END IF;
    free := free || ARRAY(SELECT l.name FROM roir.live_options() l);
    IF NEW.status = 'aborting' AND OLD.status <> 'aborting' AND NEW.epoch > OLD.epoch THEN
        free := free || ARRAY['epoch', 'owner'];
    END IF;
    SELECT n.key INTO changed FROM jsonb_each(to_jsonb(NEW)) n JOIN jsonb_each(to_jsonb(OLD)) o ON o.key = n.key
     WHERE n.value IS DISTINCT FROM o.value
       AND (n.key <> ALL (free) OR n.key = 'status' AND NEW.status NOT IN ('running', 'paused', 'aborting')) LIMIT 1;
    IF changed IS NOT NULL THEN
        RAISE insufficient_privilege USING
            MESSAGE = format('role %I may not change column %s of operation %s', current_user, changed, OLD.id),
            HINT = 'Use roir.pause, roir.resume, roir.change or roir.abort.';
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER rights BEFORE UPDATE ON roir.operation FOR EACH ROW EXECUTE FUNCTION roir.refuse_change();
