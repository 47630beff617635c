"""The states of an entry in the delta, and the effect of each event on them.

This is the paper's Figure 7 without the builder: here the builder never meets a delta row (*touched wins*).
"""

from __future__ import annotations

from enum import Enum


class EntryState(str, Enum):
    """The state of a delta row. `antimatter`: the entry is deleted. `ghost`: antimatter that the fold has used."""

    REGULAR = "regular"
    ANTIMATTER = "antimatter"
    GHOST = "ghost"


class Happening(str, Enum):
    """An event that can change the delta row of a `(key, pk)`."""

    WRITE = "a write of the entry, in capture mode"
    REMOVE = "a removal of the entry, in capture mode"
    WRITE_DIRECT = "a write of the entry, in direct mode"
    REMOVE_DIRECT = "a removal of the entry, in direct mode"
    FOLD_MATCHED = "the fold, where the base has the entry"
    FOLD_UNMATCHED = "the fold, where the base doesn't have it"
    TRUNCATE = "a TRUNCATE of the source, or of the leaf that has the row"
    COPY = "the copy of its row with a partition that came, in capture mode"
    COPY_DIRECT = "the copy of its row with a partition that came, in direct mode"
    LEAVE = "the removal of what a partition that left has left, where the entry has no row"


# (state, happening) -> next state; None on either side: no delta row.
ENTRY_STATES: dict[tuple[EntryState | None, Happening], EntryState | None] = {
    **{(state, Happening.WRITE): EntryState.REGULAR for state in (None, *EntryState)},
    **{(state, Happening.REMOVE): EntryState.ANTIMATTER for state in (None, *EntryState)},
    # From the switch on the base itself is right, and the delta only shrinks (I5).
    **{
        (state, happening): None
        for state in (None, *EntryState)
        for happening in (Happening.WRITE_DIRECT, Happening.REMOVE_DIRECT)
    },
    (EntryState.REGULAR, Happening.FOLD_MATCHED): None,
    (EntryState.REGULAR, Happening.FOLD_UNMATCHED): None,
    (EntryState.ANTIMATTER, Happening.FOLD_MATCHED): None,
    (EntryState.ANTIMATTER, Happening.FOLD_UNMATCHED): EntryState.GHOST,
    (EntryState.GHOST, Happening.FOLD_MATCHED): EntryState.GHOST,
    (EntryState.GHOST, Happening.FOLD_UNMATCHED): EntryState.GHOST,
    # No row is copied during a TRUNCATE, and afterwards there is none to copy.
    **{(state, Happening.TRUNCATE): None for state in (None, *EntryState)},
    # As the capture would for the insert of that row.
    **{(state, Happening.COPY): EntryState.REGULAR for state in (None, *EntryState)},
    **{(state, Happening.COPY_DIRECT): None for state in (None, *EntryState)},
    # Antimatter stays: it may be for a copy that a batch is about to commit.
    (None, Happening.LEAVE): None,
    (EntryState.REGULAR, Happening.LEAVE): EntryState.ANTIMATTER,
    (EntryState.ANTIMATTER, Happening.LEAVE): EntryState.ANTIMATTER,
    (EntryState.GHOST, Happening.LEAVE): EntryState.GHOST,
}
