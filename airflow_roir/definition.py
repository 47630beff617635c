"""The definition of an index: names, key columns and included columns. Validated once, here."""

from __future__ import annotations

import re
import shlex
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from airflow_roir import key_text
from airflow_roir.errors import Complaints, InvalidInput

# The schemas in each indexed database: of the control tables, and of the entries of all indexes.
SCHEMA = "roir"
DATA_SCHEMA = "roir_data"
MAX_IDENTIFIER_BYTES = 63  # PostgreSQL's NAMEDATALEN - 1
MAX_KEY_COLUMNS = 32  # PostgreSQL's INDEX_MAX_KEYS, which counts key and primary key columns together

_PLAIN = re.compile(r"[a-z_][a-z0-9_$]*")
# PostgreSQL folds ASCII letters only, and knows no other white space.
_FOLDED = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_SPACE = " \t\n\r\f\v"


def quote(name: str) -> str:
    """Quotes one SQL identifier. Every name in a statement passes through this function; no other one quotes.

    Raises InvalidInput for a name that PostgreSQL can't have.
    """
    if not name or "\0" in name:
        raise InvalidInput(f"{name!r} is not an SQL identifier: it is empty or contains a NUL character")
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True)
class QualifiedName:
    """A table's or view's name as SQL knows it; `schema` is None if it was not given."""

    schema: str | None
    name: str

    @property
    def sql(self) -> str:
        """The name for statements: always quoted."""
        return quote(self.name) if self.schema is None else f"{quote(self.schema)}.{quote(self.name)}"

    def __str__(self) -> str:
        """The name for people, and for `parse_name`: quoted if necessary."""
        return ".".join(
            part if _PLAIN.fullmatch(part) else quote(part) for part in (self.schema, self.name) if part is not None
        )


def argument(name: QualifiedName | str) -> str:
    """A name as an argument of a command, to be pasted into a shell: quoted if necessary.

    A name with control characters is written as bash and zsh read it, `$'\\x1b'`, so that it is one line that does
    nothing to a terminal.
    """
    text = str(name)
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_escaped, text))}'"


def _escaped(sign: str) -> str:
    if sign in "'\\":
        return f"\\{sign}"
    if sign.isprintable():
        return sign
    code = ord(sign)
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _parse_identifiers(text: str, separator: str, what: str) -> list[str]:
    """Splits `text` at `separator` as psql does: unquoted names fold to lower case, `""` is a quote."""
    if not isinstance(text, str):
        # A template's native value, or a form's.
        raise InvalidInput(f"{what} is {text!r}; it must be text")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidInput(f"{what} {text!r} contains a character that PostgreSQL can't have in a name")
    names: list[str] = []
    position, length = 0, len(text)
    while True:
        while position < length and text[position] in _SPACE:
            position += 1
        if position < length and text[position] == '"':
            part, position = _quoted_identifier(text, position, what)
        else:
            start = position
            while position < length and text[position] != separator and text[position] not in _SPACE:
                position += 1
            part = text[start:position]
            if '"' in part:
                raise InvalidInput(f"{what} {text!r}: quote the whole name, with inner quotes doubled")
            part = part.translate(_FOLDED)
        if not part:
            raise InvalidInput(f"{what} {text!r}: a name is empty")
        if len(part.encode()) > MAX_IDENTIFIER_BYTES:
            raise InvalidInput(f"{what} {part!r} is longer than PostgreSQL's {MAX_IDENTIFIER_BYTES} bytes")
        names.append(part)
        while position < length and text[position] in _SPACE:
            position += 1
        if position == length:
            return names
        if text[position] != separator:
            raise InvalidInput(f"{what} {text!r}: expected {separator!r} at position {position + 1}")
        position += 1


def _quoted_identifier(text: str, start: int, what: str) -> tuple[str, int]:
    position, part = start + 1, ""
    while position < len(text):
        if text[position] != '"':
            part += text[position]
            position += 1
        elif text[position + 1 : position + 2] == '"':
            part += '"'
            position += 2
        else:
            return part, position + 1
    raise InvalidInput(f"{what} {text!r}: a quoted name has no closing quote")


