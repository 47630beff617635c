-- The errors of references, foreign keys to the key of a unique index, with the code, names and details of PostgreSQL's
-- own foreign keys. The details have the values only if the writer may read them.

-- Whether the role that sent the statement may read these columns in each row of a table.
CREATE FUNCTION roir.writer_reads(relation oid, columns text[]) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    -- The function that asks runs as a table's owner.
    writer text := coalesce(nullif(current_setting('role'), 'none'), session_user);
BEGIN
    RETURN NOT EXISTS (SELECT FROM pg_class s WHERE s.oid = relation AND s.relrowsecurity)
       AND NOT EXISTS (SELECT FROM unnest(columns) k WHERE NOT has_column_privilege(writer, relation, k, 'SELECT'));
END $$;

-- The parent of a child's foreign key. A partition may have the key under another name: then its root has it.
CREATE FUNCTION roir.parent_of(child oid, name text) RETURNS oid
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.confrelid FROM pg_constraint c
     WHERE c.contype = 'f' AND c.conname = parent_of.name AND c.conparentid = 0
       AND c.conrelid IN (SELECT parent_of.child UNION SELECT a.relid FROM pg_partition_ancestors(parent_of.child) a)
     LIMIT 1
$$;

-- Refuses a row of a child whose key no row of the parent has. columns: the child's.
CREATE FUNCTION roir.refuse_orphan(relation oid, name text, columns text[], key_values text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    parent oid := roir.parent_of(relation, name);
    keys text[] := ARRAY(SELECT a.attname::text
                           FROM pg_constraint c CROSS JOIN unnest(c.confkey) WITH ORDINALITY k (attnum, n)
                           JOIN pg_attribute a ON a.attrelid = c.confrelid AND a.attnum = k.attnum
                          WHERE c.conname = name AND c.confrelid = parent AND c.conparentid = 0
                          ORDER BY k.n LIMIT cardinality(columns));
    parent_name text := (SELECT c.relname FROM pg_class c WHERE c.oid = parent);
    child record;
BEGIN
    SELECT c.relname, n.nspname INTO child
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation;
    RAISE foreign_key_violation USING
        MESSAGE = format('insert or update on table "%s" violates foreign key constraint "%s"', child.relname, name),
        SCHEMA = child.nspname, TABLE = child.relname, CONSTRAINT = name,
        DETAIL = CASE WHEN roir.writer_reads(parent, keys)
                      THEN format('Key (%s)=(%s) is not present in table "%s".', array_to_string(columns, ', '),
                                  array_to_string(key_values, ', ', 'null'), parent_name)
                      ELSE format('Key is not present in table "%s".', parent_name) END;
END $$;

-- Refuses a change of a key that rows of a child have. columns: the parent's.
CREATE FUNCTION roir.refuse_referenced(relation oid, child oid, name text, columns text[], key_values text[])
RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    root oid := coalesce(pg_partition_root(relation), relation);
    named record;
BEGIN
    SELECT c.relname, n.nspname, p.relname AS parent INTO named
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, pg_class p
     WHERE c.oid = child AND p.oid = root;
    RAISE foreign_key_violation USING
        MESSAGE = format('update or delete on table "%s" violates foreign key constraint "%s" on table "%s"',
                         named.parent, name, named.relname),
        SCHEMA = named.nspname, TABLE = named.relname, CONSTRAINT = name,
        DETAIL = CASE WHEN roir.writer_reads(root, columns)
                      THEN format('Key (%s)=(%s) is still referenced from table "%s".', array_to_string(columns, ', '),
                                  array_to_string(key_values, ', ', 'null'), named.relname)
                      ELSE format('Key is still referenced from table "%s".', named.relname) END;
END $$;
