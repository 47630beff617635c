"""The users' side: transactions that write to the source, and what the capture function does inside them.

The counterpart of `airflow_roir/engine/capture_function.py`: modes, quick and careful path, isolation rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.model import mvcc
from tests.model.mvcc import SerializationFailure, UniqueViolation, Wait
from tests.model.state import NO_SNAPSHOT, Bounds, State, User, Variant

Step = tuple[str, State]
Entry = tuple[tuple[str, int], str]


def mark(number: int) -> int:
    """The mark of a user's open transaction in row versions."""
    return -1 - number


def is_writer(of: int) -> bool:
    """Whether a mark is a user's."""
    return -100 < of < 0


def steps(state: State, bounds: Bounds, variant: Variant) -> Iterator[Step]:
    """Every step that a user can take next."""
    for number, user in enumerate(state.users):
        if user.ended:
            continue
        # Users of one kind are alike: the first begins first.
        alike = number > 0 and bounds.users[number - 1] == bounds.users[number]
        if alike and not user.begun and not state.users[number - 1].begun:
            continue
        yield from _Session(state, bounds, variant, number).steps()
    if state.left.truncates and not _source_in_use(state):
        yield "a user truncates the source and commits", _truncate(state)


class _Session:
    """A user's transaction in one state."""

    def __init__(self, state: State, bounds: Bounds, variant: Variant, number: int) -> None:
        self.state, self.bounds, self.variant, self.number = state, bounds, variant, number
        self.user = state.users[number]
        self.me = mark(number)
        self.isolation = bounds.users[number][0]
        self.repeatable = self.isolation == "RR"
        self.name = f"user {number + 1} ({self.isolation})"

    def steps(self) -> Iterator[Step]:
        user = self.user
        if self.repeatable and not user.begun:
            yield f"{self.name} takes its snapshot", self._set(begun=True, snapshot=self.state.now)
            return
        if user.chosen or user.ops:
            yield from self._go_on()
            return
        if user.left:
            yield from self._begin_statement()
        if user.writes:
            yield f"{self.name} commits", self._commit()
            yield f"{self.name} rolls back", self._rollback()

    # -- statements

    def _begin_statement(self) -> Iterator[Step]:
        for chosen in self._choices():
            begun = self._set(
                begun=True, writes=True, left=self.user.left - 1, chosen=chosen, statement=self._new_snapshot()
            )
            text = f"{self.name}: {_text(chosen)}"
            if self.bounds.fine:
                yield f"{text} (takes its snapshot)", begun
            else:
                for said, after in self._after(begun)._go_on():
                    yield f"{text}{said.removeprefix(self.name)}", after

    def _choices(self) -> Iterator[tuple[Any, ...]]:
        seen = mvcc.rows(self.state.source, self._new_snapshot(), self.me)
        for pk in self.bounds.primary_keys:
            # What an old snapshot still shows may be gone by now, and can be inserted anew.
            if pk not in seen or self.repeatable:
                yield from (("insert", pk, value) for value in self.bounds.values)
            if pk not in seen:
                continue
            yield ("delete", pk)
            yield from (("update", pk, value) for value in self.bounds.values if value != seen[pk])
        if self.bounds.swaps and len(seen) > 1:
            yield ("swap", *sorted(seen)[:2])

    def _go_on(self) -> Iterator[Step]:
        """Do one thing, or all that can be done without waiting. Nothing where the statement waits."""
        session, progress, said = self, False, "" if self.user.chosen else " goes on"
        while session.user.chosen or session.user.ops:
            if session.user.statement == NO_SNAPSHOT and self.bounds.fine and not self.repeatable:
                taken = session._set(statement=session._new_snapshot())
                yield f"{self.name}: {_op_text(session.user.ops[0])} takes its snapshot", taken
                return
            try:
                if session.user.chosen:
                    said = " writes to the source" if self.bounds.fine else said
                    after = session._write_source()
                else:
                    said = f": {_op_text(session.user.ops[0])}" if self.bounds.fine else ""
                    after = session._run(session.user.ops[0])
            except Wait:
                break
            except SerializationFailure:
                state = session._rollback()
                if not self.repeatable:
                    state = state._replace(wrong="I6: a READ COMMITTED transaction got a serialization failure")
                yield f"{self.name}{said} → 40001", state
                return
            except UniqueViolation:
                yield f"{self.name}{said} → unique violation", session._rollback()
                return
            except LookupError:
                yield (
                    f"{self.name}{said} → no such table",
                    session._rollback()._replace(wrong="I6: a user's statement met a table that was dropped"),
                )
                return
            session, progress = session._after(after), True
            if self.bounds.fine:
                break
        if progress:
            waits = session.user.chosen or session.user.ops
            yield f"{self.name}{said}{' (waits)' if waits and not self.bounds.fine else ''}", session.state

    def _write_source(self) -> State:
        user, source, me = self.user, self.state.source, self.me
        verb, pk, *rest = user.chosen
        events: list[tuple[tuple[int, str] | None, tuple[int, str] | None]] = []
        if verb == "insert":
            source = mvcc.insert(source, pk, rest[0], me)
            events.append((None, (pk, rest[0])))
        elif verb == "swap":
            for one in (pk, rest[0]):
                source, count = mvcc.delete(source, one, user.statement, me, self.repeatable)
                if not count:
                    return self._set(chosen=(), statement=NO_SNAPSHOT)
            before = mvcc.rows(self.state.source, user.snapshot if self.repeatable else self.state.now, me)
            for old, new in ((pk, rest[0]), (rest[0], pk)):
                source = mvcc.insert(source, new, before[old], me)
                events.append(((old, before[old]), (new, before[old])))
        else:
            if verb == "delete":
                old_source = source
                source, _ = mvcc.delete(source, pk, user.statement, me, self.repeatable)
                old = _ended(old_source, source, pk, me)
            else:
                source, replaced = mvcc.change(source, pk, rest[0], user.statement, me, self.repeatable)
                old = replaced[0][1] if replaced else None
            if old is not None:
                events.append(((pk, old), None if verb == "delete" else (pk, rest[0])))
        ops: list[tuple[Any, ...]] = []
        for old_row, new_row in events:
            ops += self._compile(old_row, new_row)
        return self._set(state=self.state._replace(source=source), chosen=(), ops=tuple(ops), statement=NO_SNAPSHOT)

    # -- the capture function

    def _compile(self, old: tuple[int, str] | None, new: tuple[int, str] | None) -> list[tuple[Any, ...]]:
        """What the function does for one event, as it is rendered now: no mode changes under an open writer."""
        gone = _entry(old) if old else None
        come = _entry(new) if new else None
        # Every statement's events come right after it, so that no version was written to again since.
        careful = new is None or (old is not None and old[0] != new[0])
        if self.variant == Variant.MOVED_KEYS_QUICKLY:
            careful = new is None
        ops: list[tuple[Any, ...]] = []
        building = any(g.status == "building" for g in self.state.generations)
        for number, generation in enumerate(self.state.generations):
            if generation.status not in ("building", "active", "retired", "aborting"):
                continue
            if self.variant == Variant.REBUILD_FORGETS_ACTIVE and building and generation.status != "building":
                continue
            capture, delta = generation.mode == "capture", generation.mode == "direct"
            if not capture and self._refuses(generation.mode_at):
                ops.append(("refuse", number))
            if self.variant == Variant.DIRECT_MODE_IGNORES_DELTA:
                delta = False
            if careful:
                for entry in (gone, come):
                    if entry:
                        ops += [("forget", number, entry[0])] if delta else []
                        ops.append(("settle delta" if capture else "settle base", number, entry[0]))
                continue
            assert come is not None
            if gone == come:
                continue
            if gone and gone[0] != come[0]:
                if capture:
                    ops.append(("put delta", number, gone[0], "antimatter"))
                else:
                    ops += [("forget", number, gone[0])] if delta else []
                    ops.append(("take out", number, gone[0]))
            if capture:
                ops.append(("put delta", number, come[0], "regular" + come[1], gone is None))
            else:
                ops += [("forget", number, come[0])] if delta else []
                ops.append(("put base", number, *come))
        return ops

    def _refuses(self, mode_at: int) -> bool:
        """The snapshot doesn't see the row that says the mode."""
        if self.variant in (Variant.NO_ISOLATION_CHECKS, Variant.NO_MODE_ROW):
            return False
        return self.repeatable and mode_at > self.user.snapshot

    def _run(self, op: tuple[Any, ...]) -> State:
        """One statement of the capture function. Raises what it would raise."""
        verb, number, *rest = op
        generation = self.state.generations[number]
        if verb == "refuse":
            raise SerializationFailure
        if generation.status == "dropped":
            raise LookupError
        snapshot = self.user.statement if self.user.statement != NO_SNAPSHOT else self._new_snapshot()
        me, repeatable = self.me, self.repeatable
        base, delta, ident = generation.base, generation.delta, rest[0]
        if verb.startswith("settle"):
            value = mvcc.rows(self.state.source, snapshot, me).get(ident[1])
            there = value is not None and value[0] == ident[0]
            if verb == "settle delta":
                state = "regular" + value[1:] if there else "antimatter"
                delta = mvcc.put(delta, ident, state, snapshot, me, repeatable)
            elif there:
                base = mvcc.put(base, ident, value[1:], snapshot, me, repeatable)
            else:
                base = self._take_out(base, ident, snapshot)
        elif verb == "put delta":
            there = ident in mvcc.rows(delta, snapshot, me)
            if self.variant == Variant.ANTIMATTER_DROPPED_AT_INSERT and rest[-1] is True and there:
                delta, _ = mvcc.delete(delta, ident, snapshot, me, repeatable)
            else:
                delta = mvcc.put(delta, ident, rest[1], snapshot, me, repeatable)
        elif verb == "forget":
            delta, _ = mvcc.delete(delta, ident, snapshot, me, repeatable)
        elif verb == "take out":
            base = self._take_out(base, ident, snapshot)
        else:
            base = mvcc.put(base, ident, rest[1], snapshot, me, repeatable)
        generations = list(self.state.generations)
        generations[number] = generation._replace(base=base, delta=delta)
        state = self.state._replace(generations=tuple(generations))
        return self._set(state=state, ops=self.user.ops[1:], statement=NO_SNAPSHOT)

    def _take_out(self, base: mvcc.Table, ident: tuple[str, int], snapshot: int) -> mvcc.Table:
        """A removal, and its probe: where one snapshot shows nothing, an insert meets what it can't see."""
        base, count = mvcc.delete(base, ident, snapshot, self.me, self.repeatable)
        probes = self.variant not in (Variant.NO_ISOLATION_CHECKS, Variant.NO_PROBE)
        if not count and self.repeatable and probes:
            try:
                base = mvcc.insert(base, ident, "", self.me)
            except UniqueViolation:
                raise SerializationFailure from None
            base, _ = mvcc.delete(base, ident, snapshot, self.me, self.repeatable)
        return base

    def waits_for(self) -> int | None:
        """The mark of the transaction that a statement of the capture function waits for."""
        if self.user.ops and not self.user.chosen:
            try:
                self._run(self.user.ops[0])
            except Wait as wait:
                return int(wait.args[0])
            except (SerializationFailure, LookupError):
                pass
        return None

    # -- ends

    def _commit(self) -> State:
        state = self._end()
        number = state.now + 1
        return end(state, lambda table: mvcc.commit(table, self.me, number))._replace(now=number)

    def _rollback(self) -> State:
        return end(self._end(), lambda table: mvcc.rollback(table, self.me))

    def _end(self) -> State:
        return self._set(User(begun=True, ended=True))

    def _new_snapshot(self) -> int:
        return self.user.snapshot if self.repeatable else self.state.now

    def _set(self, user: User | None = None, state: State | None = None, **changes: Any) -> State:
        state = state or self.state
        users = list(state.users)
        users[self.number] = user or users[self.number]._replace(**changes)
        return state._replace(users=tuple(users))

    def _after(self, state: State) -> _Session:
        return _Session(state, self.bounds, self.variant, self.number)


