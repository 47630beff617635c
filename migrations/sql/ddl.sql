-- The guard again: nobody passes it by what he writes into a statement or sets in his session, and it knows what a
-- published generation depends on (roir.shape_changes).

-- The first tokens of a statement, without its comments: /* nested /* too */ */ and -- to the end of the line.
CREATE FUNCTION roir.first_tokens(query text, most integer) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    rest text := query;
    tokens text[] := '{}';
    token text;
    mark integer;
    depth integer;
BEGIN
    WHILE cardinality(tokens) < most LOOP
        rest := ltrim(rest, E' \t\n\r\f\v');
        EXIT WHEN rest = '';
        IF starts_with(rest, '--') THEN
            mark := regexp_instr(rest, '[\n\r]');
            rest := CASE WHEN mark > 0 THEN substr(rest, mark) ELSE '' END;
        ELSIF starts_with(rest, '/*') THEN
            rest := substr(rest, 3);
            depth := 1;
            WHILE depth > 0 AND rest <> '' LOOP
                mark := regexp_instr(rest, '/\*|\*/');
                depth := depth + CASE WHEN mark = 0 THEN 0 WHEN substr(rest, mark, 1) = '/' THEN 1 ELSE -1 END;
                rest := CASE WHEN mark = 0 THEN '' ELSE substr(rest, mark + 2) END;
            END LOOP;
        ELSE
            -- A quoted identifier, a string, a word (all but ASCII's other characters are letters to the server), or one
            -- other character.
            token := (regexp_match(rest,
                '^(?:[uU]&"(?:[^"]|"")*"|"(?:[^"]|"")*"|''(?:[^'']|'''')*''|[^\x01-\x23\x25-\x2f\x3a-\x40\x5b-\x5e\x60\x7b-\x7f]+|.)'))[1];
            tokens := tokens || token;
            rest := substr(rest, length(token) + 1);
        END IF;
    END LOOP;
    RETURN tokens;
END $$;

-- A quoted identifier with U&"…" read, as to_regclass understands it.
CREATE FUNCTION roir.plain_identifier(token text, escape text DEFAULT '\') RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN token !~ '^[uU]&"' THEN token ELSE
        '"' || replace(unistr((
            -- The escape character twice is itself; a backslash, which unistr takes for its own, is itself where another is.
            SELECT string_agg(CASE WHEN escape = '\' THEN p.part
                                   ELSE replace(replace(p.part, '\', '\\'), escape, '\') END,
                              CASE WHEN escape = '\' THEN '\\' ELSE escape END ORDER BY p.position)
              FROM unnest(string_to_array(replace(substr(token, 4, length(token) - 4), '""', '"'), escape || escape))
                   WITH ORDINALITY AS p (part, position))), '"', '""') || '"' END
$$;

-- The partition that a statement detaches in two transactions (how: concurrently, or finalize): only a statement that
-- is sent alone can be one. Nothing where it is another statement.
CREATE FUNCTION roir.detached_in_two(query text, OUT partition text, OUT how text)
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    tokens text[];
    words text[];
    n integer;
    escape text;
BEGIN
    IF query !~* 'concurrently|finalize' THEN
        RETURN;
    END IF;
    -- ALTER TABLE IF EXISTS ONLY a.b.c * DETACH PARTITION a.b.c CONCURRENTLY, and an UESCAPE 'x' behind each name.
    tokens := roir.first_tokens(query, 40);
    words := ARRAY(SELECT lower(t.token COLLATE "C") FROM unnest(tokens) WITH ORDINALITY AS t (token, n) ORDER BY t.n);
    IF words[1:2] IS DISTINCT FROM '{alter,table}' THEN
        RETURN;
    END IF;
    n := (SELECT min(i) FROM generate_series(3, cardinality(words)) i WHERE words[i] = 'detach' AND words[i + 1] = 'partition') + 2;
    partition := '';
    LOOP
        EXIT WHEN n IS NULL OR n > cardinality(words);
        escape := CASE WHEN words[n + 1] = 'uescape' THEN substr(tokens[n + 2], 2, 1) END;
        partition := partition || roir.plain_identifier(tokens[n], coalesce(escape, '\'));
        n := n + CASE WHEN escape IS NULL THEN 1 ELSE 3 END;
        EXIT WHEN words[n] IS DISTINCT FROM '.';
        partition := partition || '.';
        n := n + 1;
    END LOOP;
    IF words[n] IN ('concurrently', 'finalize') THEN
        how := words[n];
    ELSE
        partition := NULL;
    END IF;
END $$;

-- Who has sent the statement that a function with its owner's rights looks at.
CREATE FUNCTION roir.outer_role() RETURNS name
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(nullif(current_setting('role'), 'none'), session_user)::name
$$;

-- What a name means in a search_path, which `"$user"` makes the role's own.
CREATE FUNCTION roir.relation_in_path(name text, path text, role name) RETURNS regclass
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN 1 < cardinality(parse_ident(relation_in_path.name)) THEN to_regclass(relation_in_path.name) ELSE (
        SELECT to_regclass(quote_ident(CASE WHEN s.schema = '$user' THEN relation_in_path.role::text ELSE s.schema END)
                           || '.' || relation_in_path.name)
          FROM (SELECT coalesce(replace(p.found[1], '""', '"'), lower(p.found[2])) AS schema, p.position
                  FROM regexp_matches(path, '"((?:[^"]|"")*)"|([^,\s"]+)', 'g') WITH ORDINALITY AS p (found, position)) s
         WHERE to_regclass(quote_ident(CASE WHEN s.schema = '$user' THEN relation_in_path.role::text ELSE s.schema END)
                           || '.' || relation_in_path.name) IS NOT NULL
         ORDER BY s.position LIMIT 1) END
$$;

-- True where whoever sets roir.own_ddl is believed: a role that works for indexes. Any user can set it.
CREATE FUNCTION roir.is_own_ddl() RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(current_setting('roir.own_ddl', true), '') = 'on'
           AND has_schema_privilege(roir.outer_role(), 'roir_data', 'CREATE')
$$;

-- Takes leaves in that a generation doesn't know. from_birth: their TRUNCATE is seen from their first row on, since this
-- is the end of the statement that brought them. Without that a TRUNCATE in the transaction that made the leaf leaves no
-- trace, so what is within its bounds is asked for its row, as when a partition leaves. So it is for a leaf that has
-- another file than its first one.
DROP FUNCTION roir.adopt_partitions(bigint, oid, oid[]);
CREATE FUNCTION roir.adopt_partitions(generation bigint, source oid, leaves oid[], from_birth boolean DEFAULT false)
RETURNS void LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT roir.register_partitions(generation, source, leaves);
    SELECT roir.watch_truncate(source);
    INSERT INTO roir.source_partition (generation_id, relation, parent, leaf, name, condition, status)
    SELECT p.generation_id, p.relation, p.parent, p.leaf, p.name, p.condition, 'leaving'
      FROM roir.source_partition p JOIN pg_class c ON c.oid = p.relation::oid
     WHERE p.generation_id = generation AND p.status = 'present' AND p.relation::oid = ANY (leaves)
       AND NOT (from_birth AND c.relfilenode = c.oid);
$$;

-- What is wrong with DDL that has just been run on these relations; nothing where it is harmless. Follows partitions
-- that were created. Only what this transaction has written is looked at, whatever was wrong before.
CREATE OR REPLACE FUNCTION roir.ddl_problem(relations oid[], OUT problem text, OUT hint text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    g record;
    c record;
BEGIN
    FOR g IN
        SELECT x.id, x.entry, i.source_oid::oid::regclass AS source, quote_ident(i.schema_name) || '.' || quote_ident(i.name)
               AS index, o.id AS operation, o.fingerprint
          FROM roir.index i
          JOIN roir.generation x ON x.index_id = i.id AND x.status IN ('building', 'active', 'retired')
          LEFT JOIN roir.operation o ON o.generation_id = x.id AND o.status IN ('running', 'paused')
         WHERE i.dropped_at IS NULL
           AND i.source_oid IN (SELECT r.relation::bigint FROM unnest(relations) AS r (relation)
                                UNION SELECT a.relid::oid::bigint
                                        FROM unnest(relations) AS r (relation), pg_partition_ancestors(r.relation) a)
         ORDER BY x.id
    LOOP
        FOR c IN SELECT * FROM roir.partition_changes(g.id, g.source) LOOP
            IF c.gone THEN
                IF EXISTS (SELECT FROM pg_class k WHERE k.oid = c.relation::oid AND roir.is_mine(k.xmin)) THEN
                    SELECT * INTO problem, hint FROM roir.detach_problem(c.relation::oid::regclass::text, g.source);
                    RETURN;
                END IF;
                CONTINUE;
            END IF;
            CONTINUE WHEN NOT roir.is_mine(c.link::xid)
                OR EXISTS (SELECT FROM roir.source_partition p
                            WHERE p.generation_id = g.id AND p.relation = c.relation AND p.status = 'joining');
            -- Asked of its file: to read it would run its owner's code as whoever attaches it. A foreign table has none.
            IF pg_relation_size(c.relation::oid) > 0
               OR EXISTS (SELECT FROM pg_class k WHERE k.oid = c.relation::oid AND k.relkind = 'f') THEN
                problem := format('%s would bring rows into %s that its roir indexes don''t have', c.name, g.source);
                hint := 'Attach it by roir attach-partition, or empty it by TRUNCATE, attach it and insert the rows.';
                RETURN;
            END IF;
            PERFORM roir.adopt_partitions(g.id, g.source, ARRAY[c.relation::oid],
                EXISTS (SELECT FROM pg_partition_ancestors(c.relation::oid) a WHERE a.relid::oid = ANY (relations)));
        END LOOP;
        SELECT s.* INTO c FROM roir.shape_changes(g.id) s
         WHERE EXISTS (SELECT FROM unnest(s.written_by) w WHERE roir.is_mine(w)) LIMIT 1;
        IF FOUND THEN
            problem := CASE c.kind
                WHEN 'column' THEN format('index %s needs column %I of %s', g.index, c.name, g.source)
                ELSE format('index %s holds column %I of %s as it is generated now', g.index, c.name, g.source) END;
            hint := format('Drop the index first: roir drop %s.', g.index);
            RETURN;
        END IF;
        IF g.fingerprint <> roir.fingerprint(g.source, roir.entry_columns(g.entry)) THEN
            problem := format('%s can''t be altered like this while index %s is being built (operation %s)', g.source,
                              g.index, g.operation);
            hint := format('Wait for its end, or abort it: SELECT roir.abort(%L).', g.index);
            RETURN;
        END IF;
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION roir.refuse_ddl() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' SET timezone = 'UTC'
SET intervalstyle = 'postgres' SET extra_float_digits = 3 SET bytea_output = 'hex' AS $$
DECLARE
    found record;
BEGIN
    BEGIN
        -- Looking at all partitions after each of a thousand triggers took a minute, while writers waited.
        IF roir.is_own_ddl() THEN
            RETURN;
        END IF;
        -- Too late: its first transaction has ended. roir.refuse_concurrent_detach refuses it in time.
        IF (roir.detached_in_two(current_query())).how IS NOT NULL THEN
            RETURN;
        END IF;
        SELECT p.* INTO found
          FROM roir.ddl_problem(ARRAY(SELECT c.objid FROM pg_event_trigger_ddl_commands() c
                                       WHERE c.classid = 'pg_class'::regclass)) p;
    EXCEPTION WHEN OTHERS THEN
        -- Nobody's DDL may fail because of us. What wasn't looked at is detected later.
        RAISE WARNING 'roir could not look at this statement: %', SQLERRM;
        RETURN;
    END;
    IF found.problem IS NOT NULL THEN
        RAISE object_in_use USING MESSAGE = found.problem, HINT = found.hint;
    END IF;
END $$;

-- DETACH … CONCURRENTLY commits before any other trigger hears of it. No search_path of its own, since the name is
-- looked up as the statement does; so no operator is used, and every function is qualified.
CREATE OR REPLACE FUNCTION roir.refuse_concurrent_detach() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    name pg_catalog.text;
    found pg_catalog.record;
BEGIN
    BEGIN
        name := (roir.detached_in_two(pg_catalog.current_query())).partition;
        IF name IS NULL THEN
            RETURN;
        END IF;
        SELECT * INTO found FROM roir.detached_concurrently(
            roir.relation_in_path(name, pg_catalog.current_setting('search_path'), roir.outer_role()));
    EXCEPTION WHEN OTHERS THEN
        RAISE WARNING 'roir could not look at this statement: %', SQLERRM;
        RETURN;
    END;
    IF found.problem IS NOT NULL THEN
        RAISE object_in_use USING MESSAGE = found.problem, HINT = found.hint;
    END IF;
END $$;

-- Installs the event triggers, or those of an older version anew; false where the caller is no superuser and they aren't
-- there. CREATE SCHEMA may hold a CREATE TABLE … PARTITION OF.
CREATE OR REPLACE FUNCTION roir.guard() RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    tags text[] := (SELECT evttags FROM pg_event_trigger WHERE evtname = 'roir_refuse_ddl');
BEGIN
    IF NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
        RETURN tags IS NOT NULL;
    ELSIF 'CREATE SCHEMA' = ANY (tags) THEN
        RETURN true;
    END IF;
    PERFORM roir.unguard();
    CREATE EVENT TRIGGER roir_refuse_ddl ON ddl_command_end
        WHEN TAG IN ('ALTER TABLE', 'CREATE TABLE', 'CREATE SCHEMA') EXECUTE FUNCTION roir.refuse_ddl();
    CREATE EVENT TRIGGER roir_refuse_drop ON sql_drop EXECUTE FUNCTION roir.refuse_drop();
    CREATE EVENT TRIGGER roir_refuse_concurrent_detach ON ddl_command_start
        WHEN TAG IN ('ALTER TABLE') EXECUTE FUNCTION roir.refuse_concurrent_detach();
    RETURN true;
END $$;
