"""Draws the docs' pictures of a build and of states: `make charts`. Each for light and for dark pages.

The places of the boxes are written here. For states the code decides which boxes and arrows there are: the program
fails if an arrow has no place here. An arrow keeps its meaning as `data-arrow`, so that a test can read the picture.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
sys.path.insert(0, str(Path(__file__).parents[1]))

from airflow_roir.entry_state import ENTRY_STATES, Happening  # noqa: E402 - found by the path above
from airflow_roir.generation_state import ARROWS  # noqa: E402
from airflow_roir.operation import TRANSITIONS, Phase, Verb  # noqa: E402

# The charts' colours (benchmarks/charts.py), on white and on the theme's dark.
COLOURS = {
    "light": {
        "text": "#1f2733",
        "faint": "#5b6675",
        "line": "#5b6675",
        "plain": "#f3f5f8",
        "group": "#fafbfc",
        "accent": "#fbeee6",
        "edge": "#b9c2cf",
        "strong": "#b5562a",
        "done": "#b5562a",
    },
    "dark": {
        "text": "#e4e9f0",
        "faint": "#a3aebd",
        "line": "#a3aebd",
        "plain": "#262d38",
        "group": "#1a2029",
        "accent": "#40301f",
        "edge": "#4a5666",
        "strong": "#e0a070",
        "done": "#c8814f",
    },
}

Point = tuple[float, float]
Pair = tuple[str, str]


@dataclass(frozen=True)
class Box:
    """A state. look: plain, accent (where most time is spent), or group (around others)."""

    x: float
    y: float
    width: float
    height: float
    lines: tuple[str, ...]
    look: str = "plain"

    def svg(self, colour: dict[str, str]) -> str:
        edge = colour["strong"] if self.look == "accent" else colour["edge"]
        dash = ' stroke-dasharray="5 4"' if self.look == "group" else ""
        made = [
            f'<rect x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" height="{self.height:g}" rx="8" '
            f'fill="{colour[self.look]}" stroke="{edge}"{dash}/>'
        ]
        if self.look == "group":
            made.append(text((self.x + 14, self.y + 22), self.lines, colour["faint"], "start", 13))
        else:
            middle = self.y + self.height / 2 + 5 - 9 * (len(self.lines) - 1)
            made.append(text((self.x + self.width / 2, middle), self.lines[:1], colour["text"], bold=True))
            made.append(
                text((self.x + self.width / 2, middle + 18), self.lines[1:], colour["faint"], size=13)
                * (len(self.lines) > 1)
            )
        return "".join(made)


@dataclass(frozen=True)
class Line:
    """An arrow along its points, with a label. stands_for: the arrows of the code."""

    points: tuple[Point, ...]
    label: tuple[str, ...] = ()
    at: Point = (0, 0)
    anchor: str = "middle"
    stands_for: tuple[Pair, ...] = ()
    dashed: bool = False

    def svg(self, colour: dict[str, str]) -> str:
        (x, y), *rest = self.points
        if len(rest) == 2:
            path = f"M{x:g},{y:g} Q{rest[0][0]:g},{rest[0][1]:g} {rest[1][0]:g},{rest[1][1]:g}"
        elif len(rest) == 3:
            path = f"M{x:g},{y:g} C" + " ".join(f"{px:g},{py:g}" for px, py in rest)
        else:
            path = f"M{x:g},{y:g} L{rest[0][0]:g},{rest[0][1]:g}"
        arrows = "; ".join(f"{one} > {other}" for one, other in self.stands_for)
        kept = f' data-arrow="{escape(arrows)}"' if arrows else ""
        dash = ' stroke-dasharray="5 4"' if self.dashed else ""
        return (
            f'<path d="{path}" fill="none" stroke="{colour["line"]}" stroke-width="1.5" marker-end="url(#head)"'
            f"{dash}{kept}/>" + text(self.at, self.label, colour["faint"], self.anchor, 13)
        )


@dataclass
class Picture:
    """The parts that are drawn, in that order. title: for readers who can't see the picture."""

    name: str
    title: str
    width: float
    height: float
    parts: list[Box | Line | str] = field(default_factory=list)

    def svg(self, mode: str) -> str:
        colour = COLOURS[mode]
        made = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{colour["line"]}"/></marker></defs>',
            *(part.format(**colour) if isinstance(part, str) else part.svg(colour) for part in self.parts),
            "</svg>",
        ]
        return "\n".join(made) + "\n"


