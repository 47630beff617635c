"""The users' side: transactions that write to the source, and what the capture function does inside them.

The counterpart of `airflow_roir/engine/capture/row_function.py`: modes, quick and careful path, isolation rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.model import mvcc, unique
from tests.model.mvcc import SerializationFailure, UniqueViolation, Wait
from tests.model.state import MAPS, NO_SNAPSHOT, Bounds, Generation, State, User, Variant

Step = tuple[str, State]
Entry = tuple[tuple[str, int], str]

_ASK_FOR_OTHERS = (
    Variant.LOCK_ON_PLAIN_KEYS,
    Variant.OWN_HIDES_OTHERS_ON_PLAIN_KEYS,
    Variant.KEY_SHARE,
    Variant.NO_LOCK,
    Variant.NO_LOCK_BUT_REFUSAL,
)


_PUT = (
    "in place",
    "others",
    "ask delta",
    "drop other",
    "insert",
    "holder",
    "own",
    "ask base",
    "take over",
    "ask again",
)


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


class Refused(UniqueViolation):
    """The capture's own SQLSTATE 23505. args[0]: why it is wrong, or ''."""


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
            waits = True
            for step in self._go_on():
                waits = False
                yield step
            if waits and self._is_deadlocked():
                yield f"{self.name} waits → deadlock", self._rollback()
            return
        if user.left:
            yield from self._begin_statement()
        if user.writes:
            if user.checks:
                checks = tuple(("check", pk) for pk in user.checks)
                yield from self._after(self._set(ops=(*checks, ("commit",)), checks=()))._go_on(" commits")
            else:
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
        """Statements, by what their WHERE finds; where it could find two versions, the one or the other."""
        bounds, source, snapshot = self.bounds, self.state.source, self._new_snapshot()
        for pk in bounds.primary_keys:
            seen = mvcc.versions(source, pk, snapshot, self.me)
            own = [version for version in seen if version[2] == self.me]
            # A row that an old snapshot still shows may be gone by now, and can be inserted again.
            if not seen or (self.repeatable if bounds.key == "plain" else len(own) < bounds.twins):
                yield from (("insert", pk, value) for value in bounds.values)
                if bounds.nested:
                    yield from (("insert and lose", pk, value) for value in bounds.values)
            if bounds.upserts:
                yield from (("upsert", pk, value) for value in bounds.values)
            for version in seen:
                which = (version[2] == self.me,) if len(seen) > 1 else ()
                yield ("delete", pk, *which)
                yield from (("update", pk, value, *which) for value in bounds.values if value != version[1])
                if bounds.moves:
                    yield from (("move", pk, other, *which) for other in bounds.primary_keys if other != pk)
        if bounds.swaps:
            shown = mvcc.rows(source, snapshot, self.me)
            if len(shown) > 1:
                yield ("swap", *sorted(shown)[:2])
        shown = mvcc.rows(source, snapshot, self.me)
        for name in bounds.maps:
            found = tuple(pk for pk in sorted(shown) if shown[pk][0] in MAPS[name])
            if len(found) > 1:
                yield ("map", 0, name, found, ())

    def _go_on(self, said: str = "") -> Iterator[Step]:
        """Does one thing, or all that can be done without waiting; nothing if the statement waits."""
        session, progress = self, False
        said = said or ("" if self.user.chosen else " goes on")
        while session.user.chosen or session.user.ops:
            looks = session._takes_snapshots() and session.user.statement == NO_SNAPSHOT
            if looks and self.bounds.fine:
                taken = session._set(statement=session._new_snapshot())
                yield f"{self.name}: {_op_text(session.user.ops[0])} takes its snapshot", taken
                return
            try:
                if session.user.chosen:
                    said = " writes to the source" if self.bounds.fine else said
                    afters = [session._write_source()]
                else:
                    said = f": {_op_text(session.user.ops[0])}" if self.bounds.fine else said
                    afters = session._run(session.user.ops[0])
            except Wait:
                if looks:  # it continues with the snapshot that it has taken
                    session, progress = session._after(session._set(statement=session._new_snapshot())), True
                break
            except SerializationFailure:
                state = session._rollback()
                if not self.repeatable:
                    state = state._replace(wrong="I6: a READ COMMITTED transaction got a serialization failure")
                yield f"{self.name}{said} → 40001", state
                return
            except UniqueViolation as violation:
                wrong = violation.args[0] if isinstance(violation, Refused) else ""
                how = "23505" if isinstance(violation, Refused) else "unique violation"
                yield f"{self.name}{said} → {how}", session._rollback()._replace(wrong=wrong)
                return
            except LookupError:
                yield (
                    f"{self.name}{said} → no such table",
                    session._rollback()._replace(wrong="I6: a user's statement met a table that was dropped"),
                )
                return
            if len(afters) > 1:
                for number, after in enumerate(afters, 1):
                    yield f"{self.name}{said} (two versions of the row: takes number {number})", after
                return
            session, progress = session._after(afters[0]), True
            if self.bounds.fine:
                break
        if progress:
            waits = session.user.chosen or session.user.ops
            yield f"{self.name}{said}{' (waits)' if waits and not self.bounds.fine else ''}", session.state

    def _takes_snapshots(self) -> bool:
        """Whether what is next is a statement of the capture function with a snapshot of its own."""
        return not self.repeatable and not self.user.chosen and self.user.ops[0][0] not in ("check", "commit")

    def _write_source(self) -> State:
        user, source, me = self.user, self.state.source, self.me
        verb, pk, *rest = user.chosen
        events: list[tuple[tuple[int, str] | None, tuple[int, str] | None]] = []
        again = False
        chosen: tuple[Any, ...] = ()
        arriving: list[int] = []
        if verb in ("insert", "insert and lose"):
            source = self._insert(source, pk, rest[0], arriving)
            events.append((None, (pk, rest[0])))
            if verb == "insert and lose":  # the inner statement's event comes first
                source, _ = mvcc.delete(source, pk, user.statement, me, self.repeatable, own=True)
                events.insert(0, ((pk, rest[0]), None))
                again = True
        elif verb == "upsert":
            source, met = mvcc.upsert(source, pk, rest[0], user.statement, me, self.repeatable)
            again = met is not None  # it has locked the row before it updated it
            events.append(((pk, met[1]) if met else None, (pk, rest[0])))
        elif verb == "move":
            # It holds the row that it moves while it waits for the transaction that has the key.
            source, moved = mvcc.delete(source, pk, user.statement, me, self.repeatable, *rest[1:])
            if moved:
                chosen = ("arrive", pk, rest[0], moved[0][1])
                events.append(((pk, moved[0][1]), None))  # of no use but to say its key
        elif verb == "arrive":
            source = self._insert(source, rest[0], rest[1], arriving)
            events.append(((pk, rest[1]), (rest[0], rest[1])))
        elif verb == "swap":
            for one in (pk, rest[0]):
                source, count = mvcc.delete(source, one, user.statement, me, self.repeatable)
                if not count:
                    return self._set(chosen=(), statement=NO_SNAPSHOT)
            before = mvcc.rows(self.state.source, user.snapshot if self.repeatable else self.state.now, me)
            for old, new in ((pk, rest[0]), (rest[0], pk)):
                source = self._insert(source, new, before[old], arriving)
                events.append(((old, before[old]), (new, before[old])))
        elif verb == "map":
            name, (pk, *others), before = rest
            source, found = mvcc.change(source, pk, _mapped(name), user.statement, me, self.repeatable)
            events += [*before, *(((pk, version[1]), (pk, _mapped(name)(version[1]))) for version in found)]
            if others:  # it holds the rows that it has changed while it waits for the next
                chosen = ("map", 0, name, tuple(others), tuple(events))
        elif verb == "delete":
            source, found = mvcc.delete(source, pk, user.statement, me, self.repeatable, *rest)
            events += [((pk, version[1]), None) for version in found]
        else:
            source, found = mvcc.change(source, pk, rest[0], user.statement, me, self.repeatable, *rest[1:])
            events += [((pk, version[1]), (pk, rest[0])) for version in found]
        ops: list[tuple[Any, ...]] = []
        keys = {row[1][0] for event in events for row in event if row}
        for old_row, new_row in () if chosen else events:
            # PostgreSQL's own check is a trigger too, and fires before the capture's: P sorts before r.
            if self.bounds.key == "immediate" and new_row and new_row[0] in arriving:
                ops.append(("check", new_row[0]))
            ops += self._compile(old_row, new_row, again)
        checks = user.checks
        if self.bounds.key == "deferred":
            checks = tuple(sorted(one for one in {*checks, *arriving} if mvcc.own_rows(source, one, me)))
        return self._set(
            state=self.state._replace(source=source),
            chosen=chosen,
            ops=tuple(ops),
            checks=checks,
            keys=tuple(sorted({*user.keys, *keys})) if self.bounds.unique else (),
            statement=user.statement if chosen else NO_SNAPSHOT,
        )

    def _insert(self, source: mvcc.Table, pk: int, value: str, arriving: list[int]) -> mvcc.Table:
        """A new row under the key's check. arriving: gets the primary keys that are to be checked later."""
        plain = self.bounds.key == "plain"
        if not plain and mvcc.may_conflict(source, pk, self.me):
            arriving.append(pk)
        return mvcc.insert(source, pk, value, self.me, unique=plain)

    # -- the capture function

    def _compile(self, old: tuple[int, str] | None, new: tuple[int, str] | None, again: bool) -> list[tuple[Any, ...]]:
        """The steps of the capture function for one event, as it is rendered now: no mode changes under an open
        writer."""
        gone = _entry(old) if old else None
        come = _entry(new) if new else None
        deferrable = self.bounds.key != "plain"
        careful = deferrable or again or new is None or (old is not None and old[0] != new[0])
        if self.variant == Variant.MOVED_KEYS_QUICKLY:
            careful = again or new is None
        ops: list[tuple[Any, ...]] = []
        building = any(g.status == "building" for g in self.state.generations)
        for number, generation in enumerate(self.state.generations):
            if generation.status not in ("building", "active", "retired", "aborting"):
                continue
            if self.variant == Variant.REBUILD_FORGETS_ACTIVE and building and generation.status != "building":
                continue
            capture, delta = generation.mode == "capture", generation.mode == "direct"
            trusted = capture and not (deferrable and self.variant != Variant.CAPTURE_MODE_TAKES_OLD_SNAPSHOTS)
            if not trusted and self._refuses(generation.mode_at):
                ops.append(("refuse", number))
            if self.variant == Variant.DIRECT_MODE_IGNORES_DELTA:
                delta = False
            if careful:
                for entry in (gone, come):
                    if entry:
                        ops += [("forget", number, entry[0])] if delta else []
                        ops.append(("look for delta" if capture else "look for base", number, entry[0]))
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
                in_place = self.bounds.unique and gone is not None and gone[0] == come[0] and not self.repeatable
                ops += [("in place", number, *come)] if in_place else self._put(number, *come)
        return ops

    def _put(self, number: int, ident: unique.Ident, included: str) -> list[tuple[Any, ...]]:
        """The steps that write an entry to the base, whose own row has left the delta."""
        if not self.bounds.unique:
            return [("put base", number, ident, included)]
        put = [("others", number, ident, included), ("insert", number, ident, included)]
        if self.variant == Variant.BASE_BEFORE_DELTA:
            put.reverse()
        if self.state.generations[number].mode != "direct" or self.variant == Variant.OTHERS_IN_DELTA_IGNORED:
            put = [one for one in put if one[0] != "others"]
        return put

    def _refuses(self, mode_at: int) -> bool:
        """The snapshot doesn't see the row that says the mode."""
        if self.variant in (Variant.NO_ISOLATION_CHECKS, Variant.NO_MODE_ROW):
            return False
        return self.repeatable and mode_at > self.user.snapshot

    def _run(self, op: tuple[Any, ...]) -> list[State]:
        """One statement of the capture function, or of the commit. Raises what it would raise."""
        verb, *rest = op
        if verb == "check":
            mvcc.check(self.state.source, rest[0], self.me)
            return [self._set(ops=self.user.ops[1:])]
        if verb == "commit":
            return [self._commit()]
        number, *rest = rest
        generation = self.state.generations[number]
        if verb == "refuse":
            raise SerializationFailure
        if generation.status == "dropped":
            raise LookupError
        snapshot = self.user.statement if self.user.statement != NO_SNAPSHOT else self._new_snapshot()
        me, repeatable = self.me, self.repeatable
        base, delta, ident = generation.base, generation.delta, rest[0]
        if verb.startswith("look"):
            return self._look(op, ident, snapshot)
        if verb in _PUT:
            return self._put_step(op, generation, snapshot)
        if verb == "put delta":
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
        return [self._set(state=state, ops=self.user.ops[1:], statement=NO_SNAPSHOT)]

    def _look(self, op: tuple[Any, ...], ident: tuple[str, int], snapshot: int) -> list[State]:
        """The careful path's question to the source: with what value does a row project to the entry, if one does?

        Several states where the server may find any of several versions. Raises Wait and SerializationFailure.
        """
        key, pk = ident
        source, me, repeatable, variant = self.state.source, self.me, self.repeatable, self.variant
        seen = mvcc.versions(source, pk, snapshot, me)
        own = [version for version in seen if version[2] == me]
        others = [version for version in seen if version[2] != me]

        def fitting(found: list[mvcc.Version]) -> list[str]:
            return sorted({version[1] for version in found if version[1][0] == key})

        if variant == Variant.ANY_VERSION_ANSWERS:
            return self._answers(op, source, fitting(seen))
        if variant == Variant.LOCK_ANY_VERSION:
            if fitting(own) and fitting(others) and len(op) == 3:
                # It takes the version that the server finds first, which may be either.
                return [self._set(ops=((*op, first), *self.user.ops[1:])) for first in ("own", "others")]
            if fitting(others) and op[3:] != ("own",):
                source, others = mvcc.share(source, pk, snapshot, me, repeatable, key)
                return self._answers(op, source, fitting(others) or fitting(own))
            return self._answers(op, source, fitting(own))
        plain, by_key_alone = self.bounds.key == "plain", variant == Variant.OWN_HIDES_OTHERS
        if plain and variant in _ASK_FOR_OTHERS:
            plain, by_key_alone = False, variant == Variant.OWN_HIDES_OTHERS_ON_PLAIN_KEYS
        if plain or fitting(own) or (own and by_key_alone):
            # No other transaction can have a row of a key that this one holds and that is checked at once.
            return self._answers(op, source, fitting(own))
        if variant == Variant.KEY_SHARE:
            others = mvcc.key_share(source, pk, snapshot, me, repeatable)
        elif variant == Variant.NO_LOCK_BUT_REFUSAL:
            if repeatable and any(0 <= version[3] < mvcc.NEVER for version in others):
                raise SerializationFailure
        elif variant != Variant.NO_LOCK:
            source, others = mvcc.share(source, pk, snapshot, me, repeatable)
        return self._answers(op, source, fitting(others))

    def _answers(self, op: tuple[Any, ...], source: mvcc.Table, values: list[str]) -> list[State]:
        return [self._answered(op, source, value) for value in values] or [self._answered(op, source, None)]

    def _answered(self, op: tuple[Any, ...], source: mvcc.Table, value: str | None) -> State:
        """The look's answer becomes the statement that follows."""
        verb, number, ident, *_ = op
        delta, again = verb.endswith("delta"), verb.startswith("look again")
        then: list[tuple[Any, ...]] = []
        if value is not None and delta:
            then = [("put delta", number, ident, "regular" + value[1:])]
        elif value is not None:
            then = self._put(number, ident, value[1:])
        elif not again:
            then = [("put delta", number, ident, "antimatter") if delta else ("take out", number, ident)]
            # Between the look and the removal another transaction may have brought a row of this key. The statement
            # that removes the entry locks it, so that from then on no other transaction can.
            if self.bounds.key != "plain" and not self.repeatable and self.variant != Variant.LOOK_ONCE:
                then.append((f"look again for {'delta' if delta else 'base'}", number, ident))
        state = self.state._replace(source=source)
        return self._set(state=state, ops=(*then, *self.user.ops[1:]), statement=NO_SNAPSHOT)

    def _take_out(self, base: mvcc.Table, ident: tuple[str, int], snapshot: int) -> mvcc.Table:
        """A removal, and its probe: where one snapshot shows nothing, an insert meets what it can't see."""
        held, of = unique.stored(ident, "", self.bounds.unique)
        of = "" if self.variant == Variant.REMOVAL_BY_KEY else of
        base, count = mvcc.delete(base, held, snapshot, self.me, self.repeatable, key=of)
        probes = self.variant not in (Variant.NO_ISOLATION_CHECKS, Variant.NO_PROBE)
        if not count and self.repeatable and probes:
            base, _ = mvcc.insert_or_nothing(base, held, of, snapshot, self.me, self.repeatable)
            base, _ = mvcc.delete(base, held, snapshot, self.me, self.repeatable, key=of)
        return base

    # -- a put into a unique generation

    def _put_step(self, op: tuple[Any, ...], generation: Generation, snapshot: int) -> list[State]:
        """One statement of a put. Raises Refused, and what the statement raises."""
        verb, number, ident, included, *rest = op
        key, value = unique.stored(ident, included, True)
        me, repeatable, variant = self.me, self.repeatable, self.variant
        base, delta = generation.base, generation.delta
        insert = ("insert", number, ident, included)
        match verb:
            case "others":
                found = sorted(
                    (other, state)
                    for other, state in mvcc.rows(delta, snapshot, me).items()
                    if other[0] == key and other != ident and state.startswith("regular")
                )
                return [self._then(*(("ask delta", number, ident, included, other[1]) for other, _ in found))]
            case "ask delta":
                self._ask(key, rest[0], snapshot)
                return [self._then(("drop other", *op[1:]))]
            case "drop other":
                delta, _ = mvcc.delete(delta, (key, rest[0]), snapshot, me, repeatable)
                return [self._then(generation=generation._replace(delta=delta), number=number)]
            case "insert":
                base, met = mvcc.insert_or_nothing(base, key, value, snapshot, me, repeatable)
                then = [("holder", *op[1:])] if met else []
                return [self._then(*then, generation=generation._replace(base=base), number=number)]
            case "holder":
                holders = sorted({version[1][0] for version in mvcc.versions(base, key, snapshot, me)})
                if not holders:
                    return [self._then(insert)]
                if variant == Variant.NO_QUESTION and any(int(holder) != ident[1] for holder in holders):
                    raise Refused(self._why_not(key))
                stale = {
                    other[1]
                    for other, state in mvcc.rows(delta, snapshot, me).items()
                    if other[0] == key and state == "antimatter" and variant == Variant.ANTIMATTER_IS_STALE
                }
                following = []
                for holder in map(int, holders):
                    verb = "own" if holder == ident[1] else "take over" if holder in stale else "ask base"
                    following.append(self._then((verb, number, ident, included, holder)))
                return following
            case "ask base":
                self._ask(key, rest[0], snapshot)
                return [self._then(("take over", *op[1:]))]
            case "ask again":
                self._ask(key, rest[0], snapshot)
                return [self._then()]
            case "in place":
                base, found = mvcc.change(base, key, value, snapshot, me, repeatable, key=str(ident[1]))
                then = [] if found else self._put(number, ident, included)
                return [self._then(*then, generation=generation._replace(base=base), number=number)]
            case _:  # own, take over
                base, found = mvcc.change(base, key, value, snapshot, me, repeatable, key=str(rest[0]))
                then = [] if found else [insert]
                if found and verb == "take over" and not repeatable and variant != Variant.ASK_ONCE:
                    then = [("ask again", *op[1:])]
                return [self._then(*then, generation=generation._replace(base=base), number=number)]

    def _ask(self, key: str, holder: int, snapshot: int) -> None:
        """Has the row of that primary key this key now? Raises Refused if so, and what FOR SHARE raises."""
        source, me, repeatable, variant = self.state.source, self.me, self.repeatable, self.variant
        without_lock = variant == Variant.ASK_WITHOUT_LOCK
        without_lock |= repeatable and variant == Variant.ASK_WITHOUT_LOCK_IN_OLD_SNAPSHOT
        if without_lock:
            found = mvcc.versions(source, holder, snapshot, me)
        elif variant == Variant.ASK_KEY_SHARE:
            found = mvcc.versions(source, holder, snapshot, me, own=True)
            if any(v[1][0] == key for v in mvcc.versions(source, holder, snapshot, me, own=False)):
                found += mvcc.key_share(source, holder, snapshot, me, repeatable)
        else:
            # If a row is found, the transaction ends, so the lock isn't kept.
            _, found = mvcc.share(source, holder, snapshot, me, repeatable, key, own=None)
        if any(version[1][0] == key for version in found):
            raise Refused(self._why_not(key))

    def _why_not(self, key: str) -> str:
        """U4: '' if PostgreSQL's own deferrable constraint would refuse the statement at this moment, too."""
        standing = 0
        for _, value, created, ended, how in self.state.source:
            mine_or_committed = created == self.me or created >= 0
            standing += value[:1] == key and mine_or_committed and (ended == mvcc.NEVER or how >= mvcc.LOCKED)
        return "" if standing > 1 else f"U4: refused, though no other row has {key}"

    def _then(self, *then: tuple[Any, ...], generation: Generation | None = None, number: int = 0) -> State:
        """The statement is done; `then` follows."""
        state = self.state
        if generation is not None:
            generations = list(state.generations)
            generations[number] = generation
            state = state._replace(generations=tuple(generations))
        return self._set(state=state, ops=(*then, *self.user.ops[1:]), statement=NO_SNAPSHOT)

    def waits_for(self) -> int | None:
        """The mark of the transaction that a statement waits for."""
        try:
            if self.user.chosen:
                self._write_source()
            elif self.user.ops:
                self._run(self.user.ops[0])
        except Wait as wait:
            return int(wait.args[0])
        except (SerializationFailure, UniqueViolation, LookupError):
            pass
        return None

    def _is_deadlocked(self) -> bool:
        """Users wait for each other in a circle, and this is one of them."""
        here: int | None = self.me
        for _ in self.state.users:
            here = _Session(self.state, self.bounds, self.variant, -1 - here).waits_for()
            if here is None or not is_writer(here):
                return False
            if here == self.me:
                return True
        return False

    # -- ends

    def _commit(self) -> State:
        state = self._look_again(self._end())
        number = state.now + 1
        return end(state, lambda table: mvcc.commit(table, self.me, number))._replace(now=number)

    def _rollback(self) -> State:
        return end(self._end(), lambda table: mvcc.rollback(table, self.me))

    def _look_again(self, state: State) -> State:
        """Makes the delta rows that this transaction has written new to the next look for duplicates."""
        generations = []
        for generation in state.generations:
            if generation.looked is not None:
                written = {v[0] for v in generation.delta if v[2] == self.me or v[3] == self.me}
                flight = {ident for ident in written if (ident, self.me) in generation.looked}
                looked = {one for one in generation.looked if one not in written and one[1] != self.me}
                generation = generation._replace(looked=tuple(sorted(looked | flight, key=str)))
            generations.append(generation)
        return state._replace(generations=tuple(generations))

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


