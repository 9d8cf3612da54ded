"""The whole fake in a thread of its own, for tests that run processes; those that are coroutines use the parts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from edl.tasks import end
from tests.kubernetes_fake.controllers import Controllers
from tests.kubernetes_fake.kinds import PODS, RESOURCES
from tests.kubernetes_fake.kubelet import Ended, Kubelet
from tests.kubernetes_fake.server import Fault, Server
from tests.kubernetes_fake.store import Json, Resource, Store

T = TypeVar("T")
ADMIN = "admin-token"


class FakeCluster:
    """``with FakeCluster(folder, environment) as cluster``: API server, controllers, and a kubelet for one host."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.server = Server(Store(), {ADMIN: None})
        self.controllers = Controllers(self.server.store)
        self.kubelet = Kubelet(self.server.store, folder / "pods", environment)
        self.ca: Path | None = None
        """Certificate of the server; None: there is no openssl, so it speaks plain HTTP."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-kubernetes")

    def __enter__(self) -> FakeCluster:
        self._thread.start()
        self.wait(self.server.start(self._tls()))
        self._tasks = [self._begin(self.controllers.run()), self._begin(self.kubelet.run())]
        return self

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            await self.kubelet.stop()
            for task in self._tasks:
                await end(task)
            await self.server.stop()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                await end(task)
            await self._loop.shutdown_asyncgens()

        try:
            self.wait(stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _tls(self) -> ssl.SSLContext | None:
        """kubectl sends its token over TLS only. ``ca`` is the certificate that clients have to trust."""
        if shutil.which("openssl") is None:
            return None
        certificate, key = self.folder / "ca.crt", self.folder / "ca.key"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        subject = ["-subj", "/CN=fake-kubernetes", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
        files = ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run([*command, *subject, *files], check=True, capture_output=True)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        self.ca = certificate
        return context

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        async def begin() -> asyncio.Future[None]:
            return asyncio.ensure_future(work)

        return self.wait(begin())

    def wait(self, work: Coroutine[Any, Any, T], limit_s: float = 60) -> T:
        """Run a coroutine in the fake's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(limit_s)

    def do(self, action: Callable[[], T]) -> T:
        """Call something in the fake's loop."""

        async def call() -> T:
            return action()

        return self.wait(call())

    # --- what a test says and sees -------------------------------------------------------------------------------

    def apply(self, *documents: Json, namespace: str = "default") -> None:
        """Create these objects."""
        for entry in documents:
            self.do(lambda entry=entry: self.server.store.create(resource_of(entry), namespace, entry))  # type: ignore[misc]

    def allow(self, token: str, *roles: Json) -> None:
        """Make a service account with this token that has these Roles."""
        rules = [rule for role in roles for rule in role["rules"]]
        self.do(lambda: self.server.accounts.update({token: rules}))

    def get(self, resource: Resource, name: str, namespace: str = "default") -> Json:
        return self.do(lambda: self.server.store.get(resource, namespace, name))

    def pods(self) -> dict[str, Json]:
        return {pod["metadata"]["name"]: pod for pod in self.do(lambda: self.server.store.list(PODS))}

    def room(self, pods: int) -> None:
        """Let the host have room for so many pods."""

        def change() -> None:
            self.controllers.room = pods
            self.server.store.poke()

        self.do(change)

    def fail(self, fault: Fault) -> Fault:
        """Have requests fail from now on."""
        self.do(lambda: self.server.faults.append(fault))
        return fault

    def heal(self) -> None:
        """Stop injecting failures."""
        self.do(self.server.faults.clear)

    def ended(self) -> list[Ended]:
        """Containers that have ended so far."""
        return self.do(lambda: list(self.kubelet.ended))

    def log_of(self, pod: str) -> str:
        """Output of all containers of pods of this name."""
        paths = sorted(self.kubelet.folder.glob(f"{pod}-?????-*.log"), key=lambda path: path.stat().st_mtime)
        return "".join(path.read_text(errors="replace") for path in paths)

    def kubeconfig(self, token: str = ADMIN) -> Path:
        """Write a file for ``kubectl --kubeconfig`` and return its path."""
        path = self.folder / f"kubeconfig-{token}"
        server = {"server": self.server.url, **({"certificate-authority": str(self.ca)} if self.ca else {})}
        context = {"cluster": "fake", "user": "user", "namespace": "default"}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": server}],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "fake", "context": context}],
            "current-context": "fake",
        }
        path.write_text(json.dumps(document))
        return path

    def dump(self) -> None:
        """Print what every container has written; pytest shows it when a test fails."""
        with contextlib.suppress(OSError):
            for path in sorted(self.kubelet.folder.glob("*.log")):
                print(f"----- {path.name}")
                print(path.read_text(errors="replace")[-15_000:])


def resource_of(entry: Json) -> Resource:
    """The kind of an object, as its manifest says it."""
    group, _, version = str(entry["apiVersion"]).rpartition("/")
    for one in RESOURCES:
        if (one.group, one.version, one.kind) == (group, version, entry["kind"]):
            return one
    raise KeyError(f"the fake knows no {entry['apiVersion']} {entry['kind']}")


def documents_of(path: Path) -> list[Json]:
    """All documents of a YAML file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]
