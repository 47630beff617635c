-- SQL about entries, from what a generation keeps of their columns (generation.entry): the SQL twin of entry.py.

-- The names of an entry's columns in its source.
CREATE FUNCTION roir.entry_columns(entry jsonb) RETURNS text[]
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT array_agg(c ->> 'source') FROM jsonb_array_elements(entry -> 'columns') c
$$;

-- SQL that an entry, a row `alias` of a base or delta, belongs to a partition: its constraint, over the entry's primary
-- key under the source's own names.
CREATE FUNCTION roir.entry_condition(entry jsonb, condition text, alias text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('(SELECT %s FROM (SELECT %s) e)', condition,
                  string_agg(format('%s.c%s AS %I', alias, c.position, c.value ->> 'source'), ', '))
      FROM jsonb_array_elements(entry -> 'columns') WITH ORDINALITY AS c (value, position)
     WHERE (c.value ->> 'primary_key')::boolean
$$;

-- SQL that an entry, a row `alias` of a base or delta, has its row in the source.
CREATE FUNCTION roir.has_row(entry jsonb, source oid, alias text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('EXISTS (SELECT FROM %s s WHERE %s)', source::regclass, string_agg(
               CASE WHEN (c.value ->> 'primary_key')::boolean THEN x.same
                    ELSE format('(%s OR s.%I IS NOT DISTINCT FROM NULL AND %s.c%s IS NOT DISTINCT FROM NULL)',
                                x.same, c.value ->> 'source', alias, c.position) END,
               ' AND ' ORDER BY c.position))
      FROM jsonb_array_elements(entry -> 'columns') WITH ORDINALITY AS c (value, position)
     CROSS JOIN LATERAL (
           SELECT format('s.%I::%s %s %s.c%s', c.value ->> 'source', c.value ->> 'cast', c.value ->> 'equals', alias,
                         c.position) AS same) x
     WHERE c.position <= (entry -> 'identity')::int
$$;