def waits(state: State, bounds: Bounds, variant: Variant, at_source: bool = False) -> dict[int, int]:
    """The transactions that wait inside the capture function (at_source: at the source), each with the one that it
    waits for."""
    users = [n for n, user in enumerate(state.users) if (user.chosen if at_source else user.ops and not user.chosen)]
    sessions = [_Session(state, bounds, variant, number) for number in users]
    return {session.me: held for session in sessions if (held := session.waits_for()) is not None}


def would_wait(state: State, me: int, held: int) -> bool:
    """Whether a native unique index would let `me` wait for `held`: whether `held` has written a row of the key.

    If so, the index has a version of the key whose transaction is in flight. A question (ask, look, check, commit)
    waits at the source, for the transaction that is writing the row's next version.
    """
    verb, *rest = state.users[-1 - me].ops[0]
    if verb.startswith(("ask", "look", "check", "commit")):
        return True
    _, (key, _), *_ = rest
    return key in state.users[-1 - held].keys


def end(state: State, ending: Any) -> State:
    """Apply a transaction's end to every table."""
    return state._replace(
        source=ending(state.source),
        generations=tuple(g._replace(base=ending(g.base), delta=ending(g.delta)) for g in state.generations),
    )


def _truncate(state: State) -> State:
    """The whole transaction of a TRUNCATE: its locks keep all others away from these tables, so it is one step."""
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


def _mapped(name: str) -> Callable[[str], str]:
    return lambda value: MAPS[name].get(value[0], value[0]) + value[1:]


def _entry(row: tuple[int, str]) -> Entry:
    pk, value = row
    return (value[0], pk), value[1:]


def _text(chosen: tuple[Any, ...]) -> str:
    verb, pk, *rest = chosen
    if verb == "map":
        return f"{rest[0]}s the keys of {', '.join(map(str, rest[1]))}"
    if rest and isinstance(rest[-1], bool):
        rest[-1] = "(its own)" if rest[-1] else "(another's)"
    return " ".join(map(str, (verb, pk, *rest)))


def _op_text(op: tuple[Any, ...]) -> str:
    if op[0] in ("check", "commit"):
        return " ".join(map(str, op))
    verb, number, *rest = op
    holder = f", held by {rest[2]}" if verb in _PUT and len(rest) > 2 else ""
    return f"capture of g{number + 1}: {verb} {''.join(map(str, rest[0])) if rest else ''}{holder}"
