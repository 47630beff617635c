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
  one_snapshot boolean :=
    current_setting('transaction_isolation') IN ('repeatable read', 'serializable');
  found_entries bigint;
  gone boolean;
  old_null boolean;
  new_null boolean;
BEGIN
  -- Rows may share a primary key for a while: every write is careful.

  -- generation 1, active mode
  -- Was the switch to this mode, or a swap of segments, after our snapshot? Then it doesn't see all entries.
  IF one_snapshot AND NOT roir.is_in_mode(1, 'active') THEN
    RAISE EXCEPTION USING ERRCODE = 'serialization_failure',
      MESSAGE = 'could not serialize access: an index entry of this row was written after the transaction''s snapshot',
      DETAIL = 'roir generation 1', HINT = 'Retry the transaction.';
  END IF;

  IF TG_OP <> 'INSERT' THEN
    old_null := OLD."k" IS NOT DISTINCT FROM NULL;
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
    IF here.belongs IS NULL THEN
      -- Has anybody else's row the entry of OLD?
      IF TG_RELID = {oid} THEN
        SELECT s.c1, s.c2, s.c3, true AS belongs INTO here
          FROM roir_data.g1_source s
         WHERE (s.c1 OPERATOR(pg_catalog.=) OLD."k" OR s.c1 IS NOT DISTINCT FROM NULL AND OLD."k" IS NOT DISTINCT FROM NULL)
           AND s.c2 OPERATOR(pg_catalog.=) OLD."id"
           LIMIT 1 FOR SHARE;
      ELSE
        -- Restored from a dump: under another oid, and, where it was restored alone, without our view.
        EXECUTE 'SELECT s."k" AS c1, s."id" AS c2, s."v" AS c3, true AS belongs FROM ONLY ' || TG_RELID::regclass
          || ' s WHERE (s."k" OPERATOR(pg_catalog.=) $1 OR s."k" IS NOT DISTINCT FROM NULL AND $1 IS NOT DISTINCT FROM NULL)'
          ' AND s."id" OPERATOR(pg_catalog.=) $2'
          ' LIMIT 1 FOR SHARE' INTO here
          USING OLD."k", OLD."id";
      END IF;
    END IF;
    IF here.belongs IS NULL THEN
      -- A snapshot that is older than a rewrite of the table sees no row.
      IF one_snapshot THEN
        PERFORM roir.refuse_rewritten(TG_RELID);
      END IF;
      -- No row has it: the entry goes.
      IF old_null THEN
        EXECUTE 'DELETE FROM roir_data.g1 WHERE c1 IS NOT DISTINCT FROM NULL AND c2 OPERATOR(pg_catalog.=) $2'
          USING OLD."k", OLD."id";
        GET DIAGNOSTICS found_entries = ROW_COUNT;
      ELSE
        IF OLD."k" OPERATOR(pg_catalog.<) E'2' THEN
          DELETE FROM roir_data.g1_s001 WHERE c1 OPERATOR(pg_catalog.=) OLD."k" AND c2 OPERATOR(pg_catalog.=) OLD."id";
        ELSE
          DELETE FROM roir_data.g1_s002 WHERE c1 OPERATOR(pg_catalog.=) OLD."k" AND c2 OPERATOR(pg_catalog.=) OLD."id";
        END IF;
        GET DIAGNOSTICS found_entries = ROW_COUNT;
        IF found_entries = 0 THEN
          DELETE FROM roir_data.g1 WHERE c1 OPERATOR(pg_catalog.=) OLD."k" AND c2 OPERATOR(pg_catalog.=) OLD."id";
          GET DIAGNOSTICS found_entries = ROW_COUNT;
        END IF;
      END IF;
      IF found_entries = 0 AND one_snapshot THEN
        INSERT INTO roir_data.g1 (c1, c2) VALUES (OLD."k", OLD."id") ON CONFLICT (c1, c2) DO NOTHING;
        IF old_null THEN
          EXECUTE 'DELETE FROM roir_data.g1 WHERE c1 IS NOT DISTINCT FROM NULL AND c2 OPERATOR(pg_catalog.=) $2'
            USING OLD."k", OLD."id";
        ELSE
          DELETE FROM roir_data.g1 WHERE c1 OPERATOR(pg_catalog.=) OLD."k" AND c2 OPERATOR(pg_catalog.=) OLD."id";
        END IF;
      END IF;
      -- A writer may have brought it meanwhile.
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
      IF here.belongs IS NULL THEN
        -- Has anybody else's row the entry of OLD?
        IF TG_RELID = {oid} THEN
          SELECT s.c1, s.c2, s.c3, true AS belongs INTO here
            FROM roir_data.g1_source s
           WHERE (s.c1 OPERATOR(pg_catalog.=) OLD."k" OR s.c1 IS NOT DISTINCT FROM NULL AND OLD."k" IS NOT DISTINCT FROM NULL)
             AND s.c2 OPERATOR(pg_catalog.=) OLD."id"
             LIMIT 1 FOR SHARE;
        ELSE
          -- Restored from a dump: under another oid, and, where it was restored alone, without our view.
          EXECUTE 'SELECT s."k" AS c1, s."id" AS c2, s."v" AS c3, true AS belongs FROM ONLY ' || TG_RELID::regclass
            || ' s WHERE (s."k" OPERATOR(pg_catalog.=) $1 OR s."k" IS NOT DISTINCT FROM NULL AND $1 IS NOT DISTINCT FROM NULL)'
            ' AND s."id" OPERATOR(pg_catalog.=) $2'
            ' LIMIT 1 FOR SHARE' INTO here
            USING OLD."k", OLD."id";
        END IF;
      END IF;
    END IF;
    IF here.belongs THEN
      INSERT INTO roir_data.g1 (c1, c2, c3)
      VALUES (here.c1, here.c2, here.c3)
      ON CONFLICT (c1, c2) DO UPDATE SET c1 = EXCLUDED.c1, c2 = EXCLUDED.c2, c3 = EXCLUDED.c3;
    END IF;
  END IF;

  IF TG_OP <> 'DELETE' THEN
    new_null := NEW."k" IS NOT DISTINCT FROM NULL;
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
    IF here.belongs IS NULL THEN
      -- Has anybody else's row the entry of NEW?
      IF TG_RELID = {oid} THEN
        SELECT s.c1, s.c2, s.c3, true AS belongs INTO here
          FROM roir_data.g1_source s
         WHERE (s.c1 OPERATOR(pg_catalog.=) NEW."k" OR s.c1 IS NOT DISTINCT FROM NULL AND NEW."k" IS NOT DISTINCT FROM NULL)
           AND s.c2 OPERATOR(pg_catalog.=) NEW."id"
           LIMIT 1 FOR SHARE;
      ELSE
        -- Restored from a dump: under another oid, and, where it was restored alone, without our view.
        EXECUTE 'SELECT s."k" AS c1, s."id" AS c2, s."v" AS c3, true AS belongs FROM ONLY ' || TG_RELID::regclass
          || ' s WHERE (s."k" OPERATOR(pg_catalog.=) $1 OR s."k" IS NOT DISTINCT FROM NULL AND $1 IS NOT DISTINCT FROM NULL)'
          ' AND s."id" OPERATOR(pg_catalog.=) $2'
          ' LIMIT 1 FOR SHARE' INTO here
          USING NEW."k", NEW."id";
      END IF;
    END IF;
    IF here.belongs IS NULL THEN
      -- A snapshot that is older than a rewrite of the table sees no row.
      IF one_snapshot THEN
        PERFORM roir.refuse_rewritten(TG_RELID);
      END IF;
      -- No row has it: the entry goes.
      IF new_null THEN
        EXECUTE 'DELETE FROM roir_data.g1 WHERE c1 IS NOT DISTINCT FROM NULL AND c2 OPERATOR(pg_catalog.=) $2'
          USING NEW."k", NEW."id";
      ELSE
        DELETE FROM roir_data.g1 WHERE c1 OPERATOR(pg_catalog.=) NEW."k" AND c2 OPERATOR(pg_catalog.=) NEW."id";
      END IF;
      GET DIAGNOSTICS found_entries = ROW_COUNT;
      IF found_entries = 0 AND one_snapshot THEN
        INSERT INTO roir_data.g1 (c1, c2) VALUES (NEW."k", NEW."id") ON CONFLICT (c1, c2) DO NOTHING;
        IF new_null THEN
          EXECUTE 'DELETE FROM roir_data.g1 WHERE c1 IS NOT DISTINCT FROM NULL AND c2 OPERATOR(pg_catalog.=) $2'
            USING NEW."k", NEW."id";
        ELSE
          DELETE FROM roir_data.g1 WHERE c1 OPERATOR(pg_catalog.=) NEW."k" AND c2 OPERATOR(pg_catalog.=) NEW."id";
        END IF;
      END IF;
      -- A writer may have brought it meanwhile.
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
      IF here.belongs IS NULL THEN
        -- Has anybody else's row the entry of NEW?
        IF TG_RELID = {oid} THEN
          SELECT s.c1, s.c2, s.c3, true AS belongs INTO here
            FROM roir_data.g1_source s
           WHERE (s.c1 OPERATOR(pg_catalog.=) NEW."k" OR s.c1 IS NOT DISTINCT FROM NULL AND NEW."k" IS NOT DISTINCT FROM NULL)
             AND s.c2 OPERATOR(pg_catalog.=) NEW."id"
             LIMIT 1 FOR SHARE;
        ELSE
          -- Restored from a dump: under another oid, and, where it was restored alone, without our view.
          EXECUTE 'SELECT s."k" AS c1, s."id" AS c2, s."v" AS c3, true AS belongs FROM ONLY ' || TG_RELID::regclass
            || ' s WHERE (s."k" OPERATOR(pg_catalog.=) $1 OR s."k" IS NOT DISTINCT FROM NULL AND $1 IS NOT DISTINCT FROM NULL)'
            ' AND s."id" OPERATOR(pg_catalog.=) $2'
            ' LIMIT 1 FOR SHARE' INTO here
            USING NEW."k", NEW."id";
        END IF;
      END IF;
    END IF;
    IF here.belongs THEN
      INSERT INTO roir_data.g1 (c1, c2, c3)
      VALUES (here.c1, here.c2, here.c3)
      ON CONFLICT (c1, c2) DO UPDATE SET c1 = EXCLUDED.c1, c2 = EXCLUDED.c2, c3 = EXCLUDED.c3;
    END IF;
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
  -- generation 1, active mode
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
  TRUNCATE roir_data.g1;
  RETURN NULL;
END
$roir$;
