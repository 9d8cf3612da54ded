"""Builds the documentation as a web site: every page, and the reference from the docstrings. Needs no network."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from scripts.site_parts.navigation import HOME, ROOT
from scripts.site_parts.offline import loaded_from_elsewhere

CONFIGURATION = ROOT / "scripts" / "site_parts"
FOLDER = ROOT / "build" / "site"


def run_sphinx(builder: str, folder: Path, output: Path) -> int:
    """Run Sphinx in this process; returns its exit status. Every warning is an error."""
    from sphinx.cmd.build import build_main

    words = [f"--builder={builder}", "--fail-on-warning", "--keep-going", "--quiet", f"--conf-dir={CONFIGURATION}"]
    return int(build_main([*words, f"--doctree-dir={folder / 'doctrees'}", str(ROOT), str(output)]))


def check(folder: Path) -> int:
    """Resolve every link and every name, and write no pages; returns an exit status."""
    return run_sphinx("dummy", folder, folder / "nothing")


def build(folder: Path) -> int:
    """Build the site in a folder; returns an exit status."""
    pages = folder / "html"
    if status := run_sphinx("html", folder, pages):
        return status
    shutil.copyfile(pages / f"{HOME}.html", pages / "index.html")
    if found := list(loaded_from_elsewhere(pages)):
        print("The site would load from elsewhere:", *found, sep="\n", file=sys.stderr)
        return 1
    print(f"Open {pages / 'index.html'}")
    return 0


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/site", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder that the site is built in")
    parser.add_argument("--check", action="store_true", help="resolve all links and names, and write no pages")
    options = parser.parse_args()
    sys.exit((check if options.check else build)(options.out.resolve()))


if __name__ == "__main__":
    main()
