-- Detects that this control schema's database was restored from a dump, or made by pg_upgrade. A restore gives all
-- tables other oids. pg_upgrade keeps these, but creates schemas, functions and the rows of the catalogs again, and so
-- the links of partitions. So the oids of our own tables and of our own schema show which of both happened. They don't
-- show what happened to a single source.

-- Records the present oids.
CREATE FUNCTION roir.settle() RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO roir.home (id, tables, schema_oid)
    SELECT 1, jsonb_object_agg(c.relname, c.oid::bigint), min(n.oid::bigint)
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = 'roir' AND c.relname IN ('index', 'generation', 'operation', 'source_partition', 'event')
    ON CONFLICT (id) DO UPDATE SET tables = excluded.tables, schema_oid = excluded.schema_oid
$$;

-- The event since these oids were recorded: 'restored' from a dump, 'upgraded' by pg_upgrade, NULL: none.
CREATE FUNCTION roir.moved() RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN EXISTS (SELECT FROM jsonb_each_text(h.tables) e
                              WHERE to_regclass('roir.' || quote_ident(e.key))::oid IS DISTINCT FROM e.value::oid)
                THEN 'restored'
                WHEN h.schema_oid <> (SELECT n.oid::bigint FROM pg_namespace n WHERE n.nspname = 'roir')
                THEN 'upgraded' END
      FROM roir.home h
$$;

-- Records them for the first time.
SELECT roir.settle();
