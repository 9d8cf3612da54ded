"""Statements of a script that change environment variables, among its imports."""

from __future__ import annotations

import pytest

from edl.worker.environment_changes import environment_changes


@pytest.mark.parametrize(
    "statement",
    [
        "os.environ['A'] = '1'",
        "environ['A'] = name",
        "del os.environ['A']",
        "os.environ |= {'A': '1'}",
        "os.environ.setdefault('A', '1')",
        "os.environ.update(A='1')",
        "os.environ.pop('A', None)",
        "os.putenv('A', '1')",
        "unsetenv('A')",
    ],
)
def test_a_change_is_found_with_its_place_among_the_imports(statement: str) -> None:
    text = f"import os\nif offline:\n    {statement}\nfrom heavy import light\n"
    assert environment_changes(text) == ("import os", statement, "from heavy import light")


@pytest.mark.parametrize(
    "text",
    ["import os\nrank = os.environ['RANK']\n", "import heavy\n", "os.environ['A'] = ", "print(os.environ.get('A'))"],
)
def test_without_a_change_there_is_nothing(text: str) -> None:
    assert environment_changes(text) == ()
