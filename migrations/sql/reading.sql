-- Reading a table's rows through an index: its entries first, then each row by its primary key in a statement of its
-- own, so that the planner knows the values and opens the row's partition alone. A join opens all of them.  roir.rows
-- runs with the caller's rights and settings, under the caller's row security: the functions that policies call must
-- find what they find in the caller's own queries. It is STABLE, so that all its queries have the snapshot of the
-- calling statement: a row that moves to another partition meanwhile is found once.

-- The statements that roir.rows sends, from the catalogs alone, which all roles may read. source: the table's row type.
-- view: the index's view, or another relation with the columns of the table's primary key. key: values of the index's
-- key, NULL if the entries are given.
--     look_up: the array of the entries with the key's values; $1 is the key. No value is cut or rounded to the
--     length of its column: a value that is in no row finds none.
--     statement: the rows of $1, which is an entry if one_by_one, otherwise an array of entries. For an entry of a roir
--     index the rows must also have the entry's key: the entry may be out of date.
CREATE FUNCTION roir.reading(source oid, view oid, key jsonb, OUT look_up text, OUT statement text,
                             OUT one_by_one boolean, OUT relation oid)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    primary_key oid;
    base text;
    indexed oid;
    columns text;
    unknown text;
    missing text;
    usage text := 'SELECT * FROM roir.rows(NULL::shop.orders, '
                  'ARRAY(SELECT i FROM shop.orders_by_customer i WHERE …))';
