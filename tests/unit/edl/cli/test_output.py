"""Lines of workers on an operator's terminal, and which launchers are asked for them."""

from __future__ import annotations

import dataclasses
import random

import pytest

from edl.cli.output_text import MOST_NODES, line_text, nodes_to_ask, printable
from edl.errors import UsageError
from edl.types import Incarnation, NodeId
from edl.wire.node_requests import OutputLine
from edl.wire.records import NodeInfo
from edl.wire.status import JobStatus, NodeView


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("loss 0.5", "loss 0.5"),
        ("\x1b[1;31mred\x1b[0m text", "red text"),
        ("\x1b]0;another title\x07text", "text"),
        ("\x1b]8;;http://evil/\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;Y2xpcGJvYXJk\x07", ""),
        ("\x1bPdevice string\x1b\\text", "text"),
        ("\x1b[2J\x1b[Hcleared\x1bc", "cleared"),
        ("unfinished \x1b[31", "unfinished"),
        ("unfinished \x1b]0;title", "unfinished"),
        ("\x9b31mC1\x07\x08\x00", "31mC1"),
        (" 10%|#   |\r 20%|##  |\r", " 20%|##  |"),
        ("a\tb", "a       b"),
        ("\u202egnp.exe \u2028x", "gnp.exe x"),
        ("[markup] <b>&", "[markup] <b>&"),
        ("日本", "日本"),
    ],
)
def test_printable(written: str, shown: str) -> None:
    assert printable(written) == shown


def test_nothing_that_a_terminal_obeys_remains() -> None:
    rng = random.Random(3)
    letters = "\x1b[];?0123mHJ\x07\x08\r\n\x9b\x9d\\PX^_ abc\u202e\x00\x7f"
    for _ in range(3000):
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(30)))
        assert printable(text).isprintable(), repr(text)


def test_a_line() -> None:
    line = OutputLine(3, 1, True, "\x1b[31mloss\x1b[0m")
    assert line_text("node-a", line, raw=False) == "[3@node-a]: loss"
    assert line_text("node-a", line, raw=True) == "[3@node-a]: \x1b[31mloss\x1b[0m"
    assert line_text("node-a", OutputLine(-1, 1, False, "early"), raw=False) == "[-@node-a]: early"
    assert line_text("node-a", OutputLine(0, 1, True, ""), raw=False) == "[0@node-a]:"


def launcher(name: str) -> NodeInfo:
    return NodeInfo(NodeId(name), Incarnation(1), "127.0.0.1", 7000, 2)


def job(*names: str) -> JobStatus:
    nodes = tuple(
        NodeView(name, "h", 2, "running" if at < 2 else "spare", True, at if at < 2 else -1, 2 * at if at < 2 else -1)
        for at, name in enumerate(names)
    )
    return JobStatus("job", "running", 1, 4, "", "1:9", "elastic", 0, 3, names[0], nodes, (), ())


LAUNCHERS = [launcher(name) for name in "abc"]
STATUS = job("b", "a", "c")


@pytest.mark.parametrize(
    ("nodes", "ranks", "found"),
    [
        ((), (), ["b", "a", "c"]),
        (("c",), (), ["c"]),
        ((), (0,), ["b"]),
        ((), (1, 3), ["b", "a"]),
        (("c",), (3,), ["c"]),  # lines that node c wrote when it had that rank
    ],
)
def test_who_is_asked(nodes: tuple[str, ...], ranks: tuple[int, ...], found: list[str]) -> None:
    assert [info.node for info in nodes_to_ask(LAUNCHERS, STATUS, nodes, ranks)] == found


def test_who_cannot_be_asked() -> None:
    with pytest.raises(UsageError, match="no launcher of node x is registered; there are b, a, c"):
        nodes_to_ask(LAUNCHERS, STATUS, ("a", "x"), ())
    with pytest.raises(UsageError, match="no node of the current world has rank 4; its ranks are 0 to 3"):
        nodes_to_ask(LAUNCHERS, STATUS, (), (4,))
    stopped = dataclasses.replace(STATUS, phase="suspended", world_size=0)
    with pytest.raises(UsageError, match="no world runs at this moment, and no node that is left had rank 4"):
        nodes_to_ask(LAUNCHERS, stopped, (), (4,))
    names = [f"n{number}" for number in range(MOST_NODES + 1)]
    many = [launcher(name) for name in names]
    with pytest.raises(UsageError, match="65 nodes are too many to ask at once"):
        nodes_to_ask(many, job(*names), (), ())
    assert len(nodes_to_ask(many, job(*names), names[:3], ())) == 3
