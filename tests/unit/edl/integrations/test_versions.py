"""Which versions of a trainer's package are warned about."""

from __future__ import annotations

import pytest

from edl.integrations.versions import TestedVersions, release

TESTED = TestedVersions("trainers", "5.23", "5.24")


@pytest.mark.parametrize("version", ["5.23", "5.23.0", "5.23.7", "5.23.1rc1", "5.23.0.dev0"])
def test_a_tested_version_is_not_mentioned(version: str) -> None:
    assert TESTED.warning(version) == ""


@pytest.mark.parametrize("version", ["5.22.9", "5.24", "5.24.0", "6.0", "4.57.3", "5.3", "unknown"])
def test_another_version_is_named_with_the_range_and_the_command(version: str) -> None:
    text = TESTED.warning(version)
    assert f"trainers {version} is installed" in text
    assert "5.23" in text and "5.24" in text
    assert "pip install 'trainers>=5.23,<5.24'" in text


def test_releases_are_compared_by_number() -> None:
    assert release("5.9") < release("5.23")
    assert release("5.23.0") == release("5.23")
    assert release("2.13.0+cpu") == (2, 13)