BEGIN
    SELECT c.oid, c.relkind = 'p' INTO relation, one_by_one
      FROM pg_type t JOIN pg_class c ON c.oid = t.typrelid AND c.relkind IN ('r', 'p') WHERE t.oid = source;
    view := nullif(view, 0);
    IF relation IS NULL OR view IS NULL THEN
        RAISE wrong_object_type USING
            MESSAGE = CASE WHEN view IS NULL THEN 'the entries are no rows of an index'
                           ELSE format('%s is not the row type of a table', format_type(source, NULL)) END,
            HINT = usage;
    END IF;
    SELECT c.relname INTO base
      FROM pg_rewrite r
      JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid AND d.refclassid = 'pg_class'::regclass
      JOIN pg_class c ON c.oid = d.refobjid AND c.relkind = 'p' AND c.relnamespace = 'roir_data'::regnamespace
     WHERE r.ev_class = view LIMIT 1;
    SELECT i.indexrelid INTO primary_key FROM pg_index i WHERE i.indrelid = relation AND i.indisprimary;
    IF base IS NOT NULL THEN
        SELECT d.refobjid INTO indexed
          FROM pg_rewrite r
          JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
                               AND d.refclassid = 'pg_class'::regclass
           AND d.refobjid <> r.ev_class
         WHERE r.ev_class = to_regclass(format('roir_data.%s_source', base))::oid LIMIT 1;
    END IF;
    IF key IS NOT NULL AND indexed IS DISTINCT FROM relation THEN
        RAISE wrong_object_type USING
            MESSAGE = format('%s is not a roir index of table %s', view::regclass, relation::regclass),
            HINT = CASE WHEN indexed IS NULL THEN '`roir status` lists all indexes'
                        ELSE format('It is one of %1$s: roir.rows(NULL::%1$s, …)', indexed::regclass) END;
    ELSIF key IS NOT NULL AND (jsonb_typeof(key) <> 'object' OR key = '{}') THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('index %s: give at least one key column with its value, as JSON: {"column": value}',
                             view::regclass);
    END IF;
    WITH part AS MATERIALIZED (
        SELECT x.in_table, k.position, n.name, e.type, e.type_name, e.literal_type,
               (SELECT format('OPERATOR(%I.%s)', n.nspname, o.oprname)
                  FROM pg_opclass c
                  JOIN pg_amop m ON m.amopfamily = c.opcfamily AND m.amoplefttype = c.opcintype
                   AND m.amoprighttype = c.opcintype AND m.amopstrategy = 3
                  JOIN pg_operator o ON o.oid = m.amopopr
                  JOIN pg_namespace n ON n.oid = o.oprnamespace
                 WHERE c.oid = k.opclass) AS equals,
               -- A domain over an enum isn't equal to the enum, which the entry has.
               (SELECT '::' || e.type_name FROM pg_attribute t JOIN pg_type y ON y.oid = t.atttypid
                 WHERE t.attrelid = relation AND t.attname = n.name AND NOT t.attisdropped
                  AND y.typtype = 'd') AS to_base_type
          FROM unnest(ARRAY[primary_key, to_regclass(format('roir_data.%s_key', base))::oid], ARRAY[true, false])
               AS x (oid, in_table)
          JOIN pg_index i ON i.indexrelid = x.oid
         CROSS JOIN LATERAL unnest(i.indkey[0:i.indnkeyatts - 1], i.indclass[0:i.indnkeyatts - 1])
               WITH ORDINALITY AS k (attnum, opclass, position)
         -- A view of entries has the columns of its base in their order.
         CROSS JOIN LATERAL (SELECT (SELECT a.attname::text FROM pg_attribute a WHERE a.attnum = k.attnum
                                        AND a.attrelid = CASE WHEN x.in_table THEN relation ELSE view END) AS name) n
          LEFT JOIN LATERAL (
               SELECT a.atttypid AS type, y.name AS type_name,
                      -- A literal of type name has a collation of its own.
                      concat(y.name, (SELECT format(' COLLATE %I.%I', m.nspname, c.collname)
                                        FROM pg_collation c JOIN pg_namespace m ON m.oid = c.collnamespace
                                       WHERE c.oid = a.attcollation)) AS literal_type
                 FROM pg_attribute a
                 JOIN (SELECT t.oid, format('%I.%I', s.nspname, t.typname) AS name
                         FROM pg_type t JOIN pg_namespace s ON s.oid = t.typnamespace) y ON y.oid = a.atttypid
                WHERE a.attrelid = view AND a.attname = n.name AND NOT a.attisdropped) e ON true),
    compared AS (
        SELECT p.*, concat(format('s.%I', p.name), p.to_base_type) AS ours,
               format(CASE WHEN one_by_one THEN '($1).%I' ELSE 'e.%I' END, p.name) AS theirs
          FROM part p
         WHERE p.in_table OR indexed = relation
               AND NOT EXISTS (SELECT FROM part x WHERE x.in_table AND x.name = p.name)
               -- An expression is no column of the table.
               AND EXISTS (SELECT FROM pg_attribute t
                            WHERE t.attrelid = relation AND t.attname = p.name AND NOT t.attisdropped))
    SELECT (SELECT string_agg(CASE WHEN c.in_table THEN format('%s %s %s', c.ours, c.equals, c.theirs)
                   ELSE format('(%1$s %2$s %3$s OR %1$s IS NOT DISTINCT FROM NULL AND %3$s IS NOT DISTINCT FROM NULL)',
                               c.ours, c.equals, c.theirs) END, ' AND ' ORDER BY c.in_table DESC, c.position)
              FROM compared c),
           (SELECT string_agg(quote_ident(c.name), ', ') FROM compared c WHERE c.type IS NULL),
           -- A literal, so that the planner knows the value; the server reads an array or an object.
           (SELECT string_agg(CASE WHEN key -> p.name = 'null' THEN format('v.%I IS NOT DISTINCT FROM NULL', p.name)
                   WHEN p.type = 'jsonb'::regtype
                       THEN format('v.%I %s %L::pg_catalog.jsonb', p.name, p.equals, key -> p.name)
                   WHEN jsonb_typeof(key -> p.name) IN ('array', 'object')
                   THEN format('v.%1$I %2$s (SELECT r.%1$I FROM pg_catalog.jsonb_to_record($1) r (%1$I %3$s))', p.name,
                               p.equals, p.literal_type)
                   ELSE format('v.%I %s %L::%s', p.name, p.equals, key ->> p.name, p.literal_type) END, ' AND ')
              FROM part p WHERE NOT p.in_table AND key ? p.name),
           (SELECT string_agg(quote_ident(p.name), ', ' ORDER BY p.position) FROM part p WHERE NOT p.in_table),
           (SELECT string_agg(quote_ident(k.name), ', ') FROM jsonb_object_keys(key) k (name)
             WHERE NOT EXISTS (SELECT FROM part p WHERE NOT p.in_table AND p.name = k.name))
      INTO statement, missing, look_up, columns, unknown;
    IF statement IS NULL OR missing IS NOT NULL THEN
        RAISE undefined_column USING
            MESSAGE = CASE WHEN missing IS NULL THEN format('table %s has no primary key', relation::regclass)
                           ELSE format('%s lacks %s, a part of the primary key of table %s', view::regclass, missing,
                                       relation::regclass) END, HINT = usage;
    ELSIF unknown IS NOT NULL THEN
        RAISE undefined_column USING
            MESSAGE = format('index %s: %s isn''t a column of its key or of the primary key: %s',
                             view::regclass, unknown, columns),
            HINT = format('For a condition on other columns give the entries: '
                          'roir.rows(NULL::%s, ARRAY(SELECT i FROM %s i WHERE …))',
                          relation::regclass, view::regclass);
    END IF;
    statement := format(CASE WHEN one_by_one THEN 'SELECT s.* FROM %s s WHERE %s'
                         ELSE 'SELECT s.* FROM pg_catalog.unnest($1) e JOIN ONLY %s s ON %s' END,
                        -- As regclass a temporary table would have no schema here.
                        (SELECT format('%I.%I', n.nspname, c.relname)
                           FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                          WHERE c.oid = relation), statement);
    -- v alone would be the column v, if there is one.
    look_up := format('SELECT ARRAY(SELECT (v.*)::%1$s FROM %1$s v WHERE %2$s) AS entries', view::regclass, look_up);
