"""The API server: paths, bearer tokens, roles, faults, watches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.kubernetes_fake import discovery
from tests.kubernetes_fake.kinds import BUILT_IN, CHECKS, PODS, RESOURCES
from tests.kubernetes_fake.patches import patched
from tests.kubernetes_fake.store import ApiFailure, Json, Resource, Store, at, put, selects

BOOKMARK_S = 0.5
"""Real servers send one about every minute."""
PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/(?P<version>[^/]+))(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?"
)
DEFAULT_GRACE_S = 30


@dataclass
class Fault:
    """An injected failure of requests."""

    status: int = 0
    """Answer with this; 0: never answer."""
    verbs: Sequence[str] = ()
    """Empty: any."""
    path: str = ""
    """Regular expression, searched in the path."""
    times: int = 1_000_000
    retry_after: int = 0
    hits: int = 0

    def meets(self, verb: str, path: str) -> bool:
        return self.hits < self.times and (not self.verbs or verb in self.verbs) and bool(re.search(self.path, path))


@dataclass
class Request:
    """A parsed request."""

    verb: str
    resource: Resource
    namespace: str
    name: str
    sub: str
    query: Mapping[str, str]
    content_type: str
    body: Any

    @property
    def full(self) -> str:
        return f"{self.resource.plural}/{self.sub}" if self.sub else self.resource.plural


@dataclass
class Server:
    """Serves one store. ``accounts``: rules (as in a Role) by token; None: may do everything."""

    store: Store
    accounts: dict[str, list[Json] | None] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str, Any]] = field(default_factory=list)
    """Verb, path and body of every request that came this far."""
    gone_as_status: bool = False
    """A watch from a forgotten version is refused with HTTP 410; else the watch begins, and says so in an event."""
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self, context: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> str:
        """Listen on a free port; returns the URL."""
        self.store.checks.update(CHECKS)
        app = web.Application(client_max_size=4 * 1024 * 1024)
        app.router.add_route("*", "/{rest:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, 0, ssl_context=context)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"{'https' if context else 'http'}://{host}:{port}"
        return self.url

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except ApiFailure as failure:
            headers = {"Retry-After": str(failure.retry_after)} if failure.retry_after else {}
            return web.json_response(failure.body(), status=failure.code, headers=headers)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        rules = self._rules(request)
        found = discovery.document(request.path)
        if found is not None:
            return web.json_response(found)
        asked = await self._understood(request)
        self.seen.append((asked.verb, request.path, asked.body))
        await self._suffer(asked.verb, request.path)
        self._authorize(asked, rules)
        if asked.verb == "watch":
            return await self._watch(request, asked)
        code, body = self._do(asked)
        return web.json_response(body, status=code)

    def _rules(self, request: web.Request) -> list[Json] | None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.accounts:
            raise ApiFailure(401, "Unauthorized", "Unauthorized")
        return self.accounts[token]

    async def _understood(self, request: web.Request) -> Request:
        match = PATH.fullmatch(request.path)
        group = (match["group"] or "") if match else ""
        resource = next(
            (one for one in RESOURCES if match and (one.group, one.plural) == (group, match["plural"])), None
        )
        if match is None or resource is None:
            raise ApiFailure(404, "NotFound", "the server could not find the requested resource")
        verb = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[request.method]
        if verb == "get" and not match["name"]:
            verb = "watch" if request.query.get("watch") in ("true", "1") else "list"
        raw = await request.read()
        try:
            body = json.loads(raw) if raw else None
        except ValueError as error:
            raise ApiFailure(400, "BadRequest", "the body is no JSON") from error
        name, sub = match["name"] or "", match["sub"] or ""
        return Request(
            verb, resource, match["namespace"] or "", name, sub, dict(request.query), request.content_type, body
        )

    async def _suffer(self, verb: str, path: str) -> None:
        for fault in self.faults:
            if fault.meets(verb, path):
                fault.hits += 1
                if not fault.status:
                    await asyncio.Event().wait()
                reasons = {403: "Forbidden", 409: "Conflict", 410: "Expired", 429: "TooManyRequests"}
                text = f"injected {fault.status}"
                reason = reasons.get(fault.status, "InternalError")
                raise ApiFailure(fault.status, reason, text, retry_after=fault.retry_after)

    def _authorize(self, asked: Request, rules: list[Json] | None) -> None:
        if rules is None or any(_allows(rule, asked) for rule in rules):
            return
        where = f' in the namespace "{asked.namespace}"' if asked.namespace else " at the cluster scope"
        about = f'{asked.resource.full} "{asked.name}" is' if asked.name else f"{asked.resource.full} is"
        raise ApiFailure(
            403,
            "Forbidden",
            f'{about} forbidden: User "system:serviceaccount:default:edl" cannot {asked.verb} resource '
            f'"{asked.full}" in API group "{asked.resource.group}"{where}',
        )

    # --- what is asked for ---------------------------------------------------------------------------------------

    def _do(self, asked: Request) -> tuple[int, Json]:
        store, resource = self.store, asked.resource
        match asked.verb, asked.sub:
            case "get", "scale":
                return 200, self._scale(asked)
            case (("update" | "patch"), "scale"):
                return 200, self._rescale(asked)
            case "create", "eviction":
                return 201, self._evict(asked)
            case "get", ("" | "status"):
                return 200, store.get(resource, asked.namespace, asked.name)
            case "list", "":
                return 200, self._list(asked)
            case "create", "":
                return 201, store.create(resource, asked.namespace, asked.body)
            case "update", ("" | "status"):
                return 200, store.update(resource, asked.namespace, asked.body)
            case "patch", ("" | "status"):
                before = store.get(resource, asked.namespace, asked.name)
                return 200, store.update(resource, asked.namespace, self._patched(before, asked))
            case "delete", "":
                return 200, self._delete(asked)
        raise ApiFailure(404, "NotFound", "the server could not find the requested resource")

    def _patched(self, before: Json, asked: Request) -> Json:
        entry = patched(before, asked.body, asked.content_type, strategic=asked.resource.group in BUILT_IN)
        entry["metadata"]["name"] = before["metadata"]["name"]
        return entry

    def _scale(self, asked: Request) -> Json:
        resource = asked.resource
        if not resource.replicas:
            raise ApiFailure(404, "NotFound", "the server could not find the requested resource")
        entry = self.store.get(resource, asked.namespace, asked.name)
        about = {name: entry["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion")}
        replicas = at(entry, resource.replicas, 0)
        scale: Json = {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {**about, "creationTimestamp": entry["metadata"]["creationTimestamp"]},
            "spec": {"replicas": replicas} if replicas else {},
            "status": {"replicas": at(entry, resource.status_replicas, 0)},
        }
        labels = at(entry, "spec.selector.matchLabels", {})
        text = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        text = at(entry, resource.selector, "") if resource.selector else text
        if text:
            scale["status"]["selector"] = text
        return scale

    def _rescale(self, asked: Request) -> Json:
        before = self._scale(asked)
        changed = self._patched(before, asked) if asked.verb == "patch" else asked.body
        replicas = at(changed, "spec.replicas", 0)
        if not isinstance(replicas, int) or replicas < 0:
            text = f'Scale "{asked.name}" is invalid: spec.replicas: Invalid value: {replicas}'
            raise ApiFailure(422, "Invalid", f"{text}: must be greater than or equal to 0")
        entry = self.store.get(asked.resource, asked.namespace, asked.name)
        put(entry, asked.resource.replicas, replicas)
        entry["metadata"]["resourceVersion"] = changed["metadata"].get("resourceVersion", "")
        self.store.update(asked.resource, asked.namespace, entry)
        return self._scale(asked)

    def _list(self, asked: Request) -> Json:
        entries = [entry for entry in self.store.list(asked.resource, asked.namespace) if _wanted(entry, asked.query)]
        about: Json = {"resourceVersion": str(self.store.version)}
        limit, begin = int(asked.query.get("limit", "0")), int(asked.query.get("continue", "0") or 0)
        if limit and len(entries) > begin + limit:
            about["continue"] = str(begin + limit)
        entries = entries[begin : begin + limit] if limit else entries
        kind = f"{asked.resource.kind}List"
        return {"kind": kind, "apiVersion": asked.resource.api_version, "metadata": about, "items": entries}

    def _delete(self, asked: Request) -> Json:
        """With grace for pods that have a host; everything else is gone at once, and what it owns with it."""
        store, resource = self.store, asked.resource
        entry = store.get(resource, asked.namespace, asked.name)
        options = asked.body or {}
        wanted = options.get("preconditions", {}).get("uid")
        if wanted and wanted != entry["metadata"]["uid"]:
            raise ApiFailure(409, "Conflict", f'Operation cannot be fulfilled on {resource.full} "{asked.name}": uid')
        if resource is not PODS:
            return remove_with_owned(store, resource, asked.namespace, asked.name)
        given = options.get("gracePeriodSeconds", asked.query.get("gracePeriodSeconds"))
        return delete_pod(store, asked.namespace, asked.name, None if given is None else int(given))

    def _evict(self, asked: Request) -> Json:
        evict(self.store, asked.namespace, asked.name, "EvictionByEvictionAPI", "Eviction API: evicting")
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}

    # --- watches ---------------------------------------------------------------------------------------------------

    async def _watch(self, request: web.Request, asked: Request) -> web.StreamResponse:
        given = asked.query.get("resourceVersion", "")
        gone = given not in ("", "0") and int(given) < self.store.oldest
        failure = ApiFailure(410, "Expired", f"too old resource version: {given} ({self.store.oldest})")
        if gone and self.gone_as_status:
            raise failure
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        if gone:
            await answer.write(_line("ERROR", failure.body()))
        else:
            limit_s = float(asked.query.get("timeoutSeconds", "1800"))
            with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
                await asyncio.wait_for(self._stream(answer, asked, given), limit_s)
        return answer

    async def _stream(self, answer: web.StreamResponse, asked: Request, given: str) -> None:
        version = int(given or 0)
        if not version:
            version = self.store.version
            for entry in self._list(asked)["items"]:
                await answer.write(_line("ADDED", entry))
        async for line in self._lines(asked, version):
            await answer.write(line)

    async def _lines(self, asked: Request, version: int) -> AsyncIterator[bytes]:
        while True:
            fresh = [one for one in self.store.history if one.version > version]
            for event in fresh:
                version = event.version
                full, namespace, _ = event.key
                if full == asked.resource.full and asked.namespace in ("", namespace):
                    kind = _as_seen(event.kind, event.before, event.object, asked.query)
                    if kind:
                        yield _line(kind, event.object)
            if fresh:
                continue  # more may have come while those were written
            try:
                await asyncio.wait_for(self.store.news(), BOOKMARK_S)
            except asyncio.TimeoutError:
                if asked.query.get("allowWatchBookmarks") == "true":
                    about = {"resourceVersion": str(version), "creationTimestamp": None}
                    entry = {"kind": asked.resource.kind, "apiVersion": asked.resource.api_version, "metadata": about}
                    yield _line("BOOKMARK", entry)


def delete_pod(store: Store, namespace: str, name: str, grace_s: int | None = None) -> Json:
    """Delete a pod as ``kubectl delete pod`` does: its kubelet stops it; a pod without a host disappears at once."""
    entry = store.get(PODS, namespace, name)
    if grace_s is None:
        grace_s = int(at(entry, "spec.terminationGracePeriodSeconds", DEFAULT_GRACE_S))
    if not at(entry, "spec.nodeName") or grace_s == 0 or at(entry, "status.phase") in ("Succeeded", "Failed"):
        return store.remove(PODS, namespace, name)
    return store.doom(PODS, namespace, name, grace_s)


def evict(store: Store, namespace: str, name: str, reason: str, message: str) -> None:
    """Mark a pod as the target of a disruption, and delete it."""
    entry = store.get(PODS, namespace, name)
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    entry["status"].setdefault("conditions", []).append(condition)
    store.update(PODS, namespace, entry)
    delete_pod(store, namespace, name)


def remove_with_owned(store: Store, resource: Resource, namespace: str, name: str) -> Json:
    """Background deletion: the owner goes, and what it owns after it."""
    entry = store.remove(resource, namespace, name)
    for (full, space, owned), _ in store.owned(entry["metadata"]["uid"]):
        if full == PODS.full:
            delete_pod(store, space, owned)
    return entry


def _allows(rule: Json, asked: Request) -> bool:
    def has(key: str, value: str) -> bool:
        return value in rule.get(key, []) or "*" in rule.get(key, [])

    names = rule.get("resourceNames", [])
    return (
        has("apiGroups", asked.resource.group)
        and has("resources", asked.full)
        and has("verbs", asked.verb)
        and (not names or asked.name in names)
    )


def _wanted(entry: Json, query: Mapping[str, str]) -> bool:
    if not selects(query.get("labelSelector", ""), entry["metadata"].get("labels", {})):
        return False
    for part in filter(None, query.get("fieldSelector", "").split(",")):
        path, _, value = part.partition("=")
        if str(at(entry, path, "")) != value.removeprefix("="):
            return False
    return True


def _as_seen(kind: str, before: Json | None, entry: Json, query: Mapping[str, str]) -> str:
    """An event as a watch with a selector sees it: what does not match any more has been deleted for it."""
    matches = _wanted(entry, query)
    matched = before is not None and _wanted(before, query)
    if kind == "MODIFIED":
        return {(True, True): "MODIFIED", (True, False): "ADDED", (False, True): "DELETED"}.get((matches, matched), "")
    return kind if matches else ""


def _line(kind: str, entry: Json) -> bytes:
    return json.dumps({"type": kind, "object": entry}).encode() + b"\n"
