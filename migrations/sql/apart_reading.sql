-- Reads of an index over shards, at levels with a guaranteed freshness (docs/architecture-shards.md#reads).

-- The generation that an index's view shows, with the index's name; an error if the relation is no such view.
CREATE FUNCTION roir.shown(index regclass, OUT generation bigint, OUT name text, OUT apart boolean)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    SELECT g.id, format('%I.%I', i.schema_name, i.name), i.shard_table IS NOT NULL INTO generation, name, apart
      FROM pg_rewrite r
      JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid AND d.refclassid = 'pg_class'::regclass
      JOIN pg_class c ON c.oid = d.refobjid AND c.relkind = 'p' AND c.relnamespace = 'roir_data'::regnamespace
      JOIN roir.generation g ON c.relname = 'g' || g.id
      JOIN roir.index i ON i.id = g.index_id
     WHERE r.ev_class = index;
    IF generation IS NULL THEN
        RAISE wrong_object_type USING
            MESSAGE = CASE WHEN index IS NULL THEN 'give the name of an index'
                ELSE format('%s is not a roir index', index) END,
            HINT = 'Give the view of an index: `roir status` lists all indexes';
    END IF;
END $$;

-- True if the answer of the calling query lacks nothing that any shard had committed before max_staleness ago, an error
-- if that isn't known:
--     SELECT … FROM public.v WHERE email = 'x' AND (SELECT roir.fresh('public.v', '5 s'))
-- STABLE, so that it looks with the snapshot that the query reads the entries with; only the clock is of now. PARALLEL
-- SAFE, or it would keep every query from a parallel plan. Not STRICT: if an argument was NULL, a query would silently
-- find nothing.
CREATE FUNCTION roir.fresh(index regclass, max_staleness interval) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    shown record := roir.shown(index);
    feed record;
BEGIN
    IF max_staleness IS NULL OR max_staleness < interval '0' THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('index %s: give how old an answer may be, as an interval of 0 or more', shown.name);
    ELSIF NOT shown.apart THEN
        RETURN true;
    END IF;
    SELECT s.name, clock_timestamp() - l.fresh_at AS age, l.doubt, l.fresh_at, l.removed_at INTO feed
      FROM (SELECT) one
      LEFT JOIN roir.feed l ON l.generation_id = shown.generation
      LEFT JOIN roir.shard s ON s.id = l.shard_id
     ORDER BY l.doubt IS NULL, l.removed_at IS NULL, l.fresh_at IS NOT NULL, l.fresh_at <= clock_timestamp(),
              l.fresh_at, s.name
     LIMIT 1;
    IF feed.doubt IS NULL AND feed.removed_at IS NULL AND feed.age BETWEEN interval '0' AND max_staleness THEN
        RETURN true;
    END IF;
    RAISE EXCEPTION USING
        ERRCODE = '40R01',
        MESSAGE = format('index %s: %s', shown.name,
            CASE WHEN feed.name IS NULL THEN 'it has no shard'
                 WHEN feed.doubt IS NOT NULL THEN format('entries of shard %I may be wrong: %s', feed.name, feed.doubt)
                 WHEN feed.removed_at IS NOT NULL THEN format('shard %I is captured no more', feed.name)
                 WHEN feed.age IS NULL THEN format('shard %I has not been shipped to its end yet', feed.name)
                 WHEN feed.age < interval '0'
                     THEN format('shard %I is fresh as of %s, which is in the future: the clock of '
                                                          'this server was set back', feed.name, feed.fresh_at)
                 ELSE format('shard %I lags by %s s, more than the %s s that are allowed', feed.name,
                             -- Rounded up: 5.01 s is more than 5.0 s.
                             round(ceil(extract(epoch FROM feed.age) * 10) / 10, 1),
                             round(extract(epoch FROM max_staleness), 1)) END),
        DETAIL = coalesce(format('shard %I, lag %s', feed.name, feed.age), ''),
        HINT = CASE WHEN feed.doubt IS NOT NULL THEN 'Repair them: roir verify --repair'
                    ELSE 'Retry. If the error stays, check that `roir ship` runs and reaches that shard. '
                         '`roir status` tells.' END;
END $$;

-- The facts that a reader of an index over shards needs, for airflow_roir.reading and roir.strict.
CREATE FUNCTION roir.apart(index regclass) RETURNS jsonb
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    shown record := roir.shown(index);
BEGIN
    IF NOT shown.apart THEN
        RAISE wrong_object_type USING
            MESSAGE = format('index %s is in one database with its table', shown.name),
            HINT = 'Query the view, or call roir.rows: such an index is never behind.';
    END IF;
    RETURN (
        SELECT jsonb_build_object('generation', g.id, 'name', shown.name, 'table', i.shard_table,
                                  'shard', i.shard_column,
                   'columns', g.entry -> 'columns', 'identity', g.entry -> 'identity',
                   'rules', roir.rules(i.source_oid::oid,
                                       ARRAY(SELECT c ->> 'source' FROM jsonb_array_elements(g.entry -> 'columns') c)),
                   'shards', (SELECT coalesce(jsonb_object_agg(s.name, jsonb_build_object(
                                  'home', s.home, 'outbox', l.outbox, 'rules', l.evidence -> 'rules')), '{}')
                                FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id WHERE l.generation_id = g.id))
          FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
         WHERE g.id = shown.generation);
END $$;

-- True if the caller may read the index of this generation, an error otherwise. It runs with the caller's rights. Only
-- a view whose owner may read the entries counts.
CREATE FUNCTION roir.may_read(generation bigint) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM pg_class b
                 JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass
                                 AND d.refobjid = b.oid
                 JOIN pg_rewrite r ON r.oid = d.objid
                 JOIN pg_class v ON v.oid = r.ev_class AND v.relkind = 'v'
                WHERE b.relnamespace = 'roir_data'::regnamespace AND b.relname = 'g' || generation
                  AND has_table_privilege(v.relowner, b.oid, 'SELECT') AND has_table_privilege(v.oid, 'SELECT')) THEN
        RETURN true;
    END IF;
    RAISE insufficient_privilege USING
        MESSAGE = 'permission denied: strict reads need SELECT on the whole view of the index';
