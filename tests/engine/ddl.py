"""DDL that can touch a source, its types and functions, and our objects: every subcommand of the servers' own grammar.

In `sql` {base}, {delta} and {source} belong to a generation; {capture}, {empty}, {row} and {truncate} are its functions
and triggers. The source is `t`, partitioned into `t0`, `t1` and `t2` or not; its index has the key `k, q`.
"""

from __future__ import annotations

from dataclasses import dataclass

KEYS, INCLUDE = "k, q", "v, m, c, p, g"
OPERATORS = tuple(enumerate(("<", "<=", "=", ">=", ">"), start=1))

BEFORE = (
    "CREATE SCHEMA other",
    "DO $$ BEGIN CREATE ROLE ddl_owner; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$",
    "GRANT ALL ON SCHEMA public, other TO ddl_owner",
    "CREATE TYPE mood AS ENUM ('sad', 'ok', 'fine')",
    "CREATE TYPE pair AS (a int, b int)",
    "CREATE DOMAIN code AS text",
    "CREATE DOMAIN number AS int",
    "CREATE DOMAIN day AS int",
    "CREATE SCHEMA kinds",
    "CREATE TYPE kinds.grade AS (a int, b int)",
    "CREATE FUNCTION kinds.compared(kinds.grade, kinds.grade) RETURNS int IMMUTABLE STRICT LANGUAGE sql "
    "AS 'SELECT pg_catalog.btrecordcmp($1, $2)'",
    *(
        f"CREATE FUNCTION kinds.f{n}(kinds.grade, kinds.grade) RETURNS boolean IMMUTABLE STRICT LANGUAGE sql "
        f"AS 'SELECT pg_catalog.btrecordcmp($1, $2) {sign} 0'; "
        f"CREATE OPERATOR kinds.{sign} (LEFTARG = kinds.grade, RIGHTARG = kinds.grade, FUNCTION = kinds.f{n})"
        for n, sign in OPERATORS
    ),
    "CREATE OPERATOR CLASS kinds.grade_ops DEFAULT FOR TYPE kinds.grade USING btree AS "
    + ", ".join(f"OPERATOR {n} kinds.{sign}" for n, sign in OPERATORS)
    + ", FUNCTION 1 kinds.compared(kinds.grade, kinds.grade)",
    "CREATE COLLATION plain (provider = libc, locale = 'C')",
    "CREATE TABLE parent (d int, id int)",
    "CREATE FUNCTION noop() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
)
BODY = (
    "d day, id number, k text COLLATE plain, q kinds.grade DEFAULT ROW(1, 1)::kinds.grade, "
    "v int DEFAULT 1, m mood DEFAULT 'ok', c code, p pair, "
    "g text GENERATED ALWAYS AS (upper(k)) STORED, x text, w text NOT NULL DEFAULT ''"
)
PLAIN = (f"CREATE TABLE t ({BODY}, PRIMARY KEY (id, d))",)
PARTITIONED = (
    f"CREATE TABLE t ({BODY}, PRIMARY KEY (id, d)) PARTITION BY RANGE (d)",
    *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES FROM ({n}0) TO ({n + 1}0)" for n in range(3)),
)
FILL = (
    "INSERT INTO t (d, id, k, v, m, c, p, x) SELECT i % 30, i, nullif(i % 7, 3)::text, i, 'sad', 'c' || i, "
    "ROW(i, i)::pair, repeat('x', 1500) FROM generate_series(1, 45) i",
    "ANALYZE t",
)


@dataclass(frozen=True)
class Ddl:
    """Statements that a user sends, one transaction. shape: both, plain, parts. alone: not inside a transaction block.

    unseen: without the event triggers only `verify` reports it: a leaf that came and went between two looks.
    """

    sql: tuple[str, ...]
    shape: str = "both"
    since: int = 15
    alone: bool = False
    unseen: bool = False

    @property
    def name(self) -> str:
        """The name of the test."""
        return "; ".join(self.sql)


def _both(*statements: str, since: int = 15) -> list[Ddl]:
    return [Ddl((sql,), "both", since) for sql in statements]


def _plain(*statements: str, since: int = 15) -> list[Ddl]:
    return [Ddl((sql,), "plain", since) for sql in statements]


def _parts(*statements: str, since: int = 15) -> list[Ddl]:
    return [Ddl((sql,), "parts", since) for sql in statements]


