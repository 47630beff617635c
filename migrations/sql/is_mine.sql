-- Which versions of a row are our own transaction's, however many transactions began since it did.

-- An error of pg_xact_status says that the id wasn't given out yet: so a frozen row has it from 4 billion ids ago.
CREATE FUNCTION roir.is_in_progress(id xid8) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN coalesce(pg_xact_status(id) = 'in progress', false);
EXCEPTION WHEN invalid_parameter_value THEN
    RETURN false;
END $$;

-- True where the transaction that wrote a row which we see hasn't ended: then it is ours, or one of its savepoints. A
-- savepoint's id is younger than ours by as many as were given out meanwhile: on a busy server by a million in minutes.
CREATE OR REPLACE FUNCTION roir.is_mine(written_by xid) RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN x.id < 3 THEN false
                WHEN x.id <= x.me + 1000000 THEN coalesce(pg_xact_status(x.id::text::xid8) = 'in progress', false)
                -- Dearer, since an error is caught.
                ELSE roir.is_in_progress(x.id::text::xid8) END
      FROM (SELECT n.me, n.me + CASE WHEN n.ahead < 2147483648 THEN n.ahead ELSE n.ahead - 4294967296 END AS id
              FROM (SELECT m.me, mod(4294967296 + written_by::text::numeric - mod(m.me, 4294967296), 4294967296) AS ahead
                      FROM (SELECT pg_current_xact_id()::text::numeric AS me) m) n) x
$$;
