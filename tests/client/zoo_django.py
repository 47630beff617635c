"""The table of many types (tests/client/zoo.py) as models, and random QuerySets of it. A seed gives a script."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

from django.db import models
from django.db.models import Count, Exists, F, FilteredRelation, Max, OuterRef, Q, QuerySet, Value, Window
from django.db.models.functions import Cast, Coalesce, Collate, Lower, RowNumber
from django.db.models.lookups import Exact, In

from tests.client.zoo import COLUMNS, PARTS, ROWS, Mood

Step = Callable[[str], Any]
TEXTS = ("t", "v", "c", "lo", "ca", "ci")
# Casts by which different values become equal. None fails: whether a row is cast at all depends on the plan.
ONE_CHARACTER = partial(models.CharField, max_length=1)
ROUNDED: dict[str, tuple[Any, list[Any]]] = {
    "f": (ONE_CHARACTER, ["0", "1"]),
    "n": (ONE_CHARACTER, ["2", "1"]),
    "w": (models.IntegerField, [1, 2]),
    "ts": (models.DateField, [COLUMNS["d"][2][0]]),
    "tz": (models.DateField, [COLUMNS["d"][2][0]]),
}


class Lowered(models.TextField):
    """Compares and keeps values in lower case."""

    def get_prep_value(self, value: Any) -> Any:
        """The value in lower case."""
        return value.lower() if isinstance(value, str) else value


class Blank(models.TextField):
    """Keeps None as an empty text."""

    def get_prep_value(self, value: Any) -> Any:
        """None is ''."""
        return "" if value is None else super().get_prep_value(value)

    def from_db_value(self, value: Any, *_: Any) -> Any:
        """'' is None."""
        return value or None


class Cents(models.IntegerField):
    """Keeps an amount as a whole number."""

    def get_prep_value(self, value: Any) -> Any:
        """In cents."""
        return None if value is None else int(Decimal(value) * 100)

    def from_db_value(self, value: Any, *_: Any) -> Any:
        """In whole ones."""
        return None if value is None else Decimal(value) / 100


class SameText(models.lookups.Exact):
    """An `exact` of its own: it compares without regard to case."""

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        """`lower(column) = lower(value)`."""
        left, some = self.process_lhs(compiler, connection)
        right, more = self.process_rhs(compiler, connection)
        return f"lower({left}) = lower({right})", [*some, *more]


class Loose(models.TextField):
    """Its `exact` is another one."""


Loose.register_lookup(SameText)


class Animal(models.Model):
    """A row of the zoo, by a part of its primary key."""

    id = models.IntegerField(primary_key=True)
    part = models.IntegerField()
    t = models.TextField(null=True)
    v = models.CharField(max_length=5, null=True)
    c = models.CharField(max_length=4, null=True)
    n = models.DecimalField(max_digits=8, decimal_places=2, null=True)
    w = models.DecimalField(max_digits=30, decimal_places=10, null=True)
    i = models.IntegerField(null=True)
    b = models.BigIntegerField(null=True)
    f = models.FloatField(null=True)
    ts = models.DateTimeField(null=True)
    tz = models.DateTimeField(null=True)
    d = models.DateField(null=True)
    u = models.UUIDField(null=True)
    e = models.TextField(null=True)
    me = models.TextField(null=True)
    y = models.BinaryField(null=True)
    o = models.BooleanField(null=True)
    lo = Lowered(null=True)
    bl = Blank(null=True)
    ce = Cents(null=True)
    ca = Loose(null=True)
    ci = models.TextField(null=True)

    class Meta:
        app_label = "django_shop"
        managed = False
        db_table = "zoo"


class AnimalRow(models.Model):
    """The same row by its whole primary key."""

    pk = models.CompositePrimaryKey("id", "part")
    id = models.IntegerField()
    part = models.IntegerField()
    t = models.TextField(null=True)
    i = models.IntegerField(null=True)
    ca = models.TextField(null=True)
    o = models.BooleanField(null=True)

    class Meta:
        app_label = "django_shop"
        managed = False
        db_table = "zoo"


class Pet(models.Model):
    """A row that belongs to one of the zoo, or to none."""

    id = models.IntegerField(primary_key=True)
    owner = models.ForeignKey(
        Animal, models.CASCADE, null=True, db_column="owner", db_constraint=False, related_name="pets"
    )
    k = models.TextField(null=True)

    class Meta:
        app_label = "django_shop"
        managed = False
        db_table = "pets"


class Writer:
    """Writes random calls. chance: decides everything, so that the same seed gives the same calls."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def value(self, name: str) -> Any:
        """A value to compare a column with."""
        _, _, has, others = COLUMNS[name]
        value = self.chance.choice([*has, *has, *others])
        return value.value if isinstance(value, Mood) and name == "me" else value

    def about(self, at: str, name: str) -> Any:
        """A condition on a column of the rows that a path leads to."""
        chance, path = self.chance, at + name
        field = type(Animal._meta.get_field(name))
        forms: list[tuple[int, Callable[[], Any]]] = [
            (14, lambda: Q((path, self.value(name)))),
            (7, lambda: Q((f"{path}__in", [self.value(name) for _ in range(chance.randint(1, 4))]))),
            (2, lambda: Q((f"{path}__in", [self.value(name), None]))),
            (1, lambda: Q((f"{path}__in", []))),
            (6, lambda: Q((f"{path}__isnull", True))),
            (1, lambda: Q((path, None))),
            (1, lambda: Q((f"{path}__isnull", False))),
            (3, lambda: ~Q((path, self.value(name)))),
            (1, lambda: ~Q((f"{path}__in", [self.value(name)]))),
            (1, lambda: ~~Q((path, self.value(name)))),
            (1, lambda: Q((f"{path}__gt", self.value(name)))),
            (2, lambda: Exact(F(path), self.value(name))),
            (1, lambda: In(F(path), [self.value(name), self.value(name)])),
            (2, lambda: Exact(Coalesce(F(path), Value(self.value(name), field())), self.value(name))),
            (2, lambda: Exact(Cast(F(path), models.TextField()), str(self.value(name)))),
            (1, lambda: Q((path, Value(self.value(name), field())))),
            (1, lambda: Q((path, F(path)))),
            (1, lambda: Q((f"{path}__in", [self.value(name), Value(self.value(name), field())]))),
            (1, lambda: Q((path, Animal.objects.order_by("-" + name).values(name)[:1]))),
            (1, lambda: Q((f"{path}__in", Animal.objects.filter(id__lt=9).values(name)))),
            (1, lambda: Q((f"{at}id", chance.randrange(ROWS)))),
            (1, lambda: Q((f"{at}part", chance.randrange(PARTS)))),
        ]
        if name in TEXTS:
            forms += [
                (2, lambda: Q((f"{path}__iexact", self.value(name)))),
                (1, lambda: Q((f"{path}__startswith", "a"))),
                (2, lambda: Exact(Lower(F(path)), "a")),
                (2, lambda: Exact(Collate(F(path), "C"), self.value(name))),
                (2, lambda: Exact(Collate(F(path), "loose"), self.value(name))),
            ]
        if name in ROUNDED:
            forms += [(4, lambda: Exact(Cast(F(path), ROUNDED[name][0]()), chance.choice(ROUNDED[name][1])))]
        return chance.choices([make for _, make in forms], [weight for weight, _ in forms])[0]()

    def condition(self, at: str = "", depth: int = 0, names: Sequence[str] = (*COLUMNS, "i", "ca")) -> Q:
        """A condition on the rows that a path leads to."""
        chance = self.chance
        name = chance.choice(names)
        if depth < 2 and chance.random() < 0.25:
            one, two = (self.condition(at, depth + 1, names) for _ in range(2))
            return chance.choice([lambda: one & two, lambda: one & two, lambda: one | two, lambda: ~(one | two)])()
        if depth < 2 and chance.random() < 0.03:
            return self.condition(at, 2, names) ^ self.condition(at, 2, names)
        if name == "i" and chance.random() < 0.6:
            return Q(self.about(at, "i")) & Q(self.about(at, "t"))
        return Q(self.about(at, name))

    def asked(self) -> Step:
        """A call that reads."""
        chance = self.chance
        here, there, also = self.condition(), self.condition("owner__"), self.condition()
        row, few = self.condition(names=("t", "i", "ca", "o")), chance.randint(0, 3)
        ids = [chance.randrange(ROWS) for _ in range(3)]
        k, name = chance.choice("abc"), chance.choice([*COLUMNS])
        forms: list[Callable[[QuerySet[Any], QuerySet[Any], QuerySet[Any]], Any]] = [
            lambda a, r, p: a.filter(here),
            lambda a, r, p: a.filter(here).filter(also),
            lambda a, r, p: a.filter(here).exclude(also),
            lambda a, r, p: a.exclude(here),
            lambda a, r, p: a.get(here),
            lambda a, r, p: a.filter(here).exists(),
            lambda a, r, p: a.filter(here).count(),
            lambda a, r, p: a.filter(here).order_by("id").first(),
            lambda a, r, p: a.filter(here).order_by("id")[:few],
            lambda a, r, p: a.filter(here).order_by("id")[:few].count(),
            lambda a, r, p: a.filter(here).values_list("t").distinct(),
            lambda a, r, p: a.filter(here).distinct().count(),
            lambda a, r, p: a.filter(here).aggregate(Max("i"), Count("pets")),
            lambda a, r, p: a.filter(here).values("part").annotate(many=Count("id")).values_list("part", "many"),
            lambda a, r, p: a.annotate(many=Count("pets")).filter(here, many__gt=0).values_list("id", "many"),
            lambda a, r, p: a.annotate(many=Count("pets")).filter(Q(many__gt=1) | here).values_list("id", "many"),
            lambda a, r, p: (
                a.annotate(place=Window(RowNumber(), order_by="id")).filter(here, place__lt=9).values_list("id")
            ),
            lambda a, r, p: a.filter(here).select_for_update(),
            lambda a, r, p: list(a.filter(here).iterator(chunk_size=10)),
            lambda a, r, p: list(a.filter(here).in_bulk(ids).values()),
            lambda a, r, p: a.filter(here).union(a.filter(also)),
            lambda a, r, p: a.filter(here, id__in=a.filter(also)),
            lambda a, r, p: a.filter(here).extra(where=["zoo.part < 4"]),
            lambda a, r, p: a.filter(pk__in=ids).only("id", "part").values_list("id"),
            lambda a, r, p: a.filter(here).defer("t").values_list("id"),
            lambda a, r, p: a.filter(here, pets__k=k),
            lambda a, r, p: a.filter(Q(pets__k=k) | here),
            lambda a, r, p: a.filter(here, pets=None),
            lambda a, r, p: a.filter(here).prefetch_related("pets"),
            lambda a, r, p: r.filter(row),
            lambda a, r, p: r.filter(row).count(),
            lambda a, r, p: r.filter(pk__in=[(one, one % PARTS) for one in ids]),
            lambda a, r, p: r.get(pk=(ids[0], ids[1] % PARTS)),
            lambda a, r, p: p.filter(there).values_list("id", "owner__t"),
            lambda a, r, p: p.exclude(there),
            lambda a, r, p: p.filter(there).select_related("owner"),
            lambda a, r, p: p.filter(**{f"owner__{name}__isnull": True}).values_list("id", "owner__t"),
            lambda a, r, p: p.filter(**{f"owner__{name}": None}, owner__id=None).select_related("owner"),
            lambda a, r, p: p.filter(Q(k=k) | there).select_related("owner"),
            lambda a, r, p: p.filter(id__in=ids).select_related("owner"),
            lambda a, r, p: p.filter(id__in=ids).prefetch_related("owner"),
            lambda a, r, p: [one.owner for one in p.filter(id__in=ids)],
            lambda a, r, p: p.filter(owner__in=a.filter(here)),
            lambda a, r, p: p.filter(Exists(a.filter(here, id=OuterRef("owner_id")))),
            lambda a, r, p: (
                p.annotate(one=FilteredRelation("owner", condition=there)).filter(one__t="a").values_list("id")
            ),
            lambda a, r, p: p.annotate(one=FilteredRelation("owner", condition=there)).values_list("id", "one__id"),
        ]
        form = chance.choice([*forms[:8], *forms])
        return lambda using: form(*(model.objects.using(using) for model in (Animal, AnimalRow, Pet)))

    def changed(self) -> Step:
        """A call that changes rows."""
        chance = self.chance
        here, there, row = self.condition(), self.condition("owner__"), self.condition(names=("t", "i", "ca", "o"))
        name = chance.choice([one for one in COLUMNS if one not in ("bl", "lo", "n", "w", "f", "ce")])
        new = {name: chance.choice([None, *COLUMNS[name][2]])}
        if chance.random() < 0.2:
            new = {"part": chance.randrange(PARTS)}
        number, part = chance.randrange(ROWS), chance.randrange(PARTS)
        text, k, key = chance.choice(COLUMNS["t"][2]), chance.choice("abc"), self.value("u")
        fresh = {"id": ROWS + number, "part": part}
        forms: list[Callable[[QuerySet[Any], QuerySet[Any], QuerySet[Any]], Any]] = [
            lambda a, r, p: a.filter(here).update(**new),
            lambda a, r, p: a.filter(here).update(i=F("i") + 1),
            lambda a, r, p: a.filter(here, pets__k=k).update(**new),
            lambda a, r, p: r.filter(row).update(t=text),
            lambda a, r, p: p.filter(there).update(k=k),
            lambda a, r, p: a.filter(here).delete(),
            lambda a, r, p: a.filter(here)._raw_delete(a.db),
            lambda a, r, p: r.filter(row, part=part).delete(),
            lambda a, r, p: a.filter(here, pets__k=k).delete(),
            lambda a, r, p: p.filter(there).delete(),
            lambda a, r, p: _saved(a.get(id=number), text),
            lambda a, r, p: _saved(a.get(here), text),
            lambda a, r, p: _saved(r.get(id=number), text),
            lambda a, r, p: a.get(id=number).delete(),
            lambda a, r, p: a.get_or_create(u=key, defaults=fresh),
            lambda a, r, p: a.update_or_create(u=key, defaults={"t": text}, create_defaults=fresh),
            lambda a, r, p: a.bulk_update([Animal(id=one, t=text) for one in (number, number // 2)], ["t"]),
            lambda a, r, p: len(a.bulk_create([Animal(**fresh), Animal(id=number, part=part)], ignore_conflicts=True)),
        ]
        form = chance.choice([*forms[:2], *forms])
        return lambda using: form(*(model.objects.using(using) for model in (Animal, AnimalRow, Pet)))

    def other(self) -> str:
        """A statement of another session, which commits."""
        number, part = self.chance.randrange(ROWS), self.chance.randrange(PARTS)
        return self.chance.choice(
            [
                f"UPDATE zoo SET part = {part} WHERE id IN ({number}, {number // 2})",
                f"UPDATE zoo SET i = {part} WHERE id % 10 = {number % 10}",
                f"UPDATE zoo SET t = 'a' WHERE id = {number}",
                f"DELETE FROM zoo WHERE id % 20 = {number % 20}",
                f"INSERT INTO zoo (id, part, t, i) VALUES ({2 * ROWS + number}, {part}, 'a', 1)",
            ]
        )


def _saved(one: Any, text: str) -> Any:
    one.t = text
    one.save()
    return one


def script(seed: int) -> tuple[str | None, Sequence[tuple[str, Any]], bool]:
    """The isolation level of a transaction, or None for statements on their own; its steps; whether it commits.

    A step is `call` with what takes the alias of a database, or `other` with a statement.
    """
    chance = random.Random(seed)
    writer = Writer(chance)
    level = chance.choice([None, None, "READ COMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
    taken: list[tuple[str, Any]] = []
    changes = False
    for _ in range(chance.randint(1, 5)):
        kind = chance.random()
        if kind < 0.15 and not changes:
            taken.append(("other", writer.other()))
        elif kind < 0.45:
            taken.append(("call", writer.changed()))
            changes = level is not None
        else:
            taken.append(("call", writer.asked()))
    return level, taken, chance.random() < 0.5