def parse_name(text: str, what: str = "name") -> QualifiedName:
    """Reads `schema.name` or `name`, quoted or not, as `psql` does. Raises InvalidInput."""
    parts = _parse_identifiers(text, ".", what)
    if len(parts) > 2:
        raise InvalidInput(f"{what} {text!r}: at most a schema and a name, found {len(parts)} parts")
    return QualifiedName(parts[0] if len(parts) == 2 else None, parts[-1])


def parse_columns(text: str | Sequence[str] | None, what: str = "columns") -> tuple[str, ...]:
    """Reads a comma-separated list of column names, quoted or not. None and '' give ().

    A sequence is taken as a list of names that are already separated; each may still be quoted.
    """
    if not text:
        return ()
    if isinstance(text, str):
        return tuple(_parse_identifiers(text, ",", what)) if text.strip() else ()
    if not isinstance(text, Sequence):
        raise InvalidInput(f"{what}: {text!r} is no list of names")
    names: list[str] = []
    for item in text:
        names += _parse_identifiers(item, ",", what)
    return tuple(names)


def parse_keys(text: str | Sequence[str] | None, what: str = "key columns") -> tuple[tuple[str, ...], dict[str, str]]:
    """Reads a comma-separated list of columns and expressions: `lower(email), created`, `(doc->>'sku') AS sku`.

    Returns the names that the index's view gives them, in order, and the SQL of the expressions by name. An expression
    without `AS` is named as by `CREATE INDEX`: after its function, or `expr`. `COLLATE` belongs to an expression, and
    `text_pattern_ops` and its kin are `COLLATE "C"`. `DESC` at all keys means nothing: an index is read backwards, too.
    """
    items = [text] if isinstance(text, str) else text or ()
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        return parse_columns(text, what), {}
    names: list[str] = []
    expressions: dict[str, str] = {}
    orders: list[str] = []
    for item in items:
        if not key_text.has_expression(item):
            plain = parse_columns(item, what) if isinstance(text, str) else parse_columns([item], what)
            names += plain
            orders += [""] * len(plain)
            continue
        for part in key_text.split(item, what):
            part, order = key_text.without_order(part)
            expression, name = key_text.named(part, what)
            if name is not None:
                expression, order = key_text.without_order(expression) if not order else (expression, order)
            expression = key_text.with_collation(expression, what)
            orders.append(order)
            if name is None and not key_text.has_expression(expression):
                names += _parse_identifiers(expression, ",", what)
                continue
            if name is not None:
                (name,) = _parse_identifiers(name, ",", what)
            else:
                name = _not_taken(key_text.default_name(expression), names)
            names.append(name)
            expressions[name] = expression
    _refuse_orders(text, orders, what)
    return tuple(names), expressions


def _refuse_orders(text: str | Sequence[str] | None, orders: Sequence[str], what: str) -> None:
    # The server reads an index backwards: all keys descending are all keys ascending.
    if len(set(orders)) > 1 or any(order not in ("", "desc") for order in orders):
        raise InvalidInput(
            f"{what} {text!r}: entries are in ascending order, NULLs last, and are read backwards for ORDER BY all "
            "keys DESC. Leave DESC and NULLS out; for a mixed ORDER BY, PostgreSQL sorts only the rows that share the "
            "first key"
        )


def _not_taken(name: str, names: Sequence[str]) -> str:
    numbered = (f"{name}{n}" for n in range(1, len(names) + 2))
    return name if name not in names else next(one for one in numbered if one not in names)


def key_list(names: Sequence[str], expressions: Mapping[str, str], separator: str = ", ") -> str:
    """Key or included columns as a user writes them; `parse_keys` reads it."""
    return separator.join(
        f"{expressions[name]} AS {QualifiedName(None, name)}" if name in expressions else str(QualifiedName(None, name))
        for name in names
    )


def parse_condition(text: str | None, what: str = "where") -> str:
    """Reads the condition of a partial index, as one SQL expression; '' for none. The server judges it later."""
    if text is not None and not isinstance(text, str):
        raise InvalidInput(f"{what} is {text!r}; it must be text")
    if not text or not text.strip():
        return ""
    key_text.check(text, what)
    return text.strip()


