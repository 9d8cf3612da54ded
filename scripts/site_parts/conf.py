"""Sphinx's configuration. Its source folder is the repository, so links in the pages mean what they mean on disk."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.ext.autodoc.mock import MockFinder
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

MOCKED = [
    "accelerate", "fsspec", "lightning", "lightning_fabric", "numba", "paddle", "pyarrow", "pytorch_lightning", "torch",
    "torchdata", "torchtitan", "transformers", "xxhash",
]  # fmt: skip
"""Packages of extras: the reference needs signatures and docstrings, not the frameworks. ``autodoc_mock_imports`` holds
during some imports only, and public names are imported on first use."""
sys.meta_path.insert(0, MockFinder(MOCKED))

import edl  # noqa: E402 - of this checkout
from scripts.site_parts import navigation  # noqa: E402

project, author, release = "edl", "the edl authors", edl.__version__
project_copyright = "the edl authors, Apache License 2.0"
root_doc = navigation.HOME
include_patterns = [*navigation.SOURCES, *navigation.OTHER_SOURCES]
exclude_patterns = ["build", "dist", "runs", "logs", ".*", "**/__pycache__", "**/.*", "edl", "ps", "data_service"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
extensions = ["myst_parser", "sphinx.ext.autodoc"]

# --- pages -----------------------------------------------------------------------------------------------------------

myst_heading_anchors = 6  # the anchors of repositories, which the pages use
myst_enable_extensions: list[str] = []  # plain Markdown
suppress_warnings = ["misc.highlighting_failure"]  # output of commands is not always valid in the block's language

# --- reference -------------------------------------------------------------------------------------------------------

autoclass_content = "both"  # errors are often documented with __init__
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_use_type_comments = False
add_module_names = False
maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

# --- output ----------------------------------------------------------------------------------------------------------

html_theme = "furo"
html_title = f"edl {release}"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
pygments_style, pygments_dark_style = "friendly", "monokai"

_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=\))")


def _complete(_: Any, page: str, source: list[str]) -> None:
    """Append a page's part of the navigation; a link to a folder leads to the page in it, as in a repository."""
    folder = (ROOT / page).parent

    def target(found: re.Match[str]) -> str:
        return f"{found[1].rstrip('/')}/README.md" if (folder / found[1] / "README.md").is_file() else found[1]

    source[0] = _LINK.sub(target, source[0]) + navigation.contents(page)


def _described(_: Any, what: str, name: str, __: Any, ___: Any, lines: list[str]) -> None:
    """Warn of a name in the reference that has no docstring."""
    if what in ("class", "exception", "function", "method", "property") and not any(map(str.strip, lines)):
        logging.getLogger(__name__).warning("%s has no docstring", name)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _described)
    app.connect("source-read", _complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
