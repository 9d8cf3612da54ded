"""A kubelet whose pods are processes of this host: environment, signals, grace, exit codes, restarts, readiness."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from edl.tasks import end
from tests.kubernetes_fake.kinds import PODS
from tests.kubernetes_fake.store import ApiFailure, Json, Store, at, now

STOP_S = 10.0
CANNOT_START = 128
"""Exit code of a container whose program is not there."""


@dataclass(frozen=True)
class Ended:
    """A terminated container."""

    pod: str
    code: int
    """As Kubernetes says it: 128 plus the signal for one that was killed."""
    asked: bool
    """It had been sent SIGTERM before."""


@dataclass
class Kubelet:
    """Runs the pods of one host. Only the first container of each, as a process in a session of its own."""

    store: Store
    folder: Path
    """For what the containers write."""
    environment: Mapping[str, str]
    """What every container has in its environment, in place of an image's."""
    host: str = "fake-host"
    backoff_s: float = 0.1
    """Before a container is started again; a real one waits 10 s, then 20, up to 5 minutes."""
    ended: list[Ended] = field(default_factory=list)
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By uid of the pod."""
    _groups: set[int] = field(default_factory=set)
    _stopping: bool = False
    _network: int = field(default_factory=itertools.count(1).__next__)
    """Kubelets of one process have different addresses, and so have those of different processes, most likely."""
    _addresses: int = 0

    async def run(self) -> None:
        while not self._stopping:
            for pod in self.store.list(PODS):
                uid = pod["metadata"]["uid"]
                if at(pod, "spec.nodeName") == self.host and uid not in self._running:
                    self._running[uid] = asyncio.ensure_future(self._pod(pod))
            await self.store.news()

    async def stop(self) -> None:
        """SIGKILL to everything that runs, and wait for its end."""
        self._stopping = True
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self.store.poke()
        if self._running:
            await asyncio.wait(self._running.values(), timeout=STOP_S)
        for task in self._running.values():
            await end(task)

    # --- one pod -------------------------------------------------------------------------------------------------

    async def _pod(self, pod: Json) -> None:
        namespace, name, uid = (pod["metadata"][key] for key in ("namespace", "name", "uid"))
        self._addresses += 1
        address = f"127.{20 + os.getpid() % 230}.{self._network % 250}.{self._addresses % 250 + 1}"
        restarts = 0
        while True:
            code = await self._container(pod, address, restarts)
            fresh = self._find(namespace, name, uid)
            if fresh is None or self._stopping:
                return
            policy = fresh["spec"].get("restartPolicy", "Always")
            finished = policy == "Never" or (policy == "OnFailure" and code == 0)
            reason = "Completed" if code == 0 else "Error"
            state = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": now()}}
            phase = ("Failed" if code else "Succeeded") if finished else "Running"
            deleted = "deletionTimestamp" in fresh["metadata"]
            if deleted and not finished:
                phase = "Failed" if code else "Succeeded"
            self._say(fresh, phase, state, restarts, address, ready=False)
            if deleted:
                # The last word of a kubelet: deletion without grace.
                self.store.remove(PODS, namespace, name)
                return
            if finished:
                return
            restarts += 1
            await self._pause(namespace, name, uid)

    async def _container(self, pod: Json, address: str, restarts: int) -> int:
        """Run it once; returns the exit code."""
        about, container = pod["metadata"], pod["spec"]["containers"][0]
        status = {"podIP": address, "hostIP": "127.0.0.1"}
        variables = variables_of(container, {**pod, "status": {**pod["status"], **status}})
        command = [expanded(word, variables) for word in [*container.get("command", []), *container.get("args", [])]]
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / f"{about['name']}-{about['uid'][:5]}-{restarts}.log"
        try:
            process = await self._start(command, {"HOSTNAME": about["name"], **variables}, container, log)
        except OSError as error:
            log.write_text(f"cannot be started: {error}")
            return CANNOT_START
        self._groups.add(process.pid)
        if self._stopping:
            os.killpg(process.pid, signal.SIGKILL)
        probes = asyncio.ensure_future(self._probe(pod, container, address, restarts))
        stops = asyncio.ensure_future(self._stop_in_time(pod, process))
        try:
            code = await process.wait()
        finally:
            asked = await _result(stops)
            await end(probes)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever it left behind dies with the container
            self._groups.discard(process.pid)
        code = 128 - code if code < 0 else code
        self.ended.append(Ended(about["name"], code, asked))
        return code

    async def _start(
        self, command: list[str], variables: Mapping[str, str], container: Json, log: Path
    ) -> asyncio.subprocess.Process:
        with log.open("wb") as file:
            return await asyncio.create_subprocess_exec(
                *command,
                env={**self.environment, **variables},
                cwd=container.get("workingDir"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )

    async def _stop_in_time(self, pod: Json, process: asyncio.subprocess.Process) -> bool:
        """When the pod is being deleted: SIGTERM, and SIGKILL after the grace."""
        namespace, name, uid = (pod["metadata"][key] for key in ("namespace", "name", "uid"))
        while (fresh := self._find(namespace, name, uid)) and "deletionTimestamp" not in fresh["metadata"]:
            await self.store.news()
        grace_s = fresh["metadata"]["deletionGracePeriodSeconds"] if fresh else 0
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(grace_s, _kill, process)
        return True

    async def _probe(self, pod: Json, container: Json, address: str, restarts: int) -> None:
        """Say that the container runs, and whether it is ready."""
        namespace, name, uid = (pod["metadata"][key] for key in ("namespace", "name", "uid"))
        state = {"running": {"startedAt": now()}}
        probe = at(container, "readinessProbe.httpGet")
        said: bool | None = None
        while fresh := self._find(namespace, name, uid):
            ready = await _answers(probe, container, address) if probe else True
            if ready != said:
                fresh = self._find(namespace, name, uid)
                if fresh is None:
                    return
                self._say(fresh, "Running", state, restarts, address, ready=ready)
                said = ready
            await asyncio.sleep(min(float(at(container, "readinessProbe.periodSeconds", 10)), 1.0))

    def _say(self, pod: Json, phase: str, state: Json, restarts: int, address: str, *, ready: bool) -> None:
        word = "True" if ready else "False"
        others = [one for one in pod["status"].get("conditions", []) if one["type"] not in ("Ready", "ContainersReady")]
        name = pod["spec"]["containers"][0]["name"]
        container = {"name": name, "ready": ready, "restartCount": restarts, "state": state}
        pod["status"] = {
            **pod["status"],
            "phase": phase,
            "podIP": address,
            "hostIP": "127.0.0.1",
            "conditions": [*others, {"type": "Ready", "status": word}, {"type": "ContainersReady", "status": word}],
            "containerStatuses": [container],
        }
        self.store.update(PODS, pod["metadata"]["namespace"], pod)

    async def _pause(self, namespace: str, name: str, uid: str) -> None:
        """Before the next start, unless the pod is deleted meanwhile."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.backoff_s
        while (left_s := until_s - loop.time()) > 0:
            fresh = self._find(namespace, name, uid)
            if fresh is None or "deletionTimestamp" in fresh["metadata"]:
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.store.news(), left_s)

    def _find(self, namespace: str, name: str, uid: str) -> Json | None:
        """The pod as it is now; None when it is gone, also if another one has its name."""
        with contextlib.suppress(ApiFailure):
            pod = self.store.get(PODS, namespace, name)
            return pod if pod["metadata"]["uid"] == uid else None
        return None


