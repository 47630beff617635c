"""Answers for the pages: JSON of bounded size, with an ETag, so that nothing is sent twice."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

# A name is at most 63 bytes; reasons, errors and notices are for people.
LONGEST_TEXT = 2_000
LONGEST_LIST = 1_000
# As the message of a failed task is kept (`task/failure.py`).
LONGEST_MESSAGE = 16_000
# The fields that differ at each look although nothing has changed.
CLOCKS = ("now", "silent_seconds", "age_seconds")


class Long(str):
    """A text that is sent whole: the message of a failed task, which may be a list of complaints; a run's values."""


def bounded(value: Any) -> Any:
    """The value without control characters, with texts and lists cut: any role that may write to the database can put
    text there."""
    if isinstance(value, str):
        most = LONGEST_MESSAGE if isinstance(value, Long) else LONGEST_TEXT
        text = value if len(value) <= most else value[: most - 1] + "…"
        return "".join(sign if sign == "\n" or not _misleads(sign) else "\N{REPLACEMENT CHARACTER}" for sign in text)
    if isinstance(value, dict):
        return {bounded(str(name)): bounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [bounded(one) for one in value[:LONGEST_LIST]]
    return value


def _misleads(sign: str) -> bool:
    # Cc: control; Cf: characters that turn the direction of writing; Cs: surrogates, which JSON can't contain.
    return unicodedata.category(sign) in ("Cc", "Cf", "Cs")


def answer(request: Request, content: dict[str, Any]) -> Response:
    """The content, or 304 without it if the browser has it. The browser keeps its own clock."""
    content = bounded(content)
    tag = f'W/"{hashlib.sha256(_without_clocks(content)).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if tag in [one.strip() for one in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    return JSONResponse(content, headers=headers)


def _without_clocks(content: dict[str, Any]) -> bytes:
    def still(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: still(one) for name, one in value.items() if name not in CLOCKS}
        return [still(one) for one in value] if isinstance(value, list) else value

    return json.dumps(still(content), sort_keys=True).encode()
