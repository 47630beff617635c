"""Runs one look for many objects side by side: a statement that all looks send is sent once, with the values of all.

A look is a function that reads by a connection, like the checks of an index. Each look runs until its next statement,
and waits there for the others. So a thousand indexes take few statements more than two, and the functions that look
needn't know of each other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from sqlalchemy import Connection
from sqlalchemy.engine.result import IteratorResult, Result, SimpleResultMetaData

T = TypeVar("T")

# The most looks at a time: a statement for them stays short enough for a time-out, and its locks for the lock table.
AT_ONCE = 200
VALUE = re.compile(r"%\((\w+)\)s")
# The sub-query numbers its rows, so that they keep their order, and the planner plans it apart, as if it were sent
# alone. No statement has an alias like this one's.
TOGETHER = """
SELECT q.* FROM (VALUES {rows}) one_of_many ({columns}) CROSS JOIN LATERAL (
       SELECT one_of_many.which, row_number() OVER () AS place, s.* FROM ({statement}
) s) q ORDER BY 1, 2
"""


def side_by_side(connection: Connection, looks: Sequence[Callable[[Connection], T]]) -> list[T]:
    """The results of all looks, in their order.

    A look may only read, by SELECT, and without savepoints. Raises the first error of a look, or of a statement, which
    then fails for all looks.
    """
    found: list[T] = []
    for first in range(0, len(looks), AT_ONCE):
        found += _run(connection, looks[first : first + AT_ONCE])
    return found


@dataclass(frozen=True)
class _Asked:
    """A statement that a look waits for. options: as for `Connection.exec_driver_sql`."""

    statement: str
    values: Mapping[str, Any]
    options: Mapping[str, Any]


class _Side:
    """The connection of a look: hands its statements over."""

    def __init__(self, connection: Connection, ask: Callable[[_Asked], Any]) -> None:
        self._connection, self._ask = connection, ask

    def exec_driver_sql(
        self,
        statement: str,
        parameters: Mapping[str, Any] | None = None,
        execution_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """As of a connection."""
        return self._ask(_Asked(statement, parameters or {}, execution_options or {}))

    def get_execution_options(self) -> Mapping[str, Any]:
        """As of a connection."""
        return self._connection.get_execution_options()


def _run(connection: Connection, looks: Sequence[Callable[[Connection], T]]) -> list[T]:
    if len(looks) == 1:
        return [looks[0](connection)]
    # Here: executors that only copy rows need not have it.
    from greenlet import getcurrent, greenlet

    side = cast(Connection, _Side(connection, getcurrent().switch))
    threads = [greenlet(look) for look in looks]
    answers: dict[int, Any] = dict.fromkeys(range(len(looks)), side)
    found: dict[int, T] = {}
    while answers:
        waiting: dict[int, _Asked] = {}
        for number, answer in answers.items():
            said = threads[number].switch(answer)
            if threads[number].dead:
                found[number] = said
            else:
                waiting[number] = said
        answers = _answers(connection, waiting)
    return [found[number] for number in range(len(looks))]


def _answers(connection: Connection, waiting: Mapping[int, _Asked]) -> dict[int, Any]:
    """The answers by look; one statement for all that have the same text."""
    texts: dict[str, dict[int, _Asked]] = defaultdict(dict)
    for number, asked in waiting.items():
        texts[asked.statement][number] = asked
    found: dict[int, Any] = {}
    for text, askers in texts.items():
        # Looks at indexes of one table ask for the same.
        same: dict[str, list[int]] = defaultdict(list)
        for number, asked in askers.items():
            same[repr(asked.values)].append(number)
        first = [askers[numbers[0]] for numbers in same.values()]
        keys, rows_of_each = _send(connection, text, first)
        columns = SimpleResultMetaData(keys)
        for numbers, rows in zip(same.values(), rows_of_each, strict=True):
            for number in numbers:
                found[number] = IteratorResult(columns, iter(rows))
    return found


def _send(connection: Connection, text: str, asked: Sequence[_Asked]) -> tuple[Sequence[str], list[list[Any]]]:
    """The columns, and the rows for each asker."""
    if len(asked) == 1:
        one = asked[0]
        result: Result[Any] = connection.exec_driver_sql(text, one.values or None, execution_options=one.options)
        return list(result.keys()), [[tuple(row) for row in result]]
    names = list(dict.fromkeys(VALUE.findall(text)))
    constant = {name: asked[0].values[name] for name in names if len({repr(one.values[name]) for one in asked}) == 1}
    varying = [name for name in names if name not in constant]
    values: dict[str, Any] = dict(constant)
    rows = []
    for which, one in enumerate(asked):
        values |= {f"{name} {which}": one.values[name] for name in varying}
        rows.append(f"({', '.join([str(which), *(f'%({name} {which})s' for name in varying)])})")
    columns = ", ".join(["which", *(f'"{name}"' for name in varying)])
    body = VALUE.sub(lambda found: f'one_of_many."{found[1]}"' if found[1] in varying else found[0], text)
    result = connection.exec_driver_sql(TOGETHER.format(rows=", ".join(rows), columns=columns, statement=body), values)
    found: list[list[Any]] = [[] for _ in asked]
    for row in result:
        found[row[0]].append(tuple(row)[2:])
    return list(result.keys())[2:], found