def waits(state: State, bounds: Bounds, variant: Variant) -> dict[int, int]:
    """Who waits inside the capture function, by mark, and for whom."""
    sessions = [_Session(state, bounds, variant, number) for number, user in enumerate(state.users) if user.ops]
    return {session.me: held for session in sessions if (held := session.waits_for()) is not None}


def end(state: State, ending: Any) -> State:
    """Apply a transaction's end to every table."""
    return state._replace(
        source=ending(state.source),
        generations=tuple(g._replace(base=ending(g.base), delta=ending(g.delta)) for g in state.generations),
    )


def _truncate(state: State) -> State:
    """In its own transaction, to the commit: its locks let nobody else near these tables, so it is one step."""
    generations = tuple(
        g if g.status == "dropped" else g._replace(base=(), delta=() if g.mode != "active" else g.delta)
        for g in state.generations
    )
    left = state.left._replace(truncates=state.left.truncates - 1)
    return state._replace(source=(), generations=generations, left=left, now=state.now + 1)


def _source_in_use(state: State) -> bool:
    """Somebody has a lock on the source or on one of our tables that an ACCESS EXCLUSIVE lock waits for."""
    return (
        any(user.writes for user in state.users)
        or any(worker and (worker.step in ("chosen", "copied")) for worker in state.workers)
        or any(state.folds)
    )


def _entry(row: tuple[int, str]) -> Entry:
    pk, value = row
    return (value[0], pk), value[1:]


def _ended(before: mvcc.Table, after: mvcc.Table, pk: int, me: int) -> str | None:
    """The value of the version that a delete ended: its own newest one, or the one that it marked."""
    gone = [v for v in before if v[0] == pk and v not in after and (v[3] == mvcc.NEVER or v[4] == mvcc.LOCKED)]
    return gone[0][1] if gone else None


def _text(chosen: tuple[Any, ...]) -> str:
    verb, pk, *rest = chosen
    return f"{verb} {pk} {rest[0]}" if rest else f"{verb} {pk}"


def _op_text(op: tuple[Any, ...]) -> str:
    verb, number, *rest = op
    return f"capture of g{number + 1}: {verb} {''.join(map(str, rest[0])) if rest else ''}"
