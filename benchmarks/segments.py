"""How good the estimate of a segment is: what it would take if built now, and how full its leaves are.

make bench-segments
make bench-segments ARGS="--rows 20000 --keys int uuid"    # a quick look

It starts a PostgreSQL of its own, with the extension pgstattuple. Indexes of several keys are built, and then churned,
emptied and appended to. Each time every segment with enough entries is estimated, measured by pgstattuple, and built
again beside itself. An error is positive where the estimate says more; those of sizes are shares, those of the leaves'
density are percentage points.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import install
from airflow_roir.engine.compact.segment import Segment
from airflow_roir.engine.compact.segments import segments
from airflow_roir.engine.database import Database, execute
from benchmarks.engine import build_index
from servers import contrib
from servers.postgres import CELERP, embedded_postgres

RESULTS = Path(__file__).parent / "results" / "segments.json"
# Below this a page more or less is an error of percents, and such a segment isn't worth a compaction.
ENOUGH_ROWS = 1_000
SEGMENTS = 6
# The expression of a key by the row's number i and a random one r; included columns; whether the key is unique.
KEYS: dict[str, tuple[str, str, str, bool]] = {
    "int": ("k int", "(r * 1e9)::int", "", False),
    "bigint, unique": ("k bigint", "i * 1000 + (r * 999)::int", "", True),
    "uuid": ("k uuid", "md5(r::text || i)::uuid", "", False),
    "text, 3 to 32": ("k text", "left(md5(r::text), 3 + (random() * 29)::int)", "", False),
    "text, 100 to 200": ("k text", "repeat(md5(r::text), 3) || repeat('x', 4 + (random() * 100)::int)", "", False),
    "text, date, smallint": (
        "k text, k2 date, k3 smallint",
        "left(md5(r::text), 3 + (random() * 20)::int), date '2020-01-01' + (r * 2000)::int, (r * 30000)::smallint",
        "",
        False,
    ),
    "numeric, half NULL": (
        "k numeric, k2 text",
        "(r * 1e6)::numeric(9, 2), CASE WHEN r < 0.5 THEN 'x' || i END",
        "",
        False,
    ),
    "int, included": (
        "k int, v text, w numeric",
        "(r * 1e9)::int, repeat('v', (random() * 60)::int), i * 1.5",
        "v, w",
        False,
    ),
}
FIGURES = ("heap", "tree", "leaves")


def tables(name: str, rows: int) -> list[str]:
    """The statements that make the source."""
    columns, values, _, _ = KEYS[name]
    return [
        "DROP TABLE IF EXISTS public.t",
        f"CREATE TABLE public.t (id bigint PRIMARY KEY, {columns})",
        f"INSERT INTO public.t SELECT i, {values} FROM (SELECT i, random() AS r FROM generate_series(1, {rows}) i) s",
        "ANALYZE public.t",
    ]


def changes(name: str, rows: int) -> dict[str, list[str]]:
    """The changes of the source before each look; the index's tables are vacuumed after a statement `VACUUM`."""
    columns, values, _, _ = KEYS[name]
    names = [one.split()[0] for one in columns.split(", ")]
    by = "(SELECT id AS i, random() AS r FROM public.t) s"
    write = f"UPDATE public.t SET ({', '.join(names)}) = ROW({values}) FROM {by} WHERE id = i"
    return {
        "fresh": [],
        "churned": [part for n in range(4) for part in (f"{write} AND id % 4 = {n}", "VACUUM")],
        "dead rows": [f"{write} AND id % 6 = {n}" for n in range(2)],
        "emptied": ["VACUUM", "DELETE FROM public.t WHERE id % 5 > 0", "VACUUM"],
        "appended": [
            f"INSERT INTO public.t SELECT i, {values} "
            f"FROM (SELECT i, random() AS r FROM generate_series({rows} + 1, {2 * rows}) i) s",
            "ANALYZE",
        ],
    }


def truth(connection: Connection, segment: Segment) -> tuple[int, int]:
    """The bytes of a segment's table and of its trees, built again beside it."""
    values = {"name": segment.name}
    execute(connection, f"CREATE TABLE public.rebuilt (LIKE {segment.name} INCLUDING STORAGE)")
    execute(connection, f"INSERT INTO public.rebuilt SELECT * FROM {segment.name}")
    defined = execute(
        connection, "SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = to_regclass(%(name)s)", values
    )
    for number, definition in enumerate(defined.scalars().all()):
        columns = definition.partition(" USING ")[2]
        execute(connection, f"CREATE UNIQUE INDEX rebuilt_{number} ON public.rebuilt USING {columns}")
    sizes = execute(
        connection,
        "SELECT pg_relation_size('public.rebuilt') AS heap, (SELECT sum(pg_relation_size(indexrelid)) FROM pg_index "
        "WHERE indrelid = 'public.rebuilt'::regclass)::bigint AS trees",
    ).one()
    execute(connection, "DROP TABLE public.rebuilt")
    return sizes.heap, sizes.trees


def compare(database: Database, generation: int) -> list[dict[str, float]]:
    """The errors of each segment with enough entries: of the estimate beside both, and of pgstattuple."""
    with database.autocommit() as connection:
        execute(connection, "SELECT pg_stat_force_next_flush()")
    found = []
    with database.transaction() as connection:
        estimated = segments(connection, generation)
        measured = segments(connection, generation, exact=True)
        for guess, exact in zip(estimated, measured, strict=True):
            if (exact.rows or 0) < ENOUGH_ROWS:
                continue
            assert exact.exact, exact.note
            heap, trees = truth(connection, guess)
            (heap_guess, tree_guess, leaves_guess), (heap_exact, tree_exact, leaves_exact) = (
                figures(guess),
                figures(exact),
            )
            found.append(
                {
                    "heap": heap_guess / heap_exact - 1,
                    "tree": tree_guess / tree_exact - 1,
                    "leaves": leaves_guess - leaves_exact,
                    "heap, rebuilt": heap_guess / heap - 1,
                    "tree, rebuilt": tree_guess / trees - 1,
                    "heap, exact, rebuilt": heap_exact / heap - 1,
                    "tree, exact, rebuilt": tree_exact / trees - 1,
                }
            )
    return found


