"""Objects with resource versions, and the history that watches are served from."""

from __future__ import annotations

import asyncio
import copy
import datetime
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


class ApiFailure(Exception):
    """An answer of the kind ``Status``."""

    def __init__(self, code: int, reason: str, message: str, *, retry_after: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after

    def body(self) -> Json:
        status: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        if self.retry_after:
            status["details"] = {"retryAfterSeconds": self.retry_after}
        return status


@dataclass(frozen=True)
class Resource:
    """One kind that the server knows."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    short: tuple[str, ...] = ()
    replicas: str = ""
    """Where ``/scale`` finds spec.replicas, such as ``spec.replicas``; empty: there is no ``/scale``."""
    status_replicas: str = "status.replicas"
    selector: str = ""
    """Where a custom resource keeps the text of its selector; a StatefulSet's comes from its spec."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full(self) -> str:
        """Name in messages of the API server: ``statefulsets.apps``."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


Key = tuple[str, str, str]
"""Full name of the resource, namespace, name."""


@dataclass(frozen=True)
class Event:
    version: int
    kind: str
    key: Key
    object: Json
    before: Json | None = None


Check = Callable[[Json | None, Json], None]
"""Told the old object, if there is one, and the new one; raises ``ApiFailure``."""


@dataclass
class Store:
    """All objects. Everything happens in one event loop, and nothing here waits."""

    objects: dict[Key, Json] = field(default_factory=dict)
    history: list[Event] = field(default_factory=list)
    checks: dict[str, Check] = field(default_factory=dict)
    """By full name of the resource."""
    version: int = 1000
    oldest: int = 1000
    """Versions before this one have been forgotten."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def news(self) -> None:
        """Wait for the next change."""
        await self._news.wait()

    def poke(self) -> None:
        """Wake all watchers although no object has changed."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def compact(self) -> None:
        """Forget the history, as etcd does every five minutes: watches from before now are answered with 410."""
        self.history.clear()
        self.oldest = self.version

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        found = self.objects.get((resource.full, namespace, name))
        if found is None:
            raise ApiFailure(404, "NotFound", f'{resource.full} "{name}" not found')
        return copy.deepcopy(found)

    def list(self, resource: Resource, namespace: str = "") -> list[Json]:
        """List the objects of a namespace, or of all."""
        return [
            copy.deepcopy(found)
            for (full, space, _), found in sorted(self.objects.items())
            if full == resource.full and namespace in ("", space)
        ]

    def create(self, resource: Resource, namespace: str, given: Json) -> Json:
        entry = copy.deepcopy(given)
        about = entry.setdefault("metadata", {})
        if "name" not in about and "generateName" in about:
            about["name"] = about["generateName"] + uuid.uuid4().hex[:5]
        key = (resource.full, namespace, about["name"])
        if key in self.objects:
            raise ApiFailure(409, "AlreadyExists", f'{resource.full} "{about["name"]}" already exists')
        entry["apiVersion"], entry["kind"] = resource.api_version, resource.kind
        about.update(uid=str(uuid.uuid4()), creationTimestamp=now(), generation=1)
        if resource.namespaced:
            about["namespace"] = namespace
        entry.setdefault("status", {})
        self._check(resource, None, entry)
        return self._write("ADDED", key, entry)

    def update(self, resource: Resource, namespace: str, changed: Json) -> Json:
        """Replace an object. A resource version that is not the newest is a conflict; none at all means any."""
        name = changed["metadata"]["name"]
        before = self.get(resource, namespace, name)
        entry = copy.deepcopy(changed)
        given = entry["metadata"].get("resourceVersion")
        if given and given != before["metadata"]["resourceVersion"]:
            raise ApiFailure(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on {resource.full} "{name}": the object has been modified; '
                "please apply your changes to the latest version and try again",
            )
        for fixed in ("uid", "creationTimestamp", "namespace", "deletionTimestamp", "generation"):
            if fixed in before["metadata"]:
                entry["metadata"][fixed] = before["metadata"][fixed]
        entry["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        if entry == before:
            return before
        if entry.get("spec") != before.get("spec"):
            entry["metadata"]["generation"] = before["metadata"]["generation"] + 1
        self._check(resource, before, entry)
        return self._write("MODIFIED", (resource.full, namespace, name), entry)

    def doom(self, resource: Resource, namespace: str, name: str, grace_s: int) -> Json:
        """Deletion with grace: the object stays, and says when it will have gone. Grace may be made shorter only."""
        entry = self.get(resource, namespace, name)
        about = entry["metadata"]
        if "deletionTimestamp" in about and grace_s >= about["deletionGracePeriodSeconds"]:
            return entry
        about["deletionTimestamp"] = now(grace_s)
        about["deletionGracePeriodSeconds"] = grace_s
        return self._write("MODIFIED", (resource.full, namespace, name), entry)

    def remove(self, resource: Resource, namespace: str, name: str) -> Json:
        """Gone, and with it everything that it owns."""
        key = (resource.full, namespace, name)
        entry = self.get(resource, namespace, name)
        del self.objects[key]
        self.version += 1
        entry["metadata"]["resourceVersion"] = str(self.version)
        self._tell(Event(self.version, "DELETED", key, entry, entry))
        return entry

    def owned(self, uid: str) -> Iterator[tuple[Key, Json]]:
        """Objects whose owner has this uid."""
        for key, entry in list(self.objects.items()):
            if any(owner.get("uid") == uid for owner in entry["metadata"].get("ownerReferences", [])):
                yield key, copy.deepcopy(entry)

    def _check(self, resource: Resource, before: Json | None, entry: Json) -> None:
        check = self.checks.get(resource.full)
        if check is not None:
            check(before, entry)

    def _write(self, kind: str, key: Key, entry: Json) -> Json:
        self.version += 1
        entry["metadata"]["resourceVersion"] = str(self.version)
        before = self.objects.get(key)
        self.objects[key] = entry
        self._tell(Event(self.version, kind, key, copy.deepcopy(entry), before))
        return copy.deepcopy(entry)

    def _tell(self, event: Event) -> None:
        self.history.append(event)
        self.poke()


def now(ahead_s: float = 0.0) -> str:
    """A time as Kubernetes writes it."""
    moment = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=ahead_s)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def selects(selector: str, labels: dict[str, str]) -> bool:
    """Label selectors with ``=``, ``==``, ``!=`` and plain keys."""
    for part in filter(None, selector.split(",")):
        if "!=" in part:
            key, _, value = part.partition("!=")
            if labels.get(key) == value:
                return False
        elif "=" in part:
            key, _, value = part.partition("=")
            if labels.get(key) != value.removeprefix("="):
                return False
        elif part not in labels:
            return False
    return True


def at(entry: Json, path: str, default: Any = None) -> Any:
    """Value at a path: ``at(x, "spec.replicas")``."""
    value: Any = entry
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return default
        value = value[part]
    return value


def put(entry: Json, path: str, value: Any) -> None:
    *way, last = path.split(".")
    for part in way:
        entry = entry.setdefault(part, {})
    entry[last] = value
