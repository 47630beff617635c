"""The build's side: prepare, build workers, seal, switch, fold, publish, clean up, abort, and the death of each.

The counterpart of `airflow_roir/engine/`. A transaction that holds the drain lock is one step: no writer can be open,
so nothing that it reads or writes under the lock can change or be seen before its commit; dying in it is as if it had
not begun. A resumed run needs no steps of its own, since every step starts from the committed state.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from tests.model import mvcc, unique
from tests.model.mvcc import Wait
from tests.model.state import DROPPED, Bounds, Fold, Generation, State, Variant, Worker
from tests.model.writers import Step, end


def worker_mark(slot: int) -> int:
    """The mark of a build worker's open transaction."""
    return -100 - slot


def fold_mark(slot: int) -> int:
    """The mark of a fold step's open transaction."""
    return -200 - slot


def steps(state: State, bounds: Bounds, variant: Variant) -> Iterator[Step]:
    """Every step that the build can take next."""
    yield from _phases(state, bounds, variant)
    for slot, worker in enumerate(state.workers):
        if worker is not None:
            yield from _batch(state, bounds, variant, slot, worker)
    for slot, fold in enumerate(state.folds):
        if fold is not None:
            yield from _fold(state, bounds, variant, slot, fold)


# -- phases


def _phases(state: State, bounds: Bounds, variant: Variant) -> Iterator[Step]:
    writers = any(user.writes and not user.ended for user in state.users)
    live = [n for n, g in enumerate(state.generations) if g.status in ("building", "aborting")]
    under_way = [n for n in live if not state.generations[n].done]
    one_more = not live or (bounds.together > len(live) and under_way)
    if one_more and state.left.operations and (not writers or variant == Variant.NO_DRAIN_AT_PREPARE):
        new = Generation("building", "capture", state.now + 1)
        left = state.left._replace(
            operations=state.left.operations - 1,
            claims=bounds.claims + (state.left.claims if live else 0),
            takeovers=bounds.takeovers,
        )
        prepared = state._replace(generations=(*state.generations, new), left=left, now=state.now + 1)
        yield f"prepare g{len(prepared.generations)}", prepared
    for number in live:
        yield from _operation(state, bounds, variant, number, writers)
    shown = {g.status: n for n, g in enumerate(state.generations) if g.status in ("active", "retired")}
    if len(shown) == 2 and not writers:
        generations = list(state.generations)
        for status, other in (("active", "retired"), ("retired", "active")):
            generations[shown[status]] = state.generations[shown[status]]._replace(status=other)
        yield f"revert to g{shown['retired'] + 1}", state._replace(generations=tuple(generations))
    for number, generation in enumerate(state.generations):
        if generation.status == "retired" and not writers and not _tables_in_use(state, number):
            yield f"clean up drops g{number + 1}", _with(state, number, DROPPED)
        if generation.status == "active" and generation.delta and not _folds_of(state, number):
            yield f"clean up drops the delta of g{number + 1}", _with(state, number, generation._replace(delta=()))


def _operation(state: State, bounds: Bounds, variant: Variant, number: int, writers: bool) -> Iterator[Step]:
    generation, name = state.generations[number], f"g{number + 1}"
    if generation.status == "aborting":
        if not writers and not _tables_in_use(state, number):
            yield f"abort removes {name}", _with(state, number, DROPPED)
        return
    if state.left.aborts:
        left = state.left._replace(aborts=state.left.aborts - 1)
        aborting = _with(state, number, generation._replace(status="aborting"))
        # One of several has an epoch of its own; its status fences its workers here.
        epoch = state.epoch + (bounds.together == 1)
        yield f"abort of {name} is asked for", aborting._replace(left=left, epoch=epoch)
    if state.left.takeovers:
        left = state.left._replace(takeovers=state.left.takeovers - 1)
        yield "another run takes over", state._replace(epoch=state.epoch + 1, left=left)
    if not generation.done:
        yield from _claim(state, variant, number, generation)
    elif not generation.sealed:
        # The index build waits for open transactions that have written to the base.
        if mvcc.in_use(generation.base):
            return
        if bounds.unique:
            yield _seal(state, variant, number, generation)
        else:
            yield f"seal {name}", _with(state, number, generation._replace(sealed=True))
    elif generation.mode == "capture":
        if bounds.unique:
            found, looked = _look(state, variant, number, generation)
            yield f"look at {name}: {_said(found)}", looked
            if variant == Variant.NO_LAST_LOOK:
                found, looked = {}, state
                if generation.looked is None or generation.recorded:
                    return
            if found and not writers:
                yield f"no switch of {name}: {_said(found)}", looked
            if found:
                return
        if not writers or variant == Variant.NO_DRAIN_AT_SWITCH:
            direct = generation._replace(mode="direct", mode_at=state.now + 1, looked=None, recorded=())
            yield f"switch {name} to direct mode", _with(state, number, direct)._replace(now=state.now + 1)
    else:
        yield from _take(state, bounds, variant, number, generation)
        if not writers or variant == Variant.PUBLISH_LEAVES_HELD_ROWS:
            yield from _publish(state, bounds, variant, number, generation)


