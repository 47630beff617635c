"""As `refusals.py`, for obstacles that a table, its partitions, its owner or a reader of it cause."""

from __future__ import annotations

from tests.engine.refusals import (
    ATTACH,
    ATTACHED,
    BEGIN_ATTACH,
    BOUNDS,
    BUILD,
    GUARD,
    IDLE,
    IX,
    LOADED,
    REBUILD,
    RESUME,
    TWICE,
    VERIFY,
    WORKER,
    T,
    begin,
    begin_other,
    case,
    ended,
    owned,
    with_amcheck,
    with_collation,
)

# A table of the worker, in a schema of another role.
IN_S = "roir build public.w --table s.u --keys k"
TABLE_IN_S = (
    "CREATE SCHEMA s",
    "CREATE TABLE s.u (id int PRIMARY KEY, k int)",
    "INSERT INTO s.u SELECT i, i FROM generate_series(1, 50) i",
    "ALTER TABLE s.u OWNER TO {worker}",
)

PARTITIONS = {
    "write to what is being attached": case(
        "Wait for roir attach-partition, or cancel the attach", TWICE, *LOADED, BEGIN_ATTACH, found=2, take=(1,)
    ),
    "write to what is being attached, later": case(
        "Wait for roir attach-partition, or cancel the attach", TWICE, *LOADED, BEGIN_ATTACH, found=2, take=(0,)
    ),
    "attached to another": case(
        "with these bounds, or cancel that first", BEGIN_ATTACH.replace("60", "70"), *LOADED, BEGIN_ATTACH, whole=False
    ),
    "finished before it is copied": case(
        "Use roir attach-partition, which copies them",
        f"SELECT roir.finish_attach('{T}', 'n')",
        *LOADED,
        BEGIN_ATTACH,
        again=VERIFY,
    ),
    "attach without an index": case(
        "ATTACH PARTITION.", BEGIN_ATTACH, *LOADED, starts="table", found=0, again=ATTACH, whole=False
    ),
    "detach without an index": case(
        "DETACH PARTITION, or DROP TABLE",
        "SELECT roir.detach_partition('\"P 1\"')",
        starts="table",
        found=0,
        again=f'ALTER TABLE {T} DETACH PARTITION "P 1"',
        whole=False,
    ),
    "attach without a primary key": case(
        "Give it the primary key of the table",
        BEGIN_ATTACH,
        f"CREATE TABLE n (LIKE {T})",
        found=0,
        words=("ALTER TABLE n ADD PRIMARY KEY (d, id)",),
        whole=False,
    ),
    **{
        f"bounds {wrong}": case(
            "Give them as in ATTACH PARTITION",
            BEGIN_ATTACH.replace(BOUNDS, wrong),
            *LOADED,
            found=0,
            again=f"roir attach-partition{ATTACHED}",
        )
        for wrong in ("TO (60)", f"{BOUNDS}; SELECT 1")
    },
    "attach of another's": case(
        "ALTER TABLE %s OWNER TO %I", f"roir attach-partition{ATTACHED}", *LOADED, "ALTER TABLE n OWNER TO {worker}"
    ),
    "attach that runs another's code": case(
        "Drop that first and create it again afterwards",
        f"roir attach-partition{ATTACHED}",
        *LOADED,
        "GRANT CREATE ON SCHEMA public TO {worker}",
        "worker>> CREATE FUNCTION theirs(int) RETURNS bool IMMUTABLE LANGUAGE sql AS 'SELECT true'",
        "ALTER TABLE n ADD CONSTRAINT c CHECK (theirs(v))",
        found=0,
        words=("ALTER TABLE n DROP CONSTRAINT c",),
    ),
    "attach with duplicates": case(
        "The attach was cancelled: ",
        f"roir attach-partition{ATTACHED}",
        *LOADED,
        TWICE,
        starts="unique",
        after=("UPDATE n SET k = 'other' WHERE k = '7'",),
    ),
    "came with duplicates": case(
        "Until they are healed the index lacks rows of that partition",
        f"roir sync-partitions '{T}'",
        *LOADED,
        TWICE,
        ATTACH,
        starts="unique",
        found=2,
        after=(f"UPDATE {T} SET k = 'other' WHERE id = 7001",),
    ),
    "detach of a parent": case(
        "Finish that first: roir attach-partition",
        "SELECT roir.detach_partition('sub')",
        f"CREATE TABLE sub PARTITION OF {T} FOR VALUES FROM (40) TO (70) PARTITION BY RANGE (d)",
        *LOADED,
        BEGIN_ATTACH.replace(T, "sub"),
        attached_to="sub",
    ),
    "truncate in an old transaction": case(
        "Truncate it in a READ COMMITTED transaction",
        'BEGIN ISOLATION LEVEL REPEATABLE READ; TRUNCATE "P 1"; COMMIT',
        found=0,
        again='BEGIN ISOLATION LEVEL READ COMMITTED; TRUNCATE "P 1"; COMMIT',
    ),
    "gone during a build": case("was dropped or detached without roir; ", RESUME, 'DROP TABLE "P 1"', starts="paused"),
    "came during a build": case("with rows, without roir; ", RESUME, *LOADED, ATTACH, starts="paused"),
    "guard, attach": case("Attach it by roir attach-partition, or", ATTACH, *LOADED, GUARD, again=VERIFY),
    "guard, attach of what was emptied": case(
        "Attach it by roir attach-partition, or",
        ATTACH,
        *LOADED,
        GUARD,
        take=(),
        words=("CREATE TABLE kept AS TABLE n", "TRUNCATE n"),
        again=ATTACH + f"; INSERT INTO {T} TABLE kept",
    ),
    "guard, attach of a level": case(
        "Attach %s without it, then it by roir attach-partition",
        f"ALTER TABLE {T} ATTACH PARTITION sub FOR VALUES FROM (40) TO (70)",
        f"CREATE TABLE sub (LIKE {T} INCLUDING ALL) PARTITION BY RANGE (d)",
        *LOADED,
        f"ALTER TABLE sub ATTACH PARTITION n {BOUNDS}",
        GUARD,
        words=(
            "ALTER TABLE sub DETACH PARTITION n",
            f"ALTER TABLE {T} ATTACH PARTITION sub FOR VALUES FROM (40) TO (70)",
        ),
        again=VERIFY,
        attached_to="sub",
    ),
    "guard, detach": case(
        "with and_drop => true to drop the partition, too",
        f'ALTER TABLE {T} DETACH PARTITION "P 2" CONCURRENTLY',
        GUARD,
        again="roir clean-up",
    ),
    "guard, a column": case("Drop the index first: roir drop", f"ALTER TABLE {T} DROP v CASCADE", GUARD, ends=True),
    "guard, during a build": case(
        "Wait for the end of the build, or abort it",
        f"ALTER TABLE {T} ENABLE ROW LEVEL SECURITY",
        GUARD,
        starts="paused",
        whole=False,
    ),
}

