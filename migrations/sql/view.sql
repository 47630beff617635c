-- The view of an index: it shows readers the entries, and restricts their rights.

-- Guards an index's view after a publish: true if the caller's own snapshot sees the generation as published, an
-- error if it is older and may not see every entry. layout: how often segments had been swapped for new ones, or
-- entries of rows had come late, when the view was made; an older snapshot would miss these. STABLE, so that it looks
-- with the snapshot of the query that calls it; a row, not a transaction id, since it must still be right in a database
-- that was restored from a dump. PARALLEL SAFE, or it would keep every query of the view from a parallel plan.
CREATE FUNCTION roir.published(generation bigint, layout integer DEFAULT 0) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
                WHERE g.id = published.generation AND g.layout >= published.layout
                  -- A retired generation also has all entries. But over shards it may lack some, and the snapshot shows
                  -- the freshness of another generation.
                  AND (g.status = 'active' OR g.status = 'retired' AND i.shard_table IS NULL)) THEN
        RETURN true;
    END IF;
    RAISE serialization_failure
        USING MESSAGE = 'could not serialize access: the index was published after the transaction''s snapshot',
              DETAIL = format('roir generation %s', published.generation),
              HINT = 'Retry the transaction. If that fails too, the database was restored without the rows of '
                     'roir''s own '
                     'tables. Restore it whole, or remove the indexes: DROP SCHEMA roir, roir_data CASCADE.';
END $$;

-- Functions in a view are called with the reader's rights; the reader needs no right to use their schema.
GRANT EXECUTE ON FUNCTION roir.published(bigint, integer) TO PUBLIC;

-- A condition in SQL, true of the entries to be shown; `alias`: of a row of the base. NULL if all are shown: no
-- partition is leaving or joining. removed: also hides the entries of partitions whose entries were removed, since
-- older snapshots still see them.
CREATE FUNCTION roir.is_shown(generation bigint, alias text, removed boolean DEFAULT false) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('(NOT (%s) OR %s)',
                  string_agg(roir.entry_condition(g.entry, p.condition, alias), ' OR ' ORDER BY p.id),
                  roir.has_row(g.entry, i.source_oid::oid, alias))
      FROM roir.source_partition p
      JOIN roir.generation g ON g.id = p.generation_id
      JOIN roir.index i ON i.id = g.index_id
     WHERE p.generation_id = is_shown.generation AND p.status IN ('leaving', 'joining')
       AND (p.removed_xid IS NULL OR is_shown.removed)
     GROUP BY g.entry, i.source_oid
$$;

