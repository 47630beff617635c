"""Gives the search words that people type and that the pages don't use: "undo" for a revert, "stuck" for a build.

The words of a section become entries of its index, which the search shows first if they are all that was typed, and
keywords of its page, so that the page is found by them together with others (`search_scorer.js`).
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

# By page and heading; the page itself by its title.
WORDS = {
    "airflow": {
        "The pages": "who may pause, permissions of users, buttons",
        "A callback for long pauses": "notification, email, alert by Slack",
    },
    "compact": {"Compact an index": "bloat, shrink, defragment, reindex"},
    "install": {"Java": "Java missing, Java not found", "Executors: local, Celery, Kubernetes": "CeleryExecutor, pods"},
    "limits": {"Statements that fail": "isolation level, repeatable read, serializable"},
    "operate": {
        "Pause": "stop a build",
        "Resume": "retry, try again, restart a failed build, continue a build",
        "Change": "more workers, fewer workers, number of workers, make it slower, make it faster",
        "Revert": "undo a rebuild, roll back, previous generation, old index",
        "Abandoned operations": "orphaned, dead run",
        "Drop": "delete an index, remove an index",
    },
    "partitions": {"After a plain statement": "partition detached by hand, partition dropped by hand"},
    "performance": {"What writers pay": "slow writes, cost of writes, overhead"},
    "plan": {"What a build will take": "how long does a build take, duration, estimate, time, disk space, index size"},
    "reading": {"Which way to read": "index not used, query plan, planner ignores the index"},
    "rights": {
        "Roles that watch, measure or pause": "who may pause, read-only role",
        "Secrets": "password, credentials, token",
    },
    "throttle": {
        "Replicas": "replica lags, replication lag, lag limit",
        "The queue": "priority, one build at a time",
        "Windows": "only at night, nights, nightly, weekend, maintenance window, hours",
    },
    "troubleshooting": {
        "Troubleshooting": "build is stuck, build hangs, no progress, stands still",
        "A build is slow": "slow build, build slow, why is the build slow, speed up",
        "waiting for a lock …, blocked by …": "lock timeout, locked",
        "… rows share … keys of the unique index": "duplicates found",
        "could not extend file … No space left on device": "disk full, out of disk space",
        "What happens when something runs out": "too many connections, out of memory, out of connections",
    },
    "uninstall": {"Uninstall: remove everything": "delete everything, deinstall, get rid"},
    "unique": {
        "ON CONFLICT": "upsert",
        "Heal the duplicates": "duplicates found",
        "What it can't promise": "foreign key, deferred",
    },
    "upgrade": {
        "A restore from a dump": "backup, wrong rows after a restore, pg_restore",
        "Standbys": "read replica, read replicas",
        "Publications": "logical replication",
    },
    "verify": {
        "Verify and repair": "wrong rows, missing rows, corruption, consistency check, compare index and table, "
        "repair an index"
    },
}


class WordsOfReaders(SphinxTransform):
    """Adds the words to the sections of a page. A heading that isn't there ends the build."""

    default_priority = 700

    def apply(self, **_: Any) -> None:
        given = dict(WORDS.get(self.env.docname, {}))
        for section in self.document.findall(nodes.section):
            title = section.next_node(nodes.title)
            phrases = given.pop(title.astext(), None) if title is not None else None
            if phrases is None:
                continue
            said = phrases.split(", ")
            entries = [("single", one.lower(), section["ids"][0], "main", None) for one in said]
            section.insert(1, addnodes.index(entries=entries))
            keywords = ",".join(sorted({word for one in said for word in one.lower().split()}))
            self.document.insert(0, nodes.meta("", name="keywords", content=keywords))
        assert not given, f"docs/search_words.py: page {self.env.docname} has no heading {', '.join(given)}"


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers it with Sphinx."""
    app.add_transform(WordsOfReaders)
    return {"parallel_read_safe": True}