READING = {
    "rows of another table": case(
        "It is one of %1$s",
        f"""SELECT * FROM roir.rows(NULL::n, '{IX}', '{{"k": "7"}}')""",
        *LOADED,
        fills=(f"""'{IX}', '{{"k": "7"}}'""",),
        again=VERIFY,
    ),
    "rows of no entries": case(
        "the entries are no rows of an index",
        f"SELECT * FROM roir.rows(NULL::{T}, ARRAY[1])",
        take=(),
        fills=("true",),
        again=f"SELECT * FROM roir.rows(NULL::{T}, ARRAY(SELECT i FROM {IX} i WHERE v = 7))",
    ),
    "rows by another column": case(
        "For a condition on other columns give the entries",
        f"""SELECT * FROM roir.rows(NULL::{T}, '{IX}', '{{"v": "7"}}')""",
        fills=("v = 7",),
        again="roir status",
    ),
    "rows of no index": case(
        "`roir status` lists all indexes",
        f"""SELECT * FROM roir.rows(NULL::{T}, 'n', '{{"k": "7"}}')""",
        *LOADED,
        again=f"""SELECT * FROM roir.rows(NULL::{T}, '{IX}', '{{"k": "7"}}')""",
    ),
}

UNSUITED = {
    "no primary key": case(
        "has no primary key; an index needs one",
        "roir build w --table u --keys k",
        "CREATE TABLE u (k int NOT NULL)",
        fills=("k",),
    ),
    "unlogged": case(
        "is unlogged; a crash would empty it, and the index wouldn't notice. Use ALTER TABLE ",
        "roir build w --table u --keys k",
        "CREATE UNLOGGED TABLE u (k int PRIMARY KEY)",
    ),
    "unlogged partition": case("the index wouldn't ", BUILD, 'ALTER TABLE "P 1" SET UNLOGGED', starts="table"),
    "row security": case(
        "If you want that, set ignore_row_security",
        BUILD,
        f"ALTER TABLE {T} ENABLE ROW LEVEL SECURITY",
        starts="table",
        take=(),
        again=f"{BUILD} {{flag}}",
    ),
    **{
        f"row security that holds roir, {take}": case(
            "applies to role",
            f"{BUILD} --ignore-row-security",
            *WORKER,
            *owned("worker"),
            *(f"ALTER TABLE {T} {how} ROW LEVEL SECURITY" for how in ("ENABLE", "FORCE")),
            starts="table",
            who="worker",
            fills=(T,),
            found=2,
            take=(take,),
        )
        for take in (0, 1)
    },
    "rows may not be locked": case(
        "so writes would fail. ",
        f"{BUILD} --unique",
        *WORKER,
        *owned("worker"),
        f"REVOKE UPDATE ON {T} FROM {{worker}}",
        starts="table",
        who="worker",
    ),
    "no way into the schema": case(
        "may not look into schema",
        IN_S,
        *WORKER,
        *TABLE_IN_S,
        starts="table",
        who="worker",
        whole=False,
    ),
    "owner has taken SELECT from itself": case(
        "may not read",
        IN_S,
        *WORKER,
        *TABLE_IN_S,
        "GRANT USAGE ON SCHEMA s TO {worker}",
        "REVOKE SELECT ON s.u FROM {worker}",
        starts="table",
        who="worker",
        whole=False,
    ),
    "type not usable": case(
        "which the index's entries ",
        BUILD.replace("--keys k", "--keys m"),
        *WORKER,
        "CREATE TYPE mood AS ENUM ('a')",
        f"ALTER TABLE {T} ADD m mood",
        *owned("worker"),
        "REVOKE USAGE ON TYPE mood FROM PUBLIC",
        starts="table",
        who="worker",
    ),
    "owner may replace functions": case(
        "could replace roir's functions there",
        BUILD,
        *WORKER,
        *owned("other"),
        "GRANT {other} TO {worker}",
        "worker>> GRANT CREATE ON SCHEMA roir_data TO {other}",
        starts="table",
        who="worker",
    ),
    "owner can't be become": case(
        "its capture must run as its owner",
        BUILD,
        *WORKER,
        *owned("other"),
        "GRANT {other} TO {worker} WITH INHERIT TRUE, SET FALSE",
        starts="table",
        who="worker",
    ),
    "partition of another": case(
        "to another role, but ",
        BUILD,
        *WORKER,
        *owned("other"),
        "GRANT {other} TO {worker}",
        'ALTER TABLE "P 1" OWNER TO {worker}',
        starts="table",
        who="worker",
        found=2,
        take=(0,),
    ),
    "no right in the schema": case(
        "has no right to create in schema",
        BUILD.replace(f"'{IX}'", "s.w"),
        *WORKER,
        *owned("worker"),
        "CREATE SCHEMA s",
        "GRANT USAGE ON SCHEMA s TO {worker}",
        starts="table",
        who="worker",
        whole=False,
    ),
    "covering": case(
        "Use covering auto, which covers what always fits",
        BUILD.replace("--keys k --include v", "--keys v --include k --covering all"),
        starts="table",
        found=0,
        again=BUILD + " --covering auto",
    ),
    "covering many": case(
        "Use covering auto, which covers the first ones",
        f"roir build w --table u --keys c1 --include {','.join(f'c{n}' for n in range(2, 41))} --covering all",
        f"CREATE TABLE u (c1 int PRIMARY KEY, {', '.join(f'c{n} int' for n in range(2, 41))})",
        found=0,
        again=f"roir build w --table u --keys c1 --include {','.join(f'c{n}' for n in range(2, 41))} --covering auto",
    ),
    "scan of the index": case(
        "; use key, block or auto",
        f"{REBUILD} --scan index",
        ended("aborted"),
        f"ALTER TABLE {T} DISABLE TRIGGER ALL",
        found=0,
        again=f"{REBUILD} --scan key",
    ),
    "publication of all tables, ignored": case(
        "If its subscribers skip unknown tables",
        BUILD,
        "CREATE PUBLICATION p FOR ALL TABLES",
        starts="table",
        take=(),
        found=2,
        again=f"{BUILD} {{flag}}",
    ),
    "publication of all tables": case(
        "is for all tables, so it contains",
        BUILD,
        "CREATE PUBLICATION p FOR ALL TABLES",
        starts="table",
        fills=("q",),
        found=3,
        take=(0, 1),
    ),
    "publication of a schema": case(
        "Take it out: ALTER PUBLICATION",
        BUILD,
        "CREATE PUBLICATION p FOR TABLES IN SCHEMA roir_data, public",
        starts="table",
        found=2,
        take=(0,),
    ),
    "subscription": case(
        "Use one worker: ALTER SUBSCRIPTION",
        BUILD,
        "CREATE SUBSCRIPTION s_{database} CONNECTION 'dbname=none' PUBLICATION p "
        "WITH (connect = false, slot_name = NONE, streaming = parallel)",
        f"INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate) SELECT oid, '{T}'::regclass, 'r' "
        "FROM pg_subscription WHERE subname = 's_{database}'",
        starts="table",
    ),
    "view's column renamed": case("Rename it back: ALTER VIEW", REBUILD, f"ALTER VIEW {IX} RENAME v TO w"),
    "another build without capture": case(
        "which may therefore lack writes",
        f"roir build w --table '{T}' --keys v",
        f"ALTER TABLE {T} DISABLE TRIGGER ALL",
        starts="paused",
        whole=False,
    ),
    "amcheck": case("a superuser can create it: CREATE EXTENSION", f"{VERIFY} --amcheck", with_amcheck),
    "altered while built": case(
        "Abort the operation and start again",
        RESUME,
        f"ALTER TABLE {T} ENABLE ROW LEVEL SECURITY",
        starts="paused",
        again=f"{BUILD} --ignore-row-security",
    ),
    "capture of a former owner": case(
        "Run: roir clean-up", RESUME, *owned("worker"), begin, IDLE, *owned("other"), starts="table"
    ),
}

