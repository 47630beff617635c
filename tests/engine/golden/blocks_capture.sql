CREATE TYPE roir_data.row_{oid} AS ("k" text COLLATE pg_catalog."default", "id" integer, "v" integer);

REVOKE ALL ON TYPE roir_data.row_{oid} FROM PUBLIC;

CREATE OR REPLACE FUNCTION roir_data.capture_row_{oid}(tg_op text, tg_relid oid, tg_table_schema name, touched_again boolean, old_place tid, new_place tid, old roir_data.row_{oid}, new roir_data.row_{oid}) RETURNS boolean
LANGUAGE plpgsql
AS $roir$
DECLARE
  -- Whether the source is asked what became of the row. A DELETE always does.
  careful boolean := true;
  -- Its answer: a row that has the entry now, and that the entry `belongs`.
  here record;
BEGIN
  -- Is NEW the present version of the row? Not if this transaction has written to the row again since.
  IF TG_OP = 'UPDATE' THEN
    careful := touched_again
      OR ROW(OLD."id")::record *<> ROW(NEW."id")::record;
  ELSIF TG_OP = 'INSERT' THEN
    careful := touched_again;
  END IF;

  -- generation 1, capture mode
  -- Careful: a regular row for what the source has now, antimatter for what it hasn't. A DELETE ends here.
  IF careful THEN
    IF TG_OP <> 'INSERT' THEN
      -- Has a row that this transaction wrote the entry of OLD now?
      IF TG_RELID = {oid} THEN
        SELECT s.c1, s.c2, s.c3, true AS belongs INTO here
          FROM roir_data.g1_source s
         WHERE (s.c1 OPERATOR(pg_catalog.=) OLD."k" OR s.c1 IS NOT DISTINCT FROM NULL AND OLD."k" IS NOT DISTINCT FROM NULL)
           AND s.c2 OPERATOR(pg_catalog.=) OLD."id"
           AND roir.is_mine(s.written) LIMIT 1;
      ELSE
        -- Restored from a dump: under another oid, and, where it was restored alone, without our view.
        EXECUTE 'SELECT s."k" AS c1, s."id" AS c2, s."v" AS c3, true AS belongs FROM ONLY ' || TG_RELID::regclass
          || ' s WHERE (s."k" OPERATOR(pg_catalog.=) $1 OR s."k" IS NOT DISTINCT FROM NULL AND $1 IS NOT DISTINCT FROM NULL)'
          ' AND s."id" OPERATOR(pg_catalog.=) $2'
          ' AND roir.is_mine(s.xmin) LIMIT 1' INTO here
          USING OLD."k", OLD."id";
      END IF;
      IF here.belongs THEN
        INSERT INTO roir_data.g1_delta (c1, c2, c3, state)
        VALUES (here.c1, here.c2, here.c3, 'regular')
        ON CONFLICT (c1, c2) DO UPDATE SET c1 = EXCLUDED.c1, c2 = EXCLUDED.c2, c3 = EXCLUDED.c3, state = EXCLUDED.state;
      ELSE
        -- No row has it: antimatter, which takes the entry out of the index at the fold.
        INSERT INTO roir_data.g1_delta (c1, c2, c3, state)
        VALUES (OLD."k", OLD."id", NULL, 'antimatter')
        ON CONFLICT (c1, c2) DO UPDATE SET c1 = EXCLUDED.c1, c2 = EXCLUDED.c2, c3 = EXCLUDED.c3, state = EXCLUDED.state;
      END IF;
    END IF;

    IF TG_OP <> 'DELETE' THEN
      -- Has a row that this transaction wrote the entry of NEW now?
      IF TG_RELID = {oid} THEN
        SELECT s.c1, s.c2, s.c3, true AS belongs INTO here
          FROM roir_data.g1_source s
         WHERE (s.c1 OPERATOR(pg_catalog.=) NEW."k" OR s.c1 IS NOT DISTINCT FROM NULL AND NEW."k" IS NOT DISTINCT FROM NULL)
           AND s.c2 OPERATOR(pg_catalog.=) NEW."id"
           AND roir.is_mine(s.written) LIMIT 1;
      ELSE
        -- Restored from a dump: under another oid, and, where it was restored alone, without our view.
        EXECUTE 'SELECT s."k" AS c1, s."id" AS c2, s."v" AS c3, true AS belongs FROM ONLY ' || TG_RELID::regclass
          || ' s WHERE (s."k" OPERATOR(pg_catalog.=) $1 OR s."k" IS NOT DISTINCT FROM NULL AND $1 IS NOT DISTINCT FROM NULL)'
          ' AND s."id" OPERATOR(pg_catalog.=) $2'
          ' AND roir.is_mine(s.xmin) LIMIT 1' INTO here
          USING NEW."k", NEW."id";
      END IF;
      IF here.belongs THEN
        INSERT INTO roir_data.g1_delta (c1, c2, c3, state)
        VALUES (here.c1, here.c2, here.c3, 'regular')
        ON CONFLICT (c1, c2) DO UPDATE SET c1 = EXCLUDED.c1, c2 = EXCLUDED.c2, c3 = EXCLUDED.c3, state = EXCLUDED.state;
      ELSE
        -- No row has it: antimatter, which takes the entry out of the index at the fold.
        INSERT INTO roir_data.g1_delta (c1, c2, c3, state)
        VALUES (NEW."k", NEW."id", NULL, 'antimatter')
        ON CONFLICT (c1, c2) DO UPDATE SET c1 = EXCLUDED.c1, c2 = EXCLUDED.c2, c3 = EXCLUDED.c3, state = EXCLUDED.state;
      END IF;
    END IF;

  -- Quick: NEW is the row.
  ELSIF TG_OP = 'INSERT' THEN
    INSERT INTO roir_data.g1_delta (c1, c2, c3, state)
    VALUES (NEW."k", NEW."id", NEW."v", 'regular')
    ON CONFLICT (c1, c2) DO UPDATE SET c1 = EXCLUDED.c1, c2 = EXCLUDED.c2, c3 = EXCLUDED.c3, state = EXCLUDED.state;

  -- Has the update changed the entry?
  ELSIF ROW(OLD."k", OLD."id", OLD."v")::record *<> ROW(NEW."k", NEW."id", NEW."v")::record THEN
    IF ROW(OLD."k", OLD."id")::record *<> ROW(NEW."k", NEW."id")::record THEN
      -- Another key: the old entry goes.
      INSERT INTO roir_data.g1_delta (c1, c2, c3, state)
      VALUES (OLD."k", OLD."id", NULL, 'antimatter')
      ON CONFLICT (c1, c2) DO UPDATE SET c1 = EXCLUDED.c1, c2 = EXCLUDED.c2, c3 = EXCLUDED.c3, state = EXCLUDED.state;
    END IF;
    INSERT INTO roir_data.g1_delta (c1, c2, c3, state)
    VALUES (NEW."k", NEW."id", NEW."v", 'regular')
    ON CONFLICT (c1, c2) DO UPDATE SET c1 = EXCLUDED.c1, c2 = EXCLUDED.c2, c3 = EXCLUDED.c3, state = EXCLUDED.state;

  -- Has the row moved to another block? The scan of the old one may miss it.
  ELSIF (old_place::text::point)[0] <> (new_place::text::point)[0] THEN
    INSERT INTO roir_data.g1_delta (c1, c2, c3, state)
    VALUES (NEW."k", NEW."id", NEW."v", 'regular')
    ON CONFLICT (c1, c2) DO UPDATE SET c1 = EXCLUDED.c1, c2 = EXCLUDED.c2, c3 = EXCLUDED.c3, state = EXCLUDED.state;
  END IF;

  RETURN true;
