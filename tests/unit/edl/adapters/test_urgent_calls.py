"""Calls that are sent again, to another member, while the first one has no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from edl.adapters.etcd_rpc import Connections, Endpoint, Metadata
from edl.errors import StoreError

MEMBERS = ("a", "b", "c")
Answers = Callable[[str], Awaitable[Any]]


def members(*names: str) -> Connections:
    """Connections to these members, which stand; the test plays the answers. The time limit is for them to keep."""
    rpc = Connections(names, 0.01)
    endpoints: list[Any] = [
        SimpleNamespace(address=name, connected=lambda: True, suspected=lambda: False, suspect=lambda: None)
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


def test_a_lone_member_is_asked_once() -> None:
    asked: list[str] = []

    async def answers(name: str) -> str:
        asked.append(name)
        return name

    assert urgently(members("a"), answers) == "a"
    assert asked == ["a"]
