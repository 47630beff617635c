"""The paper's scheme taken literally: rows go one by one into a table that has its unique index already.

Two workers, each with its half of the table and a watermark that commits with each batch. Nothing is captured, nothing
is verified: it is the cheapest that such a build can be.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg2

from benchmarks.scene import Result, Scene, timed

BATCH_ROWS = 100_000


def build(scene: Scene, batch_rows: int = BATCH_ROWS) -> Result:
    """Fills peer.entries, which exists, empty and indexed."""
    scene.run("CREATE TABLE peer.watermark (worker int PRIMARY KEY, watermark text[])")
    cuts = scene.cuts(scene.parallelism)

    def fill() -> None:
        with ThreadPoolExecutor(max_workers=len(cuts)) as pool:
            for done in [pool.submit(_work, scene, worker, cut, batch_rows) for worker, cut in enumerate(cuts)]:
                done.result()

    seconds = timed(fill)
    if (copied := scene.value("SELECT count(*) FROM peer.entries")) != scene.rows:
        raise RuntimeError(f"{copied} of {scene.rows} rows were copied")
    return seconds


def _work(scene: Scene, worker: int, cut: str, batch_rows: int) -> None:
    """One worker: batch after batch, each one transaction, after its watermark."""
    data = scene.data
    key = ", ".join(data.pk)
    row = f"({key})"
    texts = ", ".join(f"{column}::text" for column in data.pk)
    # PostgreSQL takes two comparisons of rows for independent, a batch for a quarter of the table, and scans all of it.
    connection = psycopg2.connect(scene.dsn, options="-c enable_seqscan=off")
    watermark: tuple[str, ...] | None = None
    done = False
    while not done:
        with connection, connection.cursor() as cursor:
            after, values = cut, []
            if watermark is not None:
                after, values = f"{cut} AND {row} > ({_marks(watermark)})", list(watermark)
            cursor.execute(
                f"SELECT {texts} FROM {data.table} WHERE {after} ORDER BY {key} OFFSET {batch_rows - 1} LIMIT 1", values
            )
            last = cursor.fetchone()
            done = last is None
            if last is not None:
                after, values = f"{after} AND {row} <= ({_marks(last)})", [*values, *last]
            cursor.execute(
                f"INSERT INTO peer.entries SELECT {data.columns} FROM {data.table} WHERE {after} "
                f"ON CONFLICT ({data.identity}) DO NOTHING",
                values,
            )
            cursor.execute(
                "INSERT INTO peer.watermark VALUES (%s, %s) "
                "ON CONFLICT (worker) DO UPDATE SET watermark = excluded.watermark",
                (worker, list(last or watermark or ())),
            )
        watermark = last
    connection.close()


def _marks(values: tuple[str, ...]) -> str:
    return ", ".join(["%s"] * len(values))