END
$roir$;

CREATE OR REPLACE FUNCTION roir_data.capture_{oid}() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off SET enable_seqscan = off
AS $roir$
DECLARE
  done boolean;
BEGIN
  -- generation 1, capture mode
  done := roir_data.capture_row_{oid}(TG_OP, TG_RELID, TG_TABLE_SCHEMA, NEW.xmax <> '0'::xid,
    OLD.ctid, NEW.ctid,
    ROW(OLD."k", OLD."id", OLD."v")::roir_data.row_{oid},
    ROW(NEW."k", NEW."id", NEW."v")::roir_data.row_{oid});
  RETURN NULL;
END
$roir$;

CREATE OR REPLACE FUNCTION roir_data.truncate_{oid}() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off
AS $roir$
BEGIN
  IF pg_relation_size(TG_RELID) > 0 THEN
    RAISE feature_not_supported USING
      MESSAGE = format('a trigger has written to %s since it was truncated', TG_RELID::regclass),
      DETAIL = 'Its table has a roir index, whose entries of these rows would be lost.',
      HINT = 'Write the rows in a statement after the TRUNCATE.';
  END IF;
  TRUNCATE roir_data.g1, roir_data.g1_delta;
  INSERT INTO roir.emptied (generation_id, relation) VALUES (1, TG_RELID);
  RETURN NULL;
END
$roir$;
