"""The Spark job that a Spark user would write: `read.jdbc` in parts, `write.jdbc`. Run by `benchmarks.peers`."""

from __future__ import annotations

import json
import sys
import time

# Without it the driver holds a part's whole result in memory; as many rows go into one INSERT.
ROWS_AT_ONCE = "10000"


def main() -> None:
    """Do the job that the argument describes, in JSON; print when Spark was ready and the seconds of the copy."""
    from pyspark.sql import SparkSession

    job = json.loads(sys.argv[1])
    spark = (
        SparkSession.builder.master(f"local[{job['cores']}]")
        .appName("benchmark")
        .config("spark.driver.extraClassPath", job["jar"])
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.range(1).count()
    ready_at, begun = time.time(), time.perf_counter()
    properties = {"driver": "org.postgresql.Driver"}
    rows = spark.read.jdbc(
        job["url"], job["source"], predicates=job["predicates"], properties=properties | {"fetchsize": ROWS_AT_ONCE}
    )
    rows.write.jdbc(
        job.get("target_url", job["url"]), job["target"], "append", properties | {"batchsize": ROWS_AT_ONCE}
    )
    print(json.dumps({"ready_at": ready_at, "copy": time.perf_counter() - begun}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