# -- uniqueness


def _seal(state: State, variant: Variant, number: int, generation: Generation) -> Step:
    """Removes the entries that the delta touches, then indexes; or records the duplicate groups that are left, and
    leaves it unsealed."""
    name, me, at, base = f"g{number + 1}", fold_mark(len(state.folds)), state.now + 1, generation.base
    touched = [ident for ident, _ in mvcc.committed(generation.delta)]
    if variant not in (Variant.SEAL_LEAVES_TOUCHED, Variant.STALE_COPY_REPORTED):
        for key, pk in touched:
            base, _ = mvcc.delete(base, key, state.now, me, repeatable=False, key=str(pk))
        base = mvcc.commit(base, me, at)
    cleaned = generation._replace(base=base)
    left = [ident for ident, _ in unique.entries(cleaned, unique=True)]
    collide = unique.groups(left)
    found = unique.groups([i for i in left if variant == Variant.STALE_COPY_REPORTED or i not in touched])
    if not collide:
        return f"seal {name}", _with(state, number, cleaned._replace(sealed=True, recorded=()))._replace(now=at)
    wrong = unique.invented(state, found) or ("" if found else "U2: a segment can't be sealed, and nothing is recorded")
    kept = _with(state, number, cleaned._replace(recorded=tuple(sorted(found))))
    return f"no seal of {name}: {_said(found)}", kept._replace(now=at, wrong=wrong)


def _look(state: State, variant: Variant, number: int, generation: Generation) -> tuple[unique.Groups, State]:
    """Looks for duplicate groups: among the delta's rows since the last look, and again among the groups recorded
    then."""
    delta = mvcc.committed(generation.delta)
    new = unique.new_since_the_look(generation)
    keys = {key for key, _ in new}
    if variant != Variant.RECORDED_FORGOTTEN:
        keys |= set(generation.recorded)
    live = unique.live(generation, leave_touched=variant == Variant.STALE_COPY_REPORTED)
    if variant == Variant.ANTIMATTER_HIDES_PAIR:
        keys -= {ident[0] for ident, value in delta if value == "antimatter"}
    if variant == Variant.ONLY_AGAINST_BASE:
        regular = {ident for ident, value in delta if value.startswith("regular")}
        keys = {key for key in keys if any(i[0] == key and i not in regular for i in live)}
    found = unique.groups(live, keys)
    looked = {ident for ident, value in delta if value.startswith("regular")}
    if variant == Variant.LOOKED_AT_FLIGHT:
        looked |= {(v[0], v[2]) for v in generation.delta if v[2] < 0}
    recorded = generation._replace(looked=tuple(sorted(looked, key=str)), recorded=tuple(sorted(found)))
    return found, _with(state, number, recorded)._replace(wrong=unique.invented(state, found))


def _said(found: unique.Groups) -> str:
    return ", ".join(f"{key} of {sorted(pks)}" for key, pks in found.items()) or "no duplicate"