def text(
    at: Point, lines: tuple[str, ...], colour: str, anchor: str = "middle", size: float = 15, bold: bool = False
) -> str:
    """Lines of text, one below the other."""
    weight = ' font-weight="600"' if bold else ""
    return "".join(
        f'<text x="{at[0]:g}" y="{at[1] + 17 * number:g}" fill="{colour}" font-size="{size:g}" '
        f'text-anchor="{anchor}"{weight}>{escape(line)}</text>'
        for number, line in enumerate(lines)
    )


def wrap(words: str, width: int) -> tuple[str, ...]:
    """The words in lines of at most that many letters."""
    lines = [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return tuple(lines)


def phases() -> Picture:
    """The phases of a build, a verification, a compaction and a foreign key, and why each ends."""
    picture = Picture("phases", "The phases of a build, a verification, a compaction and a foreign key", 960, 440)
    moves = {
        t.phase: (t.to_phase, t.reason)
        for t in TRANSITIONS
        if t.verb in (Verb.ADVANCE, Verb.COMPLETE) and t.phase is not t.to_phase
    }
    rows = (
        (20.0, 40, Phase.BUILD, "a build, after prepare, which is one transaction"),
        (20.0, 190, Phase.SUM, "a verification"),
        (600.0, 190, Phase.COMPACT, "a compaction"),
        (20.0, 340, Phase.FILL, "a foreign key"),
    )
    for x, y, phase, title in rows:
        picture.parts.append("<g>" + text((x, y - 14), (title,), "{faint}", "start", 13) + "</g>")
        while True:
            accent = phase in (Phase.BUILD, Phase.SUM, Phase.COMPACT, Phase.FILL)
            picture.parts.append(Box(x, y, 92, 44, (phase.value,), "accent" if accent else "plain"))
            if phase not in moves:
                break
            following, reason = moves.pop(phase)
            between = (x + 92 + (210 - 92) / 2, y + 66)
            picture.parts.append(
                Line(
                    ((x + 96, y + 22), (x + 206, y + 22)),
                    wrap(reason, 19),
                    between,
                    stands_for=((phase.value, following.value),),
                )
            )
            x, phase = x + 210, following
    assert not moves, f"phases without a row: {moves}"
    return picture


def statuses() -> Picture:
    """The statuses of an operation; what both running and paused can do starts from the box around both."""
    picture = Picture("statuses", "The statuses of an operation, and what leads from one to the other", 900, 330)
    verbs: dict[Pair, list[str]] = defaultdict(list)
    for arrow in TRANSITIONS:
        if arrow.verb is not Verb.ADVANCE and arrow.verb.value not in verbs[arrow.status.value, arrow.to_status.value]:
            verbs[arrow.status.value, arrow.to_status.value].append(arrow.verb.value)
    places = {
        "running": Box(60, 66, 190, 56, ("running",), "accent"),
        "paused": Box(60, 232, 190, 56, ("paused", "no process, no connection")),
        "completed": Box(480, 66, 150, 56, ("completed",)),
        "failed": Box(480, 152, 150, 56, ("failed", "nothing but an abort")),
        "aborting": Box(480, 252, 150, 48, ("aborting",)),
        "aborted": Box(730, 252, 150, 48, ("aborted",)),
    }
    picture.parts.append(Box(20, 20, 300, 295, ("unfinished",), "group"))
    picture.parts.extend(places.values())
    # The arrows by the transitions that they show: points, the label's place, its text beside the verb.
    drawn: tuple[tuple[tuple[Pair, ...], tuple[Point, ...], Point, str, str], ...] = (
        ((("running", "paused"),), ((120, 124), (120, 228)), (112, 172), "end", "{0}"),
        ((("paused", "running"),), ((190, 230), (190, 126)), (198, 172), "start", "{0}"),
        (
            (("running", "running"),),
            ((100, 64), (100, 22), (180, 22), (180, 62)),
            (190, 46),
            "start",
            "{0}: taken over",
        ),
        ((("running", "completed"),), ((252, 94), (476, 94)), (400, 86), "middle", "{0}"),
        ((("running", "failed"), ("paused", "failed")), ((322, 180), (476, 180)), (400, 172), "middle", "{0}"),
        ((("running", "aborting"), ("paused", "aborting")), ((322, 276), (476, 276)), (400, 268), "middle", "{0}"),
        ((("failed", "aborting"),), ((555, 210), (555, 248)), (563, 234), "start", "{0}"),
        ((("aborting", "aborted"),), ((632, 276), (726, 276)), (679, 268), "middle", "{0}"),
    )
    for pairs, points, at, anchor, label in drawn:
        said = {", ".join(verbs.pop(pair)) for pair in pairs}
        assert len(said) == 1, f"{pairs} don't have the same verbs: {said}"
        picture.parts.append(Line(points, (label.format(said.pop()),), at, anchor, pairs))
    assert not verbs, f"arrows without a place: {dict(verbs)}"
    return picture


# The happenings that the words on an arrow name.
WRITTEN = {Happening.WRITE, Happening.COPY}
REMOVED = {Happening.REMOVE}
FOLDED = {Happening.FOLD_MATCHED, Happening.FOLD_UNMATCHED}
# Happenings that have the same effect in any state, so that one arrow from the box around all shows them.
FOR_ALL = {Happening.WRITE_DIRECT, Happening.REMOVE_DIRECT, Happening.COPY_DIRECT, Happening.TRUNCATE}


def entry_states() -> Picture:
    """The states of an entry in the delta; what leaves a state as it is isn't drawn."""
    picture = Picture("entry-states", "The states of an entry in the delta, and what changes them", 940, 440)
    happenings: dict[Pair, set[Happening]] = defaultdict(set)
    for (state, happening), following in ENTRY_STATES.items():
        if state is not following:
            happenings[state.value if state else "none", following.value if following else "none"].add(happening)
    places = {
        "none": Box(20, 190, 150, 60, ("no row", "the base is right")),
        "regular": Box(430, 56, 190, 60, ("regular", "the entry as it is now"), "accent"),
        "antimatter": Box(430, 334, 190, 60, ("antimatter", "the entry is gone"), "accent"),
        "ghost": Box(740, 194, 160, 60, ("ghost", "leftover antimatter")),
    }
    picture.parts.append(Box(390, 16, 535, 408, ("in the delta",), "group"))
    picture.parts.extend(places.values())
    pairs = [(state, "none") for state in ("regular", "antimatter", "ghost")]
    for pair in pairs:
        assert happenings[pair] >= FOR_ALL
        happenings[pair] -= FOR_ALL
    assert not happenings.pop(("ghost", "none"))
    picture.parts.append(
        Line(
            ((388, 220), (174, 220)),
            ("from the switch on, any", "write; TRUNCATE"),
            (282, 194),
            stands_for=tuple(pairs),
        )
    )
    drawn: dict[Pair, tuple[set[Happening], tuple[Point, ...], Point, str, tuple[str, ...]]] = {
        ("none", "regular"): (WRITTEN, ((90, 186), (130, 60), (426, 76)), (190, 76), "middle", ("written",)),
        ("regular", "none"): (FOLDED, ((428, 104), (200, 110), (140, 186)), (316, 144), "middle", ("fold: upserted",)),
        ("none", "antimatter"): (REMOVED, ((90, 254), (130, 386), (426, 374)), (190, 384), "middle", ("removed",)),
        ("antimatter", "none"): (
            {Happening.FOLD_MATCHED},
            ((428, 344), (200, 340), (140, 254)),
            (312, 296),
            "middle",
            ("fold: both", "annihilate"),
        ),
        ("regular", "antimatter"): (
            REMOVED | {Happening.LEAVE},
            ((500, 120), (500, 330)),
            (492, 270),
            "end",
            ("removed",),
        ),
        ("antimatter", "regular"): (WRITTEN, ((550, 330), (550, 120)), (558, 180), "start", ("written",)),
        ("antimatter", "ghost"): (
            {Happening.FOLD_UNMATCHED},
            ((624, 372), (780, 366), (820, 258)),
            (800, 356),
            "start",
            ("fold: the base", "hasn't the entry"),
        ),
        ("ghost", "antimatter"): (REMOVED, ((780, 258), (750, 330), (624, 350)), (690, 314), "middle", ("removed",)),
        ("ghost", "regular"): (WRITTEN, ((820, 190), (790, 96), (624, 86)), (770, 104), "start", ("written",)),
    }
    for pair, (means, points, at, anchor, label) in drawn.items():
        found = happenings.pop(pair)
        assert found == means, f"{pair}: the picture says {means}, the code {found}"
        picture.parts.append(Line(points, label, at, anchor, (pair,)))
    assert not happenings, f"arrows without a place: {dict(happenings)}"
    return picture


def generations() -> Picture:
    """The life of a generation: who reads it, and how the capture maintains it."""
    picture = Picture("generations", "The life of a generation", 980, 300)
    arrows = {(arrow.was, arrow.becomes): arrow.reason for arrow in ARROWS if arrow.table == "generation"}
    places = {
        "building capture": Box(20, 70, 170, 60, ("building", "writes go to the delta")),
        "building direct": Box(280, 70, 170, 60, ("building", "writes go to the base")),
        "active active": Box(540, 70, 170, 60, ("active", "readers see it"), "accent"),
        "retired active": Box(800, 70, 160, 60, ("retired", "kept for a revert")),
        "dropped none": Box(400, 234, 190, 50, ("dropped",)),
    }
    picture.parts.extend(places.values())
    drawn: dict[Pair, tuple[tuple[Point, ...], Point, str, int]] = {
        ("building capture", "building direct"): (((192, 100), (276, 100)), (234, 44), "middle", 16),
        ("building direct", "active active"): (((452, 100), (536, 100)), (494, 90), "middle", 16),
        ("active active", "retired active"): (((680, 68), (750, 20), (840, 66)), (760, 24), "middle", 60),
        ("retired active", "active active"): (((796, 112), (714, 112)), (755, 132), "middle", 10),
        ("building capture", "dropped none"): (((105, 132), (130, 240), (396, 252)), (172, 156), "start", 16),
        ("building direct", "dropped none"): (((365, 132), (380, 190), (440, 230)), (412, 158), "start", 18),
        ("active active", "dropped none"): (((615, 132), (600, 190), (545, 230)), (606, 186), "start", 30),
        ("retired active", "dropped none"): (((885, 132), (860, 250), (594, 260)), (800, 238), "start", 26),
    }
    for pair, (points, at, anchor, width) in drawn.items():
        picture.parts.append(Line(points, wrap(arrows.pop(pair), width), at, anchor, (pair,)))
    assert not arrows, f"arrows without a place: {arrows}"
    return picture


def overview() -> Picture:
    """A build: workers copy ranges, the trigger keeps what is written meanwhile, the fold brings both together."""
    picture = Picture("overview", "Workers copy the table in ranges; what is written meanwhile is kept apart", 960, 380)
    picture.parts += [
        Box(20, 20, 230, 56, ("your application", "keeps writing")),
        Box(20, 150, 230, 210, ("your table, in ranges",), "group"),
        Box(400, 20, 190, 56, ("delta", "what changed meanwhile")),
        Box(400, 150, 190, 210, ("base, in sorted segments",), "group"),
        Box(740, 208, 200, 70, ("view", "your queries read it"), "accent"),
    ]
    # How far each range is: its watermark.
    for number, (share, worker) in enumerate(((1.0, ""), (0.62, "worker 1"), (0.35, "worker 2"), (0.0, ""))):
        y = 186 + 42 * number
        picture.parts.append(
            f'<rect x="36" y="{y}" width="198" height="28" rx="5" fill="{{plain}}" stroke="{{edge}}"/>'
            + (f'<rect x="36" y="{y}" width="{198 * share:g}" height="28" rx="5" fill="{{done}}"/>' if share else "")
        )
        if worker:
            picture.parts.append(Line(((236, y + 14), (396, y + 14)), (worker,), (322, y + 8)))
    for number in range(4):
        y = 186 + 42 * number
        picture.parts.append(
            f'<rect x="416" y="{y}" width="158" height="28" rx="5" fill="{{accent}}" stroke="{{edge}}"/>'
        )
    picture.parts += [
        Line(((135, 78), (135, 146)), ("writes",), (145, 116), "start"),
        Line(((180, 148), (230, 60), (396, 48)), ("trigger, same transaction",), (256, 104), "start"),
        Line(((495, 78), (495, 146)), ("fold: the delta wins",), (505, 116), "start"),
        Line(((592, 243), (736, 243)), ("publish",), (664, 235)),
        "<g>"
        + text((35, 374), ("filled: copied and committed, up to the watermark",), "{faint}", "start", 12)
        + "</g>",
    ]
    return picture


# Entries of the delta when the copy is complete, in the pictures of the phases.
CHANGES = 5


def bar(x: float, y: float, width: float, height: float, share: float, fill: str = "done") -> str:
    """A range or a segment: its outline, and how much of it is filled."""
    outline = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
    filled = f'<rect x="{x:g}" y="{y:g}" width="{width * share:g}" height="{height:g}" rx="4" fill="{{{fill}}}"/>'
    return outline + 'fill="{plain}" stroke="{edge}"/>' + filled * (share > 0)


def phase_of(
    name: str, title: str, copied: tuple[float, ...], changes: tuple[int, int], filled: float, sealed: int = 0
) -> Picture:
    """Table, delta and base in one phase of a build. copied: the share of each range; changes: entries of the delta,
    and how many of them are applied; filled: the share of each segment; sealed: segments that have their B-tree."""
    picture = Picture(f"phase-{name}", title, 760, 260)
    picture.parts += [
        Box(20, 20, 190, 220, ("your table, in ranges",), "group"),
        Box(330, 20, 170, 68, ("delta" if changes[0] or not filled else "delta, no longer used",), "group"),
        Box(330, 136, 170, 104, ("base, in segments",), "group"),
        Box(580, 24, 164, 56, ("view", "your queries read it"), "accent"),
        *(bar(34, 56 + 44 * number, 162, 24, share) for number, share in enumerate(copied)),
        *(bar(344 + 24 * number, 56, 16, 16, number >= changes[1], "strong") for number in range(changes[0])),
        *(bar(344, 168 + 23 * number, 90, 16, filled) for number in range(3)),
    ]
    picture.parts += [
        "<g>" + text((442, 181 + 23 * number), ("B-tree",), "{text}", "start", 13) + "</g>" for number in range(sealed)
    ]
    return picture


def read_by(picture: Picture, new: bool = False) -> Picture:
    """Adds what the view reads: the new index, or the previous one."""
    picture.parts.append(Box(580, 168, 164, 56, ("previous index", "kept for a revert" if new else "if there is one")))
    picture.parts.append(Line(((578, 62), (504, 160))) if new else Line(((662, 82), (662, 164))))
    return picture


def prepare() -> Picture:
    """Nothing is copied yet; the trigger is there."""
    picture = phase_of("prepare", "Prepare: a trigger, an empty delta, an empty base", (0, 0, 0, 0), (0, 0), 0)
    picture.parts.append(Line(((212, 62), (326, 62)), ("new: a trigger",), (269, 54)))
    return read_by(picture)


def build() -> Picture:
    """Two workers copy ranges; changes meet in the delta."""
    title = "Build: workers copy ranges into the base; the trigger writes changes into the delta"
    picture = phase_of("build", title, (1, 1, 0.62, 0.35), (3, 0), 0.7)
    picture.parts += [
        Line(((212, 62), (326, 62)), ("changes",), (269, 54)),
        Line(((198, 156), (326, 176)), ("worker 1",), (276, 154)),
        Line(((198, 200), (326, 204)), ("worker 2",), (272, 194)),
    ]
    return read_by(picture)


def seal() -> Picture:
    """All is copied; segments get their B-trees."""
    title = "Seal: each segment of the base gets its B-tree; the trigger still writes changes into the delta"
    picture = phase_of("seal", title, (1, 1, 1, 1), (CHANGES, 0), 1, 2)
    picture.parts.append(Line(((212, 62), (326, 62)), ("changes",), (269, 54)))
    return read_by(picture)


def fold() -> Picture:
    """The delta goes into the base, and so do the writers' changes."""
    title = "Fold: workers apply the delta to the base; the trigger writes changes into the base itself"
    picture = phase_of("fold", title, (1, 1, 1, 1), (CHANGES, 3), 1, 3)
    picture.parts += [
        Line(((212, 188), (326, 188)), ("changes",), (269, 180)),
        Line(((415, 90), (415, 132)), ("workers apply it",), (424, 116), "start"),
    ]
    return read_by(picture)


def publish() -> Picture:
    """The view reads the base."""
    title = "Publish: the view reads the base; the previous index is kept for a revert"
    picture = phase_of("publish", title, (1, 1, 1, 1), (0, 0), 1, 3)
    picture.parts.append(Line(((212, 188), (326, 188)), ("changes",), (269, 180)))
    return read_by(picture, new=True)


PICTURES = (overview, prepare, build, seal, fold, publish, phases, statuses, entry_states, generations)


def files() -> dict[Path, str]:
    """Every file with what belongs into it."""
    return {
        IMAGES / f"{picture.name}-{mode}.svg": picture.svg(mode)
        for picture in (draw() for draw in PICTURES)
        for mode in COLOURS
    }


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content)
