"""The steps of users: they write in a shard, put their identities on the index server, and commit or roll back."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.holders_state import (
    ENDED,
    NULL,
    Bounds,
    Ident,
    Index,
    Intent,
    Put,
    Shard,
    Snapshot,
    State,
    User,
    Variant,
    added,
    holder,
    real,
    with_poll,
    with_shard,
    with_user,
)

Steps = Iterator[tuple[str, State]]
IN_THE_SHARD = ("new", "open", "putting", "put")


def steps(state: State, bounds: Bounds, variant: Variant) -> Steps:
    for number, user in enumerate(state.users):
        if user.phase == "over":
            continue
        name = f"T{number + 1} in S{bounds.users[number][0] + 1}"
        for text, after in _user(state, number, user, bounds, variant):
            yield f"{name} {text}", after


def _user(state: State, number: int, user: User, bounds: Bounds, variant: Variant) -> Steps:
    if user.phase in ("new", "open"):
        yield from _writes(state, number, user, bounds, variant)
    if user.phase == "open":
        yield from _begin(state, number, user, bounds, variant)
    elif user.phase == "putting":
        assert user.put is not None
        if not user.put.locked:
            yield "announces", _announced(state, number, user, user.put, variant)
        elif user.put.todo:
            yield from _put(state, number, user, user.put, bounds, variant)
        else:
            if bounds.midway and user.left:
                yield "writes on", with_user(state, number, user._replace(phase="open"))
            if variant is Variant.PUT_AFTER_COMMIT:
                yield "commits before its put", _committed(state, number, user, "zombie", bounds)
            else:
                yield "commits its put", put_over(state, number, "put", commits=True, variant=variant)
            if bounds.aborts:
                yield (
                    "dies, and its put may be committed",
                    with_user(state, number, user._replace(phase="zombie", changes=(), touched=())),
                )
    elif user.phase == "put":
        yield "commits", _committed(state, number, user, "over", bounds)
    elif user.phase == "zombie":
        yield "is over, and its put is committed", put_over(state, number, "over", commits=True, variant=variant)
        if variant is not Variant.PUT_AFTER_COMMIT:
            yield "is over, and its put rolls back", put_over(state, number, "over", commits=False)
    if bounds.aborts and user.phase in ("open", "putting", "put"):
        yield "rolls back", put_over(state, number, "over", commits=False)


def _writes(state: State, number: int, user: User, bounds: Bounds, variant: Variant) -> Steps:
    """One statement, and the capture of what it touches. Where it would wait, or be refused, it is none."""
    if not user.left:
        return
    home = bounds.users[number][0]
    rows = {pk: key for key, pk in state.shards[home].rows}
    mine = rows | dict(user.changes)
    statements = [{pk: value} for pk in bounds.primary_keys for value in bounds.values if value != mine.get(pk, "")]
    if bounds.swaps and all(mine.get(pk) for pk in (1, 2)) and mine[1] != mine[2]:
        statements.append({1: mine[2], 2: mine[1]})
    others = [u for n, u in enumerate(state.users) if n != number and bounds.users[n][0] == home]
    locked = {pk for other in others if other.phase in IN_THE_SHARD for pk, _ in other.changes}
    for statement in statements:
        after = {**mine, **statement}
        if statement.keys() & locked:
            continue
        keys = [key for key in after.values() if key not in ("", NULL)]
        in_flight = {rows.get(pk) for pk in locked} | {v for o in others if o.phase in IN_THE_SHARD
                                                       for _, v in o.changes}  # fmt: skip
        taken = len(set(keys)) < len(keys) or {statement[pk] for pk in statement} & in_flight - {"", NULL}
        if taken and variant is not Variant.NO_LOCAL_INDEX:
            continue
        idents = tuple((key, pk) for pk in statement for key in (mine.get(pk, ""), after[pk]) if key)
        put = user.put
        if put is not None:
            put = put._replace(todo=_todo(number, {*put.todo, *idents}))
        changed = User(
            "open",
            user.left - 1,
            tuple(sorted({**dict(user.changes), **statement}.items())),
            (*(i for i in user.touched if i not in idents), *idents),
            put,
        )
        what = ", ".join(f"{pk}: {mine.get(pk) or 'nothing'} → {after[pk] or 'nothing'}" for pk in statement)
        yield f"writes {what}", with_user(state, number, changed)


def _todo(number: int, idents: set[Ident]) -> tuple[Ident, ...]:
    """The identities in an order, which every other transaction reverses."""
    return tuple(sorted(idents, reverse=number % 2 == 1))


def _begin(state: State, number: int, user: User, bounds: Bounds, variant: Variant) -> Steps:
    put = user.put
    if put is not None:
        if put.todo:
            yield "announces again", _announced(state, number, user, put, variant)
        return
    idents = set(user.touched)
    if variant is Variant.PUTS_ALONE:
        rows = {pk: key for key, pk in state.shards[bounds.users[number][0]].rows} | dict(user.changes)
        idents = {(key, pk) for key, pk in idents if rows[pk] == key}
    put = Put(None, False, "", _todo(number, idents), "", user.touched, (), (), ())
    if bounds.repeatable:
        index = state.index
        held = tuple((key, shard) for key, shard, by in index.holders if by == ENDED)
        put = put._replace(snapshot=Snapshot(held, index.intents, index.mode, real(state)))
        yield "begins its put", with_user(state, number, user._replace(phase="putting", put=put))
    else:
        yield "announces", _announced(state, number, user, put, variant)


def _announced(state: State, number: int, user: User, put: Put, variant: Variant) -> State:
    """It has the lock of the table of intents, and so the trigger's function as it is now."""
    mode = put.mode or state.index.mode
    if variant is Variant.MODE_AS_ROW and put.snapshot is not None:
        mode = put.snapshot.mode
    put = put._replace(locked=True, mode=mode, doing="", intents=user.touched)
    if mode == "off":
        put = put._replace(todo=())
    return with_user(state, number, user._replace(phase="putting", put=put))