def _publish(state: State, bounds: Bounds, variant: Variant, number: int, generation: Generation) -> Iterator[Step]:
    me = fold_mark(len(state.folds))
    taken, rows = _lock_rows(generation, None, me)
    try:
        folded = _apply(taken, rows, me, state.now, bounds, variant)
    except Wait:
        return
    held = [
        ident for ident, value in mvcc.committed(folded.delta) if value != "ghost" and not _ended_by(folded, ident, me)
    ]
    if held and variant != Variant.PUBLISH_LEAVES_HELD_ROWS:
        return  # InvariantViolated: paused, to be tried again
    at = state.now + 1
    folded = folded._replace(
        base=mvcc.commit(folded.base, me, at),
        delta=mvcc.commit(folded.delta, me, at),
        status="active",
        mode="active",
        mode_at=at,
    )
    generations = list(state.generations)
    if bounds.together == 1:
        generations = [g._replace(status="retired") if g.status == "active" else g for g in state.generations]
    generations[number] = folded
    yield f"publish g{number + 1}", state._replace(generations=tuple(generations), now=at)


def _ended_by(generation: Generation, ident: object, me: int) -> bool:
    return any(v[0] == ident and v[3] == me and v[4] != mvcc.LOCKED for v in generation.delta)


# -- build


def _claim(state: State, variant: Variant, number: int, generation: Generation) -> Iterator[Step]:
    if not state.left.claims or None not in state.workers or _is_carried(state, variant, number):
        return
    slot = state.workers.index(None)
    token = generation.token + 1
    worker = Worker(number, state.epoch, token, generation.watermark)
    claimed = _with(state, number, generation._replace(token=token))
    left = state.left._replace(claims=state.left.claims - 1)
    yield (
        f"worker {slot + 1} claims the range of g{number + 1}",
        _with_worker(claimed, slot, worker)._replace(left=left),
    )


def _batch(state: State, bounds: Bounds, variant: Variant, slot: int, worker: Worker) -> Iterator[Step]:
    """A batch of one row: read control and the batch's last key; copy; compare, set and commit."""
    me, name, number = worker_mark(slot), f"worker {slot + 1}", worker.generation
    generation = state.generations[number]
    yield f"{name} dies", _end_worker(state, slot)
    if generation.status == "dropped":
        return  # its next statement fails: as if it died
    first_commit = variant == Variant.WATERMARK_BEFORE_ROWS
    if worker.step == "rest":
        if worker.epoch != state.epoch:
            return  # fenced: as if it died
        keys = sorted(pk for pk, _ in mvcc.committed(state.source) if pk > worker.watermark)
        chosen = worker._replace(step="chosen", last=keys[0] if keys else worker.watermark, done=not keys)
        after = _with_worker(state, slot, chosen)
        if first_commit:
            if not _holds(state, variant, generation, worker):
                return
            marked = generation._replace(watermark=chosen.last, done=chosen.done)
            after = _with(after, number, marked)
        yield f"{name} finds the batch's last key, {'none' if chosen.done else chosen.last}", after
        if variant == Variant.CARRY_INTO_OLD_SNAPSHOT:
            if bounds.together > 1:
                read = chosen._replace(step="read", rows=_entries(state, chosen))
                yield f"{name} reads", _with_worker(state, slot, read)
        elif companions := _companions(state, worker, variant):
            names = ", ".join(f"g{n + 1}" for n in companions)
            carrying = _with_worker(state, slot, chosen._replace(carried=companions))
            if any(state.generations[n].status != "building" for n in companions):
                carrying = carrying._replace(wrong=f"C1: a batch begins for {names}, which is being aborted")
            yield f"{name} finds it, also for {names}", carrying
    elif worker.step == "chosen":
        entries = _entries(state, worker)
        text = f"{name} copies {', '.join(f'{k}{pk}' for (k, pk), _ in entries) or 'nothing'}"
        if variant == Variant.TRUNCATE_BETWEEN_READ_AND_WRITE:
            yield f"{text} (read only)", _with_worker(state, slot, worker._replace(step="read", rows=entries))
        elif worker.carried:
            yield from _carry(state, bounds, variant, slot, worker, entries)
        elif (inserted := _insert(generation, bounds, entries, me)) is not None:
            if first_commit:
                at = state.now + 1
                inserted = inserted._replace(base=mvcc.commit(inserted.base, me, at))
                rest = worker._replace(step="rest", watermark=worker.last)
                after = _with_worker(_with(state, number, inserted), slot, None if worker.done else rest)
                yield f"{text} and commits", after._replace(now=at)
            else:
                yield text, _with_worker(_with(state, number, inserted), slot, worker._replace(step="copied"))
    elif worker.step == "read" and bounds.together > 1:
        taken = worker._replace(carried=_companions(state, worker, variant), rows=())
        yield from _carry(state, bounds, variant, slot, taken, worker.rows)
    elif worker.step == "read":
        if (inserted := _insert(generation, bounds, worker.rows, me)) is not None:
            copied = worker._replace(step="copied", rows=())
            yield f"{name} writes what it has read", _with_worker(_with(state, number, inserted), slot, copied)
    elif _holds(state, variant, generation, worker) or variant == Variant.NO_COMPARE_AND_SET:
        at = state.now + 1
        committed = generation._replace(
            watermark=worker.last, done=worker.done, base=mvcc.commit(generation.base, me, at)
        )
        rest = worker._replace(step="rest", watermark=worker.last, last=0, carried=())
        marked = _with(state, number, committed)
        for other in worker.carried:
            held = state.generations[other]
            advanced = held._replace(watermark=worker.last, done=worker.done, base=mvcc.commit(held.base, me, at))
            marked = _with(marked, other, advanced)
        after = _with_worker(marked, slot, None if worker.done else rest)
        yield f"{name} commits watermark {'done' if worker.done else worker.last}", after._replace(now=at)


