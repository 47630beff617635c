-- Tables of entries that were made without one: a publication of all tables would have every write to a source refused.
-- Not of partitioned tables, which hold no rows. Each lock is ACCESS EXCLUSIVE, for a change of the catalog alone.
DO $$
DECLARE
    entries text;
BEGIN
    FOR entries IN
        SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE n.nspname = 'roir_data' AND c.relkind = 'r' AND c.relreplident <> 'f' AND c.relname ~ '^g[0-9]+_'
         ORDER BY c.relname
    LOOP
        EXECUTE format('ALTER TABLE %s REPLICA IDENTITY FULL', entries);
    END LOOP;
END $$;
