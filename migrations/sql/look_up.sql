-- Looking rows up for a statement that is still to be planned: its client adds the primary keys found as constants, so
-- that the planner opens only these rows' partitions (client/). The statement keeps its own condition. So the entries
-- found must contain all rows that it wants; what is found in excess does no harm.

-- Whether entries of a generation may be missing: a verification found differences that aren't repaired yet. NULL if
-- readers see another generation, or the index is over shards. In excess: a verification that is under way and has
-- found something counts, whatever it has repaired.
CREATE FUNCTION roir.is_doubtful(generation bigint) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT EXISTS (
                   SELECT FROM roir.verification v
                    WHERE v.index_id = g.index_id AND v.generation_id = g.id
                      AND CASE WHEN v.finished_at IS NULL
                               THEN EXISTS (SELECT FROM roir.discrepancy d WHERE d.verification_id = v.id)
                               ELSE v.missing + v.extra + v.different + v.corrupt + v.damaged + v.duplicate > v.repaired
                          END
                      AND v.id >= coalesce((SELECT max(x.id) FROM roir.verification x
                                             WHERE x.index_id = g.index_id AND x.generation_id = g.id AND x.complete),
                                           0))
              FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
             WHERE g.id = is_doubtful.generation AND g.status = 'active' AND i.shard_table IS NULL);
END $$;

-- A value's text as a constant. No % is in it, which drivers take for a parameter.
CREATE FUNCTION roir.constant(value text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 'E''' || pg_catalog.replace(pg_catalog.replace(pg_catalog.replace(value, '\', '\\'), '''', ''''''), '%', '\045')
       || '''';

-- The primary keys of a table's rows whose entries meet conditions, as SQL for a condition of that table. It never
-- fails because of the index, so that it never ends the caller's transaction: outcome says why nothing is known. Only
-- cancellations, time-outs and the caller's own serialization failures are errors.
--     generation, view, source: of the index, as `roir_client.registry` reads them.
--     named: the table's name as the caller's statement has it; it must mean the source.
--     columns, conditions: `v.column condition` for each; a condition that is NULL can't use the B-tree.
--     identity: the columns of the primary key.
--     most: if there are more rows, none is returned.
--     outcome: found; many (more than `most`); type (a condition is NULL); settings (texts of values would be
--     ambiguous); gone (another generation is shown); doubtful; name; rights; error (said has its text).
--     constants: for `column IN (constants)`, for each column of the identity; NULL if there is no row. A list of
--     whole keys would say more, but the planner compares it with the bounds of each partition: 100 rows in 95 of 600
--     partitions took five times as long.
-- Runs with the caller's rights and settings: the conditions mean what they mean in the caller's statement.
CREATE FUNCTION roir.look_up(generation bigint, view oid, source oid, named text, columns text[], conditions text[],
                             identity text[], most integer,
                             OUT outcome text, OUT entries bigint, OUT constants text[], OUT said text)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    doubtful boolean;
    detail text;
    state text;
BEGIN
    IF pg_catalog.array_position(conditions, NULL) IS NOT NULL THEN
        outcome := 'type';
        RETURN;
    END IF;
    IF NOT pg_catalog.starts_with(pg_catalog.current_setting('datestyle'), 'ISO')
       OR pg_catalog.current_setting('intervalstyle') OPERATOR(pg_catalog.<>) 'postgres'
       OR pg_catalog.current_setting('extra_float_digits')::pg_catalog.int4 OPERATOR(pg_catalog.<) 1 THEN
        outcome := 'settings';
        RETURN;
    END IF;
    doubtful := roir.is_doubtful(generation);
    IF doubtful IS NOT FALSE THEN
        outcome := CASE WHEN doubtful THEN 'doubtful' ELSE 'gone' END;
        RETURN;
    END IF;
    IF (pg_catalog.to_regclass(named)::pg_catalog.oid OPERATOR(pg_catalog.=) source) IS NOT TRUE THEN
        outcome := 'name';
        RETURN;
    END IF;
    FOR n IN 1 .. pg_catalog.cardinality(identity) LOOP
        IF NOT pg_catalog.has_column_privilege(source, identity[n], 'SELECT') THEN
            outcome := 'rights';
            RETURN;
        END IF;
    END LOOP;
    EXECUTE (SELECT pg_catalog.format(
                    'SELECT pg_catalog.count(*), ARRAY[%s]::pg_catalog.text[] '
                    'FROM (SELECT %s FROM %s v WHERE %s LIMIT %s) f',
                    pg_catalog.string_agg(pg_catalog.format('pg_catalog.string_agg(DISTINCT '
                        'roir.constant(pg_catalog.format(''%%s'', f.%I)), '', '')', i.name), ', ' ORDER BY i.n),
                    pg_catalog.string_agg(pg_catalog.format('v.%I', i.name), ', '),
                    view::pg_catalog.regclass,
                    (SELECT pg_catalog.string_agg(pg_catalog.format('v.%I %s', c.name, c.condition), ' AND ')
                       FROM ROWS FROM (pg_catalog.unnest(columns), pg_catalog.unnest(conditions)) c (name, condition)),
                    most OPERATOR(pg_catalog.+) 1)
               FROM pg_catalog.unnest(identity) WITH ORDINALITY i (name, n))
       INTO entries, constants;
    outcome := CASE WHEN entries OPERATOR(pg_catalog.>) most THEN 'many' ELSE 'found' END;
    IF outcome OPERATOR(pg_catalog.=) 'many' THEN
        constants := NULL;
    END IF;
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, said = MESSAGE_TEXT, state = RETURNED_SQLSTATE;
    -- The view refuses a snapshot that is older than the index. Any other such error is the caller's own.
    IF state OPERATOR(pg_catalog.=) '40001' AND NOT pg_catalog.starts_with(detail, 'roir generation') THEN
        RAISE;
    END IF;
    outcome := CASE WHEN state OPERATOR(pg_catalog.=) '42501' THEN 'rights' ELSE 'error' END;
    entries := NULL;
    constants := NULL;
END $$;

GRANT EXECUTE ON FUNCTION roir.is_doubtful(bigint), roir.constant(text),
      roir.look_up(bigint, oid, oid, text, text[], text[], text[], integer) TO PUBLIC;