END $$;

-- True if strict reads of a generation are possible in the snapshot of the calling query, an error otherwise.
CREATE FUNCTION roir.is_strict(generation bigint) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    problem text;
BEGIN
    IF NOT EXISTS (SELECT FROM roir.generation g WHERE g.id = is_strict.generation AND g.status = 'active') THEN
        RAISE serialization_failure USING
            MESSAGE = 'could not serialize access: another generation of the index was published',
            HINT = 'Retry the transaction.';
    END IF;
    problem := roir.strict_problem(generation);
    IF problem IS NOT NULL THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('index %s can''t be read strictly now: %s',
                (SELECT format('%I.%I', i.schema_name, i.name)
                   FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
                  WHERE g.id = is_strict.generation), problem);
    END IF;
    RETURN true;
END $$;

-- The number of polls of each shard that the index server knows: a shard that has counted fewer has lost commits.
CREATE FUNCTION roir.ticks(generation bigint) RETURNS jsonb
LANGUAGE sql STABLE PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(jsonb_object_agg(s.name, l.tick), '{}') FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id
     WHERE l.generation_id = ticks.generation
$$;

-- True if a shard's answer is the truth, an error otherwise. ticks, counted: the polls known here, and those that the
-- shard has counted.
CREATE FUNCTION roir.is_truth(shard text, home text, token text, ticks bigint, counted bigint, standby boolean)
RETURNS boolean
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    why text := CASE WHEN standby THEN 'a standby answers, which may be behind; its primary must be asked'
                     WHEN token IS DISTINCT FROM home THEN 'another database answers than the one that was added'
                     WHEN counted IS NULL THEN 'its capture is gone, or another table has its name'
                     WHEN counted < ticks THEN 'it has lost commits that the index has' END;
BEGIN
    IF why IS NOT NULL THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('shard %I: %s', shard, why), HINT = 'docs/troubleshooting.md#not-strict';
    END IF;
    RETURN true;
END $$;

