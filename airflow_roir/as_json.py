"""Turns values of the database into JSON for programs: plain numbers, moments in ISO 8601."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from datetime import datetime
from typing import Any


def plain(value: Any) -> Any:
    """A value for JSON. An object with the method `as_dict` is converted by that."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if hasattr(value, "as_dict"):
        return value.as_dict()
    return plain_fields(value) if is_dataclass(value) else value


def plain_fields(facts: Any) -> dict[str, Any]:
    """The fields of a dataclass for JSON."""
    return {one.name: plain(getattr(facts, one.name)) for one in fields(facts)}