def _entries(state: State, worker: Worker) -> tuple[tuple[unique.Ident, str], ...]:
    """The entries that the batch's statement reads."""
    rows = {
        pk: value
        for pk, value in mvcc.committed(state.source)
        if pk > worker.watermark and (worker.done or pk <= worker.last)
    }
    return tuple(sorted(((value[0], pk), value[1:]) for pk, value in rows.items()))


def _is_carried(state: State, variant: Variant, number: int) -> bool:
    """A batch of another operation's worker holds the lock on this one's range."""
    return variant != Variant.CARRY_WITHOUT_COMPARE and any(
        worker is not None and number in worker.carried for worker in state.workers
    )


def _companions(state: State, worker: Worker, variant: Variant) -> tuple[int, ...]:
    """`carrying.LOCK`: whose range is at the same place, and is neither locked nor claimed by a worker of its own.

    That it is passed over is a step, too: it may be paused, or its run silent.
    """
    found = []
    for number, generation in enumerate(state.generations):
        alive = ("building", "aborting") if variant == Variant.CARRY_ABORTED else ("building",)
        if number == worker.generation or generation.status not in alive:
            continue
        if generation.done or generation.watermark != worker.watermark:
            continue
        claimed = any(w is not None and (w.generation, w.token) == (number, generation.token) for w in state.workers)
        if variant == Variant.CARRY_WITHOUT_COMPARE or not (claimed or _is_carried(state, variant, number)):
            found.append(number)
    return tuple(found)


def _carry(
    state: State,
    bounds: Bounds,
    variant: Variant,
    slot: int,
    worker: Worker,
    entries: tuple[tuple[unique.Ident, str], ...],
) -> Iterator[Step]:
    """One statement writes the rows into the base of each; if one is gone, the batch is done again without."""
    me, name = worker_mark(slot), f"worker {slot + 1}"
    written = state
    for number in (worker.generation, *worker.carried):
        generation = state.generations[number]
        inserted = None if generation.status == "dropped" else _insert(generation, bounds, entries, me)
        if inserted is None and number == worker.generation:
            return  # as without
        if inserted is None:
            again = _with_worker(state, slot, worker._replace(step="rest", last=0, done=False, carried=()))
            if variant == Variant.CARRY_OR_FAIL:
                again = again._replace(wrong=f"C2: the end of g{number + 1} fails a batch of another operation")
            yield f"{name} can't write into g{number + 1}, and begins the batch again", again
            return
        written = _with(written, number, inserted)
    text = f"{name} copies {', '.join(f'{k}{pk}' for (k, pk), _ in entries) or 'nothing'}"
    yield text, _with_worker(written, slot, worker._replace(step="copied"))


