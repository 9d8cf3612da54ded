"""The copy of a list on the API server, through failures of its watches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import cast

import pytest

from edl.errors import SchedulerError
from edl.schedulers.kubernetes import mirror
from edl.schedulers.kubernetes.client import ApiStatusError, ApiTarget, Client, Json
from edl.schedulers.kubernetes.mirror import Mirror
from edl.tasks import end

Watch = Sequence[Json | Exception]
"""What one watch yields; it ends after that, or fails."""
PODS = ApiTarget("/api/v1/namespaces/ml/pods", "", "pods")
BROKEN = SchedulerError("connection reset", retry=True)


def pod(name: str, version: int = 1) -> Json:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def added(name: str, version: int) -> Json:
    return {"type": "ADDED", "object": pod(name, version)}


def status(code: int, message: str = "no") -> Json:
    return {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": message}}


class Api:
    """Answers lists and watches with what the test has prepared; the last watch stays open."""

    def __init__(self, *watches: Watch) -> None:
        self.pods: list[Json] = []
        self.lists = 0
        self.versions: list[str] = []
        self._watches = list(watches)

    async def get(self, target: ApiTarget, query: Mapping[str, str] | None = None) -> Json:
        self.lists += 1
        return {"items": list(self.pods), "metadata": {"resourceVersion": str(100 * self.lists)}}

    async def events(self, target: ApiTarget, query: Mapping[str, str]) -> AsyncGenerator[Json, None]:
        self.versions.append(query["resourceVersion"])
        if not self._watches:
            await asyncio.Event().wait()
        for one in self._watches.pop(0):
            if isinstance(one, Exception):
                raise one
            yield one


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(mirror, "LONGEST_PAUSE_S", 0.002)


def follow(api: Api, until: Callable[[Mirror], bool]) -> Mirror:
    """The mirror once a condition holds."""

    async def story() -> Mirror:
        pods = Mirror(cast(Client, api), PODS, "", lambda entry: True)
        task = asyncio.ensure_future(pods.run())
        try:
            while not until(pods):  # noqa: ASYNC110 - whatever it is that a test waits for
                await asyncio.sleep(0.001)
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await end(task)
        return pods

    return asyncio.run(asyncio.wait_for(story(), 60))


def test_a_broken_connection_continues_from_the_last_event() -> None:
    api = Api([added("train-0", 101), BROKEN], [BROKEN], [added("train-1", 102)])
    found = follow(api, lambda pods: len(api.versions) == 4)
    assert sorted(found.found) == ["train-0", "train-1"]
    assert (api.lists, api.versions) == (1, ["100", "101", "101", "102"])


@pytest.mark.parametrize("one", [status(410), ApiStatusError(410, "too old", retry=True)], ids=["event", "answer"])
def test_a_forgotten_version_is_listed_again_at_once(one: Json | Exception) -> None:
    api = Api([one])
    found = follow(api, lambda pods: len(api.versions) == 2)
    assert (api.lists, api.versions, found.problem) == (2, ["100", "200"], "")


@pytest.mark.parametrize(
    "one",
    [
        status(500, "etcdserver: mvcc: required revision has been compacted"),
        status(504, "Too large resource version"),
        ApiStatusError(500, "internal error", retry=True),
        ApiStatusError(400, "invalid resource version", retry=False),
        SchedulerError("a line is too long", retry=True),
    ],
    ids=["compacted", "too large", "500", "400", "too long"],
)
def test_a_version_that_is_never_accepted_is_listed_again(one: Json | Exception) -> None:
    """A server that keeps refusing the version with another status than 410 must not freeze the list for ever."""
    api = Api([one], [one], [one])
    api.pods = [pod("train-0")]
    found = follow(api, lambda pods: len(api.versions) == 4)
    assert (api.lists, api.versions) == (2, ["100", "100", "100", "200"])
    assert sorted(found.found) == ["train-0"]


def test_failures_that_are_not_in_a_row_need_no_list() -> None:
    one = status(500)
    api = Api([one], [one], [added("train-0", 101)], [one], [one])
    follow(api, lambda pods: len(api.versions) == 6)
    assert api.lists == 1


def test_a_problem_of_all_watches_does_not_come_and_go_with_the_lists() -> None:
    """A role that allows lists and no watches: the status would change with every list."""
    refused = ApiStatusError(403, "forbidden", retry=False)
    api = Api(*[[refused]] * 12, [added("train-0", 1000)])
    said: list[str] = []

    def look(pods: Mirror) -> bool:
        if not said or said[-1] != pods.problem:
            said.append(pods.problem)
        return len(api.versions) == 14

    follow(api, look)
    assert api.lists >= 4
    assert said == ["", "forbidden", ""]


def test_what_is_seen_stays_current_without_permission_to_watch() -> None:
    refused = ApiStatusError(403, "forbidden", retry=False)
    api = Api(*[[refused]] * 1000)

    def look(pods: Mirror) -> bool:
        if api.lists == 2:
            api.pods = [pod("train-0"), pod("train-1")]
        return len(pods.found) == 2

    follow(api, look)
