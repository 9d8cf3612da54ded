"""What a built site would load from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_LOADED = {
    "audio": ("src",),
    "iframe": ("src",),
    "img": ("src", "srcset"),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
}
"""By element: attributes whose address a browser loads without being asked."""
_ELSEWHERE = re.compile(r"(?:https?:)?//", re.IGNORECASE)
_IN_STYLES = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the addresses of an element."""
        names = _LOADED.get(tag, ())
        self.found += [value for name, value in attrs if name in names and value and _ELSEWHERE.match(value)]
        self.found += [one for name, value in attrs if name == "style" and value for one in _IN_STYLES.findall(value)]


def loaded_by(text: str) -> list[str]:
    """The addresses outside the site that a page of HTML loads: scripts, styles, fonts, images, frames."""
    page = _Page()
    page.feed(text)
    return page.found + _IN_STYLES.findall("".join(re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL)))


def loaded_from_elsewhere(folder: Path) -> Iterator[str]:
    """``file: address`` for each of them below a folder."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".html":
            found = loaded_by(path.read_text())
        elif path.suffix == ".css":
            found = _IN_STYLES.findall(path.read_text())
        else:
            continue
        for address in found:
            yield f"{path.relative_to(folder)}: {address}"
