"""The live view of `roir status --watch`, on a terminal: the only part of the command that imports rich.

It draws on the terminal's other screen, as `top` does, so that what was there before comes back at its end. Texts of
the database are escaped before they come here, and rich reads no markup in them.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from airflow_roir.cli.cells import printable, width, wrapped
from airflow_roir.cli.overview import operation_notes, what_of
from airflow_roir.cli.snapshot import MOVING, Look, Silence
from airflow_roir.operation import Status
from airflow_roir.quantity import counted, duration, left, percent, rate, size

if TYPE_CHECKING:
    from airflow_roir.engine.snapshot.bars import Bars
    from airflow_roir.engine.snapshot.details import Progress
    from airflow_roir.engine.snapshot.operation import OperationStatus

NARROWEST = 20
# What each row of a map is at most: more is a wall of signs.
WIDEST_MAP = 100
MOST_WORKERS = 8
COLOURS = {"done": "green", "working": "yellow", "mixed": "cyan", "waiting": "bright_black"}


class LiveView:
    """Shows looks on the whole terminal, as wide and high as it is at the moment."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False, force_terminal=True)
        # A look at a time, by our own clock.
        self._live = Live(console=self._console, screen=True, auto_refresh=False, vertical_overflow="crop")
        plain = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        self._signs = Signs(*("#>+.-", "|") if plain else ("█▶▒░─", "│"))

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._live.stop()

    def show(self, seen: Look | None, silence: Silence | None) -> None:
        """Draw."""
        room = self._console.size
        lines: list[Text] = []
        if silence is not None:
            lines += [Text(line, "bold red") for line in wrapped(str(silence), room.width)]
        if seen is not None:
            lines += self._signs.of_look(seen, max(room.width, NARROWEST))
        ending = Text("Ctrl-C ends this view; what runs goes on", "bright_black")
        if len(lines) >= room.height:
            lines = lines[: max(room.height - 2, 1)]
            ending = Text("and more: this terminal is too low to show it", "bright_black")
        self._live.update(Group(*lines, ending), refresh=True)


class Signs:
    """How things are drawn: in blocks, or by a terminal's letters alone."""

    def __init__(self, blocks: str, rule: str) -> None:
        self.full, self.now, self.mixed, self.empty, self.line = list(blocks)
        self.rule = rule

    def of_look(self, seen: Look, cells: int) -> list[Text]:
        """All operations that move, the rest in a line."""
        lines: list[Text] = []
        # First what moves: a low terminal has no room for the rest.
        for one in sorted(seen.overview.operations, key=lambda one: seen.state(one) not in MOVING):
            found = seen.progress.get(one.operation_id)
            if lines:
                lines.append(Text(self.line * cells, "bright_black"))
            lines += self._operation(seen, one, found, cells)
        for wait in seen.not_begun():
            lines += [Text(line, "yellow") for line in wrapped(printable(str(wait)), cells)]
        return lines

    def _operation(self, seen: Look, one: OperationStatus, found: Progress | None, cells: int) -> list[Text]:
        lines = [Text(line, "bold") for line in wrapped(printable(one.index), cells)]
        what = f"{what_of(one)} {one.operation_id}"
        if found is not None and found.source:
            what += f" of {printable(found.source)}"
        lines += [Text(line) for line in wrapped(what, cells)]
        if found is None:
            lines += [Text(line) for note in operation_notes(seen, one) for line in wrapped(note, cells)]
            return lines
        lines += self._phases(found, cells)
        lines.append(self._bar(found, cells))
        lines += [Text(line) for line in wrapped(", ".join(_figures(one, found)), cells)]
        lines += self._map(found.bars, cells)
        if one.status == Status.RUNNING:
            lines += self._workers(found, cells)
        for number, note in enumerate(operation_notes(seen, one)):
            style = "yellow" if number or not one.driven else ""
            lines += [Text(line, style) for line in wrapped(note, cells)]
        return lines

    def _phases(self, found: Progress, cells: int) -> list[Text]:
        """`prepare 0.1 s │ build 28 s │ seal`, in as many lines as it takes."""
        lines, line = [], Text()
        for phase in found.phases:
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

    def _bar(self, found: Progress, cells: int) -> Text:
        said = f" {percent(found.percent)}"
        room = max(cells - len(said), 5)
        done = int(room * found.percent / 100)
        bar = Text(self.full * done, "green")
        return bar.append(self.empty * (room - done), "bright_black").append(said, "bold")

    def _map(self, bars: Bars, cells: int) -> list[Text]:
        """Which pieces are done, worked on, or wait: neighbours share a sign where there are more than signs."""
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

    def _workers(self, found: Progress, cells: int) -> list[Text]:
        workers = found.workers
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


def _figures(one: OperationStatus, found: Progress) -> list[str]:
    rows = counted(found.rows, "row")
    if found.rows_estimate and found.phase in ("build", "sum", "check", "compact"):
        rows = f"{found.rows:,} of about {counted(max(found.rows_estimate, found.rows), 'row')}"
    figures = [rows]
    if found.rows_per_second_now:
        figures.append(rate(found.rows_per_second_now))
    elif found.rows_per_second and found.phase == "build":
        figures.append(f"{rate(found.rows_per_second)} until now")
    if (limit := found.options.get("max_rows_per_second")) is not None:
        figures.append(f"limited to {rate(limit)}")
    figures.append(f"{duration(found.seconds_worked)} of work")
    remaining = left(found.seconds_left, found.seconds_left_low, found.seconds_left_high)
    if remaining and one.status == Status.RUNNING:
        figures.append(remaining)
    if found.delta is not None and found.delta.rows:
        about = "about " if found.delta.sampled else ""
        figures.append(f"delta {about}{counted(found.delta.rows, 'row')} ({size(found.delta.bytes)})")
    return figures