UNSUITED |= {
    "library of a collation": case(
        "its library was exchanged, so the primary key's",
        "roir build w --table u --keys k",
        with_collation,
        "CREATE TABLE u (id text COLLATE {collation} PRIMARY KEY, k text)",
        "UPDATE pg_collation SET collversion = 'before' WHERE oid = '{collation}'::regcollation",
        found=2,
    ),
    "label renamed while built": case(
        ", but bounds and watermarks contain its old name",
        "roir resume w",
        "CREATE TYPE mood AS ENUM ('a', 'b')",
        "CREATE TABLE u (m mood, id int, k text, PRIMARY KEY (m, id))",
        "INSERT INTO u SELECT (ARRAY['a', 'b'])[1 + i % 2]::mood, i, i::text FROM generate_series(1, 100) i",
        begin_other,
        IDLE,
        "ALTER TYPE mood RENAME VALUE 'a' TO 'z'",
        take=(),
        words=("ALTER TYPE mood RENAME VALUE 'z' TO 'a'",),
    ),
    "hash of a domain": case(
        "or detach it: SELECT roir.detach_partition",
        "roir sync-partitions u",
        "CREATE DOMAIN whole AS int",
        "CREATE TABLE u (d whole PRIMARY KEY, k text) PARTITION BY RANGE (d)",
        "CREATE TABLE u0 PARTITION OF u FOR VALUES FROM (0) TO (10)",
        "roir build w --table u --keys k",
        "CREATE TABLE u1 PARTITION OF u FOR VALUES FROM (10) TO (20) PARTITION BY HASH (d)",
        "CREATE TABLE u10 PARTITION OF u1 FOR VALUES WITH (MODULUS 1, REMAINDER 0)",
    ),
}
