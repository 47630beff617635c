"""The live view of `roir status --watch`, on a terminal: the only part of the command that imports rich.

It draws on the terminal's alternate screen, as `top` does, so that the former text comes back at its end. Texts of the
database are escaped before they come here, and rich reads no markup in them.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from airflow_roir.cli.cells import printable, width, wrapped
from airflow_roir.cli.overview import operation_notes
from airflow_roir.engine.snapshot.overview import MOVING
from airflow_roir.engine.snapshot.words import figures, noun
from airflow_roir.operation import Status
from airflow_roir.quantity import counted, duration, percent, rate, size

if TYPE_CHECKING:
    from airflow_roir.cli.silence import Silence
    from airflow_roir.engine.snapshot.bars import Bars
    from airflow_roir.engine.snapshot.operation import OperationStatus
    from airflow_roir.engine.snapshot.overview import Overview
    from airflow_roir.engine.snapshot.parts import Workers

NARROWEST = 20
# The most cells in a row of a map: more can't be read.
WIDEST_MAP = 100
MOST_WORKERS = 8
COLOURS = {"done": "green", "working": "yellow", "mixed": "cyan", "waiting": "bright_black"}


class LiveView:
    """Shows looks on the whole terminal, as wide and high as it is at the moment."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False, force_terminal=True)
        # Each look is drawn when it comes, without a refresh between.
        self._live = Live(console=self._console, screen=True, auto_refresh=False, vertical_overflow="crop")
        plain = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        self._signs = Signs(*("#>+.-", "|") if plain else ("█▶▒░─", "│"))

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._live.stop()

    def show(self, seen: Overview | None, silence: Silence | None) -> None:
        """Draws a look."""
        room = self._console.size
        lines: list[Text] = []
        if silence is not None:
            lines += [Text(line, "bold red") for line in wrapped(str(silence), room.width)]
        if seen is not None:
            lines += self._signs.of_look(seen, max(room.width, NARROWEST))
        ending = Text("Ctrl-C ends this view; the operations continue", "bright_black")
        if len(lines) >= room.height:
            lines = lines[: max(room.height - 2, 1)]
            ending = Text("and more: this terminal is too low to show it", "bright_black")
        self._live.update(Group(*lines, ending), refresh=True)


class Signs:
    """The signs to draw with: blocks, or ASCII if the terminal has no others."""

    def __init__(self, blocks: str, rule: str) -> None:
        self.full, self.now, self.mixed, self.empty, self.line = list(blocks)
        self.rule = rule

    def of_look(self, seen: Overview, cells: int) -> list[Text]:
        """The lines of all operations, first those that move, and of builds that wait to begin."""
        lines: list[Text] = []
        # First operations that move: a low terminal has no room for the others.
        for one in sorted(seen.operations, key=lambda one: one.status not in MOVING):
            if lines:
                lines.append(Text(self.line * cells, "bright_black"))
            lines += self._operation(seen, one, cells)
        for wait in seen.not_begun():
            lines += [Text(line, "yellow") for line in wrapped(printable(str(wait)), cells)]
        return lines

    def _operation(self, seen: Overview, one: OperationStatus, cells: int) -> list[Text]:
        lines = [Text(line, "bold") for line in wrapped(printable(one.index), cells)]
        what = f"{noun(one)} {one.operation_id}, {printable(one.definition)}"
        lines += [Text(line) for line in wrapped(what, cells)]
        if one.bars is None or one.workers is None:
            lines += [Text(line) for note in operation_notes(seen, one) for line in wrapped(note, cells)]
            return lines
        lines += self._phases(one, cells)
        lines.append(self._bar(one, cells))
        lines += [Text(line) for line in wrapped(", ".join(_figures(one)), cells)]
        lines += self._map(one.bars, cells)
        if one.status == Status.RUNNING:
            lines += self._workers(one.workers, cells)
        for number, note in enumerate(operation_notes(seen, one)):
            style = "yellow" if number or not one.driven else ""
            lines += [Text(line, style) for line in wrapped(note, cells)]
        return lines

    def _phases(self, one: OperationStatus, cells: int) -> list[Text]:
        """The phases, `prepare 0.1 s │ build 28 s │ seal`, in as many lines as necessary."""
        lines, line = [], Text()
        for phase in one.phases:
            took = f" {duration(phase.seconds)}" if phase.seconds is not None else ""
            mark = f"{self.now} " if phase.state == "now" else ""
            piece = f"{mark}{phase.name}{took}"
            if line and line.cell_len + 3 + width(piece) > cells:
                lines.append(line)
                line = Text()
            if line:
                line.append(f" {self.rule} ", "bright_black")
            line.append(piece, {"done": "green", "now": "bold", "ahead": "bright_black"}[phase.state])
        return [*lines, line]

    def _bar(self, one: OperationStatus, cells: int) -> Text:
        said = f" {percent(one.percent_complete)}"
        room = max(cells - len(said), 5)
        done = int(room * one.percent_complete / 100)
        bar = Text(self.full * done, "green")
        return bar.append(self.empty * (room - done), "bright_black").append(said, "bold")

    def _map(self, bars: Bars, cells: int) -> list[Text]:
        """Draws which pieces are done, under work, or waiting: neighbours share a sign if there are more than signs."""
        if not bars.count:
            return []
        noun = bars.of.removesuffix("s")
        lines = [Text(line) for line in wrapped(f"{bars.done:,} of {counted(bars.count, noun)} done", cells)]
        room = min(cells, WIDEST_MAP, len(bars.items))
        text = Text()
        for place in range(room):
            some = bars.items[place * len(bars.items) // room : (place + 1) * len(bars.items) // room]
            states = {item.state for item in some}
            state = "working" if "working" in states else states.pop() if len(states) == 1 else "mixed"
            sign = {"done": self.full, "working": self.now, "mixed": self.mixed, "waiting": self.empty}[state]
            text.append(sign, COLOURS[state])
        return [*lines, text]

    def _workers(self, workers: Workers, cells: int) -> list[Text]:
        said = f"{workers.alive:,} of {counted(workers.wanted, 'worker')}"
        if workers.alive > workers.wanted:
            said = f"{counted(workers.alive, 'worker')}, {workers.wanted:,} wanted"
        lines = [Text(line) for line in wrapped(said, cells)]
        for one in workers.list[:MOST_WORKERS]:
            doing = f"waits for a lock of {one.waits_for}" if one.waits_for else one.state
            text = f"{one.worker} {printable(one.holds or 'between two')}: {printable(doing)}"
            style = "yellow" if one.waits_for else ""
            lines += [Text(line, style) for line in wrapped(text, cells, "  ")]
        if len(workers.list) > MOST_WORKERS:
            lines.append(Text(f"  and {len(workers.list) - MOST_WORKERS} more"))
        return lines


def _figures(one: OperationStatus) -> list[str]:
    found = figures(one)
    if (limit := one.options["max_rows_per_second"]) is not None:
        found.append(f"limited to {rate(limit)}")
    found.append(f"{duration(one.total_execution_time)} of work")
    if one.delta is not None and one.delta.rows:
        about = "about " if one.delta.sampled else ""
        found.append(f"delta {about}{counted(one.delta.rows, 'row')} ({size(one.delta.bytes)})")
    return found
