-- As before, but for the primary key's index itself: REINDEX CONCURRENTLY makes it anew, with another oid.
CREATE OR REPLACE FUNCTION roir.fingerprint(source oid, columns text[]) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT md5(concat_ws('|',
        (SELECT concat_ws(',', c.oid, c.relkind, c.relrowsecurity, n.nspname, c.relname)
           FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = source),
        (SELECT string_agg(concat_ws(',', attnum, quote_ident(attname), atttypid, atttypmod, attcollation), ';'
                           ORDER BY attnum)
           FROM pg_attribute WHERE attrelid = source AND attname = ANY (columns) AND NOT attisdropped),
        (SELECT concat_ws(',', indkey, indclass, indisvalid, indimmediate)
           FROM pg_index WHERE indrelid = source AND indisprimary),
        (SELECT string_agg(concat_ws(',', tgname, tgfoid, tgenabled, tgtype), ';' ORDER BY tgname)
           FROM pg_trigger WHERE tgrelid = source AND tgname IN ('roir_capture', 'roir_capture_truncate')),
        -- 'A' is ENABLE ALWAYS: a partition's own capture triggers can be disabled one by one.
        (SELECT count(*) FROM pg_trigger
          WHERE tgfoid = to_regprocedure(format('roir_data.capture_%s()', source)) AND tgenabled <> 'A')))
$$;
