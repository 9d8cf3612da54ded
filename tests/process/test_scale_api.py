"""The size of a real job, asked for over HTTP and on the command line, while launchers come and go."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.exit_codes import ExitCode
from tests.process.free_ports import free_endpoints
from tests.process.harness import Job, Node, until

FULL, READ = "a-token-that-may-do-everything", "a-token-that-may-only-look"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Three members of the store, so that one may be killed with its launcher; ranks do not need each other."""
    (tmp_path / "full").write_text(FULL)
    (tmp_path / "read").write_text(READ)
    options = ["--http-port=0", "--http-token-file=full", "--http-read-token-file=read", "--standby=none"]
    with Job(
        tmp_path,
        free_endpoints(3),
        backend="etcd-embedded",
        nnodes="1:3",
        options=(*options, "--lease-ttl=2"),
        arguments=("--free",),
    ) as running:
        yield running


def ask(node: Node, method: str, path: str, body: Any = None, token: str = FULL) -> tuple[int, Any, str]:
    """Code, document and the address of a redirect."""
    found = re.search(r"HTTP: http://127\.0\.0\.1:(\d+)", node.text)
    assert found is not None
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)) as connection:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text), answer.headers.get("Location", "")


def serving(job: Job, *names: str) -> None:
    for name in names:
        job.nodes[name].says("HTTP: http://")


def ruling(job: Job, *names: str) -> tuple[Node, str]:
    """The node that answers, and its base address as others name it."""

    def look() -> Node | None:
        codes = {name: ask(job.nodes[name], "GET", path(job, "scale"))[0] for name in names}
        return next((job.nodes[name] for name, code in codes.items() if code == 200), None)

    node = until(look, "a Master that answers over HTTP")
    assert node is not None
    return node, str(job.status()["http"])


def path(job: Job, what: str) -> str:
    return f"/v1/jobs/{job.name}/{what}"


def test_another_size_by_http_and_by_hand(job: Job) -> None:
    job.start("a", "b", "c")
    serving(job, "a", "b", "c")
    job.wait_world(3)
    master, url = ruling(job, "a", "b", "c")
    other = next(node for node in job.nodes.values() if node is not master)
    scale = path(job, "scale")

    code, _, location = ask(other, "PATCH", scale, {"spec": {"replicas": 2}})
    assert (code, location) == (307, url + scale)
    assert ask(master, "GET", scale, token="")[0] == ask(other, "GET", scale, token="wrong-wrong")[0] == 401
    assert ask(master, "PATCH", scale, {"spec": {"replicas": 2}}, token=READ)[0] == 403
    seen = ask(master, "GET", scale, token=READ)[1]
    assert (seen["spec"]["replicas"], seen["status"]["replicas"]) == (3, 3)

    seen["spec"]["replicas"] = 2
    code, taken, _ = ask(master, "PUT", scale, {**seen, "requester": "autoscaler"})
    assert (code, taken["spec"]["replicas"]) == (202, 2)
    assert ask(master, "PUT", scale, seen)[0] == 409, "the size has changed since it was read"
    assert ask(master, "PUT", scale, {"spec": {"replicas": 4}})[0] == 422
    job.wait_world(2)
    generation = taken["metadata"]["generation"]
    until(lambda: ask(master, "GET", scale)[1]["status"]["observedGeneration"] >= generation, "the request to hold")

    done = job.cli("scale", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["done"] is True
    assert ask(master, "GET", scale)[1]["status"]["replicas"] == 3, "that is what it has waited for"
    job.wait_world(3)
    assert job.cli("scale", "9").returncode == 2

    asleep = job.cli("suspend")
    assert asleep.returncode == 0, asleep.stderr
    whole = ask(master, "GET", f"/v1/jobs/{job.name}")[1]
    held = {one["type"]: one["status"] for one in whole["status"]["conditions"]}
    assert (held["Suspended"], held["Available"]) == ("True", "False")
    before = job.seen()
    assert before is not None
    assert job.cli("resume").returncode == 0
    job.wait_world(3, after=before.round)

    drained = job.cli("drain", other.name, "--reason=maintenance")
    assert drained.returncode == 0, drained.stderr
    assert drained.stdout == f"{other.name} has left\n"
    assert other.exit_code() == ExitCode.OK, other.text
    job.wait_world(2)


@pytest.mark.slow
def test_the_next_master_answers(job: Job) -> None:
    job.start("a", "b", "c")
    serving(job, "a", "b", "c")
    job.wait_world(3)
    master, _ = ruling(job, "a", "b", "c")
    scale = path(job, "scale")
    code, taken, _ = ask(master, "PATCH", scale, {"spec": {"replicas": 2}, "idempotencyKey": "night"})
    assert code == 202
    job.wait_world(2)
    master.kill()
    left = [node.name for node in job.nodes.values() if node is not master]
    new, url = ruling(job, *left)
    seen = ask(new, "GET", scale)[1]
    assert (seen["spec"]["replicas"], seen["metadata"]["resourceVersion"]) == (2, taken["metadata"]["resourceVersion"])
    code, again, _ = ask(new, "PATCH", scale, {"spec": {"replicas": 1}, "idempotencyKey": "night"})
    assert (code, again["spec"]["replicas"]) == (202, 2), "the next one knows what was asked for under this key"
    follower = next(job.nodes[name] for name in left if job.nodes[name] is not new)
    assert ask(follower, "GET", scale)[2] == url + scale
    job.wait_world(2, after=job.status()["round"] - 1)


def test_an_address_of_another_host_ends_the_launcher(tmp_path: Path) -> None:
    options = ("--http-port=0", "--http-host=203.0.113.7")
    with Job(tmp_path, free_endpoints(1), backend="etcd-embedded", nnodes="1:1", options=options) as job:
        node = job.start("a")
        assert node.exit_code() == ExitCode.PORT_IN_USE
        assert "cannot serve HTTP on 203.0.113.7" in node.text