def _holds(state: State, variant: Variant, generation: Generation, worker: Worker) -> bool:
    """The compare-and-set of `claims.COMMIT`."""
    return (
        (generation.token, generation.watermark, state.epoch) == (worker.token, worker.watermark, worker.epoch)
        and not generation.done
        and generation.status == "building"
        # The commit waits for the transaction that has locked the range, and then finds the range moved.
        and not _is_carried(state, variant, worker.generation)
    )


def _insert(
    generation: Generation, bounds: Bounds, entries: tuple[tuple[unique.Ident, str], ...], me: int
) -> Generation | None:
    base = generation.base
    try:
        for ident, included in entries:
            held, value = unique.stored(ident, included, bounds.unique)
            base = mvcc.insert(base, held, value, me, unique=generation.sealed)
    except (Wait, mvcc.UniqueViolation):
        return None  # a zombie after the seal: it waits, or fails as if it died
    return generation._replace(base=base)


def _end_worker(state: State, slot: int) -> State:
    rolled_back = end(state, lambda table: mvcc.rollback(table, worker_mark(slot)))
    return _with_worker(rolled_back, slot, None)


# -- fold


def _take(state: State, bounds: Bounds, variant: Variant, number: int, generation: Generation) -> Iterator[Step]:
    """SELECT … FOR UPDATE SKIP LOCKED: one delta row, or all of them."""
    if None not in state.folds:
        return
    slot = state.folds.index(None)
    me = fold_mark(slot)
    # Without FOR UPDATE it may also read rows that others have locked; SKIP LOCKED leaves these out.
    lockable = [
        ident for ident, value in mvcc.committed(generation.delta) if value != "ghost"
        and (variant == Variant.FOLD_WITHOUT_LOCKS or _lock_rows(generation, (ident,), me)[1])
    ]  # fmt: skip
    choices: list[tuple[Any, ...]] = [(ident,) for ident in lockable]
    if len(lockable) > 1:
        choices.append(tuple(lockable))
        if bounds.unique and bounds.folds > 1:
            choices += [two for two in combinations(lockable, 2) if len(lockable) > 2]
    for idents in choices:
        text = (
            f"fold {slot + 1} takes {', '.join(''.join(map(str, i)) for i in idents)} from the delta of g{number + 1}"
        )
        if variant == Variant.FOLD_WITHOUT_LOCKS:
            rows = tuple((i, v) for i, v in mvcc.committed(generation.delta) if i in idents)
            yield text, _with_fold(state, slot, Fold(number, rows))
        else:
            locked, rows = _lock_rows(generation, idents, me)
            yield text, _with_fold(_with(state, number, locked), slot, Fold(number, rows))


def fold_waits(state: State, bounds: Bounds, variant: Variant) -> dict[int, int]:
    """The fold steps that wait, by mark, each with the transaction that it waits for."""
    waiting = {}
    for slot, fold in enumerate(state.folds):
        if fold is not None and not fold.applied:
            generation, rows = state.generations[fold.generation], fold.rows[: _at_once(bounds)]
            try:
                _apply(generation, rows, fold_mark(slot), state.now, bounds, variant)
            except Wait as wait:
                waiting[fold_mark(slot)] = int(wait.args[0])
    return waiting


def _fold(state: State, bounds: Bounds, variant: Variant, slot: int, fold: Fold) -> Iterator[Step]:
    me, name = fold_mark(slot), f"fold {slot + 1}"
    generation = state.generations[fold.generation]
    gone = end(state, lambda table: mvcc.rollback(table, me))
    yield f"{name} dies", _with_fold(gone, slot, None)
    if generation.status == "dropped":
        return
    after = state
    if not fold.applied:
        rows, left = fold.rows[: _at_once(bounds)], fold.rows[_at_once(bounds) :]
        try:
            applied = _apply(generation, rows, me, state.now, bounds, variant)
        except Wait:
            return
        after = _with_fold(_with(state, fold.generation, applied), slot, fold._replace(rows=left, applied=not left))
        if bounds.fine:
            yield f"{name} applies {'them' if len(rows) > 1 else ''.join(map(str, rows[0][0]))}", after
            return
    at = after.now + 1
    done = end(after, lambda table: mvcc.commit(table, me, at))
    yield (
        f"{name} commits" if bounds.fine else f"{name} applies them and commits",
        _with_fold(done, slot, None)._replace(now=at),
    )


