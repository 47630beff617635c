-- The setting roir.on_conflict: with the value `nothing`, an INSERT skips a row whose key another row has
-- (docs/architecture.md#on-conflict). The setting roir.open, local to a transaction, has the number of statements that
-- have begun and not ended, by source, trigger depth and operation, and when the first of them began to insert. Users
-- who change it only change which rows of their own statement are skipped.

-- Notes that a statement begins that inserts into a source, or updates it.
CREATE FUNCTION roir.statement_begins(source oid, operation text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    open jsonb := coalesce(nullif(current_setting('roir.open', true), ''), '{}');
    name text := format('%s %s %s', source, pg_trigger_depth(), operation);
BEGIN
    IF operation = 'INSERT' AND NOT EXISTS (SELECT FROM jsonb_object_keys(open) k
                                             WHERE k LIKE source || ' % INSERT') THEN
        open := open || jsonb_build_object(source || ' since', clock_timestamp());
    END IF;
    PERFORM set_config('roir.open', (open || jsonb_build_object(name, coalesce((open ->> name)::int, 0) + 1))::text,
                       true);
END $$;

-- True if a row that is to be inserted into a source is an INSERT's, COPY's or MERGE's own, and may be skipped: not one
-- that an UPDATE moves to another partition, which would be lost. In doubt false: the statement names a partition
-- instead of its table, or also updates the table.
CREATE FUNCTION roir.may_skip(source oid) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.open ? format('%s %s INSERT', source, s.depth) AND NOT s.open ? format('%s %s UPDATE', source, s.depth)
      FROM (SELECT coalesce(nullif(current_setting('roir.open', true), ''), '{}')::jsonb AS open,
                   pg_trigger_depth() AS depth) s
$$;

-- Notes that a statement has ended.
CREATE FUNCTION roir.statement_ends(source oid, operation text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    open jsonb := coalesce(nullif(current_setting('roir.open', true), ''), '{}');
    -- A cascade's statement begins within a trigger, but its end is the outer statement's.
    name text := (SELECT k FROM jsonb_object_keys(open) k
                   WHERE k LIKE source || ' % ' || operation AND split_part(k, ' ', 2)::int >= pg_trigger_depth()
                   ORDER BY split_part(k, ' ', 2)::int DESC LIMIT 1);
BEGIN
    IF name IS NOT NULL THEN
        open := CASE WHEN (open ->> name)::int > 1 THEN open || jsonb_build_object(name, (open ->> name)::int - 1)
                     ELSE open - name END;
    END IF;
    IF NOT EXISTS (SELECT FROM jsonb_object_keys(open) k WHERE k LIKE source || ' % INSERT') THEN
        open := open - (source || ' since');
    END IF;
    PERFORM set_config('roir.open', CASE WHEN open = '{}' THEN '' ELSE open::text END, true);
END $$;

-- The setting that has the rows with such a key: several, since a setting is written as a whole.
CREATE FUNCTION roir.bucket(generation bigint, key text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('roir.passed_%s_%s', generation, mod(abs(hashtext(key)::bigint), 256))
$$;

-- The rows that this statement has let pass with such a key: their primary keys, as text. Their entries come only at
-- its end. Keys are compared as text: if equal keys have different texts, the capture refuses the second row.
CREATE FUNCTION roir.passed(source oid, generation bigint, key text) RETURNS SETOF jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT jsonb_array_elements(b.bucket -> 'rows' -> key)
      FROM (SELECT nullif(current_setting(roir.bucket(generation, key), true), '')::jsonb AS bucket) b
     WHERE b.bucket -> 'since' = current_setting('roir.open')::jsonb -> (source || ' since')
$$;

-- Notes that the statement has let a row pass.
CREATE FUNCTION roir.let_pass(source oid, generation bigint, key text, primary_key text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name text := roir.bucket(generation, key);
    since jsonb := current_setting('roir.open')::jsonb -> (source || ' since');
    bucket jsonb := coalesce(nullif(current_setting(name, true), '')::jsonb, '{}');
    rows jsonb := CASE WHEN bucket -> 'since' = since THEN bucket -> 'rows' ELSE '{}' END;
BEGIN
    rows := rows || jsonb_build_object(key, coalesce(rows -> key, '[]') || jsonb_build_array(to_jsonb(primary_key)));
    PERFORM set_config(name, jsonb_build_object('since', since, 'rows', rows)::text, true);
END $$;

-- True if each statement that can move a row into this leaf is noted when it begins: one that updates a table above it.
-- Another level may have become part of the table without the trigger.
CREATE FUNCTION roir.watches_updates(leaf oid, function oid) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT NOT EXISTS (
        SELECT FROM pg_partition_ancestors(leaf) a
         WHERE a.relid <> leaf
           AND NOT EXISTS (SELECT FROM pg_trigger t
                            WHERE t.tgrelid = a.relid AND t.tgfoid = function AND t.tgtype & 19 = 18
                              AND t.tgenabled IN ('O', 'A')))
$$;
