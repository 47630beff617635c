-- Guards an index's view after a publish: true where the caller's own snapshot sees the generation as published, an
-- error where it is older and may not see every entry. STABLE, so that it looks with the snapshot of the query that
-- calls it; a row, not a transaction id, since it must still be right in a database that was restored from a dump.
-- PARALLEL SAFE, or it would keep every query of the view from a parallel plan.
CREATE FUNCTION roir.published(generation bigint) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM roir.generation g
                WHERE g.id = published.generation AND g.status IN ('active', 'retired')) THEN
        RETURN true;
    END IF;
    RAISE serialization_failure
        USING MESSAGE = 'could not serialize access: the index was published after the transaction''s snapshot',
              DETAIL = format('roir generation %s', published.generation),
              HINT = 'Retry the transaction.';
END $$;

-- Functions in a view are called with the rights of whoever reads the view, and needn't be found by name for that.
GRANT EXECUTE ON FUNCTION roir.published(bigint) TO PUBLIC;
