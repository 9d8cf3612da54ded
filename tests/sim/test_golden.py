"""Each story ends as its file says. ``--rewrite`` writes the files again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.golden import play, stories


@pytest.mark.parametrize("story", stories(), ids=lambda path: path.stem)
def test_story(story: Path, request: pytest.FixtureRequest) -> None:
    before = story.read_text()
    now = play(before)
    if request.config.getoption("--rewrite"):
        story.write_text(now)
    else:
        assert now == before, "if this is what you want: pytest tests/sim/test_golden.py --rewrite"


def test_a_story_is_the_same_each_time() -> None:
    text = stories()[0].read_text()
    assert play(text) == play(text)
