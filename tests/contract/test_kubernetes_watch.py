"""The Kubernetes adapters against the fake API server: what they make of what happens there by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest

from edl.errors import SchedulerError
from edl.schedulers.kubernetes import mirror
from edl.schedulers.kubernetes import scheduler as adapter
from edl.schedulers.kubernetes.client import ApiTarget, Client
from edl.schedulers.kubernetes.mirror import Mirror
from edl.schedulers.kubernetes.pods import of_host
from edl.schedulers.port import Disruption, Observation, SchedulerSize, Sized
from edl.tasks import end
from tests.contract.kubernetes_fixture import CASES, POD, RULES, SET, TOKEN, Setup, run, setup, sizes, until, watching
from tests.kubernetes_fake import kinds
from tests.kubernetes_fake.server import Fault, delete_pod, evict
from tests.kubernetes_fake.store import Json, at


def test_a_watch_begins_with_what_is_and_follows(tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(SET, tmp_path, controllers=True, poll="30") as here, watching(here.scheduler) as seen:
            await until(lambda: Sized(SchedulerSize(2, 2)) in seen)
            for nodes in (4, 1):
                entry = here.store.get(kinds.STATEFUL_SETS, "default", "train")
                entry["spec"]["replicas"] = nodes
                here.store.update(kinds.STATEFUL_SETS, "default", entry)
                await until(lambda nodes=nodes: nodes in sizes(seen))  # type: ignore[misc]
            await until(lambda: len([one for one in seen if isinstance(one, Disruption)]) == 3)
            doomed = [one for one in seen if isinstance(one, Disruption)]
            assert {one.node for one in doomed} == {"train-1", "train-2", "train-3"}
            assert {one.lead_s for one in doomed} == {30.0}
            first = next(at for at, one in enumerate(seen) if isinstance(one, Disruption))
            assert sizes(seen[:first])[-1] == 1, "the size is told before the pods that it costs"

    run(story())


def test_pods_that_stay_pending_are_explained(tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(SET, tmp_path, controllers=True) as here, watching(here.scheduler) as seen:
            here.controllers.room = 2
            await here.scheduler.request(4, "test")
            words = "2 pods pending: 0/1 nodes are available: 1 Insufficient cpu. preemption: 0/1 nodes are available"
            await until(lambda: Sized(SchedulerSize(4, 2, words)) in seen)
            assert await here.scheduler.current() == SchedulerSize(4, 2, words)
            here.controllers.room = 4
            here.store.poke()
            await until(lambda: seen[-1] == Sized(SchedulerSize(4, 4)))

    run(story())


def test_why_a_pod_goes(tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(SET, tmp_path, controllers=True) as here, watching(here.scheduler) as seen:
            await until(lambda: Sized(SchedulerSize(2, 2)) in seen)
            evict(here.store, "default", "train-1", "PreemptionByScheduler", "a more important pod")
            await until(lambda: Disruption("train-1", "PreemptionByScheduler: a more important pod", 30.0) in seen)
            delete_pod(here.store, "default", "train-0", 5)
            await until(lambda: Disruption("train-0", "the pod is being deleted", 5.0) in seen)
            assert len([one for one in seen if isinstance(one, Disruption)]) == 2, "each is told once"

    run(story())


def test_taints_of_hosts(tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(SET, tmp_path, controllers=True, watch_nodes="true") as here:
            hosts = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}
            here.server.accounts[TOKEN] = [*RULES, hosts]
            async with watching(here.scheduler) as seen:
                await until(lambda: Sized(SchedulerSize(2, 2)) in seen)
                host = here.store.get(kinds.NODES, "", "fake-host")
                host["spec"]["taints"] = [{"key": "mine", "effect": "NoSchedule"}]
                here.store.update(kinds.NODES, "", host)
                host = here.store.get(kinds.NODES, "", "fake-host")
                host["spec"]["taints"] += [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]
                here.store.update(kinds.NODES, "", host)
                words = "its host fake-host has the taint ToBeDeletedByClusterAutoscaler"
                await until(lambda: {Disruption("train-0", words), Disruption("train-1", words)} <= set(seen))

    run(story())


PREEMPTED = Disruption("train-1", "PreemptionByScheduler: a more important pod", 30.0)


def preempt(here: Setup) -> None:
    evict(here.store, "default", "train-1", "PreemptionByScheduler", "a more important pod")


@pytest.mark.parametrize("status", [0, 429])
def test_a_pod_that_will_be_removed_does_not_wait_for_the_size(tmp_path: Path, status: int) -> None:
    """While the server does not answer, or is overloaded."""

    async def story() -> None:
        begun = setup(SET, tmp_path, controllers=True, timeout="600", poll="600")
        async with begun as here, watching(here.scheduler) as seen:
            await until(lambda: Sized(SchedulerSize(2, 2)) in seen)
            here.server.faults.append(fault := Fault(status, ["get"], "/scale"))
            preempt(here)
            await until(lambda: PREEMPTED in seen)
            assert fault.hits

    run(story())


def test_a_pod_that_will_be_removed_is_known_before_the_watch_fails(tmp_path: Path) -> None:
    """The right to read the size has just been taken away."""

    async def story() -> None:
        seen: list[Observation] = []
        async with setup(SET, tmp_path, controllers=True, timeout="600", poll="600") as here:
            with pytest.raises(SchedulerError, match="statefulsets/scale"):
                async for observation in here.scheduler.watch():
                    seen.append(observation)
                    if observation == Sized(SchedulerSize(2, 2)):
                        here.server.faults.append(Fault(403, ["get"], "/scale"))
                        preempt(here)
        assert PREEMPTED in seen

    run(story())


def test_of_hosts_only_their_taints_are_kept_and_matter(tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(SET, tmp_path, controllers=True) as here:
            here.server.accounts[TOKEN] = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}]
            client = Client(here.scheduler._options)
            hosts = Mirror(
                client, ApiTarget("/api/v1/nodes", "", "nodes", cluster=True), "", lambda host: True, of_host
            )
            task = asyncio.ensure_future(hosts.run())
            try:
                await until(lambda: hosts.complete)
                assert hosts.found["fake-host"] == {"metadata": {"name": "fake-host"}, "spec": {"taints": []}}
                hosts.changed.clear()
                host = here.store.get(kinds.NODES, "", "fake-host")
                host["metadata"]["labels"] = {"heartbeat": "1"}
                here.store.update(kinds.NODES, "", host)
                await asyncio.sleep(0.5)
                assert not hosts.changed.is_set()
                host = here.store.get(kinds.NODES, "", "fake-host")
                host["spec"]["taints"] = [{"key": "mine", "effect": "NoSchedule"}]
                here.store.update(kinds.NODES, "", host)
                await until(hosts.changed.is_set)
            finally:
                await end(task)
                await client.close()

    run(story())


def test_an_entry_that_nobody_expected_does_not_end_a_watch(tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(SET, tmp_path, controllers=True) as here:
            client = Client(here.scheduler._options)
            odd = [True]

            def mine(pod: Json) -> bool:
                if odd.pop() if odd else False:
                    raise KeyError("metadata")
                return True

            pods = Mirror(client, ApiTarget("/api/v1/namespaces/default/pods", "", "pods"), "", mine)
            task = asyncio.ensure_future(pods.run())
            try:
                await until(lambda: pods.complete)
                odd.append(True)
                await here.scheduler.request(3, "test")
                await until(lambda: len(pods.found) == 3 and not pods.problem and not odd)
                assert not task.done()
            finally:
                await end(task)
                await client.close()

    run(story())


@pytest.mark.parametrize("as_status", [False, True])
def test_a_watch_from_a_forgotten_version_lists_again(as_status: bool, tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(SET, tmp_path, controllers=True) as here:
            here.server.gone_as_status = as_status
            here.server.faults.append(fault := Fault(500, ["watch"]))
            async with watching(here.scheduler) as seen:
                await until(lambda: fault.hits >= 2)
                entry = here.store.get(kinds.STATEFUL_SETS, "default", "train")
                entry["spec"]["replicas"] = 3
                here.store.update(kinds.STATEFUL_SETS, "default", entry)
                await until(lambda: len(here.store.list(kinds.PODS)) == 3)
                here.store.compact()
                here.server.faults.clear()
                await until(lambda: seen[-1:] == [Sized(SchedulerSize(3, 3))])

    run(story())


def test_a_watch_survives_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence, refusals and a restart: nothing is raised, and afterwards it says what is."""
    monkeypatch.setattr(mirror, "LONGEST_PAUSE_S", 0.3)
    monkeypatch.setattr(adapter, "LONGEST_PAUSE_S", 0.3)

    async def story() -> None:
        async with setup(SET, tmp_path, controllers=True, timeout="1") as here, watching(here.scheduler) as seen:
            await until(lambda: Sized(SchedulerSize(2, 2)) in seen)
            for status in (500, 429, 0):
                here.server.faults.append(fault := Fault(status))
                await until(lambda fault=fault: fault.hits >= 3)  # type: ignore[misc]
                here.server.faults.clear()
            here.server.faults.append(fault := Fault(403, path="/pods"))
            here.server.store.compact()
            entry = here.store.get(kinds.STATEFUL_SETS, "default", "train")
            entry["spec"]["replicas"] = 3
            here.store.update(kinds.STATEFUL_SETS, "default", entry)
            await until(lambda: sizes(seen)[-1:] == [3])
            here.server.faults.clear()
            await until(lambda: seen[-1] == Sized(SchedulerSize(3, 3)))

    run(story())


