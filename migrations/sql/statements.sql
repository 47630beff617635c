-- Reads the text of a statement for the guard, before the statement runs. No text, and no setting of a session, gets a
-- statement past the guard.

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
            -- A quoted identifier, a string, a word (to the server all characters beyond ASCII are letters), or one
            -- other character.
            token := (regexp_match(rest,
                '^(?:[uU]&"(?:[^"]|"")*"|"(?:[^"]|"")*"|''(?:[^'']|'''')*'''
                '|[^\x01-\x23\x25-\x2f\x3a-\x40\x5b-\x5e\x60\x7b-\x7f]+|.)'))[1];
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
            -- The escape character twice means itself. A backslash, which unistr uses, means itself if the escape
            -- character is another one.
            SELECT string_agg(CASE WHEN escape = '\' THEN p.part
                                   ELSE replace(replace(p.part, '\', '\\'), escape, '\') END,
                              CASE WHEN escape = '\' THEN '\\' ELSE escape END ORDER BY p.position)
              FROM unnest(string_to_array(replace(substr(token, 4, length(token) - 4), '""', '"'), escape || escape))
                   WITH ORDINALITY AS p (part, position))), '"', '""') || '"' END
$$;

-- The partition that a statement detaches in two transactions (how: concurrently, or finalize); such a statement must
-- be sent alone. NULL for any other statement.
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
    n := (SELECT min(i) FROM generate_series(3, cardinality(words)) i
           WHERE words[i] = 'detach' AND words[i + 1] = 'partition') + 2;
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

-- The role that has sent the statement; for functions that run with their owner's rights.
CREATE FUNCTION roir.outer_role() RETURNS name
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(nullif(current_setting('role'), 'none'), session_user)::name
$$;

-- The relation that a name means in a search_path, in which `"$user"` is the role's own schema.
CREATE FUNCTION roir.relation_in_path(name text, path text, role name) RETURNS regclass
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN 1 < cardinality(parse_ident(relation_in_path.name)) THEN to_regclass(relation_in_path.name) ELSE (
        SELECT to_regclass(quote_ident(CASE WHEN s.schema = '$user' THEN relation_in_path.role::text ELSE s.schema END)
                           || '.' || relation_in_path.name)
          FROM (SELECT coalesce(replace(p.found[1], '""', '"'), lower(p.found[2])) AS schema, p.position
                  FROM regexp_matches(path, '"((?:[^"]|"")*)"|([^,\s"]+)', 'g')
                       WITH ORDINALITY AS p (found, position)) s
         WHERE to_regclass(quote_ident(CASE WHEN s.schema = '$user' THEN relation_in_path.role::text ELSE s.schema END)
                           || '.' || relation_in_path.name) IS NOT NULL
         ORDER BY s.position LIMIT 1) END
$$;