def _at_once(bounds: Bounds) -> int:
    """How many rows a fold step applies in one step of the model: a unique key can hold it up between two of them."""
    return 1 if bounds.fine and bounds.unique else 1 << 10


def _lock_rows(
    generation: Generation, idents: tuple[object, ...] | None, me: int
) -> tuple[Generation, tuple[tuple[object, str], ...]]:
    delta, rows = generation.delta, []
    for ident, value in mvcc.committed(delta):
        if value != "ghost" and (idents is None or ident in idents):
            delta, locked = mvcc.lock_unlocked(delta, ident, me)
            if locked is not None:
                rows.append((ident, locked))
    # The regular ones first, as the engine does.
    return generation._replace(delta=delta), tuple(sorted(rows, key=lambda row: (row[1] == "antimatter", row)))


def _hold(base: mvcc.Table, key: str, me: int) -> tuple[mvcc.Table, bool]:
    """SELECT … FOR UPDATE SKIP LOCKED of a key's entry. False if there is one, and another transaction has it."""
    locked, value = mvcc.lock_unlocked(base, key, me)
    others = any(v[0] == key and v[2] >= 0 and v[3] < 0 and v[3] != me for v in base)
    return locked, value is not None or not others


def _apply(
    generation: Generation,
    rows: tuple[tuple[Any, str], ...],
    me: int,
    snapshot: int,
    bounds: Bounds,
    variant: Variant,
) -> Generation:
    """Regular: upsert, of a unique one by its key; antimatter: annihilate, or a ghost. Raises Wait."""
    base, delta = generation.base, generation.delta
    for ident, value in rows:
        if bounds.unique and variant != Variant.FOLD_WAITS_AT_BASE:
            base, free = _hold(base, ident[0], me)
            if not free:
                continue  # a later step's
        if value == "antimatter":
            held, pk = unique.stored(ident, "", bounds.unique)
            base, count = mvcc.delete(base, held, snapshot, me, repeatable=False, key=pk)
            if count:
                delta, _ = mvcc.delete(delta, ident, snapshot, me, repeatable=False)
            else:
                delta, _ = mvcc.change(delta, ident, "ghost", snapshot, me, repeatable=False)
            continue
        delta, _ = mvcc.delete(delta, ident, snapshot, me, repeatable=False)
        if variant == Variant.BASE_WINS and ident in mvcc.rows(base, snapshot, me):
            continue
        held, value = unique.stored(ident, value.removeprefix("regular"), bounds.unique)
        if variant == Variant.FOLD_KEEPS_HOLDER:
            base, met = mvcc.insert_or_nothing(base, held, value, snapshot, me, repeatable=False)
            if met is None or not met[1].startswith(str(ident[1])):
                continue
        base = mvcc.put(base, held, value, snapshot, me, repeatable=False)
    return generation._replace(base=base, delta=delta)


# -- tables


def _with(state: State, number: int, generation: Generation) -> State:
    generations = list(state.generations)
    generations[number] = generation
    return state._replace(generations=tuple(generations))


def _with_worker(state: State, slot: int, worker: Worker | None) -> State:
    workers = list(state.workers)
    workers[slot] = worker
    return state._replace(workers=tuple(workers))


def _with_fold(state: State, slot: int, fold: Fold | None) -> State:
    folds = list(state.folds)
    folds[slot] = fold
    return state._replace(folds=tuple(folds))


def _folds_of(state: State, number: int) -> bool:
    return any(fold and fold.generation == number for fold in state.folds)


def _tables_in_use(state: State, number: int) -> bool:
    """True if an open transaction holds a lock that a DROP of the generation's tables waits for."""
    generation = state.generations[number]
    return mvcc.in_use(generation.base) or mvcc.in_use(generation.delta) or _folds_of(state, number)