def test_a_watch_ends_where_trying_again_is_of_no_use(tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(SET, tmp_path) as here:
            here.server.accounts[TOKEN] = []
            stream: Awaitable[Observation] = here.scheduler.watch().__aiter__().__anext__()
            with pytest.raises(SchedulerError, match="statefulsets/scale") as caught:
                await stream
            assert not caught.value.retry

    run(story())


def test_pods_of_other_jobs_do_not_count(tmp_path: Path) -> None:
    """A Paddle operator labels the pods of all its jobs alike: the owner tells them apart."""

    async def story() -> None:
        async with setup(CASES[3], tmp_path) as here, watching(here.scheduler) as seen:
            for job in ("train", "other"):
                owner = [{"kind": "PaddleJob", "name": job, "uid": job}]
                about = {"name": f"{job}-worker-0", "labels": {"paddle-res-type": "worker"}, "ownerReferences": owner}
                here.store.create(kinds.PODS, "default", {"metadata": about, "spec": {**POD, "nodeName": "host"}})
            await until(lambda: Sized(SchedulerSize(2, 1, "1 pod not created yet")) in seen)
            for job in ("other", "train"):
                delete_pod(here.store, "default", f"{job}-worker-0", 7)
            await until(lambda: Disruption("train-worker-0", "the pod is being deleted", 7.0) in seen)
            assert "other-worker-0" not in {one.node for one in seen if isinstance(one, Disruption)}

    run(story())


def test_long_lists_come_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "PAGE", 3)

    async def story() -> None:
        async with setup(SET, tmp_path, controllers=True) as here:
            await here.scheduler.request(10, "test")
            await until(lambda: all(at(pod, "spec.nodeName") for pod in here.store.list(kinds.PODS)))
            await until(lambda: len(here.store.list(kinds.PODS)) == 10)
            assert await here.scheduler.current() == SchedulerSize(10, 10)
            assert len([verb for verb, _, _ in here.server.seen if verb == "list"]) == 4

    run(story())
