"""Looks at the databases are shared: they don't grow with the tabs that are open."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest

from airflow_roir.errors import NotFound
from airflow_roir.page import cache as shared
from airflow_roir.page.cache import Looks, NoAnswer

FOR_EVER = 1e9


class Counted:
    """A look that says the how many-th it is."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls = 0
        self.error = error

    def __call__(self) -> int:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return self.calls


def many(looks: Looks, work: Callable[[], int], tabs: int) -> list[int | BaseException]:
    async def ask() -> list[int | BaseException]:
        return await asyncio.gather(
            *(looks.look("shop", "progress", work) for _ in range(tabs)), return_exceptions=True
        )

    return asyncio.run(ask())


def test_a_hundred_tabs_ask_once() -> None:
    work = Counted()
    assert many(Looks(fresh_s=FOR_EVER), work, 100) == [1] * 100
    assert work.calls == 1


def test_who_asks_later_gets_a_new_look() -> None:
    looks, work = Looks(fresh_s=0), Counted()
    assert [many(looks, work, 1), many(looks, work, 1)] == [[1], [2]]


def test_a_change_makes_the_next_look_a_new_one() -> None:
    looks, work = Looks(fresh_s=FOR_EVER), Counted()
    many(looks, work, 1)
    looks.forget("another")
    assert many(looks, work, 1) == [1]
    looks.forget("shop")
    assert many(looks, work, 1) == [2]


def test_a_database_that_fails_is_not_asked_by_every_tab() -> None:
    looks, work = Looks(failed_s=FOR_EVER), Counted(NotFound("gone"))
    assert all(isinstance(one, NotFound) for one in many(looks, work, 50) + many(looks, work, 50))
    assert work.calls == 1


def test_what_is_kept_is_bounded() -> None:
    looks = Looks(fresh_s=FOR_EVER)

    async def ask() -> None:
        for number in range(2 * shared.KEPT):
            await looks.look("shop", number, lambda: 0)
        for number in range(2 * shared.LANES):
            await looks.look(f"database {number}", 0, lambda: 0)

    asyncio.run(ask())
    assert len(looks) == shared.KEPT
    assert len(looks._lanes) == shared.LANES


def test_a_database_that_hangs_holds_up_no_other() -> None:
    looks, freed = Looks(), threading.Event()

    async def ask() -> int:
        for number in range(3 * shared.THREADS):
            with pytest.raises(NoAnswer, match="connection hanging"):
                await looks.look("hanging", number, freed.wait, patience_s=0.01)
        return await looks.look("shop", "progress", lambda: 7)

    try:
        assert asyncio.run(ask()) == 7
    finally:
        freed.set()


def test_looks_that_nobody_waits_for_are_bounded_and_do_not_begin() -> None:
    """Found: the pages' looks at a database that hangs were queued without bound, and run later though every asker had
    left; a connection called `airflow` shared its threads with what is asked of Airflow. It holds: at most 64 wait, and
    a look without an asker doesn't begin; Airflow has threads of its own.
    """
    looks, freed = Looks(), threading.Event()
    hung: list[int] = []
    begun: list[int] = []

    def hang() -> None:
        hung.append(1)
        freed.wait()

    async def ask() -> int:
        told = []
        # One that is late to begin doesn't begin at all.
        while len(hung) < shared.THREADS:
            with pytest.raises(NoAnswer) as reason:
                await looks.look("hanging", f"hangs, {len(told)}", hang, 0.001)
            told.append(str(reason.value))
        for number in range(2 * shared.WAITING):
            with pytest.raises(NoAnswer) as reason:
                await looks.look("hanging", number, lambda: begun.append(1), 0.001)
            told.append(str(reason.value))
        assert told[0].endswith("hasn't answered within 0.001 s")
        assert told[-1].endswith(f"hasn't answered yet, and {shared.WAITING} requests wait for it")
        freed.set()
        while looks._lanes["hanging"].waiting:
            await asyncio.sleep(0)
        return await looks.look("hanging", "after", lambda: 7)

    try:
        assert asyncio.run(ask()) == 7
    finally:
        freed.set()
    assert begun == []


def test_a_connection_that_is_called_airflow_has_a_lane_of_its_own() -> None:
    """Found: the pages' looks at a database that hangs were queued without bound, and run later though every asker had
    left; a connection called `airflow` shared its threads with what is asked of Airflow. It holds: at most 64 wait, and
    a look without an asker doesn't begin; Airflow has threads of its own.
    """
    looks = Looks(fresh_s=FOR_EVER)

    async def ask() -> list[int]:
        return [
            await looks.look(lane, "connections", partial(int, number))
            for number, lane in enumerate(("airflow", shared.AIRFLOW))
        ]

    assert asyncio.run(ask()) == [0, 1]


def test_a_look_that_takes_longer_than_anybody_waits_is_seen_by_who_asks_again() -> None:
    """A thousand indexes take longer than the page waits. Their facts would be old before a page got them."""
    looks, freed = Looks(fresh_s=0), threading.Event()
    calls: list[int] = []

    def work() -> int:
        calls.append(0)
        freed.wait()
        return len(calls)

    async def ask() -> int:
        with pytest.raises(NoAnswer):
            await looks.look("shop", "indexes", work, patience_s=0.05)
        freed.set()
        await looks.look("shop", "indexes", work)
        return await looks.look("shop", "indexes", work)

    assert (asyncio.run(ask()), len(calls)) == (1, 1)


def test_a_change_that_nobody_waits_for_does_not_begin() -> None:
    """The user has seen that the database doesn't answer, and may want something else by the time it does."""
    looks, freed, begun = Looks(), threading.Event(), threading.Event()

    async def ask() -> int:
        for number in range(shared.THREADS):
            with pytest.raises(NoAnswer):
                await looks.look("hanging", number, freed.wait, patience_s=0.01)
        with pytest.raises(NoAnswer, match="may still take effect: look again"):
            await looks.change("hanging", begun.set, patience_s=0.01)
        freed.set()
        # Behind it in the same queue, for each thread of the lane.
        for number in range(shared.THREADS):
            await looks.look("hanging", ("after", number), lambda: 0)
        return await looks.change("hanging", lambda: 7)

    assert asyncio.run(ask()) == 7
    assert not begun.is_set()
