-- Looking rows up for a statement that is still to be planned: its client adds the primary keys found as constants, so
-- that the planner opens only these rows' partitions (client/). The statement keeps its own condition. So the entries
-- found must contain all rows that it wants; what is found in excess does no harm.

-- Whether entries of a generation may be missing: a verification found differences that aren't repaired yet. NULL if
-- readers see another generation. In excess: a verification that is under way and has found something counts, whatever
-- it has repaired.
CREATE FUNCTION roir.is_doubtful(generation bigint) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    index bigint;
    doubtful boolean;
BEGIN
    -- Each look-up asks this; the rest is seldom needed.
    SELECT g.index_id, EXISTS (
               SELECT FROM roir.verification v
                WHERE v.index_id = g.index_id AND v.generation_id = g.id
                  AND (v.finished_at IS NULL
                       OR v.missing + v.extra + v.different + v.corrupt + v.damaged + v.duplicate > v.repaired))
      INTO index, doubtful
      FROM roir.generation g WHERE g.id = is_doubtful.generation AND g.status = 'active';
    IF doubtful IS NOT TRUE THEN
        RETURN doubtful;
    END IF;
    RETURN EXISTS (SELECT FROM roir.verification v
                    WHERE v.index_id = index AND v.generation_id = is_doubtful.generation
                      AND CASE WHEN v.finished_at IS NULL
                               THEN EXISTS (SELECT FROM roir.discrepancy d WHERE d.verification_id = v.id)
                               ELSE v.missing + v.extra + v.different + v.corrupt + v.damaged + v.duplicate > v.repaired
                          END
                      AND v.id >= coalesce((SELECT max(x.id) FROM roir.verification x
                                             WHERE x.index_id = index AND x.generation_id = is_doubtful.generation
                                               AND x.complete), 0));
END $$;

-- The query of roir.look_up, with the same arguments: with constants, or, if it gets a name, as a statement that
-- prepares it. NULL if the B-tree can't serve a comparison with a value's type.
CREATE FUNCTION roir.look_up_query(generation bigint, view oid, source oid, named text, columns text[], kinds text[],
                                   accepts text[], identity text[], most integer, types text[], literals text[],
                                   name text) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    own pg_catalog.oid[];
    type pg_catalog.text;
    value pg_catalog.text;
    parameters pg_catalog.text[];
    selected pg_catalog.text;
    readable pg_catalog.text;
    wanted pg_catalog.text;
BEGIN
    FOR n IN 1 .. pg_catalog.cardinality(columns) LOOP
        own := pg_catalog.string_to_array(types[n], ',');
        value := NULL;
        IF NOT own OPERATOR(pg_catalog.<@) accepts[n]::pg_catalog.oid[] THEN
            RETURN NULL;
        ELSIF pg_catalog.cardinality(own) OPERATOR(pg_catalog.>) 1 THEN
            -- A value without a type gets the column's only if all are without.
            IF own OPERATOR(pg_catalog.&&) '{705}' THEN
                RETURN NULL;
            END IF;
            FOR m IN 1 .. pg_catalog.cardinality(own) LOOP
                value := pg_catalog.concat_ws(', ', value, pg_catalog.format('(%s::pg_catalog.text[])[%s]::%s',
                             literals[n], m, pg_catalog.format_type(own[m], -1)));
            END LOOP;
            value := pg_catalog.concat('ARRAY[', value, ']');
        ELSIF own IS NOT NULL THEN
            type := CASE WHEN own[1] OPERATOR(pg_catalog.<>) 705 THEN pg_catalog.concat(
                        pg_catalog.format_type(own[1], -1),
                        CASE WHEN kinds[n] OPERATOR(pg_catalog.=) 'IN' THEN '[]' END) END;
            parameters := pg_catalog.array_append(parameters, coalesce(type, 'unknown'));
            value := CASE WHEN name IS NOT NULL THEN pg_catalog.concat('$', pg_catalog.cardinality(parameters))
                          WHEN type IS NULL THEN literals[n]
                          ELSE pg_catalog.concat(literals[n], '::', type) END;
        END IF;
        wanted := pg_catalog.concat_ws(' AND ', wanted, pg_catalog.format(
            CASE WHEN kinds[n] OPERATOR(pg_catalog.=) 'IN' THEN 'v.%I = ANY (%s)' ELSE 'v.%I %3$s %2$s' END,
            columns[n], value, kinds[n]));
    END LOOP;
    FOR n IN 1 .. pg_catalog.cardinality(identity) LOOP
        selected := pg_catalog.concat_ws(', ', selected,
                                         pg_catalog.format('pg_catalog.format(''%%s'', v.%I)', identity[n]));
        readable := pg_catalog.concat_ws(' AND ', readable, pg_catalog.format(
                        'pg_catalog.has_column_privilege(%s::pg_catalog.oid, %L::pg_catalog.text, ''SELECT'')', source,
                        identity[n]));
    END LOOP;
    RETURN pg_catalog.concat(CASE WHEN name IS NOT NULL THEN pg_catalog.concat('PREPARE ', name,
               CASE WHEN parameters IS NOT NULL
                    THEN pg_catalog.format('(%s)', pg_catalog.array_to_string(parameters, ', ')) END, ' AS ') END,
        pg_catalog.format(
        'SELECT CASE WHEN NOT pg_catalog.starts_with(pg_catalog.current_setting(''datestyle''), ''ISO'') '
        'OR pg_catalog.current_setting(''intervalstyle'') OPERATOR(pg_catalog.<>) ''postgres'' '
        'OR pg_catalog.current_setting(''extra_float_digits'')::pg_catalog.int4 OPERATOR(pg_catalog.<) 1 '
        'THEN ''{settings}''::pg_catalog.text[] '
        'WHEN roir.is_doubtful(%1$s) IS NOT FALSE '
        'THEN CASE WHEN roir.is_doubtful(%1$s) THEN ''{doubtful}'' ELSE ''{gone}'' END::pg_catalog.text[] '
        'WHEN (pg_catalog.to_regclass(%2$L)::pg_catalog.oid OPERATOR(pg_catalog.=) %3$s) IS NOT TRUE THEN ''{name}'' '
        'WHEN NOT (%4$s) THEN ''{rights}'' '
        'ELSE ARRAY(SELECT ARRAY[%5$s] FROM %6$s v WHERE %7$s LIMIT %8$s) END',
        generation, named, source, readable, selected, view::pg_catalog.regclass, wanted,
        most OPERATOR(pg_catalog.+) 1));
