"""Objects of every kind in the fake API server, and an adapter for each."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from edl.job_records import SchedulerChoice
from edl.schedulers.kubernetes import open_scheduler
from edl.schedulers.kubernetes.scheduler import KubernetesScheduler
from edl.schedulers.port import Observation, Sized
from edl.tasks import end
from tests.kubernetes_fake import kinds
from tests.kubernetes_fake.controllers import Controllers
from tests.kubernetes_fake.server import Server
from tests.kubernetes_fake.store import Json, Resource, Store

TOKEN = "the-pod's-token"
T = TypeVar("T")
POD: Json = {"containers": [{"name": "main", "image": "none", "command": ["true"]}], "restartPolicy": "Never"}
RULES: list[Json] = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["apps"], "resources": ["statefulsets/scale"], "verbs": ["get", "patch"]},
    {"apiGroups": ["kubeflow.org"], "resources": ["pytorchjobs/scale"], "verbs": ["get", "patch"]},
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get", "patch"]},
    {"apiGroups": ["batch.volcano.sh"], "resources": ["jobs"], "verbs": ["get", "patch"]},
    {"apiGroups": ["batch.paddlepaddle.org"], "resources": ["paddlejobs"], "verbs": ["get", "patch"]},
]


def stateful_set(replicas: int = 2) -> Json:
    labels = {"app": "train"}
    template = {"metadata": {"labels": labels}, "spec": {**POD, "restartPolicy": "Always"}}
    spec = {"replicas": replicas, "podManagementPolicy": "Parallel", "serviceName": "train", "template": template}
    spec["selector"] = {"matchLabels": labels}
    return {"metadata": {"name": "train"}, "spec": spec}


def indexed_job(nodes: int = 2) -> Json:
    spec = {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed", "template": {"spec": POD}}
    return {"metadata": {"name": "train"}, "spec": spec}


def volcano_job(replicas: int = 2, least: int = 2) -> Json:
    tasks = [
        {"name": "etcd", "replicas": 1, "template": {"spec": POD}},
        {"name": "worker", "replicas": replicas, "template": {"spec": POD}},
    ]
    return {"metadata": {"name": "train"}, "spec": {"minAvailable": least, "tasks": tasks}}


def paddle_job(replicas: int = 2) -> Json:
    return {"metadata": {"name": "train"}, "spec": {"worker": {"replicas": replicas, "template": {"spec": POD}}}}


def pytorch_job(replicas: int = 2) -> Json:
    worker = {"replicas": replicas, "template": {"spec": POD}}
    return {"metadata": {"name": "train"}, "spec": {"pytorchReplicaSpecs": {"Worker": worker}}}


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of object, and where a reader of the object finds the size."""

    kind: str
    target: str
    resource: Resource
    given: Callable[[], Json]
    paths: tuple[str, ...]
    ask_none_at_end: bool
    indexed: bool = True

    def sizes(self, store: Store) -> set[int]:
        entry = store.get(self.resource, "default", "train")
        return {int(_at(entry, path)) for path in self.paths}


def _at(entry: Any, path: str) -> Any:
    for part in path.split("."):
        entry = entry[int(part)] if isinstance(entry, list) else entry.get(part, 0)
    return entry


CASES = [
    Case("statefulset", "train", kinds.STATEFUL_SETS, stateful_set, ("spec.replicas",), True),
    Case("job", "train", kinds.JOBS, indexed_job, ("spec.parallelism", "spec.completions"), False),
    Case("volcano", "train", kinds.VOLCANO_JOBS, volcano_job, ("spec.tasks.1.replicas",), False),
    Case("paddlejob", "train", kinds.PADDLE_JOBS, paddle_job, ("spec.worker.replicas",), False),
    Case(
        "custom",
        "kubeflow.org/v1/pytorchjobs/train",
        kinds.PYTORCH_JOBS,
        pytorch_job,
        ("spec.pytorchReplicaSpecs.Worker.replicas",),
        True,
        indexed=False,
    ),
]
every_kind = pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
SET = CASES[0]


@dataclasses.dataclass
class Setup:
    """A fake API server with one object in it, and an adapter for that."""

    server: Server
    controllers: Controllers
    scheduler: KubernetesScheduler
    token_file: Path

    @property
    def store(self) -> Store:
        return self.server.store

    def sent(self, verb: str) -> list[Any]:
        return [body for one, _, body in self.server.seen if one == verb]


@contextlib.asynccontextmanager
async def setup(case: Case, folder: Path, *, controllers: bool = False, **conf: str) -> AsyncIterator[Setup]:
    server = Server(Store(), {TOKEN: RULES})
    url = await server.start()
    server.store.create(case.resource, "default", case.given())
    token_file = folder / "token"
    token_file.write_text(TOKEN + "\n")
    told = {"api": url, "namespace": "default", "token_file": str(token_file), "timeout": "5", "poll": "0.1", **conf}
    scheduler = open_scheduler(SchedulerChoice(case.kind, case.target, told))
    made = Controllers(server.store)
    task = asyncio.ensure_future(made.run()) if controllers else None
    try:
        yield Setup(server, made, scheduler, token_file)
    finally:
        await scheduler.close()
        if task is not None:
            await end(task)
        await server.stop()


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - whatever it is that a test waits for
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def watching(scheduler: KubernetesScheduler) -> AsyncIterator[list[Observation]]:
    """Everything that a watch has said so far."""
    seen: list[Observation] = []

    async def follow() -> None:
        stream = scheduler.watch()
        assert isinstance(stream, AsyncGenerator)
        async with contextlib.aclosing(stream) as observations:
            async for observation in observations:
                seen.append(observation)

    task = asyncio.ensure_future(follow())
    try:
        yield seen
        if task.done():
            task.result()
    finally:
        await end(task)


def sizes(seen: list[Observation]) -> list[int]:
    return [one.size.nodes for one in seen if isinstance(one, Sized)]