-- An error if the caller's transaction reads by one snapshot: it would decide by what was committed before that.
CREATE FUNCTION roir.check_isolation(caller text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE feature_not_supported USING
            MESSAGE = format('%s needs a READ COMMITTED transaction: it must see all that is committed', caller);
    END IF;
END $$;

-- Keeps, until the end of the transaction, all that an index's view is made of: which generation is active, its layout,
-- its partitions that are leaving or joining. Each transaction that changes any of this, or the view, calls this first
-- and only then reads what it decides by. Order of locks: the source, this, the view. The view's own lock wouldn't do:
-- before the first publish there is no view.
CREATE FUNCTION roir.hold_view(index bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM roir.check_isolation('changing an index');
    PERFORM FROM roir.index i WHERE i.id = hold_view.index FOR NO KEY UPDATE;
END $$;

-- The statement that makes a view show a generation: guarded or not, and without entries of partitions that are leaving
-- or joining. name: quoted, as it is written. Copies the options of a view that is replaced, which OR REPLACE would
-- reset. The caller holds the view's lock, and roir.hold_view.
CREATE FUNCTION roir.view_statement(name text, generation bigint, guarded boolean, replaced regclass) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT concat('CREATE ', CASE WHEN replaced IS NOT NULL THEN 'OR REPLACE ' END, 'VIEW ', name,
        (SELECT format(' WITH (%s)', string_agg(format('%I = %L', split_part(o, '=', 1), split_part(o, '=', 2)), ', '))
           FROM pg_class c, unnest(c.reloptions) o WHERE c.oid = replaced HAVING count(*) > 0),
        ' AS SELECT ',
        (SELECT string_agg(format('b.c%s AS "%s"', c.position, replace(c.value ->> 'source', '"', '""')), ', '
                           ORDER BY c.position)
           FROM jsonb_array_elements(g.entry -> 'columns') WITH ORDINALITY AS c (value, position)),
        format(' FROM (SELECT EXISTS (SELECT FROM roir_data.g%1$s)) r, roir_data.g%1$s_shown b', g.id),
        (SELECT ' WHERE ' || string_agg(w.condition, ' AND ' ORDER BY w.number)
           -- As a sub-select it runs once per query, also in a parallel plan.
           FROM (VALUES (1, CASE WHEN guarded THEN
                                 format('(SELECT roir.published(%s))', concat_ws(', ', g.id, nullif(g.layout, 0))) END),
                        (2, h.hiding)) AS w (number, condition) WHERE w.condition IS NOT NULL))
      FROM roir.generation g CROSS JOIN LATERAL (SELECT roir.is_shown(g.id, 'b', true) AS hiding) h
     WHERE g.id = view_statement.generation
$$;

-- The view that shows a generation's entries, if the generation is active: the view with its index's name, or else the
-- same view under the name that a user gave it; never another view that has taken the index's name.
CREATE FUNCTION roir.view_of(generation bigint) RETURNS regclass
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.oid::regclass
      FROM roir.generation x
      JOIN roir.index i ON i.id = x.index_id
      JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass
                      AND d.refobjid = to_regclass(format('roir_data.g%s', x.id))
      JOIN pg_rewrite r ON r.oid = d.objid
      JOIN pg_class c ON c.oid = r.ev_class AND c.relkind = 'v'
      JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname <> 'roir_data'
     WHERE x.id = view_of.generation AND x.status = 'active'
     ORDER BY n.nspname = i.schema_name AND c.relname = i.name DESC, c.oid LIMIT 1
$$;

-- Replaces a generation's view, if the generation is active. The view is guarded if it was before, or if `guard` is
-- true. It hides the entries of partitions that are leaving or joining.
CREATE FUNCTION roir.refresh_view(generation bigint, guard boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v record;
    guarded boolean;
BEGIN
    PERFORM roir.hold_view(x.index_id) FROM roir.generation x WHERE x.id = generation;
    SELECT c.oid, c.oid::regclass::text AS name, c.relnamespace::regnamespace::text AS schema INTO v
      FROM pg_class c WHERE c.oid = roir.view_of(generation);
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- This changes nothing, and locks only the view: LOCK TABLE would lock all relations that the view reads, the
    -- source too.
    EXECUTE format('ALTER VIEW %s SET SCHEMA %s', v.name, v.schema);
    guarded := guard OR EXISTS (
        SELECT FROM pg_rewrite r JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
         WHERE r.ev_class = v.oid AND d.refclassid = 'pg_proc'::regclass
           AND d.refobjid = 'roir.published(bigint, integer)'::regprocedure);
    EXECUTE roir.view_statement(v.name, generation, guarded, v.oid);
    IF to_regclass(v.name) IS DISTINCT FROM v.oid::regclass THEN
        RAISE lock_not_available USING MESSAGE = format('view %s was renamed meanwhile', v.name);
    END IF;
END $$;

-- From now on only snapshots that see this transaction may read an active or retired generation: an older one may lack
-- entries of rows that it sees. Replaces the view.
CREATE FUNCTION roir.refuse_older(generation bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM roir.hold_view(x.index_id) FROM roir.generation x WHERE x.id = generation;
    UPDATE roir.generation x
       SET layout = layout + 1, laid_out_at = clock_timestamp(), mode_xid = pg_current_xact_id()::text
     WHERE x.id = generation AND x.status IN ('active', 'retired');
    PERFORM roir.refresh_view(generation, guard => true);
END $$;

-- Makes the view of entries, roir_data.g…_shown, and so the index's view above it, read-only. Otherwise a role with
-- more rights on the index's view could write entries, or lock them, with our rights; for LOCK TABLE a DELETE right is
-- enough. The server checks a view's owner for the relations below the view, so our role gives up all but SELECT on the
-- inner view. A superuser passes all checks; so the inner view then gets another owner, pg_write_server_files, which
-- may only read the entries. Its members can become superuser anyway (they write the server's files), and so gain
-- nothing by owning a view.
CREATE FUNCTION roir.only_read(generation bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    own record;
BEGIN
    SELECT v.oid::regclass AS view, v.relowner AS reads, b.oid::regclass AS base, b.relowner AS owner,
           r.rolname AS name,
           r.rolsuper AS mighty, has_table_privilege(b.relowner, v.oid, 'INSERT, UPDATE, DELETE, TRUNCATE') AS more,
           -- A dump can be restored without its grants.
           CASE WHEN r.rolsuper THEN has_table_privilege('pg_write_server_files', b.oid, 'SELECT')
                ELSE has_table_privilege(b.relowner, v.oid, 'SELECT') END AS readable
      INTO own
      FROM pg_class v JOIN pg_class b ON b.oid = to_regclass(format('roir_data.g%s', generation))
      JOIN pg_roles r ON r.oid = b.relowner
     WHERE v.oid = to_regclass(format('roir_data.g%s_shown', generation));
    IF own.mighty AND (own.reads <> 'pg_write_server_files'::regrole OR NOT own.readable) THEN
        EXECUTE format('GRANT SELECT ON %s TO pg_write_server_files', own.base);
        EXECUTE format('ALTER VIEW %s OWNER TO pg_write_server_files', own.view);
    ELSIF NOT own.mighty AND (own.more OR own.reads <> own.owner OR NOT own.readable) THEN
        EXECUTE format('ALTER VIEW %s OWNER TO %I', own.view, own.name);
        EXECUTE format('REVOKE ALL ON %s FROM %I', own.view, own.name);
        EXECUTE format('GRANT SELECT ON %s TO %I', own.view, own.name);
    END IF;
END $$;

-- True if a role with more rights on a generation's view than to read can use these on the entries.
CREATE FUNCTION roir.is_open(generation bigint, view oid) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT NOT EXISTS (SELECT FROM pg_rewrite r
                         JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
                        WHERE r.ev_class = v.oid AND d.refclassid = 'pg_class'::regclass AND d.refobjid = s.oid)
           OR has_table_privilege(v.relowner, s.oid, x.more)
              AND has_table_privilege(s.relowner, to_regclass(format('roir_data.g%s', generation))::oid, x.more)
      FROM (VALUES ('INSERT, UPDATE, DELETE, TRUNCATE')) x (more)
      JOIN pg_class v ON v.oid = view
      LEFT JOIN pg_class s ON s.oid = to_regclass(format('roir_data.g%s_shown', generation))
$$;
