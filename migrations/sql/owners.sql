-- The rights of a source's owner on our tables. The capture of rows runs as the owner, so a new owner needs the rights,
-- and the former owner loses them. If there are event triggers, ALTER TABLE … OWNER TO hands the rights over at once.
-- Without them, and after REASSIGN OWNED, which fires no event trigger, the next clean-up does it; until then `roir
-- status` reports it.

-- Our tables that a source's writes touch, and the rights that its owner needs there.
CREATE FUNCTION roir.stores(source oid) RETURNS TABLE (relation oid, rights text)
LANGUAGE sql STABLE ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.relation, s.rights
      FROM roir.generation g
      JOIN roir.index i ON i.id = g.index_id
     CROSS JOIN LATERAL (
           SELECT to_regclass(format('roir_data.g%s%s', g.id, x.suffix))::oid, x.rights
             FROM (VALUES ('', 'SELECT, INSERT, UPDATE, DELETE'), ('_delta', 'SELECT, INSERT, UPDATE, DELETE'),
                          -- To lock a row takes the right to update it.
                          ('_source', 'SELECT, UPDATE')) AS x (suffix, rights)
           UNION ALL
           -- The capture of a unique index reads the default segment itself.
           SELECT h.inhrelid, CASE WHEN h.inhrelid = to_regclass(format('roir_data.g%s_s000', g.id))
                                    AND g.entry ->> 'unique' <> '' AND (g.entry -> 'identity') > (g.entry -> 'key')
                                   THEN 'SELECT, INSERT, UPDATE, DELETE' ELSE 'SELECT, UPDATE, DELETE' END
             FROM pg_inherits h WHERE h.inhparent = to_regclass(format('roir_data.g%s', g.id))) AS s (relation, rights)
     WHERE i.source_oid = stores.source::bigint AND g.status <> 'dropped' AND s.relation IS NOT NULL
$$;

-- The roles that may write our tables of a source but don't own the source, and the tables. A role that may only read
-- isn't listed: an administrator grants that, for a backup. Nor is a role that may create in our schema: it works for
-- indexes.
CREATE FUNCTION roir.former_owners(source oid) RETURNS TABLE (name text, relation regclass)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT DISTINCT CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END,
           c.oid::regclass
      FROM roir.stores(source) s
      JOIN pg_class c ON c.oid = s.relation
     CROSS JOIN LATERAL aclexplode(c.relacl) a
     WHERE a.privilege_type IN ('INSERT', 'UPDATE', 'DELETE', 'TRUNCATE')
       AND a.grantee NOT IN (c.relowner, (SELECT t.relowner FROM pg_class t WHERE t.oid = source))
       AND (a.grantee = 0 OR NOT has_schema_privilege(a.grantee, 'roir_data', 'CREATE'))
$$;

-- Revokes their rights.
CREATE FUNCTION roir.take_from_former_owners(source oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    held record;
BEGIN
    FOR held IN SELECT * FROM roir.former_owners(source) LOOP
        EXECUTE format('REVOKE ALL ON %s FROM %s CASCADE', held.relation, held.name);
    END LOOP;
    FOR held IN
        SELECT quote_ident(pg_get_userbyid(a.grantee)) AS name
          FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) a
         WHERE p.oid = 'roir.note_taken(bigint, oid, tid)'::regprocedure AND a.grantee NOT IN (0, p.proowner)
           AND NOT EXISTS (SELECT FROM roir.index i JOIN pg_class t ON t.oid = i.source_oid::oid
                            WHERE t.relowner = a.grantee AND i.dropped_at IS NULL)
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION roir.note_taken(bigint, oid, tid) FROM %s CASCADE', held.name);
    END LOOP;
END $$;

-- Grants a source's owner the rights that it needs on our tables: the source is read, and its writes are captured, with
-- the owner's rights.
CREATE FUNCTION roir.give_to_owner(source oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    store record;
    owner text := (SELECT quote_ident(pg_get_userbyid(t.relowner)) FROM pg_class t WHERE t.oid = source);
BEGIN
    FOR store IN SELECT s.relation::regclass AS name, s.rights FROM roir.stores(source) s
                   JOIN pg_class c ON c.oid = s.relation JOIN pg_class t ON t.oid = source
                    WHERE c.relowner <> t.relowner
                      -- The code that creates a table grants the rights on it.
                      AND NOT roir.is_mine(c.xmin) LOOP
        EXECUTE format('GRANT %s ON %s TO %s', store.rights, store.name, owner);
    END LOOP;
    EXECUTE format('GRANT EXECUTE ON FUNCTION roir.note_taken(bigint, oid, tid) TO %s', owner);
END $$;

-- Hands the capture of these tables over to their new owners, if they are sources and our role may do it: a superuser
-- may.
CREATE FUNCTION roir.follow_owners(relations oid[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moved record;
    lacks boolean;
    known bigint[];
BEGIN
    FOR moved IN
        SELECT t.oid AS source, p.oid::regprocedure AS capture, t.relowner AS owner,
               to_regproc(format('roir_data.capture_row_%s', t.oid))::regprocedure AS called,
               quote_ident(pg_get_userbyid(t.relowner)) AS name
          FROM pg_class t
          JOIN pg_proc p ON p.oid = to_regprocedure(format('roir_data.capture_%s()', t.oid))
         WHERE t.oid = ANY (relations) AND p.proowner <> t.relowner
    LOOP
        PERFORM roir.give_to_owner(moved.source);
        -- The new owner of a function needs CREATE on the schema, during the change of owner.
        lacks := NOT has_schema_privilege(moved.owner, 'roir_data', 'CREATE');
        IF lacks THEN
            EXECUTE format('GRANT CREATE ON SCHEMA roir_data TO %s', moved.name);
        END IF;
        -- Keeps its mark as it is afterwards: otherwise a function that was handed there and back would look like one
        -- that was replaced for a while.
        known := ARRAY(SELECT g.id FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
                        WHERE i.source_oid = moved.source::bigint AND g.status <> 'dropped'
                          AND NOT EXISTS (SELECT FROM roir.mark_changes(g.id) m
                                           WHERE m.name IN ('function capture', 'function row')));
        EXECUTE format('ALTER FUNCTION %s OWNER TO %s', moved.capture, moved.name);
        -- A former owner may have dropped it. It is created again at the next refresh.
        IF moved.called IS NOT NULL THEN
            EXECUTE format('ALTER FUNCTION %s OWNER TO %s', moved.called, moved.name);
        END IF;
        PERFORM roir.keep_marks(k, ARRAY['function capture', 'function row']) FROM unnest(known) k;
        IF lacks THEN
            EXECUTE format('REVOKE CREATE ON SCHEMA roir_data FROM %s', moved.name);
        END IF;
        -- The function names its owner. It is created again when it is needed.
        EXECUTE format('DROP FUNCTION IF EXISTS roir_data.read_%s(text)', moved.source);
        PERFORM roir.take_from_former_owners(moved.source);
    END LOOP;
END $$;
