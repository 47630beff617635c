"""Pictures for the docs: a browser that shows an Airflow, and small files of what it shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

IMAGES = Path(__file__).parents[2] / "docs" / "images"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PATIENCE_MS = 180_000
# A third of the bytes of a picture with all colours.
COLOURS = 256


@contextmanager
def browser_page(width: int, height: int) -> Iterator[Any]:
    """A page of Chromium, in which no script fails."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=os.environ.get("CHROMIUM") or None, args=FLAGS)
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(PATIENCE_MS)
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        yield page
        browser.close()
        assert wrong == []


def sign_in(page: Any, airflow: Any, user: str) -> None:
    """Sign in to Airflow by its own page."""
    page.goto(f"{airflow.url}/auth/login")
    page.get_by_label("Username").fill(user)
    page.locator("input[type=password]").fill(airflow.password)
    page.keyboard.press("Enter")
    page.wait_for_url(f"{airflow.url}/")


def set_theme(page: Any, theme: str) -> None:
    """Set Airflow's theme for the next page."""
    page.evaluate("theme => localStorage.setItem('theme', theme)", theme)


def keep(name: str, shot: bytes) -> None:
    """Write a picture of the docs as a small file."""
    picture = Image.open(BytesIO(shot)).convert("RGB")
    # By coverage: else a small red button turns brown.
    small = picture.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(IMAGES / f"{name}.png", optimize=True)