END $$;

-- The rows of a table that belong to these entries, which are taken in the same statement:
--     SELECT * FROM roir.rows(NULL::shop.orders,
--                             ARRAY(SELECT i FROM shop.orders_by_customer i WHERE i.customer_id > 4700))
-- Needs SELECT on the table.
CREATE FUNCTION roir.rows(source anyelement, entries anycompatiblearray) RETURNS SETOF anyelement
LANGUAGE plpgsql STABLE ROWS 100 AS $$
DECLARE
    how pg_catalog.record;
    entry pg_catalog.record;
    returned bigint;
    total bigint := 0;
BEGIN
    IF entries IS NULL THEN
        RETURN;
    END IF;
    SELECT r.* INTO how
      FROM pg_catalog.pg_type a
      LEFT JOIN pg_catalog.pg_type t ON t.oid OPERATOR(pg_catalog.=) a.typelem
     CROSS JOIN LATERAL roir.reading(pg_catalog.pg_typeof(source), t.typrelid, NULL) r
     WHERE a.oid OPERATOR(pg_catalog.=) pg_catalog.pg_typeof(entries)::pg_catalog.oid;
    IF how.one_by_one THEN
        FOREACH entry IN ARRAY entries LOOP
            RETURN QUERY EXECUTE how.statement USING entry;
            GET DIAGNOSTICS returned = ROW_COUNT;
            total := total OPERATOR(pg_catalog.+) returned;
        END LOOP;
    ELSE
        RETURN QUERY EXECUTE how.statement USING entries;
        GET DIAGNOSTICS total = ROW_COUNT;
    END IF;
    -- The lock on the rows' table is younger than the snapshot, unlike a query's: a rewrite may have come in between.
    IF total OPERATOR(pg_catalog.<) pg_catalog.cardinality(entries) THEN
        PERFORM roir.refuse_rewritten(how.relation);
    END IF;
END $$;

-- The rows of a table by values of an index's key and primary key, all of them or some:
--     SELECT * FROM roir.rows(NULL::shop.orders, 'shop.orders_by_customer', '{"customer_id": 4711}')
-- JSON's null finds NULL. A text is read as any literal of that type is, under the settings of the caller. Needs SELECT
-- on the table and on the index.
CREATE FUNCTION roir.rows(source anyelement, index regclass, key jsonb) RETURNS SETOF anyelement
LANGUAGE plpgsql STABLE ROWS 100 AS $$
DECLARE
    how pg_catalog.record;
    looked_up pg_catalog.record;
    entry pg_catalog.record;
    returned bigint;
    total bigint := 0;
BEGIN
    how := roir.reading(pg_catalog.pg_typeof(source), index, coalesce(key, '{}'));
    EXECUTE how.look_up INTO looked_up USING key;
    IF how.one_by_one THEN
        FOREACH entry IN ARRAY looked_up.entries LOOP
            RETURN QUERY EXECUTE how.statement USING entry;
            GET DIAGNOSTICS returned = ROW_COUNT;
            total := total OPERATOR(pg_catalog.+) returned;
        END LOOP;
    ELSE
        RETURN QUERY EXECUTE how.statement USING looked_up.entries;
        GET DIAGNOSTICS total = ROW_COUNT;
    END IF;
    -- As above.
    IF total OPERATOR(pg_catalog.<) pg_catalog.cardinality(looked_up.entries) THEN
        PERFORM roir.refuse_rewritten(how.relation);
    END IF;
END $$;
