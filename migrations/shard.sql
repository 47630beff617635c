-- The small schema of a shard, which captures its writes for indexes on other servers. airflow_roir/shards/home.py
-- installs it and checks its version; each outbox has a table, a view and functions of its own (outbox.py).

CREATE SCHEMA roir_shard;

-- One row. token: identifies this database, if another one answers under its name.
CREATE TABLE roir_shard.home (
    id smallint PRIMARY KEY DEFAULT 1 CHECK (id = 1),
    version integer NOT NULL,
    token uuid NOT NULL DEFAULT gen_random_uuid()
);

-- Drawn under the lock of the row that is touched, so that it grows with each change of one entry.
CREATE SEQUENCE roir_shard.version;

-- For each generation of an index that captures here.
CREATE TABLE roir_shard.outbox (
    name text PRIMARY KEY,
    -- The index server's own token, and the index's name there.
    server text NOT NULL,
    index_name text NOT NULL,
    source oid NOT NULL,
    entry jsonb NOT NULL,
    -- The number of polls with something to ship: a server that counts fewer has lost commits.
    tick bigint NOT NULL DEFAULT 0,
    -- The step of the index server whose rows were deleted here last: an index server that counts less has lost
    -- commits.
    step bigint NOT NULL DEFAULT 0,
    -- The version of the last TRUNCATE.
    emptied bigint NOT NULL DEFAULT 0,
    -- The parts whose rows are captured (roir_shard.parts), with their links.
    leaves jsonb NOT NULL DEFAULT '{}',
    -- And their bounds, by which their entries are found once parts have changed.
    bounds jsonb NOT NULL DEFAULT '{}',
    -- A digest of the capture's functions, as they were created.
    capture text NOT NULL DEFAULT '',
    -- The side that announces writes before they commit: server or client; NULL: none.
    announced_by text CHECK (announced_by IN ('server', 'client')),
    -- A digest of the function that announces, as it was created.
    announcing text,
    -- True if no two shards may have the same key of the index.
    is_unique boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now()
);

-- The last batch of each range that was read for an index server. Written by the reader after its rows, and on disk
-- before they are committed there: a shard that has lost commits has lost it, too.
CREATE TABLE roir_shard.mark (
    outbox text NOT NULL REFERENCES roir_shard.outbox (name) ON DELETE CASCADE,
    piece bigint NOT NULL,
    mark bigint NOT NULL,
    PRIMARY KEY (outbox, piece)
);

-- As roir.standing: the owner of a source is the only role that captures here, so that no role's code runs as another
-- role.
CREATE FUNCTION roir_shard.standing(source oid, others oid[], names text[], body text,
                                    OUT trusted boolean, OUT owners bigint, OUT owner text, OUT made boolean,
                                    OUT may_create boolean, OUT other text, OUT named boolean)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT min(pg_get_userbyid(c.relowner)) = session_user AND count(DISTINCT c.relowner) = 1,
           count(DISTINCT c.relowner),
           min(pg_get_userbyid(c.relowner)) FILTER (WHERE c.oid = source), false, false,
           min(c.oid::regclass::text) FILTER (WHERE pg_get_userbyid(c.relowner) <> session_user), true
      FROM pg_class c
     WHERE c.oid = ANY (source || others) OR c.oid = ANY (ARRAY(SELECT to_regclass(n)::oid FROM unnest(names) n))
$$;

