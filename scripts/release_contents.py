"""What the archives of a release may contain, as functions on names and bytes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

PACKAGES = ("edl", "ps", "data_service")
_GENERATED = re.compile(r"PKG-INFO|setup\.cfg|[^/]+\.egg-info/.*")
"""Files that setuptools adds to an sdist."""


def of_packages(names: Iterable[str]) -> set[str]:
    """Those of the files that belong to a package of the product."""
    return {name for name in names if name.partition("/")[0] in PACKAGES and "/" in name}


def wheel_problems(names: Collection[str], tracked: Collection[str]) -> list[str]:
    """What a wheel lacks, and what it should not contain. ``tracked``: all files of the commit."""
    wanted = of_packages(tracked)
    found = {name for name in names if not re.match(r"edl-[^/]+\.dist-info/", name)}
    return _differences(found, wanted, "the wheel")


def sdist_problems(names: Collection[str], tracked: Collection[str]) -> list[str]:
    """The same for an sdist, whose names begin with ``edl-VERSION/``. It may contain any tracked file."""
    inside = {name.partition("/")[2] for name in names}
    found = {name for name in inside if name and not _GENERATED.fullmatch(name)}
    wanted = of_packages(tracked) | {"pyproject.toml", "LICENSE", "NOTICE", "README.md"}
    return _differences(found - (set(tracked) - wanted), wanted, "the sdist")


def path_problems(files: Mapping[str, bytes], paths: Iterable[str]) -> list[str]:
    """Files that name a folder of the machine on which they were built, such as the checkout. ``paths``: absolute."""
    wanted = {path.rstrip("/") + "/" for path in paths if path.strip("/")}
    return [
        f"{name} contains the path {path} of this machine"
        for name, content in sorted(files.items())
        for path in sorted(wanted)
        if path.encode() in content
    ]


def has_section(changelog: str, version: str) -> bool:
    """Whether the changelog has a dated section for a version: ``## [0.1.0] - 2026-12-01``."""
    return re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE) is not None


def sums_text(sums: Mapping[str, str]) -> str:
    """The content of ``SHA256SUMS``, as ``sha256sum --check`` reads it. ``sums``: hexadecimal digests by file name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def _differences(found: Collection[str], wanted: Collection[str], archive: str) -> list[str]:
    missing = [f"{archive} lacks {name}" for name in sorted(set(wanted) - set(found))]
    return missing + [
        f"{archive} contains {name}, which does not belong in it" for name in sorted({*found} - {*wanted})
    ]
