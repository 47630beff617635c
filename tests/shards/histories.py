"""The states of rows over time, as far as their writers know, and whether a strict answer can be true."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

Row = tuple[str, int]
State = tuple[str | None, int] | None
# id, key, value, shard
Found = tuple[int, str | None, int, str]


@dataclass
class History:
    """The states of one row, each with the time since which it can be seen, and the time since which no other can."""

    states: list[tuple[State, float, float]] = field(default_factory=lambda: [(None, 0.0, 0.0)])

    @property
    def last(self) -> State:
        return self.states[-1][0]

    def possible(self, since: float, until: float) -> set[State]:
        """All that could be seen at some moment between the two."""
        found = set()
        states = list(self.states)
        for number, (state, earliest, _) in enumerate(states):
            latest = states[number + 1][2] if number + 1 < len(states) else float("inf")
            if earliest <= until and latest >= since:
                found.add(state)
        return found


class Histories:
    """The histories of the rows of several writers, each of which writes rows of its own."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = {row: History() for row in rows}

    def begin(self, shard: str, changes: Mapping[int, State]) -> None:
        """Just before the commit: from here on it may be seen."""
        now = time.monotonic()
        for id_, state in changes.items():
            self.rows[shard, id_].states.append((state, now, float("inf")))

    def end(self, shard: str, changes: Mapping[int, State], committed: bool) -> None:
        """Records whether the transaction committed, once that is known."""
        now = time.monotonic()
        for id_ in changes:
            states = self.rows[shard, id_].states
            if committed:
                state, begun, _ = states[-1]
                states[-1] = (state, begun, now)
            else:
                states.pop()

    def wrong(
        self, key: str | None, found: Collection[Found], since: float, until: float, shards: Collection[str]
    ) -> list[str]:
        """The rows that an answer, read between `since` and `until`, misses or makes up. shards: those whose rows must
        all be in it."""
        problems = []
        by_row = {(shard, id_): (k, v) for id_, k, v, shard in found}
        if len(by_row) < len(found):
            problems.append(f"a row comes twice: {sorted(found)}")
        for row, history in self.rows.items():
            possible, got = history.possible(since, until), by_row.get(row)
            if got is not None and (got not in possible or got[0] != key):
                problems.append(f"{row}: {got} was made up, of {possible}")
            if got is None and row[0] in shards and all(one is not None and one[0] == key for one in possible):
                problems.append(f"{row}: missed, one of {possible}")
        return problems
