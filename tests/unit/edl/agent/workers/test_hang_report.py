"""Where workers hang, for people."""

from __future__ import annotations

import pytest

from edl.agent.machine.diagnosis import LONGEST_TRACEBACK
from edl.agent.workers.hang_report import MOST_WORKERS, innermost, stacks_by_rank, summary, waits_for
from edl.wire.collective_wait import CollectiveWait, PendingCollective
from edl.wire.node_requests import OutputLine

WAIT = CollectiveWait("1", (PendingCollective("nccl:broadcast", 3, "tp"), PendingCollective("nccl:barrier", 4, "tp")))
LIBRARY = '  File "/venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 5 in backward'


def stack(*frames: str) -> str:
    other = ["Thread 0x1 (most recent call first):", '  File "/home/me/other.py", line 1 in runs_beside']
    return "\n".join([*other, "Current thread 0x2 (most recent call first):", *frames])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (stack(LIBRARY, '  File "/home/me/train.py", line 31 in step'), "train.py:31 in step"),
        (
            stack('  File "<frozen runpy>", line 88 in _run_code', '  File "/a b/x.py", line 2 in <module>'),
            "x.py:2 in <module>",
        ),
        (stack(LIBRARY), "graph.py:5 in backward"),
        (stack("  <no Python frame>"), ""),
        ("", ""),
    ],
    ids=["own code", "frozen modules", "only a library", "no frame", "nothing"],
)
def test_the_place_is_the_users_innermost_frame_of_the_main_thread(text: str, place: str) -> None:
    assert innermost(text) == place


def test_stacks_are_put_together_by_rank_and_the_end_is_kept() -> None:
    lines = [OutputLine(rank, 1, True, f"line {number} of {rank}  ") for number in range(3) for rank in (4, 5)]
    assert stacks_by_rank(lines)[5] == "line 0 of 5\nline 1 of 5\nline 2 of 5"
    many = [OutputLine(0, 1, True, f"frame {number}") for number in range(2000)]
    text = stacks_by_rank(many)[0]
    assert len(text) == LONGEST_TRACEBACK and text.endswith("frame 1999")


def test_a_line_about_all_ranks() -> None:
    stacks = {0: stack('  File "/home/me/train.py", line 31 in step'), 1: ""}
    assert summary([0, 1, 2], stacks, {0: WAIT, 1: WAIT}) == (
        "rank 0 at train.py:31 in step, waits for nccl:broadcast, number 3 of group tp; "
        "rank 1 waits for nccl:broadcast, number 3 of group tp"
    )
    assert summary(range(100), dict.fromkeys(range(100), stacks[0]), {}).count("rank") == MOST_WORKERS
    assert waits_for(None) == waits_for(CollectiveWait()) == ""