-- An error unless the source of an outbox and all its partitions are the session's own: to read another role's table
-- can run that role's code. Called under a lock that keeps the owners, in the transaction that reads.
CREATE FUNCTION roir_shard.check_owners(outbox text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    stranger record;
BEGIN
    SELECT c.oid::regclass AS name, pg_get_userbyid(c.relowner) AS owner INTO stranger
      FROM roir_shard.outbox o
     CROSS JOIN LATERAL (SELECT o.source AS oid UNION ALL
                         SELECT t.relation FROM roir_shard.partition_tree(o.source) t) r
      JOIN pg_class c ON c.oid = r.oid
     WHERE o.name = check_owners.outbox AND pg_get_userbyid(c.relowner) <> session_user LIMIT 1;
    IF FOUND THEN
        RAISE insufficient_privilege USING
            MESSAGE = format('table %s belongs to %I, and what is read as %I would run code of that role',
                             stranger.name, stranger.owner, session_user),
            HINT = format('ALTER TABLE %s OWNER TO %I', stranger.name, session_user);
    END IF;
END $$;

-- The tables that contain a source's rows: its leaves, or itself if it has no partitions. The link changes when rows
-- come, go or change without a trigger: it is made of the transactions that attached the leaf and its levels, and of
-- the expressions of its generated columns.
CREATE FUNCTION roir_shard.parts(source oid) RETURNS TABLE (relation oid, link text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY
    SELECT p.relation, concat_ws(' ', p.link,
                                 (SELECT string_agg(d.oid::text, ' ' ORDER BY d.oid)
                                    FROM pg_attrdef d
                                    JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
                                   WHERE d.adrelid = p.relation AND a.attgenerated = 's'))
      FROM (SELECT t.relation, t.link FROM roir_shard.partition_tree(parts.source) t
             WHERE t.leaf AND EXISTS (SELECT FROM pg_partitioned_table r WHERE r.partrelid = parts.source)
            UNION ALL
            SELECT c.oid, NULL FROM pg_class c WHERE c.oid = parts.source AND c.relkind <> 'p') p;
END $$;

CREATE FUNCTION roir_shard.leaves(source oid) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT coalesce(jsonb_object_agg(t.relation::text, t.link), '{}') FROM roir_shard.parts(source) t);
END $$;

-- For a part and each level above it, up to the source: the columns of its partition key, as numbers of the source's
-- columns, and its bounds as the catalog prints them; for a default partition also those of the others. plain: by the
-- usual order of the columns, so that another server can evaluate the bounds.
CREATE FUNCTION roir_shard.levels(source oid, part oid) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH RECURSIVE up AS (
        SELECT i.inhrelid AS child, i.inhparent AS parent FROM pg_inherits i
         WHERE i.inhrelid = levels.part AND levels.part <> levels.source
        UNION ALL
        SELECT i.inhrelid, i.inhparent FROM up JOIN pg_inherits i ON i.inhrelid = up.parent
         WHERE up.parent <> levels.source)
    SELECT coalesce(jsonb_agg(jsonb_build_object(
               'bound', pg_get_expr(c.relpartbound, c.oid),
               'others', (SELECT coalesce(jsonb_agg(pg_get_expr(o.relpartbound, o.oid)), '[]')
                            FROM pg_inherits i JOIN pg_class o ON o.oid = i.inhrelid
                           WHERE i.inhparent = up.parent AND o.oid <> c.oid AND c.oid = p.partdefid),
               'columns', k.columns,
               'plain', p.partstrat <> 'h' AND k.plain)), '[]')
      FROM up JOIN pg_class c ON c.oid = up.child JOIN pg_partitioned_table p ON p.partrelid = up.parent
     CROSS JOIN LATERAL (
           SELECT jsonb_agg(s.attnum ORDER BY x.position) AS columns,
                  bool_and(oc.opcdefault AND x.coll = a.attcollation) IS TRUE AS plain
             FROM unnest(p.partattrs::int2[], p.partclass::oid[], p.partcollation::oid[])
                  WITH ORDINALITY AS x (number, opclass, coll, position)
             LEFT JOIN pg_attribute a ON a.attrelid = up.parent AND a.attnum = x.number
             -- A partition may have its columns in another order.
             LEFT JOIN pg_attribute s ON s.attrelid = levels.source AND s.attname = a.attname
             LEFT JOIN pg_opclass oc ON oc.oid = x.opclass) k
$$;

-- By part: its condition, for this server only, and its levels, which another server may read.
CREATE FUNCTION roir_shard.bounds(source oid) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- A table without partitions, or a default partition alone, has none.
    RETURN (SELECT coalesce(jsonb_object_agg(t.relation::text, jsonb_build_object(
                       'condition', coalesce(pg_get_partition_constraintdef(t.relation), 'true'),
                       'levels', roir_shard.levels(bounds.source, t.relation))), '{}')
              FROM roir_shard.parts(bounds.source) t);
END $$;

-- A digest of what the capture functions of an outbox do; it changes with the functions.
CREATE FUNCTION roir_shard.capture_of(outbox text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    -- That the owner is the schema's counts, not the owner's name.
    SELECT md5(string_agg(concat_ws('|', n.part, p.prosrc, p.prosecdef, p.proconfig, p.proowner = s.nspowner), '|'
                          ORDER BY n.part))
      FROM unnest(ARRAY['_touch', '_emptied']) AS n (part)
      LEFT JOIN pg_proc p ON p.oid = to_regprocedure(format('roir_shard.%I()', outbox || n.part))
      LEFT JOIN pg_namespace s ON s.oid = p.pronamespace
$$;

-- True if the database was restored from a dump since an outbox was created in it: then its tables have other oids than
-- those recorded. The view of the source is of the present table.
CREATE FUNCTION roir_shard.is_restored(outbox text) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN EXISTS (SELECT FROM roir_shard.outbox o
                     JOIN pg_rewrite r ON r.ev_class = to_regclass(format('roir_shard.%I', o.name || '_source'))
                    WHERE o.name = is_restored.outbox
                      AND NOT EXISTS (SELECT FROM pg_depend d
                                       WHERE d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
                                         AND d.refclassid = 'pg_class'::regclass AND d.refobjid = o.source));
END $$;

-- Why an outbox may lack writes to its source; NULL if it doesn't. Called in each poll.
CREATE FUNCTION roir_shard.capture_problem(outbox text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    o record;
    relation oid;
    reason text;
BEGIN
    SELECT * INTO o FROM roir_shard.outbox x WHERE x.name = capture_problem.outbox;
    IF o.name IS NULL THEN
        RETURN 'its outbox is gone';
    ELSIF roir_shard.is_restored(o.name) THEN
        RETURN 'its database was restored from a dump; rebuild the index';
    ELSIF NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = o.source) THEN
        RETURN 'its table was dropped';
    ELSIF roir_shard.capture_of(o.name) IS DISTINCT FROM o.capture THEN
        RETURN 'the function of its capture was altered';
    END IF;
    -- A view reads with its owner's rights, under the row security for its owner.
    IF EXISTS (SELECT FROM pg_class c JOIN pg_class s ON s.oid = o.source
                WHERE c.oid = to_regclass(format('roir_shard.%I', o.name || '_source'))
                  AND c.relowner <> s.relowner) THEN
        RETURN 'the view that its rows are read by belongs to another role than its table';
    END IF;
    -- Columns are captured by their names; if one doesn't exist, writes fail.
    IF EXISTS (SELECT FROM jsonb_array_elements(o.entry -> 'columns') c
                 JOIN pg_attribute a ON a.attrelid = o.source AND a.attname = c ->> 'source'
                WHERE NOT a.attisdropped AND a.attnum <> (c ->> 'attnum')::int) THEN
        RETURN 'another column has the name of an indexed one';
    ELSIF (SELECT array_agg(k.number::int ORDER BY k.number)
             FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey::int2[]) AS k (number)
            WHERE i.indrelid = o.source AND i.indisprimary)
          IS DISTINCT FROM (SELECT array_agg((c ->> 'attnum')::int ORDER BY (c ->> 'attnum')::int)
                              FROM jsonb_array_elements(o.entry -> 'columns') c
                             WHERE (c ->> 'primary_key')::boolean) THEN
        RETURN 'its primary key was dropped or altered';
    END IF;
    SELECT x.why INTO reason
      FROM pg_class c CROSS JOIN LATERAL (
           SELECT CASE WHEN c.relpersistence <> 'p' THEN 'is unlogged: a crash empties it'
                       WHEN c.relrowsecurity THEN 'has row security, which hides its rows'
                       WHEN EXISTS (SELECT FROM pg_rewrite r WHERE r.ev_class = c.oid) THEN 'has a rule'
                       WHEN EXISTS (SELECT FROM pg_trigger g
                                     WHERE g.tgrelid = c.oid AND NOT g.tgisinternal
                                       AND g.tgfoid IS DISTINCT FROM
                                           to_regprocedure(format('roir_shard.%I()', o.name || '_announce')))
                       THEN 'has a trigger that isn''t ours' END AS why) x
     WHERE c.oid = to_regclass(format('roir_shard.%I', o.name));
    IF NOT FOUND THEN
        RETURN 'its outbox is gone';
    ELSIF reason IS NOT NULL THEN
        RETURN format('its outbox roir_shard.%s %s', o.name, reason);
    END IF;
    SELECT p.relation INTO relation FROM roir_shard.parts(o.source) p JOIN pg_class c ON c.oid = p.relation
     WHERE c.relkind <> 'r' OR c.relpersistence <> 'p' LIMIT 1;
    IF FOUND THEN
        RETURN format('%s is unlogged or foreign', relation::regclass);
    END IF;
    SELECT t.oid INTO relation
      FROM (SELECT o.source AS oid UNION SELECT p.relation FROM roir_shard.parts(o.source) p) t
     WHERE NOT EXISTS (SELECT FROM pg_trigger g
                        -- After each row that is inserted, updated or deleted, without a condition.
                        WHERE g.tgrelid = t.oid AND g.tgenabled = 'A' AND g.tgtype = 29 AND g.tgqual IS NULL
                          AND cardinality(g.tgattr::int2[]) = 0
                          AND g.tgfoid = to_regprocedure(format('roir_shard.%I()', o.name || '_touch')))
     LIMIT 1;
    IF FOUND THEN
        RETURN format('the capture trigger of %s is missing or disabled', relation::regclass);
    END IF;
    -- A new leaf gets its trigger when it is followed; none of its rows is shipped before.
    SELECT t.oid INTO relation
      FROM (SELECT p.relation AS oid FROM roir_shard.parts(o.source) p
             WHERE p.relation = o.source OR o.leaves ->> p.relation::text = p.link) t
     WHERE NOT EXISTS (SELECT FROM pg_trigger g
                        WHERE g.tgrelid = t.oid AND g.tgenabled = 'A' AND g.tgtype & 32 <> 0 AND g.tgqual IS NULL
                          AND g.tgfoid = to_regprocedure(format('roir_shard.%I()', o.name || '_emptied')))
     LIMIT 1;
    IF FOUND THEN
        RETURN format('the capture trigger of TRUNCATE of %s is missing or disabled', relation::regclass);
    END IF;
    RETURN NULL;
END $$;

-- The same kind of evidence that each write was announced: the triggers and functions, and the foreign table by which
-- it is sent. Each begins with the owner, whom REASSIGN OWNED changes.
CREATE FUNCTION roir_shard.announcing_evidence(outbox text) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH outbox AS MATERIALIZED (
        SELECT x.name, x.source, to_regclass(format('roir_shard.%I', x.name))::oid AS relation,
               to_regclass(format('roir_shard.%I', x.name || '_intent'))::oid AS intent
          FROM roir_shard.outbox x WHERE x.name = announcing_evidence.outbox AND x.announced_by IS NOT NULL),
    code AS MATERIALIZED (
        SELECT p.oid, n.part, p.proowner, p.xmin
          FROM outbox o
         CROSS JOIN unnest(ARRAY['_announce', '_whole', '_own']) AS n (part)
          JOIN pg_proc p ON p.oid = to_regprocedure(format('roir_shard.%I()', o.name || n.part))),
    trace (name, value) AS (
        SELECT 'trigger ' || t.tgname, concat_ws(' ', '', t.oid, t.xmin)
          FROM outbox o JOIN pg_trigger t ON t.tgrelid IN (o.relation, o.source)
         WHERE t.tgfoid = ANY (ARRAY(SELECT c.oid FROM code c))
        UNION ALL
        SELECT 'function ' || c.part, concat_ws(' ', c.proowner, c.oid, c.xmin) FROM code c
        UNION ALL
        SELECT 'table', concat_ws(' ', c.relowner, c.oid, c.xmin) FROM outbox o JOIN pg_class c ON c.oid = o.intent
        UNION ALL
        SELECT 'columns', concat_ws(' ', '', md5(string_agg(concat_ws(' ', a.attname, a.xmin), ',' ORDER BY a.attnum)))
          FROM outbox o JOIN pg_attribute a ON a.attrelid = o.intent AND a.attnum > 0 HAVING count(*) > 0
        UNION ALL
        SELECT 'options', concat_ws(' ', '', f.ftserver, f.xmin)
          FROM outbox o JOIN pg_foreign_table f ON f.ftrelid = o.intent)
    SELECT coalesce(jsonb_object_agg(t.name, t.value), '{}') FROM trace t
$$;

-- Evidence that the outbox has every write: marks of the objects that must have existed, unchanged, all the while; and
-- the rules that compare values. After a drop, or an alteration that was undone, an object looks as before. But the
-- server has created it again: with another oid, or by another transaction (xmin). The index server keeps this evidence
-- and compares it in each poll, as roir.marks is kept and compared on one server. first: a row of the outbox that is
-- never shipped; if it is gone, the outbox was emptied. schema: pg_upgrade changes it, and all else.
CREATE FUNCTION roir_shard.evidence(outbox text) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    o record;
    first text;
BEGIN
    SELECT x.*, to_regclass(format('roir_shard.%I', x.name)) AS relation INTO o
      FROM roir_shard.outbox x WHERE x.name = evidence.outbox;
    IF o.relation IS NOT NULL THEN
        EXECUTE format('SELECT t.xid::text FROM %s t WHERE t.version = 0', o.relation) INTO first;
    END IF;
    RETURN (
        WITH relation AS MATERIALIZED (
            -- A new leaf gets its trigger of TRUNCATE when it is followed.
            SELECT p.relation AS oid, p.link,
                   p.relation = o.source OR o.leaves ->> p.relation::text = p.link AS followed
              FROM roir_shard.parts(o.source) p
            UNION ALL SELECT t.relation, t.link, true FROM roir_shard.partition_tree(o.source) t WHERE NOT t.leaf
            UNION ALL SELECT c.oid, '', true FROM pg_class c WHERE c.oid = o.source AND c.relkind = 'p'),
        capture AS MATERIALIZED (
            SELECT p.oid, p.proname, p.proowner, p.xmin FROM unnest(ARRAY['_touch', '_emptied']) AS n (part)
              JOIN pg_proc p ON p.oid = to_regprocedure(format('roir_shard.%I()', o.name || n.part))),
        trace (name, value) AS (
            SELECT format('trigger %s/%s/%s', r.oid, r.link, t.tgtype),
                   string_agg(concat(t.oid, ' ', t.xmin), ',' ORDER BY t.oid)
              FROM relation r CROSS JOIN LATERAL (
                   SELECT t.oid, t.xmin, t.tgtype FROM pg_trigger t
                    WHERE t.tgrelid = r.oid AND t.tgfoid = ANY (ARRAY(SELECT c.oid FROM capture c))
                      AND (r.followed OR t.tgtype & 32 = 0) OFFSET 0) t
             GROUP BY r.oid, r.link, t.tgtype
            UNION ALL
            SELECT 'function ' || c.proname, concat_ws(' ', c.oid, c.proowner, c.xmin) FROM capture c
            UNION ALL
            SELECT 'view', concat(w.oid, ' ', w.xmin)
              FROM pg_rewrite w WHERE w.ev_class = to_regclass(format('roir_shard.%I', o.name || '_source'))
            UNION ALL
            SELECT 'outbox', o.relation::oid::text WHERE o.relation IS NOT NULL
            UNION ALL
            SELECT 'first', first WHERE first IS NOT NULL
            UNION ALL
            -- A column that was altered and altered back may have lost a part of its values, or its numbering.
            SELECT 'columns', md5(string_agg(concat_ws(' ', a.attname, a.xmin, d.oid), ',' ORDER BY a.attnum))
              FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
             WHERE a.attrelid = o.relation AND a.attname ~ '^(c[0-9]+|version|xid)$' AND NOT a.attisdropped
            HAVING count(*) > 0
            UNION ALL
            SELECT 'sequence', concat_ws(' ', s.seqrelid, s.xmin, pg_relation_filenode(s.seqrelid))
              FROM pg_sequence s WHERE s.seqrelid = to_regclass('roir_shard.version')
            UNION ALL
            SELECT 'schema', n.oid::text FROM pg_namespace n WHERE n.nspname = 'roir_shard')
        SELECT jsonb_object_agg(t.name, t.value)
               || jsonb_build_object('announcing', roir_shard.announcing_evidence(o.name),
                                     'rules', roir_shard.rules(o.source,
                   ARRAY(SELECT c ->> 'source' FROM jsonb_array_elements(o.entry -> 'columns') c)))
          FROM trace t);
END $$;

-- A digest of what an outbox's function that announces does.
CREATE FUNCTION roir_shard.announcing_of(outbox text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT md5(concat_ws('|', p.prosrc, p.prosecdef, p.proconfig, p.proowner = s.nspowner,
                         -- By its name: pg_upgrade gives it another oid.
                         (SELECT s.srvname || f.ftoptions::text
                            FROM pg_foreign_table f JOIN pg_foreign_server s ON s.oid = f.ftserver
                           WHERE f.ftrelid = to_regclass(format('roir_shard.%I', announcing_of.outbox || '_intent')))))
      FROM pg_proc p JOIN pg_namespace s ON s.oid = p.pronamespace
     WHERE p.oid = to_regprocedure(format('roir_shard.%I()', outbox || '_announce'))
$$;

-- Why a writer may commit without an announcement; NULL if none can. Called in each poll.
CREATE FUNCTION roir_shard.announcing_problem(outbox text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    o record;
BEGIN
    SELECT * INTO o FROM roir_shard.outbox x WHERE x.name = announcing_problem.outbox;
    IF o.announced_by IS NULL THEN
        RETURN 'its writes aren''t announced';
    ELSIF roir_shard.announcing_of(o.name) IS DISTINCT FROM o.announcing THEN
        RETURN 'what announces writes was altered';
    ELSIF NOT EXISTS (SELECT FROM pg_trigger g
                       WHERE g.tgrelid = to_regclass(format('roir_shard.%I', o.name)) AND g.tgenabled = 'A'
                         AND g.tgdeferrable AND g.tginitdeferred
                         AND g.tgfoid = to_regprocedure(format('roir_shard.%I()', o.name || '_announce')))
       OR NOT EXISTS (SELECT FROM pg_trigger g
                       WHERE g.tgrelid = o.source AND g.tgenabled = 'A' AND g.tgtype & 34 = 34
                         AND g.tgfoid = to_regprocedure(format('roir_shard.%I()', o.name || '_whole'))) THEN
        RETURN 'a trigger that announces writes is missing or disabled';
    ELSIF EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = to_regclass(format('roir_shard.%I', o.name || '_intent'))
                                             AND NOT g.tgisinternal) THEN
        RETURN 'the table that announcements are written to has a trigger';
    END IF;
    RETURN NULL;
END $$;

-- True if no two committed rows of a table can have the same values in these columns, none of them NULL: a unique index
-- of the table ensures that, on these columns or some of them, by the equality that other indexes use.
CREATE FUNCTION roir_shard.is_unique(source oid, columns int[]) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH equal (opclass, operator, type, is_default) AS (
        SELECT c.oid, o.amopopr, c.opcintype, c.opcdefault
          FROM pg_opclass c JOIN pg_am a ON a.oid = c.opcmethod AND a.amname = 'btree'
          JOIN pg_amop o ON o.amopfamily = c.opcfamily
                        AND o.amoplefttype = c.opcintype AND o.amoprighttype = c.opcintype
                        AND o.amopstrategy = 3)
    SELECT EXISTS (
        SELECT FROM pg_index i
         WHERE i.indrelid = source AND i.indisunique AND i.indisvalid AND i.indislive AND NOT i.indisexclusion
           AND i.indpred IS NULL AND i.indexprs IS NULL
           AND NOT EXISTS (
               SELECT FROM generate_series(0, i.indnkeyatts - 1) n
                 LEFT JOIN pg_collation l ON l.oid = i.indcollation[n]
                WHERE i.indkey[n] <> ALL (columns) OR NOT coalesce(l.collisdeterministic, true)
                   OR NOT EXISTS (SELECT FROM equal e
                                    JOIN equal d ON d.type = e.type AND d.operator = e.operator AND d.is_default
                                   WHERE e.opclass = i.indclass[n])))
$$;

-- Why two rows of a shard may share a key of a unique index; NULL if they can't. Called in each poll.
CREATE FUNCTION roir_shard.unique_problem(outbox text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    o record;
    columns int[];
BEGIN
    SELECT * INTO o FROM roir_shard.outbox x WHERE x.name = unique_problem.outbox;
    columns := array(SELECT (c.value ->> 'attnum')::int
                       FROM jsonb_array_elements(o.entry -> 'columns') WITH ORDINALITY AS c (value, position)
                      WHERE c.position <= (o.entry ->> 'key')::int);
    IF NOT roir_shard.is_unique(o.source, columns) THEN
        RETURN 'its table has no unique index of its own on the key any more';
    END IF;
    RETURN NULL;
END $$;

-- The changes of this transaction that aren't announced yet, of outboxes with announced_by = 'client'. Each row is an
-- intent, for that index server.
CREATE FUNCTION roir_shard.unannounced()
RETURNS TABLE (server text, outbox text, generation bigint, version bigint, intent text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF pg_current_xact_id_if_assigned() IS NULL THEN
        RETURN;
    END IF;
    FOR server, outbox IN
        SELECT o.server, o.name FROM roir_shard.outbox o WHERE o.announced_by = 'client' ORDER BY 2
    LOOP
        RETURN QUERY EXECUTE format('SELECT %L::text, %L::text, u.* FROM roir_shard.%I() u',
                                    server, outbox, outbox || '_own');
    END LOOP;
END $$;
