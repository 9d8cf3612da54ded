"""``edl data``, ``ps``, ``config`` and ``health``: what they make of a status; and commands that ask a person first."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence

import pytest
from click.testing import CliRunner, Result

from edl.cli import confirm, find, polling
from edl.cli.__main__ import edl
from edl.types import Incarnation, NodeId
from edl.wire.alarm import Alarm
from edl.wire.health import HealthView
from edl.wire.node_requests import OptionValue, OptionValues
from edl.wire.records import NO_SETTINGS, NodeInfo
from edl.wire.scale_requests import Drain, Granted, Resize, ScaleRequest, ScaleView, Suspend, Verdict
from edl.wire.status import Count, DroppedSlot, JobStatus, ServiceShare, ServiceView
from tests.support.fake_master import FakeMaster

MNIST = ServiceView(
    *("data", "mnist", "mnist: epoch 2, 40 of 100 shards done"),
    (
        *(Count("epoch", 2), Count("shards", 100), Count("done_shards", 40), Count("leased_shards", 6)),
        *(Count("quarantined_shards", 1), Count("records", 60_000), Count("done_records", 24_000)),
        *(Count("records_per_s", 1500.0), Count("left_s", 24.0)),
    ),
    (ServiceShare("node-a", 2, 4, 15_000), ServiceShare("node-b", 1, 2, 9_000)),
)
PSERVERS = (
    ServiceView("ps", "pservers", "2 pservers, all copies in sync", (Count("pservers", 2),)),
    ServiceView(
        *("ps", "ps-0", "ps-0: 2048 buckets, 2048 copies"),
        (
            *(Count("number", 0), Count("owned_buckets", 2048), Count("copied_buckets", 2048), Count("rows", 1000)),
            *(Count("rows_bytes", 1 << 20), Count("most_bytes", 1 << 30), Count("pulls", 7), Count("lag_s", 0.25)),
        ),
    ),
    ServiceView("ps", "ps-1", "ps-1: 2048 buckets", (Count("owned_buckets", 2048), Count("copied_buckets", 2048))),
    ServiceView("ps", "trainers", "3 trainers: a, b, c", (Count("trainers", 3),)),
)
OPTIONS = OptionValues(
    (
        OptionValue("--nnodes", "1:8", "command-line", "", "1:1"),
        OptionValue("--max-restarts", "5", "paddle", "PADDLE_MAX_RESTARTS", "3"),
        OptionValue("--lease-ttl", "3", "default", "", "3"),
        OptionValue("--rdzv-conf", "…", "edl", "EDL_RDZV_CONF", ""),
    )
)
INFOS = tuple(
    NodeInfo(NodeId(name), Incarnation(1), "h", 1, 2, devices=uuids)
    for name, uuids in (("node-a", ("GPU-1", "GPU-2")), ("node-b", ("", "")))
)


class Client:
    """A Master and its launchers."""

    def __init__(self, status: JobStatus) -> None:
        self.launchers = INFOS
        self.seen = status
        self.requests: list[ScaleRequest] = []
        self.asked_of = ""

    async def status(self) -> JobStatus:
        return self.seen

    async def submit(self, request: ScaleRequest) -> Granted:
        self.requests.append(request)
        return Granted(Verdict.ACCEPTED, "granted", 41, 2)

    def launcher(self, info: NodeInfo) -> Client:
        self.asked_of = info.node
        return self

    async def options(self) -> OptionValues:
        return OPTIONS

    async def close(self) -> None:
        pass


def run(
    monkeypatch: pytest.MonkeyPatch, words: Sequence[str], answer: str = "", **seen: object
) -> tuple[Client, Result]:
    client = Client(dataclasses.replace(FakeMaster().status(), **seen))  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def found(where: object) -> AsyncIterator[Client]:
        yield client

    monkeypatch.setattr(find, "master_of", found)
    monkeypatch.setattr(polling, "master_of", found)
    monkeypatch.setattr(polling, "located", lambda where: where)
    return client, CliRunner().invoke(edl, [*words, "--rdzv-id=train"], input=answer)


class TestData:
    def test_progress_and_readers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, done = run(monkeypatch, ["data"], services=(MNIST, ServiceView("data", "readers", "2 readers")))
        lines = [line.split() for line in done.stdout.splitlines()]
        assert lines[1] == ["mnist", "2", "40/100", "24,000/60,000", "6", "1", "1,500/s", "24", "s", "3"]
        assert lines[4:] == [["mnist", "node-a", "2", "4", "15,000"], ["mnist", "node-b", "1", "2", "9,000"]]
        _, done = run(monkeypatch, ["data", "--node=node-b"], services=(MNIST,))
        assert "node-a" not in done.stdout

    def test_json(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, done = run(monkeypatch, ["data", "--json"], services=(MNIST,))
        (shown,) = json.loads(done.stdout)["data_sets"]
        assert (shown["name"], shown["shares"][1]["leases"]) == ("mnist", 2)

    def test_a_data_set_of_which_little_is_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, done = run(monkeypatch, ["data"], services=(ServiceView("data", "x", "", (Count("shards", 3),)),))
        assert done.stdout.splitlines()[1].split() == ["x", "-", "-/3", "-", "-", "-", "-", "-", "0"]

    def test_a_job_without_data(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, done = run(monkeypatch, ["data"])
        assert "has no data sets" in str(done.exception)

    def test_options_before_a_command_are_not_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, done = run(monkeypatch, ["data", "--json", "add", "mnist", "more.parquet"])
        assert done.exit_code == 2 and "options belong after the command: edl data add" in done.output


class TestPservers:
    def test_placement_and_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, done = run(monkeypatch, ["ps"], services=PSERVERS)
        lines = done.stdout.splitlines()
        assert lines[:2] == ["2 pservers, all copies in sync", "3 trainers: a, b, c"]
        assert lines[3].split() == [
            "ps-0",
            "2,048",
            "2,048",
            "1,000",
            *["1.0", "MiB", "of", "1.0", "GiB"],
            "7",
            "-",
            "0.2",
            "s",
        ]
        assert lines[4].split() == ["ps-1", "2,048", "2,048", "-", "-", "-", "-", "-"]

    def test_json(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, done = run(monkeypatch, ["ps", "--json"], services=(*PSERVERS, MNIST))
        names = [one["name"] for one in json.loads(done.stdout)["items"]]
        assert names == ["pservers", "ps-0", "ps-1", "trainers"]

    def test_a_job_without_pservers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, done = run(monkeypatch, ["ps"])
        assert "has no parameter servers" in str(done.exception)


class TestConfig:
    def test_what_was_given_and_by_whom(self, monkeypatch: pytest.MonkeyPatch) -> None:
        client, done = run(monkeypatch, ["config"])
        assert client.asked_of == "node-a", "the Master's"
        lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
        assert lines[1:5] == [
            "--nnodes 1:8 command line; default 1:1",
            "--max-restarts 5 Paddle's variables (PADDLE_MAX_RESTARTS); default 3",
            "--rdzv-conf … environment (EDL_RDZV_CONF); default -",
            "1 options have their defaults (--all lists them)",
        ]

    def test_all_of_another_node(self, monkeypatch: pytest.MonkeyPatch) -> None:
        client, done = run(monkeypatch, ["config", "--all", "--node=node-b"])
        assert client.asked_of == "node-b"
        assert "--lease-ttl" in done.stdout and "have their defaults" not in done.stdout

    def test_what_was_changed_since(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scale = ScaleView(minimum=2, maximum=4, desired=3, generation=2, by="edl scale (me@here)")
        settings = dataclasses.replace(NO_SETTINGS, number=2, local_batch=8)
        _, done = run(monkeypatch, ["config", "--json"], scale=scale, settings=settings)
        changed = json.loads(done.stdout)["changed"]
        assert changed[1] == "  Size: 2:4 nodes, 3 wanted, by edl scale (me@here)"
        assert changed[2].startswith("  Settings 2: ")


class TestHealth:
    ALARM = Alarm("disk-space", "log directory /logs", "critical", "1 GiB is free", "node-b")
    DROPPED = DroppedSlot("node-a", "h", 1, "GPU-2", "it failed twice", 3)

    def test_each_node_and_then_what_is_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = {
            "alarms": (self.ALARM, Alarm("waiting", text="for 400 s")),
            "dropped": (self.DROPPED,),
            "warnings": ("no",),
        }
        _, done = run(monkeypatch, ["health"], **seen)  # type: ignore[arg-type]
        lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
        assert lines[1] == "node-a 10.0.0.1 running 2 of 2 1 - -"
        assert lines[2] == "node-b 10.0.0.1 running unknown - 1 -"
        assert lines[5:] == [
            "Alarm (warning): waiting: for 400 s",
            "Alarm (critical): disk-space (log directory /logs) on node-b: 1 GiB is free",
            "Dropped: slot 1 of node-a (GPU-2) after round 3: it failed twice. "
            "To use it again: edl uncordon node-a --device=1",
            "Warning: no",
        ]

    def test_one_node_as_json(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, done = run(monkeypatch, ["health", "--node=node-b", "--json"], alarms=(self.ALARM,))
        (node,) = json.loads(done.stdout)["nodes"]
        assert (node["node"], node["alarms"][0]["name"]) == ("node-b", "disk-space")
        _, done = run(monkeypatch, ["health", "--node=nobody"])
        assert "has no node nobody" in str(done.exception)

    def test_a_job_that_is_well(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, done = run(monkeypatch, ["health"])
        assert done.stdout.splitlines()[-1] == "No alarms, no dropped slots, no warnings."

    def test_verdicts_of_checks_are_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        view = HealthView("node-a", "h", "slow", "3 times the median", excluded=True, expires_s=3600.0)
        _, done = run(monkeypatch, ["health"], health=(view,))
        assert [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("node-")][:2] == ["slow", "-"]
        assert "Health of node-a: kept out, slow: 3 times the median (checked again in " in done.stdout


class TestConfirmation:
    @pytest.fixture(autouse=True)
    def at_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("edl.cli.size", "edl.cli.__main__"):
            monkeypatch.setattr(f"{module}.must_ask", lambda yes, as_json: not (yes or as_json))

    @pytest.mark.parametrize(
        ("words", "kind", "question"),
        [
            (("scale", "2"), Resize, "Shrink the job from 3 to 2 nodes?"),
            (("scale", "--max=1"), None, "Shrink the job from 3 to 1 nodes?"),
            (("drain", "node-a", "node-b"), Drain, "Drain node-a, node-b? The launchers there exit"),
            (("suspend",), Suspend, "Suspend the job? Its workers end until edl resume"),
        ],
    )
    def test_what_ends_workers_is_asked_about(
        self, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], kind: type | None, question: str
    ) -> None:
        client, done = run(monkeypatch, [*words, "--no-wait"], answer="n\n")
        assert question in done.output and client.requests == [] and done.exit_code != 0
        client, done = run(monkeypatch, [*words, "--no-wait"], answer="y\n")
        assert client.requests and (kind is None or isinstance(client.requests[0], kind))
        for sure in ("--yes", "--json"):
            client, done = run(monkeypatch, [*words, "--no-wait", sure])
            assert client.requests and question not in done.output

    @pytest.mark.parametrize("words", [("scale", "5"), ("scale", "auto"), ("resume",), ("cordon", "node-d")])
    def test_what_does_not_is_not(self, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
        client, _ = run(monkeypatch, [*words, "--no-wait"])
        assert client.requests


def test_nobody_is_asked_without_a_terminal() -> None:
    assert not confirm.must_ask(yes=False, as_json=False), "pytest has none"
