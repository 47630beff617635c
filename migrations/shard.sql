-- The small schema of a shard: what captures its writes for indexes on other servers. airflow_roir/engine/shards/home.py
-- installs it, and checks its version; each outbox has a table, a view and functions of its own (outbox.py).

CREATE SCHEMA roir_shard;

-- One row. token: tells this database from any other one that answers under its name.
CREATE TABLE roir_shard.home (
    id smallint PRIMARY KEY DEFAULT 1 CHECK (id = 1),
    version integer NOT NULL,
    token uuid NOT NULL DEFAULT gen_random_uuid()
);

-- Drawn under the lock of the row that is touched, so that it grows with each change of one entry.
CREATE SEQUENCE roir_shard.version;

-- For each generation of an index that captures here.
CREATE TABLE roir_shard.outbox (
    name text PRIMARY KEY,
    -- The index server's own token, and how the index is called there.
    server text NOT NULL,
    index_name text NOT NULL,
    source oid NOT NULL,
    entry jsonb NOT NULL,
    -- How often it was visited with something to ship: who counts fewer has lost commits.
    tick bigint NOT NULL DEFAULT 0,
    -- The step of the index server whose rows were cleared away last: an index server that counts less has lost commits.
    step bigint NOT NULL DEFAULT 0,
    -- The version of the last TRUNCATE.
    emptied bigint NOT NULL DEFAULT 0,
    -- The leaves whose rows were captured, with the transactions that linked them.
    leaves jsonb,
    -- Who announces writes before they commit: server, client, or nobody.
    announced_by text CHECK (announced_by IN ('server', 'client')),
    created_at timestamptz NOT NULL DEFAULT now()
);

-- As roir.standing: who owns a source is the only role that captures here, so that no code of others runs as anybody else.
CREATE FUNCTION roir_shard.standing(source oid, others oid[], names text[], body text, OUT trusted boolean, OUT owners bigint,
                                    OUT owner text, OUT made boolean, OUT may_create boolean, OUT other text, OUT named boolean)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT min(pg_get_userbyid(c.relowner)) = session_user AND count(DISTINCT c.relowner) = 1, count(DISTINCT c.relowner),
           min(pg_get_userbyid(c.relowner)), false, false,
           min(c.oid::regclass::text) FILTER (WHERE pg_get_userbyid(c.relowner) <> session_user), true
      FROM pg_class c WHERE c.oid = ANY (source || others)
$$;
