"""The disturbances of a test with faults: servers die, shippers are killed, and an operator verifies, rebuilds,
reverts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import patch

from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, clean_up, lifecycle, prepare, revert
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.lifecycle import verify
from airflow_roir.errors import IllegalTransition, InvalidInput, NotFound, RoirError
from airflow_roir.operation import Phase, Status
from airflow_roir.options import BuildOptions, VerifyOptions
from airflow_roir.shards import registry
from airflow_roir.shards.announce import announce
from airflow_roir.shards.ship import feeds
from airflow_roir.shards.ship.feed import FeedShipper, InShard
from airflow_roir.shards.verify import judge
from tests.shards import apart
from tests.shards.fault_readers import INDEX

if TYPE_CHECKING:
    from tests.shards.faults import Traffic


class Shipper:
    """Ships a feed of a shard step by step: claims, polls, applies, dies, comes back with an old poll, takes over."""

    def __init__(self, traffic: Traffic, shard: str, number: int, chance: random.Random) -> None:
        self.traffic, self.shard, self.number, self.chance = traffic, shard, number, chance
        self.index = traffic.through("", number)
        self.there = traffic.through(shard, number)
        self.one: FeedShipper | None = None

    def run(self) -> None:
        while not self.traffic.stopped.is_set():
            try:
                if self.one is not None or self._claim():
                    self._step()
                self.traffic.stopped.wait(self.chance.uniform(0, 0.05))
                dies = self.chance.random() < 0.01
            except (InShard, DBAPIError, RoirError) as error:
                self.traffic.happened[f"a shipper's {type(error).__name__}"] += 1
                self.traffic.stopped.wait(0.02)
                # Some continue with what they remember, as the service does.
                dies = not isinstance(error, InShard) or self.chance.random() < 0.3
            if dies:
                self._die()
        self._die()

    def _claim(self) -> bool:
        with self.index.transaction() as connection:
            found = feeds.to_ship(connection, [self.shard])
        if found:
            feed = self.chance.choice(found).id
            owner, most = f"{self.shard} {self.number}", self.chance.choice((4, 30, 1000))
            self.one = FeedShipper(self.index, feed, owner, self.there, most)
            if self.one.claim(take_over=self.chance.random() < 0.15):
                return True
        self._die()
        self.traffic.stopped.wait(0.05)
        return False

    def _step(self) -> None:
        assert self.one is not None
        if self.chance.random() < 0.3:
            self.traffic.happened["pass"] += self.one.ship_pass(self.traffic.stopped.is_set) > 0
            return
        found = self.one.poll()
        if self.chance.random() < 0.2:
            self.traffic.stopped.wait(self.chance.uniform(0, 0.3))
        self.one.apply(found)
        self.traffic.happened["applied"] += 1

    def _die(self) -> None:
        if self.one is not None:
            self.one.close()
        self.one = None


class Service:
    """`roir ship`, which is killed at random moments and started again."""

    def __init__(self, traffic: Traffic, chance: random.Random) -> None:
        self.traffic, self.chance = traffic, chance

    def run(self) -> None:
        while not self.traffic.stopped.is_set():
            with tempfile.TemporaryFile("w+") as said:
                process = subprocess.Popen(
                    [sys.executable, "-m", "airflow_roir.cli", "ship", "--every", "50ms"],
                    env=os.environ | {"ROIR_DSN": self.traffic.network.dsn("", self.traffic.SERVICE)},
                    stdout=said,
                    stderr=said,
                )
                self.traffic.stopped.wait(self.chance.uniform(2, 12))
                ended = process.poll()
                with suppress(ProcessLookupError):
                    process.send_signal(self.chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
                process.wait(20)
                said.seek(0)
                text = said.read()
            if "Traceback" in text or "went wrong" in text:
                self.traffic.wrong.append(f"roir ship: {text[-2000:]}")
            # It may begin in the moment in which the index server is away.
            self.traffic.happened["roir ship was killed" if ended is None else "roir ship didn't begin"] += 1


class Killer:
    """Kills a server without a checkpoint and starts it again; often registers the shards with another DSN then."""

    def __init__(self, traffic: Traffic, chance: random.Random) -> None:
        self.traffic, self.chance = traffic, chance

    def run(self) -> None:
        servers = self.traffic.made.servers
        while not self.traffic.stopped.wait(self.chance.uniform(1, 8)):
            who = self.chance.choice(sorted(servers))
            servers[who].kill()
            self.traffic.happened[f"{who} was killed"] += 1
            self.traffic.stopped.wait(self.chance.choice([0.0, 0.2, 0.5, 2.0]))
            servers[who].start()
            if self.chance.random() < 0.7:
                # Registering the shards again ends the waits until the next try.
                for name in self.traffic.made.names:
                    dsn = self.traffic.network.dsn(name, self.chance.choice(self.traffic.NAMED))
                    with suppress(DBAPIError):
                        registry.add(self.traffic.made.database, name, dsn)


class Hands:
    """Verifications, rebuilds over other shards, reverts, clean-ups, another announcer: one after the other."""

    def __init__(self, traffic: Traffic, chance: random.Random) -> None:
        self.traffic, self.chance = traffic, chance
        self.database = traffic.through("", traffic.HANDS)
        self.wanted: str | None = None
        self.through = replace(traffic.made, index=traffic.network.dsn("", traffic.HANDS))

    def run(self) -> None:
        works = [self.verify, self.verify, self.rebuild, self.rebuild, self.revert, self.revert, self.clean_up]
        works.append(self.announce)
        # On a busy machine a schedule has time for few of them: each begins with a revert, which is soon done.
        work = self.revert
        while not self.traffic.stopped.wait(self.chance.uniform(0, 0.5)):
            until = self.chance.randrange(4)
            # Some failures are tried again a few times, as a person would.
            for _ in range(1 + until):
                try:
                    done = work()
                    self.traffic.happened[f"{work.__name__}{'' if done else ' was refused'}"] += 1
                    break
                except (DBAPIError, RoirError) as error:
                    self._note(work.__name__, error)
                if self.traffic.stopped.wait(0.1):
                    break
            self.finish()
            again = work == self.rebuild and self.chance.random() < 0.5
            work = self.revert if again else self.chance.choice(works)

    def _note(self, what: str, error: Exception) -> None:
        if "lost" in str(error) and "commits" in str(error):
            self.traffic.wrong.append(f"{what}: nothing was lost: {error}")
        self.traffic.happened[f"{what}: {type(error).__name__}"] += 1
        self.traffic.said.append(f"{what}: {str(error)[:200]!r}")

    def verify(self) -> bool:
        # Nearly all is written to all the while: else it would look on for half a minute.
        with patch.object(judge, "REST_S", 0.02):
            report = verify(self.database, INDEX, VerifyOptions(repair=self.chance.random() < 0.5), "hands")
        if report.found:
            self.traffic.wrong.append(f"a verification has found what isn't there: {report} {report.first}")
        return True

    def rebuild(self) -> bool:
        names = list(self.traffic.made.names)
        if self.chance.random() < 0.5:
            names.remove(self.chance.choice(names))
        # Until it is known what came of it readers may miss the others.
        self.traffic.covered &= set(names)
        definition = IndexDefinition.parse(INDEX, None, None, None, shards=names)
        options = BuildOptions(
            revert_window_s=self.chance.choice([0, 60, 60]), verify=self.chance.choice(["none", "after"]), ranges=3
        )
        prepare.prepare(self.database, definition, options, "hands")
        self.drive()
        return True

    def drive(self) -> None:
        """Drives the operation from its phase to the end."""
        run = start_run(self.database, INDEX, "hands", take_over=True)
        phase = operations.find_operation(self.database, INDEX).phase
        if phase == Phase.BUILD:
            apart.build_all(self.through, run)
        if phase in (Phase.BUILD, Phase.SEAL):
            apart.seal_all(self.through, run)
        lifecycle.run_phases(self.database, run)

    def finish(self) -> None:
        """Resume what is unfinished, or abort it; then see which shards it is over."""
        while not self.traffic.stopped.is_set():
            try:
                row = operations.find_operation(self.database, INDEX)
                if row.status in (Status.RUNNING, Status.PAUSED, Status.FAILED):
                    if row.status == Status.FAILED:
                        self.traffic.wrong.append(f"an operation failed: {row.error}")
                    if row.kind == "verify" or row.status == Status.FAILED or self.chance.random() < 0.3:
                        abort.abort(self.database, INDEX, "hands", patience_s=5)
                        self.traffic.happened["abort"] += 1
                    else:
                        self.drive()
                        self.traffic.happened["resume"] += 1
                elif row.status == Status.ABORTING:
                    clean_up.clean_up(self.database)
                elif self.wanted is None or self.announce():
                    self.traffic.covered = self.traffic.shards_shown()
                    return
            except (DBAPIError, RoirError) as error:
                self._note("finish", error)
            self.traffic.stopped.wait(0.1)

    def revert(self) -> bool:
        self.traffic.covered &= self.traffic.shards_kept()
        try:
            revert.revert(self.database, INDEX, "hands", patience_s=5)
        except NotFound:
            return False
        return True

    def clean_up(self) -> bool:
        clean_up.clean_up(self.database)
        return True

    def announce(self) -> bool:
        # Until it is done in all shards strict reads are refused.
        self.wanted = self.wanted or self.chance.choice(self.traffic.ways_to_announce)
        try:
            announce.announce(self.database, INDEX, self.wanted)
        except InvalidInput as error:
            # The server of a shard can't reach the index server now.
            if "can't write to the index server" not in str(error):
                raise
            return False
        self.wanted = None
        return True


def end(traffic: Traffic) -> None:
    """Aborts an unfinished operation."""
    with suppress(IllegalTransition):
        abort.abort(traffic.made.database, INDEX, "test")
    clean_up.clean_up(traffic.made.database)
