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
BEGIN
    SELECT g.index_id INTO index FROM roir.generation g WHERE g.id = is_doubtful.generation AND g.status = 'active';
    IF index IS NULL THEN
        RETURN NULL;
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

-- The primary keys of a table's rows whose entries meet conditions, as texts. It never fails because of the index, so
-- that it never ends the caller's transaction: outcome says why nothing is known. Only cancellations, time-outs and the
-- caller's own serialization failures are errors.
--     generation, view, source: of the index, as `roir_client.registry` reads them.
--     named: the table's name as the caller's statement has it; it must mean the source.
--     columns, conditions: `v.column condition` for each; a condition that is NULL can't use the B-tree.
--     identity: the columns of the primary key.
--     most: if there are more rows, none is returned.
--     outcome: found; many (more than `most`); type (a condition is NULL); settings (texts of values would be
--     ambiguous); gone (another generation is shown); doubtful; name; rights; error (said has its text).
--     keys: the rows' values, in the order of the identity.
-- Runs with the caller's rights and settings: the conditions mean what they mean in the caller's statement.
CREATE FUNCTION roir.look_up(generation bigint, view oid, source oid, named text, columns text[], conditions text[],
                             identity text[], most integer,
                             OUT outcome text, OUT keys text[], OUT said text)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    doubtful boolean;
    selected pg_catalog.text;
    wanted pg_catalog.text;
    detail pg_catalog.text;
    state pg_catalog.text;
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
        selected := pg_catalog.concat(selected, CASE WHEN n OPERATOR(pg_catalog.>) 1 THEN ', ' END,
                                  'pg_catalog.format(''%s'', v.', pg_catalog.quote_ident(identity[n]), ')');
    END LOOP;
    -- Short, since it is planned each time: the client does the rest.
    FOR n IN 1 .. pg_catalog.cardinality(columns) LOOP
        wanted := pg_catalog.concat(wanted, CASE WHEN n OPERATOR(pg_catalog.>) 1 THEN ' AND ' END,
                                    'v.', pg_catalog.quote_ident(columns[n]), ' ', conditions[n]);
    END LOOP;
    EXECUTE pg_catalog.concat('SELECT ARRAY(SELECT ARRAY[', selected, '] FROM ', view::pg_catalog.regclass, ' v WHERE ',
                              wanted, ' LIMIT ', most OPERATOR(pg_catalog.+) 1, ')') INTO keys;
    outcome := 'found';
    IF pg_catalog.array_length(keys, 1) OPERATOR(pg_catalog.>) most THEN
        outcome := 'many';
        keys := NULL;
    END IF;
    -- Ends the block as a failure, which releases its locks: a publish locks first the source, then the view. If the
    -- caller kept a lock of the view, and then wrote to the source, both would wait for each other.
    RAISE SQLSTATE 'RO001';
EXCEPTION WHEN SQLSTATE 'RO001' THEN
    NULL;
WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, said = MESSAGE_TEXT, state = RETURNED_SQLSTATE;
    -- The view refuses a snapshot that is older than the index. Any other such error is the caller's own.
    IF state OPERATOR(pg_catalog.=) '40001' AND NOT pg_catalog.starts_with(detail, 'roir generation') THEN
        RAISE;
    END IF;
    outcome := CASE WHEN state OPERATOR(pg_catalog.=) '42501' THEN 'rights' ELSE 'error' END;
    keys := NULL;
END $$;

GRANT EXECUTE ON FUNCTION roir.is_doubtful(bigint),
      roir.look_up(bigint, oid, oid, text, text[], text[], text[], integer) TO PUBLIC;
