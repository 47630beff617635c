"""Reads a page as a user without a mouse, or without eyes, gets it: stops by Tab, announcements, findings of axe."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# More stops than any of the pages has.
MOST_STOPS = 80
# The rules of WCAG 2.2, levels A and AA, and those that are good practice.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
# Whether the focus can be seen: the element is in sight, and its outline differs from what is around it.
SEEN = """() => {
  const one = document.activeElement, style = getComputedStyle(one), box = one.getBoundingClientRect();
  const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
  const inside = box.width > 0 && box.top < innerHeight && box.bottom > 0 && box.left < innerWidth && box.right > 0;
  return ring && inside;
}"""
# Keeps each text that a live region gets.
HEAR = """() => {
  window.heard = [];
  const live = "[role=status], [role=alert], [aria-live], output";
  new MutationObserver((changes) => {
    for (const { target, addedNodes } of changes) {
      const at = target.nodeType === Node.ELEMENT_NODE ? target : target.parentElement;
      const added = [...addedNodes].filter((one) => one.querySelector);
      const inside = added.flatMap((one) => [...one.querySelectorAll(live)]);
      for (const region of [at?.closest(live), ...inside]) {
        const text = region?.checkVisibility() ? region.textContent.trim() : "";
        if (text && window.heard.at(-1) !== text) window.heard.push(text);
      }
    }
  }).observe(document, { subtree: true, childList: true, characterData: true, attributeFilter: ["hidden"] });
}"""


@dataclass(frozen=True)
class Stop:
    """One stop of Tab: role and name by Chromium's accessibility tree, and whether the focus can be seen there."""

    role: str
    name: str
    description: str
    is_disabled: bool
    is_seen: bool

    @property
    def told(self) -> tuple[str, str]:
        """Role and name."""
        return self.role, self.name


class Focus:
    """Reads the focused element of a page's frame as a screen reader gets it."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab
        self.cdp = tab.context.new_cdp_session(tab)

    def read(self) -> Stop | None:
        """None if no element has the focus."""
        at = self.cdp.send("Runtime.evaluate", {"expression": "document.activeElement"})["result"]
        if at.get("className") == "HTMLBodyElement":
            return None
        asked = {"objectId": at["objectId"], "fetchRelatives": False}
        [node] = self.cdp.send("Accessibility.getPartialAXTree", asked)["nodes"]

        def text(key: str) -> str:
            return str(node.get(key, {}).get("value", ""))

        properties = {one["name"]: one["value"].get("value") for one in node.get("properties", [])}
        return Stop(
            text("role"), text("name"), text("description"), bool(properties.get("disabled")), self.tab.evaluate(SEEN)
        )


def stops(tab: Any) -> list[Stop]:
    """All stops of Tab, from the top of the page to its end."""
    focus, found = Focus(tab), []
    for _ in range(MOST_STOPS):
        tab.keyboard.press("Tab")
        if (one := focus.read()) is None:
            return found
        found.append(one)
    raise AssertionError(f"Tab comes to no end: {found}")


def drawings(tab: Any) -> list[tuple[str, str, str]]:
    """Role, name and value of each bar and picture, by Chromium's accessibility tree."""
    nodes = tab.context.new_cdp_session(tab).send("Accessibility.getFullAXTree")["nodes"]
    found = []
    for node in nodes:
        role = str(node.get("role", {}).get("value"))
        if role in ("progressbar", "image", "img"):
            properties = {one["name"]: one["value"].get("value") for one in node.get("properties", [])}
            name = str(node.get("name", {}).get("value", ""))
            found.append((role, name, str(properties.get("valuetext", ""))))
    return found


def violations(page: Any) -> str:
    """The findings of axe in a page or a frame: rule, element and reason of each; '' if it finds nothing."""
    spec = find_spec("axe_playwright_python")
    assert spec is not None
    assert spec.origin is not None
    [script] = Path(spec.origin).parent.rglob("axe.min.js")
    page.evaluate(script.read_text())
    asked = {"runOnly": {"type": "tag", "values": RULES}, "resultTypes": ["violations"]}
    found = page.evaluate("asked => axe.run(document, asked)", asked)["violations"]
    lines = (f"{one['id']}: {node['html'][:200]}: {node['failureSummary']}" for one in found for node in one["nodes"])
    return "\n".join(lines)


def hear(page: Any) -> None:
    """Begin to keep what live regions say."""
    page.evaluate(HEAR)


def heard(page: Any) -> list[str]:
    """The texts of live regions since `hear`."""
    found: list[str] = page.evaluate("window.heard")
    return found
