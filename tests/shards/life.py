"""Random lives of an index over shards: its operations, shipping, writes and DDL in the shards, in any order.

Every step is made by one thread; sessions of writers stay open over steps. At rest each generation that is shipped to
is the union of the projections.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from airflow_roir.engine import abort, build, clean_up, drop, lifecycle, revert, seal
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import Run, start_run
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import Fenced, LockNotAcquired
from airflow_roir.options import VerifyOptions
from airflow_roir.shards.ship.feed import FeedShipper, InShard
from airflow_roir.shards.ship.feeds import to_ship
from airflow_roir.shards.ship.shipping import Shipper
from servers.shards import Shards, run_sql
from tests.shards import apart
from tests.shards.life_tables import Tables


class Life(Tables):
    """One index over them, from its first build to its last drop."""

    def __init__(self, made: Shards, seed: int, kind: str, k: str, pg: int) -> None:
        super().__init__(made, seed, kind, k, pg)
        self.run_: Run | None = None
        self.phase = "none"
        self.shippers: dict[int, FeedShipper] = {}

    # -- a life

    def live(self, count: int) -> None:
        try:
            if self.chance.random() < 0.7:
                self.publish()
            for _ in range(count):
                self.step()
            self.rest()
            self.end()
        except BaseException:
            print(self.told[0], *self.told[-60:], sep="\n")
            raise
        finally:
            for one in self.shippers.values():
                one.close()
            for place in self.places.values():
                place.session.close()

    def publish(self) -> None:
        """A whole build, with writes and DDL between its steps."""
        self._begin()
        for step in (self._build, self._seal, self._finish):
            before = self.phase
            while self.phase == before:
                self.write()
                self.alter()
                step()

    def step(self) -> None:
        draw = self.chance.random()
        if draw < 0.4:
            self.write()
        elif draw < 0.55:
            self.alter()
        elif draw < 0.85:
            self.ship()
        elif draw < 0.96:
            self.operate()
        else:
            self.rest()

    # -- shipping

    def ship(self) -> None:
        with self.made.database.transaction() as connection:
            feeds = [one.id for one in to_ship(connection)]
        if not feeds:
            return
        feed = self.chance.choice(feeds)
        shipper = self.shippers.get(feed)
        if shipper is not None and self.chance.random() < 0.15:
            self.say("a shipper dies", str(feed))
            self.shippers.pop(feed).close()
            return
        if shipper is None:
            self.say("claim", str(feed))
            most = self.chance.choice([2, 5, 20_000])
            shipper = self.shippers[feed] = FeedShipper(self.made.database, feed, f"test {len(self.told)}", most=most)
            if not shipper.claim(take_over=True):
                self.shippers.pop(feed).close()
                return
        try:
            if self.chance.random() < 0.3:
                self.say("ship a pass", str(feed))
                shipper.ship_pass()
            else:
                self.say("poll", str(feed))
                shipper.apply(shipper.poll())
        except Fenced:
            self.say("fenced", str(feed))
            self.shippers.pop(feed).close()
        except InShard as error:
            # A writer's DDL that is not committed holds it up.
            self.say("in shard", str(error))
            self.shippers.pop(feed).close()
            if not error.passes:
                raise

    def rest(self) -> None:
        """All is shipped: each generation is right, and nothing is in doubt."""
        self.say("rest")
        self.end_transactions()
        for one in self.shippers.values():
            one.close()
        self.shippers.clear()
        with self.made.database.transaction() as connection:
            feeds = [one.id for one in to_ship(connection)]
        for feed in feeds:
            shipper = FeedShipper(self.made.database, feed, "rest")
            assert shipper.claim(take_over=True)
            shipper.ship_pass()
            shipper.release()
        generations = self.made.ask(
            "SELECT DISTINCT generation_id FROM roir.feed WHERE id = ANY (%s) ORDER BY 1", feeds
        )
        for (generation,) in generations:
            apart.assert_exact(self.made, generation)
        assert self.made.ask("SELECT doubt FROM roir.feed WHERE doubt IS NOT NULL AND removed_at IS NULL") == []

    # -- operations of the index

    def operate(self) -> None:
        steps: dict[str, list[Callable[[], None]]] = {
            "none": [self._begin, self._revert, self._verify, self._clean_up, self._drop],
            "build": [self._build] * 9 + [self._pause, self._abort, self._clean_up],
            "seal": [self._seal] * 9 + [self._pause, self._abort],
            "finish": [self._finish] * 12 + [self._abort],
        }
        self.chance.choice(steps[self.phase])()

    def tidy(self) -> None:
        """Gives schema and table the same name in all shards, since a build finds them by name."""
        self.end_transactions()
        for name, place in self.places.items():
            if place.schema != "app":
                run_sql(self.made.dsns[name], f"ALTER SCHEMA {place.schema} RENAME TO app")
                place.schema = "app"
            if place.table != "t":
                run_sql(self.made.dsns[name], f"ALTER TABLE {place.name} RENAME TO t")
                place.table = "t"

    def is_there(self) -> bool:
        return bool(self.made.ask("SELECT count(*) FROM roir.index WHERE dropped_at IS NULL")[0][0])

    def _begin(self) -> None:
        self.tidy()
        count = self.chance.randint(1, len(self.made.names))
        shards = ",".join(sorted(self.chance.sample(self.made.names, count)))
        options = {"ranges": 4, "batch_rows": 10, "parallelism": 1, "verify": "none"}
        if self.is_there():
            self.say("rebuild", shards)
            named = self.chance.choice([shards, None])
            prepared, run = apart.begin(self.made, None, None, None, shards=named, **options)
        else:
            self.say("build", shards)
            prepared, run = apart.begin(self.made, "k", "v,g", "app.t", shards=shards, **options)
        del prepared
        self.run_, self.phase = run, "build"

    @property
    def run(self) -> Run:
        assert self.run_ is not None
        return self.run_

    def _build(self) -> None:
        with apart.worker(self.made, self.run) as worker:
            for _ in range(self.chance.choice([2, 50, 50])):
                claim = worker.claim()
                if not isinstance(claim, build.Claim):
                    if claim.reason == "done":
                        self.say("built")
                        self.end_transactions()
                        build.finish(self.made.database, self.run)
                        self.phase = "seal"
                    return
                self.say("batch")
                while claim is not None:
                    outcome = worker.step(claim)
                    assert isinstance(outcome, Step)
                    claim = outcome.rest
                    if claim is not None and self.chance.random() < 0.5:
                        self.write()

    def _seal(self) -> None:
        self.say("seal")
        for _ in seal.PHASE.work(self.made.database, self.run, 0):
            if self.chance.random() < 0.3:
                self.write()
        self.end_transactions()
        seal.finish(self.made.database, self.run)
        self.phase = "finish"

    def _pause(self) -> None:
        self.say("pause and resume")
        requests.pause(self.made.database, "public.ix", "test")
        for _ in range(self.chance.randrange(4)):
            self.write()
        requests.resume(self.made.database, "public.ix", "test")
        self.run_ = start_run(self.made.database, "public.ix", "test", take_over=True)

    def _finish(self) -> None:
        self.say("finish")
        self.end_transactions()
        self.release()
        lifecycle.run_phases(self.made.database, self.run)
        self.phase = "none"

    def release(self) -> None:
        for one in self.shippers.values():
            one.release()
        self.shippers.clear()

    def _abort(self) -> None:
        self.say("abort")
        self.end_transactions()
        abort.abort(self.made.database, "public.ix", "test")
        self.phase = "none"

    def _revert(self) -> None:
        found = self.made.ask("SELECT count(*) FILTER (WHERE status = 'retired') FROM roir.generation")
        if found[0][0] and self.is_there():
            self.say("revert")
            self.end_transactions()
            with suppress(LockNotAcquired):
                revert.revert(self.made.database, "public.ix", "test")

    def _verify(self) -> None:
        """Entries are damaged, found and repaired, while it is shipped."""
        found = self.made.ask("SELECT id FROM roir.generation WHERE status = 'active'")
        if not found:
            return
        self.say("verify")
        self.end_transactions()
        self.release()
        base, last = f"roir_data.g{found[0][0]}", f"c{5 + (self.kind.key != 'id')}"
        self.made.ask(f"DELETE FROM {base} WHERE c2 = '{self.chance.choice(self.made.names)}' AND random() < 0.1")
        self.made.ask(f"UPDATE {base} SET {last} = 99 WHERE random() < 0.1")
        shipper = Shipper(self.made.database, every_s=0.05)
        with shipper.running():
            lifecycle.verify(self.made.database, "public.ix", VerifyOptions(repair=True), "test")
        shipper.end()

    def _clean_up(self) -> None:
        self.say("clean up")
        self.end_transactions()
        clean_up.clean_up(self.made.database)

    def _drop(self) -> None:
        if self.is_there() and self.chance.random() < 0.3:
            self.say("drop")
            self.end_transactions()
            self.release()
            drop.drop_index(self.made.database, "public.ix", "test")

    def end(self) -> None:
        """Nothing is left of it."""
        if self.phase != "none":
            self._abort()
        self.release()
        if self.is_there():
            drop.drop_index(self.made.database, "public.ix", "test")
        assert clean_up.clean_up(self.made.database).waiting == []
        for name in self.made.names:
            found = self.made.ask(
                "SELECT (SELECT count(*) FROM roir_shard.outbox), "
                "(SELECT count(*) FROM pg_trigger WHERE tgname ~ '^roir'), "
                "(SELECT count(*) FROM pg_class WHERE relnamespace = 'roir_shard'::regnamespace AND relname ~ '^o_'), "
                "(SELECT count(*) FROM pg_proc WHERE pronamespace = 'roir_shard'::regnamespace AND proname ~ '^o_')",
                shard=name,
            )
            assert found == [(0, 0, 0, 0)], name