def parse_shards(text: str | Sequence[str] | None) -> tuple[str, ...]:
    """Reads a comma-separated list of shards' names, as they were added. None and '' give ()."""
    names = text.split(",") if isinstance(text, str) else text or ()
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(f"shards: {text!r} is no list of names")
    return tuple(name.strip() for name in names if name.strip())


@dataclass(frozen=True)
class IndexDefinition:
    """A named index: its source, key columns in order, and included columns (docs/architecture.md#words).

    unique: no two rows of the source may have the same key, over all its partitions, or shards. nulls_not_distinct: nor
    the same NULLs (docs/architecture.md#uniqueness). A rebuild may leave both out: the index has them.

    expressions: the SQL of the key and included columns that are expressions, by the names that the view gives them.
    where: the condition of a partial index, which only has entries of the rows that satisfy it; '' for all rows.

    shards: the servers with parts of the table, for an index over shards (docs/architecture-shards.md); a rebuild keeps
    its shards unless it names others. shard_column: the view's column with the shard's name; None is `shard`.

    `source` and `key` are empty for the rebuild of an index that exists: the index has them.
    """

    name: QualifiedName
    source: QualifiedName | None = None
    key: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    unique: bool = False
    nulls_not_distinct: bool = False
    shards: tuple[str, ...] = ()
    shard_column: str | None = None
    expressions: tuple[tuple[str, str], ...] = ()
    where: str = ""

    # False: it has flaws, or a part of it can't be read. It serves to look for more that is wrong.
    is_sound: bool = field(default=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.is_sound:
            complaints = Complaints()
            self.complain(complaints)
            complaints.settle()

    def complain(self, complaints: Complaints) -> None:
        """Adds what is wrong with the definition, as far as that is known without the database."""
        for flaw in self._flaws():
            complaints.add(InvalidInput(f"index {self.name}: {flaw}"))

    def _flaws(self) -> Iterator[str]:
        for shard in sorted({shard for shard in self.shards if self.shards.count(shard) > 1}):
            yield f"shard {quote(shard)} is repeated; name it only once"
        if self.shard_column is not None and not self.shards:
            yield "shard_column names the column that tells the shard: give shards, too"
        for name in ("unique", "nulls_not_distinct"):
            if not isinstance(value := getattr(self, name), bool):
                yield f"{name} is {value!r}; it must be true or false"
        if self.nulls_not_distinct and not self.unique:
            yield "only a unique index tells NULLs apart or not; give unique, too, or leave nulls_not_distinct out"
        if self.nulls_not_distinct and self.shards:
            yield "over shards NULLs are distinct, and several rows may have them; leave nulls_not_distinct out"
        if (self.source is None) != (not self.key):
            yield "give the table and the key columns together, or neither of them to rebuild an index that exists"
        if self.include and self.source is None:
            yield "included columns need a table and key columns; a rebuild keeps those the index has"
        if self.where and self.source is None:
            yield "a condition needs a table and key columns; a rebuild keeps the one the index has"
        if self.shards and (self.expressions or self.where):
            yield "an index over shards can't have expressions or a condition yet; use columns of the table"
        for kind, columns in (("key", self.key), ("included", self.include)):
            for column in sorted({column for column in columns if columns.count(column) > 1}):
                yield f"{kind} column {quote(column)} is repeated; name it only once"
        for column in self.include:
            if column in self.key:
                yield f"column {quote(column)} is a key column already; don't include it again"

    @property
    def columns(self) -> tuple[str, ...]:
        """The key and included columns that are columns of the table."""
        computed = {name for name, _ in self.expressions}
        return tuple(name for name in (*self.key, *self.include) if name not in computed)

    @property
    def unique_here(self) -> bool:
        """True if the table of entries contains each key only once. Over shards it can't: it has all that the shards
        have committed."""
        return self.unique and not self.shards

    @classmethod
    def parse(
        cls,
        index: str,
        table: str | None = None,
        keys: str | Sequence[str] | None = None,
        include: str | Sequence[str] | None = None,
        unique: bool = False,
        nulls_not_distinct: bool = False,
        shards: str | Sequence[str] | None = None,
        shard_column: str | None = None,
        where: str | None = None,
        *,
        complaints: Complaints | None = None,
    ) -> IndexDefinition:
        """Reads a definition from SQL identifiers as a user types them. Raises one error for all that is wrong.

        complaints: gets what is wrong instead; then the definition is the one that the rest gives.
        """
        unread = Complaints()

        def read(otherwise: Any, parse: Callable[..., Any], *given: Any) -> Any:
            with unread.noted():
                return parse(*given)
            return otherwise

        source = read(None, parse_name, table, "table") if table else None
        nothing: tuple[tuple[str, ...], dict[str, str]] = ((), {})
        key, of_key = read(nothing, parse_keys, keys, "key columns")
        included, of_included = read(nothing, parse_keys, include, "included columns")
        # Otherwise the part that can't be read would seem to be missing.
        is_whole = not unread
        found = cls(
            name=read(NAMELESS, parse_name, index, "index"),
            source=source,
            key=key,
            include=included,
            unique=unique,
            nulls_not_distinct=nulls_not_distinct,
            shards=read((), parse_shards, shards),
            shard_column=read(NAMELESS, parse_name, shard_column, "shard column").name if shard_column else None,
            expressions=tuple({**of_key, **of_included}.items()),
            where=read("", parse_condition, where),
            is_sound=False,
        )
        if is_whole:
            found.complain(unread)
        if complaints is None:
            unread.settle()
        else:
            for one in unread.found:
                complaints.add(one)
        return found if unread else replace(found, is_sound=True)


# The name of an index whose own can't be read.
NAMELESS = QualifiedName(None, "?")
_NAME = r'(?:"(?:[^"]|"")*"|[^"()\s])+'
_BEFORE = re.compile(rf"\s*(?P<unique>unique\s+)?(?P<name>{_NAME})\s*(?=\()", re.IGNORECASE)
_INCLUDE = re.compile(r"\s*include\s*(?=\()", re.IGNORECASE)
_NULLS = re.compile(r"\s*nulls\s+not\s+distinct", re.IGNORECASE)
_WHERE = re.compile(r"\s*where\b(?P<condition>.+)", re.IGNORECASE | re.DOTALL)


def parse_beside(text: str, table: str | None) -> IndexDefinition:
    """Reads `[UNIQUE] name (keys) [INCLUDE (columns)] [NULLS NOT DISTINCT] [WHERE condition]`, of that table's index.

    Raises InvalidInput.
    """
    if not table:
        raise InvalidInput(f"{text!r}: an index beside another one needs the table of both: give --table, too")
    before = _BEFORE.match(text)
    end = before and key_text.end_of_brackets(text, before.end())
    if before is None or end is None:
        raise _no_index(text)
    keys, include = text[before.end() + 1 : end - 1], None
    if found := _INCLUDE.match(text, end):
        start, end = found.end(), key_text.end_of_brackets(text, found.end())
        if end is None:
            raise _no_index(text)
        include = text[start + 1 : end - 1]
    if nulls := _NULLS.match(text, end):
        end = nulls.end()
    where = _WHERE.fullmatch(text, end)
    is_whole = where is not None or not text[end:].strip()
    if not is_whole or not keys.strip() or (include is not None and not include.strip()):
        raise _no_index(text)
    condition = where["condition"] if where else None
    unique = before["unique"] is not None
    return IndexDefinition.parse(before["name"], table, keys, include, unique, nulls is not None, where=condition)


def _no_index(text: str) -> InvalidInput:
    return InvalidInput(f"{text!r} is no index; write it as 'public.by_day (day, id) INCLUDE (amount)'")


class Scan(str, Enum):
    """The input of a generation's build: the source in the order of its primary key, the source block by block, or, in
    a rebuild, the blocks of the active generation.
    """

    KEY = "key"
    BLOCK = "block"
    INDEX = "index"

    @property
    def by_blocks(self) -> bool:
        """True if ranges are pieces of files; otherwise they are pieces of the primary key's order."""
        return self is not Scan.KEY
