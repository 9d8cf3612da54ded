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


def build(folder: Path) -> int:
    """Build the site in a folder; returns an exit status. Anything that Sphinx warns of is an error."""
    from sphinx.cmd.build import build_main

    pages = folder / "html"
    words = ["--builder=html", "--fail-on-warning", "--keep-going", "--quiet", f"--conf-dir={CONFIGURATION}"]
    words.append(f"--doctree-dir={folder / 'doctrees'}")
    if status := build_main([*words, str(ROOT), str(pages)]):
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
    sys.exit(build(parser.parse_args().out.resolve()))


if __name__ == "__main__":
    main()
