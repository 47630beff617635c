"""The search of the built pages finds the right section for what users type, and shows the paragraph that answers.

Sphinx's own search found nothing if a page lacked one of the words, and showed the title where that had the words.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import playwright
import pytest

ROOT = Path(__file__).parents[2]
# Playwright brings it.
NODE = Path(playwright.__file__).parent / "driver" / "node"
# As users typed them: the section that answers, and a word that its excerpt must have.
PHRASES = {
    "two duplicates were found, how do I go on": ("unique.html#heal-the-duplicates", "duplicates"),
    "the replica lags, make it stop earlier": ("throttle.html#replicas", "replica_lag"),
    "which port behind PgBouncer": ("pgbouncer.html", "6432"),
    "remove everything": ("uninstall.html", "Drop the indexes"),
    "how do I undo a rebuild": ("operate.html#revert", "undoes the last rebuild"),
    "build is stuck waiting for a lock": ("troubleshooting.html#waiting-for-a-lock-blocked-by", "open"),
    "make the build slower at night": ("throttle.html#windows", "night"),
    "ERROR: could not extend file base/5/1663: No space left on device": (
        "troubleshooting.html#could-not-extend-file-no-space-left-on-device",
        "disk",
    ),
    "ON CONFLICT does not work with my unique index": ("unique.html#on-conflict", "ON CONFLICT"),
    "what should my application do at 40001": ("application.html#isolation-levels-and-retries", "40001"),
    "how long will a build take and how much disk does it need": ("plan.html", "disk"),
    "run it on Kubernetes with CeleryExecutor": ("install.html#executors-local-celery-kubernetes", "Celery"),
    "who may pause a build in Airflow": ("airflow.html#the-pages", ""),
    "what shows whether the index is right": ("verify.html", "difference"),
    "are passwords written to logs": ("rights.html#secrets", "logs"),
    "why is the index not used by the planner": ("reading.html", "planner never uses"),
    "can I upgrade PostgreSQL with pg_upgrade": ("upgrade.html#a-new-version-of-postgresql", "pg_upgrade"),
    "my logical replication subscriber stops": ("upgrade.html#publications", "subscriber"),
    "detach a partition every month with pg_partman": ("partitions.html#pg-partman", "pg_partman"),
    "query the index with django orm": ("application.html#django", "model"),
    "resume after the scheduler was killed": ("airflow.html#restarts-and-crashes", "scheduler"),
    "more workers while it runs": ("operate.html#change", "Workers"),
    "the airflow task failed with execution_timeout": ("failures.html", "execution_timeout"),
    "the table's foreign key to a unique index": ("unique.html#what-it-can-t-promise", "foreign key"),
    "what does exit code 3 mean": ("reference/command-line.html#exit-codes", "paused"),
    "aurora rds without superuser": ("rights.html#event-triggers", "Aurora"),
    "slack message xyzzy when a build is paused for long": ("airflow.html#a-callback-for-long-pauses", "slack"),
    "roir.pause": ("operate.html#where-you-can-do-it", "roir.pause"),
    "BuildIndexOperator": ("reference/operators.html#airflow_roir.operators.build.BuildIndexOperator", "spark"),
    "worker died": ("spark.html#when-something-dies", ""),
    "worker was lost": ("spark.html#when-something-dies", "worker is lost"),
    "who may pause": ("rights.html#roles-that-watch-measure-or-pause", "pause"),
    'record "old" has no field "customer_id"': ("troubleshooting.html#record-new-has-no-field", ""),
    "Continue button after a run has ended": ("airflow.html#the-pages", "Continue"),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The results of each phrase, the best first."""
    folder = tmp_path_factory.mktemp("pages")
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-d", str(folder / "trees")]
    subprocess.run([*sphinx, "docs", str(folder / "html")], cwd=ROOT, check=True)
    asked = json.dumps({"folder": str(folder / "html"), "queries": [*PHRASES, "xyzzy", "the of and", ""]})
    done = subprocess.run(
        [NODE, Path(__file__).with_name("search.js")], input=asked, capture_output=True, text=True, check=True
    )
    return dict(zip([*PHRASES, "xyzzy", "the of and", ""], json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_of_users_finds_its_section(phrase: str, found: dict[str, list[dict[str, Any]]]) -> None:
    address, word = PHRASES[phrase]
    best = {one["address"]: one["excerpt"] for one in found[phrase][:3]}
    assert address in best
    assert word in best[address]


def test_words_that_no_page_has_find_nothing(found: dict[str, list[dict[str, Any]]]) -> None:
    assert found["xyzzy"] == found["the of and"] == found[""] == []