def variables_of(container: Json, pod: Json) -> dict[str, str]:
    """A container's own environment, the downward API included."""
    variables: dict[str, str] = {}
    for one in container.get("env", []):
        path = at(one, "valueFrom.fieldRef.fieldPath")
        value = field_of(pod, path) if path else str(one.get("value", ""))
        variables[one["name"]] = value if path else expanded(value, variables)
    return variables


def field_of(pod: Json, path: str) -> str:
    """Value of a field reference such as ``metadata.name``, ``status.podIP`` or ``metadata.labels['x']``."""
    match = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if match:
        return str(pod["metadata"].get(match[1], {}).get(match[2], ""))
    return str(at(pod, path, ""))


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """``$(NAME)``; ``$$(NAME)`` stands for itself, and so does a name that is not known."""

    def value(match: re.Match[str]) -> str:
        if match[0].startswith("$$"):
            return match[0][1:]
        return variables.get(match[1], match[0])

    return re.sub(r"\$?\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)", value, text)


async def _answers(probe: Json, container: Json, address: str) -> bool:
    port = probe["port"]
    if isinstance(port, str):
        port = next(one["containerPort"] for one in container["ports"] if one["name"] == port)
    try:
        limit, url = aiohttp.ClientTimeout(total=1), f"http://{address}:{port}{probe['path']}"
        async with aiohttp.ClientSession(timeout=limit) as session, session.get(url) as answer:
            return answer.status < 400
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
        return False


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def _result(task: asyncio.Future[bool]) -> bool:
    """True if the container received SIGTERM; a task that is still running is cancelled."""
    if task.done() and not task.cancelled():
        return task.result()
    await end(task)
    return False
