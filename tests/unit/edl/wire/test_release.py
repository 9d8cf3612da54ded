"""Which versions of edl share a job."""

from __future__ import annotations

import random

import pytest

from edl import __version__
from edl.wire import plain
from edl.wire.origin import Origin
from edl.wire.release import Founder, compatible, founder_of, refusal, remark


@pytest.mark.parametrize(
    ("mine", "theirs", "together"),
    [
        ("0.1.0", "0.1.0", True),
        ("0.1.0", "0.1.12", True),
        ("0.1.0", "0.1", True),
        ("0.1.0", "0.1.0.post1", True),
        ("0.1.0", "0.1.1+cluster.2", True),
        ("0.1.0", "0.2.0", False),
        ("0.1.0", "0.10.0", False),
        ("1.2.0", "2.2.0", False),
        ("0.2.0", "0.2.0rc1", False),
        ("0.2.0rc1", "0.2.0rc2", False),
        ("0.2.0.dev3", "0.2.0.dev4", False),
        ("0.2.0rc1", "0.2.0rc1", True),
        ("0.1.0", "", False),
        ("0.1.0", "unknown", False),
    ],
)
def test_what_may_share_a_job(mine: str, theirs: str, together: bool) -> None:
    assert compatible(mine, theirs) is together
    assert compatible(theirs, mine) is together


def test_final_versions_share_a_job_if_their_first_two_numbers_are_equal() -> None:
    draw = random.Random(7)
    for _ in range(500):
        one, other = ([draw.randint(0, 3), draw.randint(0, 12), draw.randint(0, 30)] for _ in range(2))
        texts = [".".join(map(str, numbers)) for numbers in (one, other)]
        assert compatible(*texts) is (one[:2] == other[:2])


def test_the_fields_that_all_versions_of_edl_read() -> None:
    """This text is what version 0.1.0 writes. It must be read for ever: change no name and no type."""
    written = (
        b'{"node":"a","host":"h1","uid":1000,"user":"alice","script":"train.py","digest":"d1","edl":"0.1.0",'
        b'"python":"3.12","frameworks":["torch 2.9.0"]}'
    )
    assert founder_of(written) == Founder("0.1.0", "a", "h1")
    today = Origin("a", "h1", 1000, "alice", "train.py", "d1", __version__, "3.12", ("torch 2.9.0",))
    assert founder_of(plain.dumps(today)) == Founder(__version__, "a", "h1")
    assert founder_of(b'{"edl":"7.0.0","fields":{"of":["a","newer","version"]}}') == Founder("7.0.0")


@pytest.mark.parametrize("stored", [b"", b"\x08\x01", b"[]", b'{"edl":7}', b'{"edl":null}'])
def test_what_has_another_form_is_of_an_unknown_version(stored: bytes) -> None:
    assert founder_of(stored) == Founder()


def test_the_refusal_names_both_versions_and_the_next_action() -> None:
    older = refusal("j", "0.2.0", Founder("0.1.3", "a", "h1"))
    assert older.startswith("job j runs edl 0.1.3 (started by node a on h1), and this launcher is edl 0.2.0: only ")
    assert "Install edl 0.1.3 on this node, or upgrade the job: end it with a checkpoint, and start all" in older
    newer = refusal("j", "0.2.0", Founder("0.10.0"))
    assert "Install edl 0.10.0 on this node (" in newer and "upgrade" not in newer
    assert "a pre-release shares a job with no other version" in refusal("j", "0.2.0", Founder("0.2.0rc1"))
    assert "an unknown version of edl, and this launcher is edl 0.2.0" in refusal("j", "0.2.0", Founder())


def test_a_command_of_another_version_says_so_and_only_then() -> None:
    assert not remark("j", "0.1.0", Founder("0.1.9")) and not remark("j", "0.1.0", Founder())
    text = remark("j", "0.2.0", Founder("0.1.0", "a", "h1"))
    assert "job j runs edl 0.1.0, and this command is edl 0.2.0" in text and "node a on h1" in text