def _put(state: State, number: int, user: User, put: Put, bounds: Bounds, variant: Variant) -> Steps:
    """The next statement of the trigger's function."""
    ident, home, index = put.todo[0], bounds.users[number][0], state.index
    key = ident[0]
    found = holder(index, key)
    done = put._replace(todo=put.todo[1:], doing="")
    seen = found is not None and (put.snapshot is None or found[:2] in put.snapshot.holders)

    def now(put: Put, index: Index = index) -> State:
        return with_user(state._replace(index=index), number, user._replace(put=put))

    def refused(why: str) -> tuple[str, State]:
        return f"puts {key}: {why}", put_over(state, number, "over", commits=False)

    def waits() -> tuple[str, State]:
        return f"gives up waiting for the holder of {key}", put_over(state, number, "over", commits=False)

    if key == NULL and variant is not Variant.NULL_HELD:
        yield f"puts nothing for {ident}", now(done)
    elif put.doing == "":
        if found is None:
            held = index._replace(holders=added(index.holders, (key, home, number)))
            yield f"inserts the holder of {key}", now(done._replace(holders=added(put.holders, key)), held)
        elif found[2] == number:
            yield f"finds its own holder of {key}", now(done)
        elif found[2] != ENDED:
            yield waits()
        elif not seen:
            yield refused("40001, it doesn't see the holder")
        else:
            yield f"finds a holder of {key}", now(put._replace(doing="lock"))
    elif put.doing == "lock":
        free = variant is Variant.NO_KEY_SHARE
        if found is None or found[2] != ENDED:
            if put.snapshot is not None:
                yield refused("40001, the holder has gone")
            else:
                yield f"begins again with {key}", now(put._replace(doing=""))
        elif not seen:
            yield refused("40001, the holder has gone")
        elif not free and any(key in poll.locked for poll in state.polls):
            yield waits()
        else:
            locked = put if free else put._replace(shared=added(put.shared, key))
            mine = found[1] == home
            after = locked._replace(todo=put.todo[1:], doing="") if mine else locked._replace(doing="decide")
            yield f"locks S{found[1] + 1}'s holder of {key}", now(after)
    elif found is None:
        yield refused("40001, the holder has gone")
    elif put.mode == "filling":
        contested = put.contested if variant is Variant.PUT_UNCONTESTED else added(put.contested, key)
        yield f"finds {key} contested", now(done._replace(contested=contested))
    else:
        intents = index.intents if put.snapshot is None else put.snapshot.intents
        named = any(i.shard == found[1] and i.ident[0] == key for i in intents)
        if named and variant is Variant.HANDED_OVER:
            yield f"takes over {key}", now(done._replace(contested=added(put.contested, key)))
        elif named and variant is not Variant.REFUSED_AT_ONCE:
            yield refused("40001, it may be leaving")
        else:
            text, failed = refused("23505")
            yield text, failed._replace(wrong=_false_refusal(state, put, ident, found[1], home, user))


def _false_refusal(state: State, put: Put, ident: Ident, other: int, home: int, user: User) -> str:
    rows = {pk: key for key, pk in state.shards[home].rows} | dict(user.changes)
    if put.mode == "refusing" and rows.get(ident[1]) != ident[0]:
        return "H5: who takes a duplicate away is refused"
    if not state.index.promised or any(shard.lost for shard in state.shards):
        return ""
    there = {*real(state), *(put.snapshot.real if put.snapshot is not None else ())}
    return "" if (other, ident[0]) in there else f"H2: {ident[0]} is refused, and no other shard has it"


def put_over(state: State, number: int, phase: str, commits: bool, variant: Variant = Variant.CORRECT) -> State:
    """The end of the index server's transaction."""
    user, index = state.users[number], state.index
    put = user.put
    left = user._replace(phase=phase, put=None)
    if phase == "over":
        left = User("over", 0, (), (), None)
    state = with_user(state, number, left)
    if put is None:
        return state
    if not commits:
        return state._replace(index=index._replace(holders=tuple(h for h in index.holders if h[2] != number)))
    home = state.homes[number]
    holders = [(key, shard, ENDED if by == number else by) for key, shard, by in index.holders]
    intents = index.intents
    contested = put.contested
    if put.locked:
        intents = added(intents, *(Intent(home, ident, number) for ident in put.intents))
    if variant is Variant.HANDED_OVER and put.mode == "enforced":
        holders = [(key, home if key in put.contested else shard, by) for key, shard, by in holders]
        contested = ()
    return state._replace(
        index=index._replace(
            holders=tuple(sorted(holders)), intents=intents, contested=added(index.contested, *contested)
        )
    )


def _committed(state: State, number: int, user: User, phase: str, bounds: Bounds) -> State:
    """Commits in the user's shard. The rows that it touched get new versions in the outbox, so no poll clears them
    away."""
    home = bounds.users[number][0]
    shard, poll = state.shards[home], state.polls[home]
    rows = {pk: key for key, pk in shard.rows} | dict(user.changes)
    outbox = (*(i for i in shard.outbox if i not in user.touched), *user.touched)
    after = Shard(tuple(sorted((key, pk) for pk, key in rows.items() if key)), outbox, shard.lost)
    poll = poll._replace(
        acked=tuple(i for i in poll.acked if i not in user.touched),
        shipped=tuple(i for i in poll.shipped if i not in user.touched),
    )
    over = User("over", 0, (), (), None) if phase == "over" else user._replace(phase=phase, changes=())
    return with_poll(with_shard(with_user(state, number, over), home, after), home, poll)
