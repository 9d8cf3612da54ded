"""What a release may contain. Building one takes minutes and the network: scripts/release does it."""

from __future__ import annotations

import random

import pytest

from scripts.release_contents import (
    has_section,
    of_packages,
    path_problems,
    sdist_problems,
    sums_text,
    wheel_problems,
)

PACKAGE = ["edl/__init__.py", "edl/py.typed", "edl/web/assets/main.js", "ps/store/store.py", "data_service/__init__.py"]
OTHERS = ["tests/unit/test_names.py", "docs/release.md", "examples/01/train.py", "scripts/release", "setup.py"]
ROOT_FILES = ["pyproject.toml", "LICENSE", "NOTICE", "README.md"]
TRACKED = PACKAGE + OTHERS + ROOT_FILES
INFO = ["edl-0.1.0.dist-info/METADATA", "edl-0.1.0.dist-info/licenses/LICENSE"]
GENERATED = ["PKG-INFO", "setup.cfg", "edl.egg-info/SOURCES.txt"]


def in_sdist(names: list[str]) -> list[str]:
    return [f"edl-0.1.0/{name}" for name in names]


def test_what_is_right() -> None:
    assert not wheel_problems(PACKAGE + INFO, TRACKED)
    for others in ([], OTHERS):
        assert not sdist_problems(in_sdist(PACKAGE + ROOT_FILES + GENERATED + others), TRACKED)


def test_each_file_that_lacks_or_is_too_much_is_named() -> None:
    draw = random.Random(3)
    strangers = [*OTHERS, "shared/notes.md", "edl/web/assets/new.js", "edl/__pycache__/x.pyc", "top.py"]
    for _ in range(300):
        kept, added = draw.sample(PACKAGE, draw.randint(0, 5)), draw.sample(strangers, draw.randint(0, 5))
        lacks = [f"the wheel lacks {name}" for name in sorted(set(PACKAGE) - set(kept))]
        more = [f"the wheel contains {name}, which does not belong in it" for name in sorted(added)]
        assert wheel_problems([*kept, *added, *INFO], TRACKED) == lacks + more


def test_an_sdist_with_files_that_are_not_tracked_or_without_some_that_it_needs() -> None:
    whole = PACKAGE + ROOT_FILES + GENERATED
    assert sdist_problems(in_sdist([*whole, ".env"]), TRACKED) == [
        "the sdist contains .env, which does not belong in it"
    ]
    for name in PACKAGE + ROOT_FILES:
        assert sdist_problems(in_sdist([one for one in whole if one != name]), TRACKED) == [f"the sdist lacks {name}"]


def test_only_folders_with_the_name_of_a_package_are_packages() -> None:
    assert of_packages(["edl/a.py", "edl.py", "edlx/a.py", "docs/edl/a.md", "ps/b.py"]) == {"edl/a.py", "ps/b.py"}


def test_paths_of_the_machine_that_builds() -> None:
    files = {"a.py": b"see /home/me/edl/x", "b.py": b"/home/meadow/x", "c.pyc": b"\0/build/x"}
    assert path_problems(files, ["/home/me/edl", "/home/me/", "/build", "/"]) == [
        "a.py contains the path /home/me/ of this machine",
        "a.py contains the path /home/me/edl/ of this machine",
        "c.pyc contains the path /build/ of this machine",
    ]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("## [0.1.0] - 2026-12-01", True),
        ("## [0.1.0]", False),
        ("## [0.1.0] - soon", False),
        ("## [0.1.01] - 2026-12-01", False),
        ("## [0x1.0] - 2026-12-01", False),
        ("see ## [0.1.0] - 2026-12-01", False),
    ],
)
def test_the_section_of_the_changelog(line: str, found: bool) -> None:
    assert has_section(f"# Changelog\n\n## [Unreleased]\n\n{line}\n\n### Added\n", "0.1.0") is found


def test_sums_are_in_the_form_of_sha256sum() -> None:
    assert sums_text({"b.whl": "02", "a.tar.gz": "01"}) == "01  a.tar.gz\n02  b.whl\n"
