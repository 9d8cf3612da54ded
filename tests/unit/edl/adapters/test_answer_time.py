"""How long calls to the store may take, and a store that is too slow for the configured limit."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from edl.adapters.answer_time import MOST_TIMES, AnswerTime
from edl.adapters.etcd_rpc import Connections, Endpoint, Metadata
from edl.errors import StoreUnavailable


def test_a_quick_store_gets_the_configured_time() -> None:
    time = AnswerTime(0.5, 3)
    for now_s in range(100):
        time.asked(float(now_s))
        time.answered(0.01)
        assert time.limit_s(now_s + 0.9) == 0.5, "nothing was asked meanwhile: that is no silence"


def test_an_election_of_the_store_changes_nothing() -> None:
    time = AnswerTime(0.5, 3)
    time.asked(0.0)
    assert time.limit_s(0.6) == 0.5


def test_the_limit_grows_with_the_silence_and_ends_with_it() -> None:
    time = AnswerTime(0.5, 3)
    time.asked(10.0)
    time.asked(11.0)  # of the same silence
    assert [time.limit_s(now_s) for now_s in (11.0, 12.0, 13.0)] == [0.5, 1.0, 1.5]
    assert time.limit_s(60.0) == MOST_TIMES * 0.5
    time.refused()
    assert time.limit_s(60.0) == 0.5


def test_each_try_among_the_members_may_take_longer_than_answers_do() -> None:
    time = AnswerTime(0.5, 3)
    time.asked(0.0)
    time.answered(0.15)
    assert time.limit_s(1.0) / 3 == pytest.approx(3 * 0.15)
    time.answered(5.0)
    assert time.limit_s(1.0) == MOST_TIMES * 0.5


def test_a_store_that_has_become_quick_again_is_believed_soon() -> None:
    time = AnswerTime(0.5, 3)
    time.answered(0.2)
    for _ in range(10):
        time.answered(0.002)
    assert time.limit_s(0.0) == 0.5


class Late(grpc.aio.AioRpcError):
    """A call that got no answer in time."""

    def __init__(self) -> None:
        nothing = grpc.aio.Metadata()
        super().__init__(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing, "Deadline Exceeded")


def test_a_store_that_is_slower_than_the_limit_is_reached_nevertheless() -> None:
    """Three members, each of which needs more than its third of the limit: every call was given up too early."""
    rpc = Connections(("a", "b", "c"), 0.03)
    endpoints: list[Any] = [
        SimpleNamespace(
            address=name,
            answered_s=0.0,
            foreign=False,
            connected=lambda: True,
            suspected=lambda: False,
            suspect=lambda: None,
        )
        for name in rpc.addresses
    ]
    rpc._endpoints = endpoints
    needs_s = 0.035

    async def attempt(endpoint: Endpoint, timeout_s: float, metadata: Metadata) -> Any:
        if timeout_s < needs_s:
            raise Late
        return endpoint.address

    async def until_answered() -> str:
        while True:
            try:
                return str(await rpc.call(attempt, repeatable=True))
            except StoreUnavailable as error:
                assert "its disk or the network is slow" in str(error)

    async def main() -> str:
        return await asyncio.wait_for(until_answered(), 60)

    assert asyncio.run(main()) in rpc.addresses