def figures(segment: Segment) -> tuple[int, int, float]:
    """The bytes that its table and its trees need, and how full their leaves are."""
    if segment.heap_needed is None or segment.tree_needed is None or segment.leaf_density is None:
        raise ValueError(f"{segment.name}: {segment.note}")
    return segment.heap_needed, segment.tree_needed, segment.leaf_density


def measure(database: Database, name: str, rows: int) -> dict[str, list[dict[str, float]]]:
    """All states of an index of that key, one after the other."""
    _, _, include, unique = KEYS[name]
    keys = ", ".join(one.split()[0] for one in KEYS[name][0].split(", ") if one.split()[0] not in include.split(", "))
    run(database, ["DROP SCHEMA IF EXISTS roir, roir_data CASCADE", *tables(name, rows)])
    install.init(database)
    definition = IndexDefinition.parse("public.ix", "public.t", keys, include or None, unique=unique)
    build_index(database, definition, parallelism=2, segments=SEGMENTS, verify="none")
    with database.transaction() as connection:
        [generation] = execute(connection, "SELECT id FROM roir.generation WHERE status = 'active'").scalars().all()
    found = {}
    for state, statements in changes(name, rows).items():
        run(database, statements, f"roir_data.g{generation}")
        found[state] = compare(database, generation)
    return found


def run(database: Database, statements: Sequence[str], base: str = "") -> None:
    """Each in a transaction of its own; VACUUM and ANALYZE are of the index's tables."""
    with database.autocommit() as connection:
        for statement in statements:
            if statement in ("VACUUM", "ANALYZE"):
                # The session's own counts must arrive first.
                execute(connection, "SELECT pg_stat_force_next_flush()")
                parts = execute(
                    connection,
                    "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = to_regclass(%(base)s)",
                    {"base": base},
                )
                for part in parts.scalars().all():
                    execute(connection, f"{statement} {'(ANALYZE) ' * (statement == 'VACUUM')}{part}")
            else:
                execute(connection, statement)


def table(found: dict[str, dict[str, list[dict[str, float]]]], suffix: str = "") -> str:
    """Markdown: of each key and state the median and the worst error. suffix: beside what."""
    figures = [f"{one}{suffix}" for one in FIGURES if not suffix or one != "leaves"]
    heads = " | ".join(f"{one.split(',')[0]}, median | worst" for one in figures)
    lines = [f"| key | state | segments | {heads} |"]
    lines.append("| --- " * (3 + 2 * len(figures)) + "|")
    by_state: dict[str, list[dict[str, float]]] = {}
    for name, states in found.items():
        for state, errors in states.items():
            by_state.setdefault(state, []).extend(errors)
            lines.append(row(name, state, errors, figures))
    lines += [
        row(name, "all", [one for of in states.values() for one in of], figures) for name, states in found.items()
    ]
    lines += [row("all", state, errors, figures) for state, errors in by_state.items()]
    return "\n".join(lines)


def row(name: str, state: str, errors: list[dict[str, float]], figures: Sequence[str]) -> str:
    cells = []
    for figure in figures:
        values = [one[figure] for one in errors]
        for value in (median(values), max(values, key=abs)) if values else ():
            cells.append(f"{100 * value:+.1f}{'' if figure == 'leaves' else ' %'}")
    return f"| {name} | {state} | {len(errors)} | {' | '.join(cells)} |"


def extremes(found: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """The least and the greatest error of each figure over all segments, and how many are within 3 %."""
    errors = [one for states in found.values() for of in states.values() for one in of]
    lines = ["| figure | least | greatest | within 3 % |", "| --- | --- | --- | --- |"]
    for figure in errors[0]:
        values = [one[figure] for one in errors]
        near = sum(abs(value) <= 0.03 for value in values) / len(values)
        lines.append(f"| {figure} | {100 * min(values):+.1f} % | {100 * max(values):+.1f} % | {100 * near:.0f} % |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--keys", nargs="+", choices=KEYS, default=[*KEYS])
    chosen = parser.parse_args()
    version = contrib.find(CELERP) or contrib.ensure(CELERP)
    found: dict[str, Any] = {}
    with embedded_postgres(version, settings="autovacuum = off\n") as dsn:
        database = Database(dsn, "roir bench")
        run(database, ["CREATE EXTENSION pgstattuple SCHEMA public", "SELECT setseed(0.5)"])
        for name in chosen.keys:
            found[name] = measure(database, name, chosen.rows)
    RESULTS.write_text(json.dumps({"postgres": version, "rows": chosen.rows, "keys": found}, indent=1) + "\n")
    print("the estimate beside pgstattuple\n")
    print(table(found))
    print("\nthe estimate beside a segment that is built again\n")
    print(table(found, ", rebuilt"))
    print("\npgstattuple beside a segment that is built again\n")
    print(table(found, ", exact, rebuilt"))
    print("\nall segments: `rebuilt` is beside one that is built again, `exact` is pgstattuple\n")
    print(extremes(found))


if __name__ == "__main__":
    main()
