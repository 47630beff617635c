"""The kill matrix at length: every row in every phase, random moments by printed seeds, and random schedules.

Between them two operators do at random what they can beside users, on PostgreSQL 16 and 18 (tests/crash/test_storm.py).

`make soak SECONDS=3600`, or `python -m benchmarks.soak --seconds 3600`. Results: benchmarks/results/soak.json, and a
table for benchmarks/results/soak.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PER_CALL = 6
STORMS = 2
# Each brings up what takes long itself: a call runs all of its tests that were drawn.
PYTEST = [sys.executable, "-m", "pytest", "--target", "all", "-rfE", "-p", "no:cacheprovider"]


def collect() -> dict[str, list[str]]:
    """The tests of tests/crash that kill something, by file; those of `make soak` too."""
    listed = subprocess.run([*PYTEST, "--collect-only", "tests/crash"], capture_output=True, text=True, check=True)
    tests: dict[str, list[str]] = defaultdict(list)
    for line in listed.stdout.splitlines():
        if "::" in line and not re.search("random_moments|test_storm", line) and "[" in line:
            tests[line.split("::")[0]].append(line)
    return tests


def draw(chance: random.Random, tests: dict[str, list[str]]) -> list[list[str]]:
    """A round: every test once, in calls of a few of one file, in a random order."""
    calls = []
    for found in tests.values():
        mixed = chance.sample(found, len(found))
        calls += [mixed[place : place + PER_CALL] for place in range(0, len(mixed), PER_CALL)]
    chance.shuffle(calls)
    return calls


def run(arguments: list[str], account: Path, **environment: str) -> tuple[int, str]:
    """One call of pytest: its exit code and what it said."""
    done = subprocess.run(
        [*PYTEST, *arguments],
        env={**os.environ, "ROIR_CRASH_RESULTS": str(account), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout.strip().splitlines()[-1], flush=True)
    return done.returncode, done.stdout


def table(accounts: list[dict[str, Any]]) -> str:
    """Markdown: killed x phase."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in accounts:
        cells[one["killed"], one["phase"]].append(one)
    lines = [
        "| killed | phase | kills | seconds until running again, median / longest | rows redone, most | wrong rows |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (killed, phase), ones in sorted(cells.items()):
        seconds = sorted(one["seconds"] for one in ones)
        lines.append(
            f"| {killed} | {phase} | {len(ones)} | {seconds[len(seconds) // 2]:.1f} / {seconds[-1]:.1f} "
            f"| {max(one['rows_redone'] for one in ones)} | {sum(one['wrong_rows'] for one in ones)} |"
        )
    return "\n".join(lines)


def keep(account: Path, head: dict[str, Any]) -> None:
    """Writes the kills of an account so far to the results, one per line."""
    RESULTS.mkdir(exist_ok=True)
    rows = ",\n".join(account.read_text().splitlines())
    (RESULTS / "soak.json").write_text(f'{json.dumps(head)[:-1]}, "accounts": [\n{rows}\n]}}\n')


def main() -> int:
    """See the module. Returns 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--schedules", type=int, default=50, help="random schedules of tests/engine/test_schedules.py")
    parser.add_argument("--leave-out", default="", help="a part of the names of tests that aren't run")
    chosen = parser.parse_args()
    chance = random.Random(chosen.seed)
    print(f"seed {chosen.seed}", flush=True)
    begun = time.monotonic()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="roir-soak-") as folder:
        account = Path(folder) / "accounts"
        account.touch()
        tests = collect()
        if chosen.leave_out:
            tests = {file: found for file, found in tests.items() if chosen.leave_out not in file}
        waiting: list[list[str]] = []
        schedules = [(["tests/engine/test_schedules.py"], {"ROIR_SCHEDULES": str(chosen.schedules)})]
        while time.monotonic() - begun < chosen.seconds:
            if not waiting:
                waiting = draw(chance, tests)
            seeds = " ".join(str(chance.randrange(1_000_000)) for _ in range(PER_CALL))
            storms = " ".join(str(chance.randrange(1_000_000)) for _ in range(STORMS))
            planned = [
                (waiting.pop(), {}),
                (["tests/crash/test_random_moments.py"], {"ROIR_CRASH_SEEDS": seeds}),
                (["tests/crash/test_storm.py", "--pg", chance.choice(("16", "18"))], {"ROIR_STORM_SEEDS": storms}),
            ]
            if schedules and time.monotonic() - begun > chosen.seconds / 2:
                planned.append(schedules.pop())
            for arguments, environment in planned:
                code, said = run(arguments, account, **environment)
                if code:
                    failures.append(" ".join(arguments))
                    print(said[-6000:], flush=True)
                # At once, so that what was seen outlives an interruption.
                keep(account, {"seed": chosen.seed, "seconds": round(time.monotonic() - begun), "failed": failures})
    accounts = json.loads((RESULTS / "soak.json").read_text())["accounts"]
    print(table(accounts))
    print(f"{len(accounts)} kills in {time.monotonic() - begun:.0f} s, failed calls: {failures or 'none'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
