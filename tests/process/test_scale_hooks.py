"""Sizes from a script, as Horovod's elastic jobs have it, and nodes from a command, with real launchers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import WORKERS, Job, OutsideEtcd, until
from tests.process.test_rejoin import redone


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[OutsideEtcd]:
    with OutsideEtcd(tmp_path / "etcd") as store:
        yield store


def job(etcd: OutsideEtcd, tmp_path: Path, *options: str, **named: Any) -> Job:
    return Job(tmp_path, [etcd.endpoint], script=(str(WORKERS / "rejoin_plain.py"),), options=options, **named)


def name_hosts(file: Path, *hosts: str) -> None:
    file.with_suffix(".new").write_text("".join(f"{host}:1\n" for host in hosts))
    file.with_suffix(".new").replace(file)


@pytest.mark.soak
def test_a_discovery_script_sizes_the_job(etcd: OutsideEtcd, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    name_hosts(hosts, "h1", "h2", "h3")
    options = (f"--scheduler=discovery:cat {hosts}", "--scheduler-conf=poll=0.2")
    with job(etcd, tmp_path, *options, nnodes="1:3") as running:
        running.start("h1", "h2", "h3")
        three = running.wait_world(3)
        running.wait_steps(20)
        refused = running.cli("scale", "2", "--no-wait")
        assert refused.returncode == 2
        assert f"discovery:cat {hosts}" in refused.stderr, "it says where the size is decided"
        hosts.rename(tmp_path / "away")  # the script fails: nothing happens
        running.wait_steps(20)
        assert running.seen() == three
        name_hosts(hosts, "h1", "h3")
        two = running.wait_world(2, after=three.round)
        assert sorted(two.nodes.values()) == ["h1", "h3"]
        assert running.nodes["h2"].exit_code() == 0, "it leaves in good order"
        running.wait_steps(20)
        running.end_soon()
        assert set(running.exit_codes().values()) == {0}
        assert redone(running.steps()) == []


CLOUD = """
import json, pathlib, sys
folder = pathlib.Path(__file__).parent
calls = folder / "calls"
calls.write_text((calls.read_text() if calls.exists() else "") + json.dumps(sys.argv[1:]) + "\\n")
size = folder / "size"
if sys.argv[1] == "current":
    print(size.read_text())
elif (folder / "broken").exists():
    sys.exit("no quota")
else:
    size.write_text(sys.argv[2])
"""


@pytest.mark.slow
def test_a_command_is_asked_and_told(etcd: OutsideEtcd, tmp_path: Path) -> None:
    """The machines are started here, by what the command was asked for."""
    folder = tmp_path / "cloud"
    folder.mkdir()
    (folder / "cloud.py").write_text(CLOUD)
    (folder / "size").write_text("1")
    (folder / "broken").write_text("")

    def calls() -> list[list[str]]:
        found = [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
        return [call for call in found if call[0] != "current"]

    with job(etcd, tmp_path, f"--scheduler=exec:{sys.executable} {folder / 'cloud.py'}") as running:
        first = running.start("a")
        running.wait_world(1)
        assert running.cli("scale", "3", "--no-wait", "--reason=more data").returncode == 0
        status = running.wait_status(lambda status: "no quota" in status["scale"]["waiting"], "an explanation")
        assert status["phase"] == "running", "the job goes on"
        (folder / "broken").unlink()
        until(lambda: (folder / "size").read_text() == "3", "the request")
        assert first.text.count("no quota") == 1, "said once"
        running.start("b", "c")
        three = running.wait_world(3)
        running.wait_steps(20)
        assert running.cli("scale", "2", "--no-wait").returncode == 0
        two = running.wait_world(2, after=three.round)
        (gone,) = set(three.nodes.values()) - set(two.nodes.values())
        assert running.nodes[gone].exit_code() == 0
        until(lambda: (folder / "size").read_text() == "2", "the release")
        running.end_soon()
        assert set(running.exit_codes().values()) == {0}
        assert redone(running.steps()) == []
    assert ["request", "3", "more data"] in calls()
    assert [call[:2] + call[3:] for call in calls() if call[0] == "release"] == [["release", "2", gone]]
