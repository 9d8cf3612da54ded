"""The libraries of the dashboard, which are part of the package: their files and licences, from the npm registry.

    python -m scripts.vendor_assets write    fetch them again, in the versions of the table below
    python -m scripts.vendor_assets check    fail when the files differ from those

Needs npm. Browsers load the files as they are: there is no build step, only the edits of the table.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "edl/web/assets/vendor"
LICENCE = "LICENSE"
MAP_COMMENT = re.compile(r"\n?//# sourceMappingURL=.*")


@dataclass(frozen=True, slots=True)
class Library:
    """One package of the npm registry."""

    name: str
    version: str
    licence: str
    purpose: str
    files: tuple[tuple[str, str], ...]
    """Paths in the package, and names here."""
    edits: tuple[tuple[str, str], ...] = ()
    """Texts that are replaced in all files."""
    end: str = ""
    """Text after the scripts."""


LIBRARIES = (
    Library(
        "preact",
        "11.2.0",
        "MIT",
        "components",
        (("dist/preact.mjs", "preact.js"), ("hooks/dist/hooks.mjs", "hooks.js")),
        edits=(('from"preact"', 'from"./preact.js"'),),  # browsers know no package names
    ),
    Library("htm", "3.1.1", "Apache-2.0", "templates", (("dist/htm.module.js", "htm.js"),)),
    Library(
        "uplot",
        "1.6.32",
        "MIT",
        "charts",
        (("dist/uPlot.iife.min.js", "uplot.js"), ("dist/uPlot.min.css", "uplot.css")),
        end="export default uPlot;\n",  # its ES module is not minified
    ),
)


def fetched(library: Library) -> dict[str, bytes]:
    """The files of a library by their names here, as they belong in ``FOLDER``."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", f"{library.name}@{library.version}"]
        packed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
        with tarfile.open(Path(folder) / packed) as archive:
            found = {name: _content(archive, path) for path, name in library.files}
            found[f"{library.name}.LICENSE.txt"] = _content(archive, LICENCE)
    return {name: _edited(library, name, content) for name, content in found.items()}


def _content(archive: tarfile.TarFile, path: str) -> str:
    file = archive.extractfile(f"package/{path}")
    if file is None:
        raise FileNotFoundError(f"the package has no file {path}")
    return file.read().decode()


def _edited(library: Library, name: str, text: str) -> bytes:
    if name.endswith(".txt"):
        return text.encode()
    text = MAP_COMMENT.sub("", text)
    for old, new in library.edits:
        text = text.replace(old, new)
    return (text.rstrip("\n") + "\n" + (library.end if name.endswith(".js") else "")).encode()


def table(files: dict[str, bytes]) -> str:
    """The page that lists the libraries."""
    rows = [
        f"| [{one.name}](https://www.npmjs.com/package/{one.name}) | {one.version} | {one.licence} | {one.purpose} | "
        f"{', '.join(f'`{name}`' for _, name in one.files)} |"
        for one in LIBRARIES
    ]
    sums = [f"| `{name}` | {len(data):,} | `{hashlib.sha256(data).hexdigest()}` |" for name, data in files.items()]
    return "\n".join(
        (
            "# Libraries of the dashboard",
            "",
            "Written by `python -m scripts.vendor_assets write`; do not edit.",
            "",
            "| package | version | licence | for | files |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "| file | bytes | SHA-256 |",
            "|---|---|---|",
            *sums,
            "",
        )
    )


def expected() -> dict[str, bytes]:
    """All files of ``FOLDER``."""
    files: dict[str, bytes] = {}
    for library in LIBRARIES:
        files |= fetched(library)
    return {**files, "README.md": table(files).encode()}


def main(command: str) -> int:
    """Write the files, or compare them; returns the exit status."""
    files = expected()
    if command == "write":
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (FOLDER / name).write_bytes(content)
        return 0
    different = [name for name, content in files.items() if _read(name) != content]
    extra = sorted({path.name for path in FOLDER.iterdir()} - set(files))
    for name in (*different, *extra):
        print(f"{FOLDER.relative_to(ROOT) / name} differs. Run: python -m scripts.vendor_assets write")
    return 1 if different or extra else 0


def _read(name: str) -> bytes:
    path = FOLDER / name
    return path.read_bytes() if path.exists() else b""


if __name__ == "__main__":
    if sys.argv[1:] not in (["write"], ["check"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
