"""Calls that are sent again, to another member, while the first one has no answer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from edl.adapters.clock import SystemClock
from edl.adapters.etcd_rpc import Connections, Endpoint, Metadata
from edl.errors import StoreError

MEMBERS = ("a", "b", "c")
Answers = Callable[[str], Awaitable[Any]]


def members(*names: str, down: str = "", suspects: list[str] | None = None) -> Connections:
    """Connections to these members, which stand except for ``down``; the test plays the answers. The time limit is for
    them to keep. ``suspects``: takes the names of those that are found silent."""
    rpc = Connections(names, 0.01)
    found = [] if suspects is None else suspects
    endpoints: list[Any] = [
        SimpleNamespace(
            address=name,
            answered_s=0.0,
            connected=lambda name=name: name != down,
            suspected=lambda: False,
            suspect=functools.partial(found.append, name),
        )
        for name in names
    ]
    rpc._endpoints = endpoints
    return rpc


def urgently(rpc: Connections, answers: Answers) -> Any:
    async def main() -> Any:
        async def attempt(endpoint: Endpoint, timeout_s: float, metadata: Metadata) -> Any:
            return await answers(endpoint.address)

        return await asyncio.wait_for(rpc.hedged(attempt), 60)

    return asyncio.run(main())


def test_another_member_answers_for_one_that_does_not() -> None:
    asked: list[str] = []
    given_up: list[str] = []

    async def answers(name: str) -> str:
        asked.append(name)
        if name != "c":
            try:
                await asyncio.Event().wait()
            finally:
                given_up.append(name)
        return name

    assert urgently(members(*MEMBERS), answers) == "c"
    assert asked == ["a", "b", "c"]
    assert given_up == ["a", "b"]


def test_a_member_that_answers_in_time_is_the_only_one_asked() -> None:
    asked: list[str] = []

    async def answers(name: str) -> str:
        asked.append(name)
        return name

    assert urgently(members(*MEMBERS), answers) == "a"
    assert asked == ["a"]


def test_the_first_error_ends_it() -> None:
    async def answers(name: str) -> str:
        if name == "b":
            raise StoreError("refused")
        await asyncio.Event().wait()
        return name

    with pytest.raises(StoreError, match="refused"):
        urgently(members(*MEMBERS), answers)


def test_an_answer_counts_more_than_an_error_that_comes_with_it() -> None:
    both = asyncio.Event()

    async def answers(name: str) -> str:
        if name == "a":
            await both.wait()
            raise StoreError("refused")
        both.set()
        return name

    assert urgently(members(*MEMBERS), answers) == "b"


def test_a_member_that_is_silent_while_another_answers_loses_its_streams() -> None:
    """Its host may have lost power: the watches must not wait until gRPC notices that."""
    suspects: list[str] = []

    async def answers(name: str) -> str:
        if name == "a":
            await asyncio.Event().wait()
        return name

    assert urgently(members(*MEMBERS, suspects=suspects), answers) == "b"
    assert suspects == ["a"]


def test_a_member_that_answers_the_repetition_is_not_silent() -> None:
    suspects: list[str] = []
    asked: list[str] = []

    async def answers(name: str) -> str:
        asked.append(name)
        if len(asked) == 1:  # it was passing this one on to a leader that has died
            await asyncio.Event().wait()
        return name

    assert urgently(members("a", "b", down="b", suspects=suspects), answers) == "a"
    assert asked == ["a", "a"]
    assert suspects == []


def test_who_is_cancelled_asks_nobody_any_more() -> None:
    suspects: list[str] = []
    given_up: list[str] = []
    twice = asyncio.Event()

    async def answers(name: str) -> str:
        try:
            if name == "b":
                twice.set()
            await asyncio.Event().wait()
        finally:
            given_up.append(name)
        return name

    async def main() -> None:
        async def attempt(endpoint: Endpoint, timeout_s: float, metadata: Metadata) -> Any:
            return await answers(endpoint.address)

        urgent = asyncio.ensure_future(members(*MEMBERS, suspects=suspects).hedged(attempt))
        await asyncio.wait_for(twice.wait(), 60)
        urgent.cancel()
        with pytest.raises(asyncio.CancelledError):
            await urgent
        assert {"a", "b"} <= set(given_up)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert suspects == []


def test_a_lone_member_is_asked_once() -> None:
    asked: list[str] = []

    async def answers(name: str) -> str:
        asked.append(name)
        return name

    assert urgently(members("a"), answers) == "a"
    assert asked == ["a"]


@pytest.mark.parametrize(("age_s", "silent"), [(1.0, False), (1001.0, True)])
def test_a_member_has_some_time_before_it_counts_as_silent(age_s: float, silent: bool) -> None:
    """Another member may have answered a call that was sent hardly later."""
    suspects: list[str] = []
    rpc = members(*MEMBERS, suspects=suspects)
    rpc._judge_silence(rpc._endpoints[0], SystemClock().now_s() - age_s, 1000.0)
    assert suspects == (["a"] if silent else [])