def _alone(sql: str, shape: str = "both", since: int = 15) -> Ddl:
    return Ddl((sql,), shape, since, alone=True)


ALTER_COLUMN = [
    *_both(
        "ALTER TABLE t ADD COLUMN more int",
        "ALTER TABLE t ADD COLUMN IF NOT EXISTS k int",
        "ALTER TABLE t ADD COLUMN more float DEFAULT random()",
        "ALTER TABLE t ADD COLUMN more bigint GENERATED ALWAYS AS IDENTITY",
        "ALTER TABLE t ALTER v SET DEFAULT 7",
        "ALTER TABLE t ALTER v DROP DEFAULT",
        "ALTER TABLE t ALTER x SET NOT NULL",
        "ALTER TABLE t ALTER w DROP NOT NULL",
        "ALTER TABLE t ALTER id DROP NOT NULL",
        "ALTER TABLE t ALTER v SET STATISTICS 500",
        "ALTER TABLE t ALTER v SET (n_distinct = 5)",
        "ALTER TABLE t ALTER v RESET (n_distinct)",
        "ALTER TABLE t ALTER k SET STORAGE EXTERNAL",
        "ALTER TABLE t ALTER k SET COMPRESSION pglz",
        "ALTER TABLE t ALTER w TYPE varchar(90)",
        "ALTER TABLE t ALTER x TYPE text USING upper(x)",
        "ALTER TABLE t ALTER k TYPE text COLLATE plain USING upper(k)",
        "ALTER TABLE t ALTER k TYPE text COLLATE plain",
        'ALTER TABLE t ALTER k TYPE text COLLATE "C"',
        "ALTER TABLE t ALTER k TYPE varchar(90)",
        "ALTER TABLE t DROP COLUMN g, ALTER k TYPE text COLLATE plain USING upper(k)",
        "ALTER TABLE t ALTER v TYPE int USING -v",
        "ALTER TABLE t ALTER v TYPE bigint",
        "ALTER TABLE t ALTER m TYPE mood USING 'fine'",
        "ALTER TABLE t ALTER c TYPE code USING 'other'",
        "ALTER TABLE t ALTER p TYPE pair USING NULL",
        "ALTER TABLE t ALTER id TYPE int USING -id",
        "ALTER TABLE t ALTER id TYPE bigint",
        "ALTER TABLE t DROP COLUMN x",
        "ALTER TABLE t DROP COLUMN v",
        "ALTER TABLE t DROP COLUMN v CASCADE",
        "ALTER TABLE t DROP COLUMN g",
        "ALTER TABLE t DROP COLUMN k CASCADE",
        "ALTER TABLE t DROP COLUMN id CASCADE",
        "ALTER TABLE t DROP COLUMN v, ADD COLUMN v int",
        "ALTER TABLE t DROP COLUMN v CASCADE, ADD COLUMN v int DEFAULT 3",
        "ALTER TABLE t DROP COLUMN c CASCADE, ADD COLUMN c code DEFAULT 'anew'",
        "ALTER TABLE t ALTER g DROP EXPRESSION",
        "ALTER TABLE t ALTER g DROP EXPRESSION IF EXISTS",
        "ALTER TABLE t RENAME COLUMN x TO y",
        "ALTER TABLE t RENAME COLUMN v TO y",
        "ALTER TABLE t RENAME COLUMN k TO y",
        "ALTER TABLE t RENAME COLUMN id TO y",
    ),
    *_plain(
        "ALTER TABLE t ALTER id ADD GENERATED BY DEFAULT AS IDENTITY",
        "ALTER TABLE t ALTER id ADD GENERATED BY DEFAULT AS IDENTITY; "
        "ALTER TABLE t ALTER id SET INCREMENT 5 RESTART 900",
        "ALTER TABLE t ALTER id ADD GENERATED BY DEFAULT AS IDENTITY; ALTER TABLE t ALTER id DROP IDENTITY",
        "ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ALTER id DROP NOT NULL",
    ),
    *_both(
        "ALTER TABLE t ALTER g SET EXPRESSION AS (lower(k) || '!')",
        "ALTER TABLE t ALTER g SET EXPRESSION AS (upper(k))",
        since=17,
    ),
    *_parts("ALTER TABLE t1 ALTER g SET EXPRESSION AS ('leaf ' || k)", since=17),
    *_both("ALTER TABLE t ADD COLUMN more int GENERATED ALWAYS AS (v + 1) VIRTUAL", since=18),
    Ddl(("ALTER TABLE t RENAME x TO y", "ALTER TABLE t RENAME c TO x", "ALTER TABLE t RENAME y TO c")),
    Ddl(("ALTER TABLE t RENAME d TO y", "ALTER TABLE t RENAME id TO d", "ALTER TABLE t RENAME y TO id")),
    Ddl(("ALTER TABLE t RENAME v TO y", "ALTER TABLE t ADD COLUMN v int DEFAULT 5")),
    Ddl(("ALTER TABLE t RENAME v TO y", "ALTER TABLE t RENAME y TO v")),
]
ALTER_TABLE = [
    *_both(
        "ALTER TABLE t ADD CHECK (v IS NULL OR v < 1000000)",
        "ALTER TABLE t ADD CONSTRAINT most CHECK (v < 1000000) NOT VALID; ALTER TABLE t VALIDATE CONSTRAINT most",
        "ALTER TABLE t ADD UNIQUE (d, id, k)",
        "ALTER TABLE t ADD CONSTRAINT fk FOREIGN KEY (d, id) REFERENCES t DEFERRABLE; "
        "ALTER TABLE t ALTER CONSTRAINT fk NOT DEFERRABLE",
        "ALTER TABLE t DROP CONSTRAINT t_pkey",
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, d)",
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (d, id)",
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (d, id, w)",
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, d) DEFERRABLE INITIALLY DEFERRED",
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD UNIQUE (d, id)",
        "ALTER TABLE t RENAME CONSTRAINT t_pkey TO other_pkey",
        "ALTER TABLE t SET WITHOUT OIDS",
        "ALTER TABLE t SET LOGGED",
        "ALTER TABLE t DISABLE TRIGGER ALL",
        "ALTER TABLE t DISABLE TRIGGER USER",
        "ALTER TABLE t ENABLE TRIGGER ALL",
        "ALTER TABLE t ENABLE REPLICA TRIGGER {row}",
        "ALTER TABLE t ENABLE TRIGGER {row}",
        "ALTER TABLE t DISABLE TRIGGER {row}",
        "ALTER TABLE t DISABLE TRIGGER {truncate}",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER {row}",
        "DROP TRIGGER {row} ON t",
        "DROP TRIGGER {truncate} ON t",
        "ALTER TRIGGER {row} ON t RENAME TO zz",
        "CREATE OR REPLACE TRIGGER {row} AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION {capture}(); "
        "ALTER TABLE t ENABLE ALWAYS TRIGGER {row}",
        "CREATE OR REPLACE TRIGGER {row} AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW WHEN (false) "
        "EXECUTE FUNCTION {capture}(); ALTER TABLE t ENABLE ALWAYS TRIGGER {row}",
        "CREATE OR REPLACE TRIGGER {row} AFTER INSERT OR UPDATE OF x OR DELETE ON t FOR EACH ROW "
        "EXECUTE FUNCTION {capture}(); ALTER TABLE t ENABLE ALWAYS TRIGGER {row}",
        "CREATE TRIGGER b BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION noop()",
        "CREATE RULE r AS ON DELETE TO t DO INSTEAD NOTHING",
        "CREATE RULE r AS ON DELETE TO t DO INSTEAD NOTHING; ALTER TABLE t DISABLE RULE r",
        "CREATE RULE r AS ON UPDATE TO t DO ALSO SELECT 1; ALTER TABLE t ENABLE REPLICA RULE r",
        "ALTER TABLE t OWNER TO ddl_owner",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "ALTER TABLE t REPLICA IDENTITY NOTHING",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE t FORCE ROW LEVEL SECURITY",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
        "ALTER TABLE t DISABLE ROW LEVEL SECURITY",
        "CREATE POLICY some ON t USING (id < 20)",
        "ALTER TABLE t RENAME TO u",
        "ALTER TABLE t SET SCHEMA other",
        "ALTER SCHEMA other RENAME TO another",
        "ALTER SCHEMA public RENAME TO another",
        "ALTER TABLE t RENAME TO u; CREATE TABLE t (LIKE u INCLUDING ALL); "
        "INSERT INTO t (d, id, k) VALUES (1, 900, 'a')",
        "ALTER TABLE t RENAME TO u; CREATE VIEW t AS SELECT * FROM u WHERE id % 2 = 0",
        "ALTER TABLE t SET SCHEMA other; CREATE VIEW t AS SELECT * FROM other.t WHERE false",
        "CREATE INDEX ON t (v)",
        "CREATE UNIQUE INDEX more ON t (d, id, v)",
        "CREATE STATISTICS s ON v, k FROM t",
        "COMMENT ON TABLE t IS 'detach partition t1 concurrently'",
        "GRANT ALL ON t TO ddl_owner",
        "REVOKE ALL ON t FROM postgres",
        "DROP TABLE t",
        "DROP TABLE t CASCADE",
        "CREATE VIEW seen AS SELECT * FROM t",
        "ALTER INDEX t_pkey RENAME TO other_pkey",
        "REINDEX TABLE parent",
    ),
    *_plain(
        "CREATE UNIQUE INDEX more ON t (id, d); ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY USING INDEX more",
        "CREATE UNIQUE INDEX more ON t (d, id); ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY USING INDEX more",
        "ALTER TABLE t ADD EXCLUDE (id WITH =)",
        "ALTER TABLE t CLUSTER ON t_pkey",
        "ALTER TABLE t CLUSTER ON t_pkey; ALTER TABLE t SET WITHOUT CLUSTER",
        "ALTER TABLE t SET UNLOGGED",
        "ALTER TABLE t SET (fillfactor = 50)",
        "ALTER TABLE t RESET (fillfactor)",
        "ALTER TABLE t SET ACCESS METHOD heap",
        "ALTER TABLE t SET TABLESPACE pg_default",
        "ALTER TABLE t INHERIT parent",
        "ALTER TABLE t INHERIT parent; ALTER TABLE t NO INHERIT parent",
        "CREATE TABLE child () INHERITS (t); INSERT INTO child (d, id, k) VALUES (1, 900, 'child')",
        "CLUSTER t USING t_pkey",
        "REINDEX TABLE t",
        "REINDEX INDEX t_pkey",
        "CREATE TABLE whole (LIKE t INCLUDING DEFAULTS INCLUDING GENERATED) PARTITION BY RANGE (d); "
        "ALTER TABLE whole ATTACH PARTITION t FOR VALUES FROM (0) TO (100)",
        "CREATE TYPE row_of AS (d int, id int); CREATE TABLE typed OF row_of; ALTER TABLE typed NOT OF",
        "TRUNCATE t",
    ),
    _alone("VACUUM FULL t"),
    _alone("VACUUM FREEZE t"),
    _alone("REINDEX TABLE CONCURRENTLY t"),
    _alone("CREATE INDEX CONCURRENTLY ON t (v)", "plain"),
    *_both("ALTER TABLE t ALTER CONSTRAINT t_w_not_null NO INHERIT", since=18),
]
TYPES = [
    *_both(
        "ALTER TYPE mood RENAME TO feeling",
        "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'",
        "ALTER TYPE mood RENAME VALUE 'sad' TO 'x'; ALTER TYPE mood RENAME VALUE 'ok' TO 'sad'; "
        "ALTER TYPE mood RENAME VALUE 'x' TO 'ok'",
        "ALTER TYPE mood ADD VALUE 'mad' BEFORE 'sad'",
        "ALTER TYPE mood SET SCHEMA other",
        "ALTER TYPE mood OWNER TO ddl_owner",
        "DROP TYPE mood",
        "DROP TYPE mood CASCADE",
        "ALTER TYPE pair RENAME TO two",
        "ALTER TYPE pair RENAME ATTRIBUTE a TO z",
        "ALTER TYPE pair ADD ATTRIBUTE more int",
        "ALTER TYPE pair DROP ATTRIBUTE a",
        "ALTER TYPE pair ALTER ATTRIBUTE a TYPE bigint",
        "DROP TYPE pair CASCADE",
        "ALTER DOMAIN code RENAME TO cipher",
        "ALTER DOMAIN code ADD CONSTRAINT some CHECK (VALUE <> 'never')",
        "ALTER DOMAIN code ADD CONSTRAINT some CHECK (VALUE <> 'never') NOT VALID; "
        "ALTER DOMAIN code VALIDATE CONSTRAINT some",
        "ALTER DOMAIN code ADD CONSTRAINT some CHECK (VALUE <> 'never'); "
        "ALTER DOMAIN code RENAME CONSTRAINT some TO more; ALTER DOMAIN code DROP CONSTRAINT more",
        "ALTER DOMAIN code SET DEFAULT 'c'",
        "ALTER DOMAIN code DROP DEFAULT",
        "ALTER DOMAIN code SET NOT NULL",
        "ALTER DOMAIN code DROP NOT NULL",
        "ALTER DOMAIN code OWNER TO ddl_owner",
        "ALTER DOMAIN code SET SCHEMA other",
        "DROP DOMAIN code CASCADE",
        "ALTER COLLATION plain RENAME TO simple",
        "ALTER COLLATION plain REFRESH VERSION",
        "ALTER COLLATION plain SET SCHEMA other",
        "ALTER COLLATION plain OWNER TO ddl_owner",
        "DROP COLLATION plain CASCADE",
        "ALTER DOMAIN number RENAME TO amount",
        "ALTER DOMAIN number SET SCHEMA other",
        "ALTER DOMAIN number ADD CONSTRAINT some CHECK (VALUE <> 77)",
        "ALTER DOMAIN number OWNER TO ddl_owner",
        "ALTER DOMAIN day RENAME TO date_of",
        "ALTER DOMAIN day SET SCHEMA other",
        "ALTER TYPE pair SET SCHEMA other",
        "ALTER TYPE kinds.grade RENAME TO note",
        "ALTER TYPE kinds.grade SET SCHEMA other",
        "ALTER TYPE kinds.grade OWNER TO ddl_owner",
        "ALTER TYPE kinds.grade RENAME ATTRIBUTE a TO z",
        "ALTER TYPE kinds.grade ADD ATTRIBUTE more int",
        "ALTER TYPE kinds.grade DROP ATTRIBUTE b",
        "ALTER SCHEMA kinds RENAME TO another",
        "ALTER SCHEMA kinds OWNER TO ddl_owner",
        "ALTER OPERATOR CLASS kinds.grade_ops USING btree RENAME TO more_ops",
        "ALTER OPERATOR CLASS kinds.grade_ops USING btree SET SCHEMA other",
        "ALTER OPERATOR CLASS kinds.grade_ops USING btree OWNER TO ddl_owner",
        "ALTER OPERATOR FAMILY kinds.grade_ops USING btree RENAME TO more_ops",
        "ALTER OPERATOR FAMILY kinds.grade_ops USING btree SET SCHEMA other",
        "ALTER OPERATOR FAMILY kinds.grade_ops USING btree OWNER TO ddl_owner",
        "ALTER OPERATOR FAMILY kinds.grade_ops USING btree ADD FUNCTION 1 (int8, int4) btint84cmp(int8, int4)",
        "ALTER OPERATOR kinds.= (kinds.grade, kinds.grade) SET SCHEMA other",
        "ALTER OPERATOR kinds.= (kinds.grade, kinds.grade) OWNER TO ddl_owner",
        "ALTER FUNCTION kinds.compared(kinds.grade, kinds.grade) RENAME TO more",
        "ALTER FUNCTION kinds.f3(kinds.grade, kinds.grade) SET SCHEMA other",
        "DROP OPERATOR CLASS kinds.grade_ops USING btree",
        "DROP OPERATOR FAMILY kinds.grade_ops USING btree CASCADE",
        "DROP OPERATOR kinds.= (kinds.grade, kinds.grade) CASCADE",
        "DROP SCHEMA kinds CASCADE",
        "ALTER EXTENSION plpgsql SET SCHEMA other",
    )
]
OURS = [
    *_both(
        "ALTER VIEW ix RENAME TO iy",
        "ALTER VIEW ix RENAME COLUMN v TO y",
        "ALTER VIEW ix ALTER COLUMN v SET DEFAULT 3",
        "ALTER VIEW ix SET SCHEMA other",
        "ALTER VIEW ix OWNER TO ddl_owner",
        "ALTER VIEW ix SET (security_barrier = true)",
        "ALTER VIEW ix RESET (security_barrier)",
        "DROP VIEW ix",
        "DROP VIEW ix; CREATE VIEW ix AS SELECT * FROM t",
        "DROP VIEW ix; CREATE VIEW ix AS SELECT k, q, id, d, v, m, c, p, g FROM t WHERE false",
        "CREATE OR REPLACE VIEW ix AS SELECT c1 AS k, c2 AS q, c3 AS id, c4 AS d, c5 AS v, c6 AS m, c7 AS c, c8 AS p, "
        "c9 AS g FROM {base} WHERE c4 < 5",
        "ALTER TABLE {base} RENAME TO lost",
        "ALTER TABLE {base} SET SCHEMA other",
        "ALTER TABLE {base} RENAME COLUMN c4 TO y",
        "ALTER TABLE {base} RENAME COLUMN c1 TO y",
        "ALTER TABLE {base} DROP COLUMN c4",
        "ALTER TABLE {base} DROP COLUMN c4 CASCADE",
        "ALTER TABLE {base} ALTER COLUMN c4 TYPE bigint",
        "ALTER TABLE {base} DETACH PARTITION {base}_s001",
        "ALTER TABLE {base} OWNER TO ddl_owner",
        "ALTER TABLE {base}_s001 SET UNLOGGED",
        "ALTER TABLE {base}_s001 RENAME TO lost",
        "DROP TABLE {base}_s001",
        "DROP TABLE {base}",
        "DROP TABLE {base} CASCADE",
        "DROP INDEX {base}_key",
        "ALTER TABLE {delta} RENAME TO lost",
        "DROP TABLE {delta}",
        "ALTER FUNCTION {capture}() RENAME TO lost",
        "CREATE OR REPLACE FUNCTION {capture}() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "CREATE OR REPLACE FUNCTION {empty}() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "ALTER FUNCTION {capture}() SECURITY INVOKER",
        "ALTER FUNCTION {capture}() OWNER TO ddl_owner",
        "DROP FUNCTION {empty}() CASCADE",
        "ALTER VIEW {source} RENAME TO lost",
        "ALTER VIEW {source} RENAME COLUMN c1 TO y",
        "ALTER VIEW {source} OWNER TO ddl_owner",
        "ALTER VIEW {source} SET SCHEMA other",
        "DROP VIEW {source}",
        "DROP VIEW {source}; ALTER TABLE t ALTER v TYPE int USING -v",
        "DROP VIEW {source}; CREATE VIEW {source} AS SELECT k AS c1, q AS c2, id AS c3, d AS c4, v AS c5, m AS c6, "
        "c AS c7, p AS c8, g AS c9, xmin AS written FROM t WHERE id > 9",
        "DROP FUNCTION {capture}()",
        "DROP FUNCTION {capture}() CASCADE",
    )
]
PARTITIONS = [
    *_parts(
        "DROP TABLE t1",
        "DROP TABLE t1, t2",
        "ALTER TABLE t DETACH PARTITION t1",
        "ALTER TABLE t DETACH /* a /* nested */ comment */ PARTITION -- and another\n t1",
        "DO $$ BEGIN EXECUTE 'ALTER TABLE t DETACH PARTITION ' || 't1'; END $$",
        "CREATE FUNCTION f() RETURNS void LANGUAGE plpgsql AS 'BEGIN ALTER TABLE t DETACH PARTITION t1; END'; "
        "SELECT f()",
        "/* detach partition t1 concurrently */ ALTER TABLE t DETACH PARTITION t1",
        "SET roir.own_ddl = 'on'; ALTER TABLE t DETACH PARTITION t1; RESET roir.own_ddl",
        "ALTER TABLE t DETACH PARTITION t1; ALTER TABLE t ATTACH PARTITION t1 FOR VALUES FROM (10) TO (20)",
        "ALTER TABLE t DETACH PARTITION t1; DELETE FROM t1; "
        "ALTER TABLE t ATTACH PARTITION t1 FOR VALUES FROM (10) TO (20)",
        "ALTER TABLE t DETACH PARTITION t1; CREATE TABLE t1b PARTITION OF t FOR VALUES FROM (10) TO (20); "
        "INSERT INTO t SELECT d, id, k, q, v, m, c, p FROM t1",
        "CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (30) TO (40)",
        "CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (30) TO (40); INSERT INTO t (d, id, k) VALUES (31, 900, 'a')",
        "CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (30) TO (40); INSERT INTO t (d, id, k) VALUES (31, 900, 'a'); "
        "TRUNCATE t3",
        "CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (30) TO (40); INSERT INTO t (d, id, k) VALUES (31, 900, 'a'); "
        "TRUNCATE t3; INSERT INTO t (d, id, k) VALUES (32, 901, 'b')",
        "CREATE TABLE t3 PARTITION OF t DEFAULT; INSERT INTO t (d, id, k) VALUES (31, 900, 'a'); TRUNCATE t3",
        "CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (30) TO (40) PARTITION BY HASH (id); "
        "CREATE TABLE t30 PARTITION OF t3 FOR VALUES WITH (MODULUS 1, REMAINDER 0); "
        "INSERT INTO t (d, id, k) VALUES (31, 900, 'a'); TRUNCATE t3",
        "CREATE SCHEMA made CREATE TABLE t3 PARTITION OF public.t FOR VALUES FROM (30) TO (40); "
        "INSERT INTO t (d, id, k) VALUES (31, 900, 'a'); TRUNCATE made.t3",
        "CREATE UNLOGGED TABLE t3 PARTITION OF t FOR VALUES FROM (30) TO (40)",
        "CREATE TABLE t3 (LIKE t INCLUDING ALL); ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (30) TO (40)",
        "CREATE TABLE t3 (LIKE t INCLUDING ALL); INSERT INTO t3 (d, id, k) VALUES (31, 900, 'a'); "
        "ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (30) TO (40)",
        "CREATE TABLE t3 (LIKE t INCLUDING ALL); ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (30) TO (40); "
        "INSERT INTO t (d, id, k) VALUES (31, 900, 'a'); TRUNCATE t3",
        "TRUNCATE t1",
        "TRUNCATE t1; INSERT INTO t (d, id, k) VALUES (11, 900, 'a')",
        "TRUNCATE t",
        "ALTER TABLE t1 RENAME TO u1",
        "ALTER TABLE t1 SET SCHEMA other",
        "ALTER TABLE t1 SET UNLOGGED",
        "ALTER TABLE t1 OWNER TO ddl_owner",
        "ALTER TABLE t1 ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
        "ALTER TABLE t1 DISABLE TRIGGER ALL",
        "ALTER TABLE t1 DISABLE TRIGGER {truncate}; TRUNCATE t1",
        "DROP TRIGGER {truncate} ON t1; TRUNCATE t1",
        "DROP TRIGGER {row} ON t1",
        "ALTER TABLE t1 ALTER k SET STATISTICS 5",
        "ALTER TABLE t1 ALTER v SET DEFAULT 9",
        "ALTER TABLE t1 ALTER v TYPE bigint",
        "ALTER TABLE t1 RENAME v TO y",
        "ALTER TABLE t1 DROP CONSTRAINT t1_pkey",
        "CLUSTER t1 USING t1_pkey",
        "CREATE TABLE child () INHERITS (t1)",
        "ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE ONLY t ADD PRIMARY KEY (id, d)",
        "ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE ONLY t ADD PRIMARY KEY (id, d); "
        "INSERT INTO t (d, id, k) SELECT d, id, 'twice' FROM t WHERE id = 3",
    ),
    *(
        Ddl(("CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (30) TO (40)" + rest,), "parts", unseen=True)
        for rest in (
            "; INSERT INTO t (d, id, k) VALUES (31, 900, 'a'); DROP TABLE t3",
            "; INSERT INTO t (d, id, k) VALUES (31, 900, 'a'); ALTER TABLE t DETACH PARTITION t3",
            " PARTITION BY LIST (id); CREATE TABLE t30 PARTITION OF t3 DEFAULT; "
            "INSERT INTO t (d, id, k) VALUES (31, 900, 'a'); DROP TABLE t30",
        )
    ),
    *(
        _alone(sql, "parts")
        for sql in (
            "ALTER TABLE t DETACH PARTITION t1 CONCURRENTLY",
            "ALTER TABLE t DETACH PARTITION t1 /* x */ CONCURRENTLY",
            "ALTER TABLE t DETACH PARTITION -- x\n public . t1\n/* /* y */ */concurrently",
            '/* \' */ ALTER TABLE IF EXISTS ONLY public.t DETACH PARTITION "t1" CONCURRENTLY',
            'ALTER TABLE t DETACH PARTITION U&"\\0074\\+000031"/**/CONCURRENTLY',
            "ALTER TABLE t DETACH PARTITION U&\"!0074!0031\" UESCAPE '!' CONCURRENTLY -- '",
            "VACUUM FULL t1",
        )
    ),
]
EVERYTHING: list[Ddl] = [*ALTER_COLUMN, *ALTER_TABLE, *TYPES, *OURS, *PARTITIONS]
