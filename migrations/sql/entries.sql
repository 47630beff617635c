-- SQL about entries, from the columns that a generation keeps (generation.entry): the SQL twin of entry.py.

-- The names of the source's columns that entries come from.
CREATE FUNCTION roir.entry_columns(entry jsonb) RETURNS text[]
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT array_agg(DISTINCT n.name)
      FROM (SELECT CASE WHEN coalesce(c ->> 'call', '') = '' THEN jsonb_build_array(c -> 'source')
                        ELSE c -> 'arguments' END
              FROM jsonb_array_elements(entry -> 'columns') c
             UNION ALL SELECT coalesce(nullif(entry -> 'condition', 'null') -> 'arguments', '[]')) x (names)
     CROSS JOIN LATERAL jsonb_array_elements_text(x.names) n (name)
$$;

-- A condition in SQL: an entry, a row `alias` of a base or delta, belongs to a partition. It is the partition's
-- constraint, over the entry's primary key under the source's own names.
CREATE FUNCTION roir.entry_condition(entry jsonb, condition text, alias text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('(SELECT %s FROM (SELECT %s) e)', condition,
                  string_agg(format('%s.c%s AS %I', alias, c.position, c.value ->> 'source'), ', '))
      FROM jsonb_array_elements(entry -> 'columns') WITH ORDINALITY AS c (value, position)
     WHERE (c.value ->> 'primary_key')::boolean
$$;

-- An expression in SQL, as Computed.of: the call of roir's function for it, with columns of `record`. NULL without one.
CREATE FUNCTION roir.computed(call text, arguments jsonb, record text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT call || concat('(', string_agg(format('%s.%I', record, a.name), ', ' ORDER BY a.position), ')')
      FROM jsonb_array_elements_text(arguments) WITH ORDINALITY AS a (name, position)
$$;

-- A condition in SQL: `record`, a row of the source, projects to an entry, a row `alias` of a base or delta. It is the
-- twin of Entry.has_row, to the letter except for quotes that a name doesn't need.
CREATE FUNCTION roir.is_same(entry jsonb, record text, alias text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT string_agg(CASE WHEN (c.value ->> 'primary_key')::boolean THEN x.same
                           ELSE format('(%s OR %s IS NOT DISTINCT FROM NULL AND %s IS NOT DISTINCT FROM NULL)',
                                       x.same, v.ours, v.theirs) END, ' AND ' ORDER BY c.position)
      FROM jsonb_array_elements(entry -> 'columns') WITH ORDINALITY AS c (value, position)
     CROSS JOIN LATERAL (
           -- A cast only if it is necessary: it names the type, which may be renamed.
           SELECT CASE WHEN coalesce(c.value ->> 'call', '') = '' THEN format('%s.%I', record, c.value ->> 'source')
                       ELSE concat('(' || roir.computed(c.value ->> 'call', c.value -> 'arguments', record),
                                   ' COLLATE ' || (c.value ->> 'collation'), ')') END
                  || CASE WHEN (c.value ->> 'domain')::boolean THEN '::' || (c.value ->> 'cast') ELSE '' END AS ours,
                  format('%s.c%s', alias, c.position) AS theirs) v
     CROSS JOIN LATERAL (SELECT concat_ws(' ', v.ours, c.value ->> 'equals', v.theirs) AS same) x
     WHERE c.position <= (entry -> 'identity')::int
$$;

-- A condition in SQL: an entry, a row `alias` of a base or delta, has its row in the source.
CREATE FUNCTION roir.has_row(entry jsonb, source oid, alias text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('EXISTS (SELECT FROM %s s WHERE %s)', source::regclass,
                  concat_ws(' AND ', roir.is_same(entry, 's', alias),
                            roir.computed(entry #>> '{condition,call}', entry #> '{condition,arguments}', 's')))
$$;