-- The statements that roir.strict sends. about: the result of roir.apart. key: values as texts that all servers read
-- alike.
--     unnamed: finds the entries that no intent names.  named: finds each shard's primary keys that intents name, as
--     SQL.  before, after: the statement for a shard, around these keys.  definition, result: its columns here.
CREATE FUNCTION roir.strict_statements(about jsonb, view regclass, key jsonb, OUT unnamed text, OUT named text,
                                       OUT before text,
                                       OUT after text, OUT definition text, OUT result text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH part AS (
        SELECT c.position, c.value ->> 'source' AS name, c.value ->> 'type' AS type, c.value ->> 'cast' AS base,
               c.value ->> 'equals' AS equals, (c.value -> 'primary_key')::boolean AS in_primary_key,
               c.value ->> 'source' = about ->> 'shard' AS is_shard,
               CASE WHEN (c.value -> 'domain')::boolean THEN '::' || (c.value ->> 'cast') ELSE '' END AS to_base_type,
               -- A literal of type name has a collation of its own.
               concat(c.value ->> 'cast', ' COLLATE ' || (c.value ->> 'collation')) AS literal_type
          FROM jsonb_array_elements(about -> 'columns') WITH ORDINALITY AS c (value, position)),
    compared AS (
        SELECT p.*, row_number() OVER (PARTITION BY p.in_primary_key AND NOT p.is_shard ORDER BY p.position) AS number,
               CASE WHEN NOT key ? p.name THEN NULL
                    WHEN key ->> p.name IS NULL THEN format('s.%I IS NOT DISTINCT FROM NULL', p.name)
                    ELSE format('s.%I%s %s %L::%s', p.name, p.to_base_type, p.equals, key ->> p.name, p.literal_type)
               END AS condition
          FROM part p),
    rest AS (SELECT c.* FROM compared c WHERE c.in_primary_key AND NOT c.is_shard),
    joined AS (
        SELECT (SELECT string_agg(c.condition, ' AND ') FROM compared c) AS ours,
               (SELECT string_agg(' AND ' || c.condition, '') FROM compared c WHERE NOT c.is_shard) AS theirs,
               (SELECT string_agg(format('a.%1$I %2$s s.%1$I', c.name, c.equals), ' AND ')
                  FROM compared c WHERE c.in_primary_key) AS same,
               (SELECT string_agg(format('s.%I', c.name), ', ' ORDER BY c.number) FROM rest c) AS primary_key,
               format('roir_data.g%s_announced', about ->> 'generation') AS intents)
    SELECT format('SELECT s.* FROM %1$s s WHERE %2$s '
                  'AND NOT EXISTS (SELECT FROM (SELECT s.* FROM %3$s s WHERE %2$s) a WHERE %4$s)',
                  view, j.ours, j.intents, j.same),
           format('SELECT a.shard, concat_ws('', '', %s) AS keys '
                  'FROM (SELECT DISTINCT s.%I AS shard, %s FROM %s s WHERE %s) '
                  'a (shard, %s) GROUP BY a.shard ORDER BY a.shard',
                  (SELECT string_agg(format('format(''pg_catalog.unnest(%%L::text[])'', array_agg(concat(a.n%s)))',
                                            c.number), ', ' ORDER BY c.number)
                     FROM rest c), about ->> 'shard', j.primary_key, j.intents, j.ours,
                  (SELECT string_agg(format('n%s', c.number), ', ' ORDER BY c.number) FROM rest c)),
           format('s.* FROM roir_shard.home h LEFT JOIN (SELECT true, %s FROM %s s JOIN ROWS FROM (',
                  (SELECT string_agg(format('s.%I', c.name), ', ' ORDER BY c.position) FROM part c
                   WHERE NOT c.is_shard),
                  about ->> 'table'),
           format(') n (%s) ON %s%s) s ON true',
                  (SELECT string_agg(format('n%s', c.number), ', ' ORDER BY c.number) FROM rest c),
                  (SELECT string_agg(format('s.%I%s %s n.n%s::%s', c.name, c.to_base_type, c.equals, c.number,
                                            c.literal_type),
                                     ' AND ') FROM rest c), j.theirs),
           (SELECT string_agg(format('c%s %s', c.position, c.type), ', ' ORDER BY c.position) FROM part c
            WHERE NOT c.is_shard),
           (SELECT string_agg(CASE WHEN c.is_shard THEN '$1' ELSE format('d.c%s', c.position) END, ', '
                              ORDER BY c.position)
              FROM part c)
      FROM joined j
$$;

-- The entries of an index with these values of the key and the primary key, all of them or some, read strictly:
--     SELECT * FROM roir.strict(NULL::public.users_by_email, '{"email": "x@y"}')
-- JSON's null finds NULL. Text is read under the settings below, so that all servers read it alike. Needs dblink,
-- SELECT on the index, and for each shard a foreign server of its name that the caller may use. STABLE: entries and
-- intents are of one snapshot, that of the calling query. A shard is read afterwards, in a session of its own, so its
-- snapshot is younger; a foreign table's could be older. Only shards that intents name are read, one after the other.
CREATE FUNCTION roir.strict(index anyelement, key jsonb) RETURNS SETOF anyelement
LANGUAGE plpgsql STABLE ROWS 10
SET search_path = pg_catalog, pg_temp SET DateStyle = 'ISO, YMD' SET IntervalStyle = postgres SET TimeZone = 'UTC'
SET extra_float_digits = 3 SET bytea_output = hex AS $$
DECLARE
    view regclass := (SELECT nullif(t.typrelid, 0) FROM pg_type t WHERE t.oid = pg_typeof(index));
    about jsonb := roir.apart(view);
    dblink text := (SELECT quote_ident(n.nspname) FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
                     WHERE e.extname = 'dblink');
    ticks jsonb := roir.ticks((about ->> 'generation')::bigint);
    texts jsonb := '{}';
    one record;
    how record;
    asked record;
    read text;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE feature_not_supported USING
            MESSAGE = 'strict reads need READ COMMITTED: the snapshot of this transaction is older than the read',
            HINT = 'Read in a READ COMMITTED transaction.';
    ELSIF dblink IS NULL THEN
        RAISE undefined_object USING MESSAGE = 'strict reads in SQL need the extension dblink',
            HINT = 'CREATE EXTENSION dblink';
    ELSIF coalesce(jsonb_typeof(key), '') <> 'object' OR key = '{}' THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('index %s: give at least one key column with its value, as JSON: {"column": value}', view);
    END IF;
    FOR one IN SELECT k.name, k.value, c.value ->> 'cast' AS type
                 FROM jsonb_each(key) k (name, value)
                 LEFT JOIN jsonb_array_elements(about -> 'columns') WITH ORDINALITY AS c (value, position)
                        ON c.value ->> 'source' = k.name AND c.position <= (about -> 'identity')::int LOOP
        read := NULL;
        IF one.type IS NULL THEN
            RAISE undefined_column USING
                MESSAGE = (SELECT format('index %s: %s isn''t a column of its key or of the primary key: %s', view,
                                         (SELECT string_agg(quote_ident(k.name), ', ')
                                            FROM jsonb_object_keys(key) k (name)
                                           WHERE NOT k.name = ANY (array_agg(c.value ->> 'source'))),
                                         string_agg(quote_ident(c.value ->> 'source'), ', ' ORDER BY c.position))
                             FROM jsonb_array_elements(about -> 'columns') WITH ORDINALITY AS c (value, position)
                            WHERE c.position <= (about -> 'identity')::int),
                HINT = 'Put other conditions into the query around roir.strict.';
        ELSIF one.value <> 'null' THEN
            EXECUTE CASE WHEN one.type = 'jsonb' THEN format('SELECT concat(%L::jsonb)', one.value)
                         WHEN jsonb_typeof(one.value) IN ('array', 'object')
                         THEN format('SELECT concat(r.x) FROM jsonb_to_record(%L) r (x %s)',
                                     jsonb_build_object('x', one.value), one.type)
                         ELSE format('SELECT concat(%L::%s)', one.value #>> '{}', one.type) END INTO read;
        END IF;
        texts := texts || jsonb_build_object(one.name, read);
    END LOOP;
    how := roir.strict_statements(about, view, texts);
    RETURN QUERY EXECUTE how.unnamed;
    FOR asked IN EXECUTE how.named LOOP
        IF NOT EXISTS (SELECT FROM pg_foreign_server f WHERE f.srvname = asked.shard) THEN
            RAISE undefined_object USING
                MESSAGE = format('shard %I can''t be asked: there is no foreign server of that name', asked.shard),
                HINT = format('CREATE SERVER %I FOREIGN DATA WRAPPER dblink_fdw OPTIONS (host …, dbname …)',
                              asked.shard);
        END IF;
        EXECUTE format('SELECT %L = ANY (%s.dblink_get_connections())', asked.shard, dblink) INTO read;
        IF read = 'true' THEN
            RAISE object_in_use USING
                MESSAGE = format('a connection of dblink has the name of shard %I; it may be in a transaction',
                                 asked.shard),
                HINT = format('SELECT dblink_disconnect(%L)', asked.shard);
        END IF;
        BEGIN
            RETURN QUERY EXECUTE format(
                'SELECT %s FROM %s.dblink($1, $2) AS d (token text, tick bigint, standby boolean, present boolean, %s) '
                'WHERE CASE WHEN roir.is_truth($1, $3, d.token, $4, d.tick, d.standby) THEN d.present END',
                how.result, dblink, how.definition)
                USING asked.shard, concat(
                    -- Another table may have taken the name of ours.
                    format('SELECT h.token::text, (SELECT o.tick FROM roir_shard.outbox o WHERE o.name = %L AND '
                           'o.source = pg_catalog.to_regclass(%L)), pg_catalog.pg_is_in_recovery(), ',
                           about #>> ARRAY['shards', asked.shard, 'outbox'], about ->> 'table'),
                    how.before, asked.keys, how.after),
                about #>> ARRAY['shards', asked.shard, 'home'], (ticks ->> asked.shard)::bigint;
        EXCEPTION WHEN connection_exception OR connection_failure OR sqlclient_unable_to_establish_sqlconnection THEN
            -- The library's message contains parts of a DSN, so it isn't shown.
            RAISE sqlclient_unable_to_establish_sqlconnection USING
                MESSAGE = format('shard %I can''t be asked: no connection to it', asked.shard),
                HINT = 'Retry once it can be reached again.';
        END;
    END LOOP;
END $$;