END $$;

-- The primary keys of a table's rows whose entries meet conditions, as texts. It never fails because of the index, so
-- that it never ends the caller's transaction. Only cancellations, time-outs and the caller's own serialization
-- failures are errors.
--     generation, view, source: of the index, as `roir_client.registry` reads them.
--     named: the table's name as the caller's statement has it; it must mean the source.
--     columns, kinds: what is compared, and how: `=`, `IN` or `IS NULL`.
--     accepts: for each column, the types that its B-tree can be compared with, as an array of oids.
--     identity: the columns of the primary key.
--     most: of more rows, only one is returned in excess.
--     types: of each column's values, as oids with commas. NULL for `IS NULL`.
--     literals: the value, or an array of the values for `IN`, as a literal without a type. NULL for `IS NULL`.
-- Returns an array for each row, of its values in the order of the identity. If nothing is known, it is an array of
-- texts, why: type (of a value), settings (texts of values would be ambiguous), gone (another generation is shown),
-- doubtful, name, rights, or error, and what it says.
-- Runs with the caller's rights and settings: the conditions mean what they mean in the caller's statement. The session
-- keeps the plan of a query as a prepared statement: planning takes longer than looking up.
CREATE FUNCTION roir.look_up(generation bigint, view oid, source oid, named text, columns text[], kinds text[],
                             accepts text[], identity text[], most integer, types text[], literals text[])
RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    plan pg_catalog.text;
    run pg_catalog.text;
    own pg_catalog.text[];
    query pg_catalog.text;
    given pg_catalog.text;
    keys pg_catalog.text[];
    mixed pg_catalog.bool := false;
    detail pg_catalog.text;
    said pg_catalog.text;
    state pg_catalog.text;
BEGIN
    -- A list of one type is one parameter.
    IF 'IN' OPERATOR(pg_catalog.=) ANY (kinds) THEN
        FOR n IN 1 .. pg_catalog.cardinality(kinds) LOOP
            own := pg_catalog.string_to_array(types[n], ',');
            IF own[1] OPERATOR(pg_catalog.=) ALL (own) THEN
                types[n] := own[1];
            ELSIF own IS NOT NULL THEN
                mixed := true;
            END IF;
        END LOOP;
    END IF;
    BEGIN
        IF mixed THEN
            RAISE invalid_sql_statement_name;
        END IF;
        -- The name has all that the plan is made of, and what the view is called: as long as that is so, a plan that
        -- the server renews reads the same view.
        plan := pg_catalog.format('"roir %s"', pg_catalog.hash_record_extended(
            ROW(generation, view::pg_catalog.regclass::pg_catalog.text, source, named, columns, kinds, accepts,
                identity, most, types), 0));
        given := pg_catalog.array_to_string(literals, ', ');
        run := pg_catalog.concat('EXECUTE ', plan, CASE WHEN given OPERATOR(pg_catalog.<>) ''
                                                        THEN pg_catalog.format('(%s)', given) END);
        EXECUTE run INTO keys;
    EXCEPTION WHEN invalid_sql_statement_name THEN
        query := roir.look_up_query(generation, view, source, named, columns, kinds, accepts, identity, most, types,
                                    literals, plan);
        IF query IS NULL THEN
            RETURN '{type}';
        ELSIF mixed THEN
            EXECUTE query INTO keys;
        ELSE
            EXECUTE query;
            EXECUTE run INTO keys;
        END IF;
    END;
    -- Ends the block as a failure, which releases its locks: a publish locks first the source, then the view. If the
    -- caller kept a lock of the view, and then wrote to the source, both would wait for each other.
    RAISE SQLSTATE 'RO001';
EXCEPTION WHEN SQLSTATE 'RO001' THEN
    RETURN keys;
WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, said = MESSAGE_TEXT, state = RETURNED_SQLSTATE;
    -- The view refuses a snapshot that is older than the index. Any other such error is the caller's own.
    IF state OPERATOR(pg_catalog.=) '40001' AND NOT pg_catalog.starts_with(detail, 'roir generation') THEN
        RAISE;
    END IF;
    RETURN CASE WHEN roir.is_doubtful(generation) IS NULL THEN '{gone}'
                WHEN state OPERATOR(pg_catalog.=) '42501' THEN '{rights}' ELSE ARRAY['error', said] END;
END $$;

GRANT EXECUTE ON FUNCTION roir.is_doubtful(bigint),
      roir.look_up_query(bigint, oid, oid, text, text[], text[], text[], text[], integer, text[], text[], text),
      roir.look_up(bigint, oid, oid, text, text[], text[], text[], text[], integer, text[], text[]) TO PUBLIC;
