"""One list of how frameworks speak of lost peers, for workers and agents; and exceptions that hide such a one."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from edl.agent.machine.diagnosis import last_words
from edl.wire.peer_loss import chain, speaks_of_lost_peer

LOSSES = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:33184.",
    "Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:144] no error",
    "Timed out waiting 1800000ms for recv operation",
    "gloo::EnforceNotMet",
    "NCCL communicator was aborted on rank 1.",
    "ncclRemoteError: A call failed possibly due to a network error",
    "failed to recv, got 0 bytes",
    "Connection was likely closed: [TCPStore] recv timed out",
    "TCPStore: connection failed",
    "Socket Timeout",
    "Broken pipe",
    "BROKEN PIPE",
    "torch.distributed.DistStoreError: wait timeout after 300000ms",
]
OTHERS = [
    "mat1 and mat2 shapes cannot be multiplied",
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "requests: socket timeout of my own",
    "TCPStore is what I use",
]


def tail_speaks_of_it(text: str) -> bool:
    return last_words(1, f'Traceback (most recent call last):\n  File "t.py"\nRuntimeError: {text}\n', "").peer_loss


@pytest.mark.parametrize("text", LOSSES)
def test_agents_and_workers_know_the_same_texts(text: str) -> None:
    assert speaks_of_lost_peer(text)
    assert last_words(1, f'Traceback (most recent call last):\n  File "t.py"\nRuntimeError: {text}\n', "").peer_loss
    torch = pytest.importorskip("torch.distributed")
    from edl.torch.framework import TorchFramework

    assert torch is not None and TorchFramework().lost_peers(RuntimeError(text))


@pytest.mark.parametrize("text", OTHERS)
def test_other_texts_are_about_other_things(text: str) -> None:
    assert not speaks_of_lost_peer(text)
    assert not last_words(1, f'Traceback (most recent call last):\n  File "t.py"\nRuntimeError: {text}\n', "").peer_loss


class StepFailed(Exception):
    """A script's own."""


def caught(raise_it: Any) -> BaseException:
    try:
        raise_it()
    except (RuntimeError, ValueError, StepFailed) as error:
        return error
    raise AssertionError


def lost() -> None:
    raise RuntimeError("gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def from_it() -> None:
    try:
        lost()
    except RuntimeError as error:
        raise StepFailed("the step failed") from error


def while_handling() -> None:
    try:
        lost()
    except RuntimeError:
        raise StepFailed("the step failed")  # noqa: B904 - that is the point


def hidden() -> None:
    try:
        lost()
    except RuntimeError:
        raise StepFailed("the step failed") from None


def twice() -> None:
    try:
        while_handling()
    except StepFailed as error:
        raise ValueError("again") from error


def deep() -> None:
    error: BaseException = caught(lost)
    for _ in range(50):
        outer = StepFailed("outer")
        outer.__context__ = error
        error = outer
    raise error


CASES = [lost, from_it, while_handling, hidden, twice, deep]


@pytest.mark.torch
@pytest.mark.parametrize("how", CASES)
def test_a_lost_peer_is_known_behind_a_scripts_own_exception(how: Any) -> None:
    pytest.importorskip("torch")
    from edl.torch.framework import TorchFramework

    assert TorchFramework().lost_peers(caught(how))
    assert not TorchFramework().lost_peers(StepFailed("of its own"))


def test_the_chain_ends_when_it_turns() -> None:
    first, second = ValueError(1), ValueError(2)
    first.__cause__, second.__context__ = second, first
    assert list(chain(first)) == [first, second]


def test_groups_are_looked_into() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("there are no groups")
    else:
        inner = caught(lost)
        group = ExceptionGroup("several", [ValueError(1), inner])  # noqa: F821 - newer than the oldest Python
        assert inner in list(chain(group))
