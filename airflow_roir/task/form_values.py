"""Reads values of forms, templates and the Task State Store, where a number may be text."""

from __future__ import annotations

from typing import Any

from airflow_roir.errors import InvalidInput


def whole_number(name: str, value: Any) -> int | None:
    """Reads an optional whole number; None, '' and 'None' (an empty field, rendered) are None.

    Raises InvalidInput. The range is checked by `BuildOptions` and `VerifyOptions`.
    """
    if value is None or (isinstance(value, str) and value.strip() in ("", "None")):
        return None
    if isinstance(value, str):
        # For JSON Schema 2.0 is a whole number, too, and a template renders it as `2.0`.
        text = value.strip().replace("_", "").replace(",", "")
        try:
            return int(text.removesuffix(".0"))
        except ValueError:
            raise InvalidInput(f"{name} is {_shown(value)}; it must be a whole number") from None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{name} is {_shown(value)}; it must be a whole number")
    return value


def number(name: str, value: Any) -> float | None:
    """Reads an optional number; None, '' and 'None' (an empty field, rendered) are None. Raises InvalidInput."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    text = optional_text(value)
    try:
        return None if text is None else float(text)
    except ValueError:
        raise InvalidInput(f"{name} is {_shown(value)}; it must be a number") from None


def optional_text(value: Any) -> str | None:
    """Reads an optional text; None, '' and 'None' (an empty field, rendered) are None."""
    text = "" if value is None else str(value).strip()
    return None if text in ("", "None") else text


def yes_or_no(name: str, value: Any) -> bool | None:
    """Reads an optional truth; None, '' and 'None' (an empty field, rendered) are None. Raises InvalidInput."""
    if isinstance(value, bool):
        return value
    text = (optional_text(value) or "").lower()
    if text not in ("", "true", "false"):
        raise InvalidInput(f"{name} is {_shown(value)}; it must be true or false")
    return text == "true" if text else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
