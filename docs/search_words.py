"""Words that people type into the search and that the pages don't use: "undo" for a revert, "stuck" for a build.

`search_sections.py` adds them to the sections. A heading that isn't there ends the build.
"""

from __future__ import annotations

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
        "repair an index, index is right"
    },
}
