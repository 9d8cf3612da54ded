"""A host that one real job found bad is not used by the next one, until somebody lifts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.harness import Job, OutsideEtcd, until


@pytest.mark.soak_but("store")
@pytest.mark.slow
@pytest.mark.parametrize("place", ["directory", "store"])
def test_the_next_job_does_not_use_it(etcd: OutsideEtcd, tmp_path: Path, place: str) -> None:
    where = "store" if place == "store" else str(tmp_path / "denylist")
    at = ["--at=store", f"--rdzv-endpoint={etcd.endpoint}"] if place == "store" else [f"--at={where}"]
    options = (f"--denylist={where}", "--denylist-for=3600")
    with Job(tmp_path, [etcd.endpoint], nnodes="1:2", options=options, arguments=("--bad-slot=b/0",)) as first:
        first.start("a", options=("--host-id=m-a",))
        first.start("b", options=("--host-id=m-b",))
        first.wait_world(1)
        listed = json.loads(_until_listed(first, at))
        assert [(one["host"], one["device"], one["by"]) for one in listed] == [("m-b", "", f"job {first.name}")]
        assert "RuntimeError: the card in b/0 does not answer" in listed[0]["reason"]
        assert listed[0]["until_s"] - listed[0]["since_s"] == 3600
        first.end_soon()
        first.exit_codes()
    with Job(tmp_path, [etcd.endpoint], nnodes="1:2", options=options) as second:
        second.start("c", options=("--host-id=m-b",))
        status = second.wait_status(lambda seen: seen["dropped"], "the denylist of c")
        assert (status["dropped"][0]["by"], status["dropped"][0]["host_id"]) == ("denylist", "m-b")
        second.wait_status(lambda seen: "c on the denylist (edl denylist)" in seen["reason"], "the reason for waiting")
        second.start("d", options=("--host-id=m-d",))
        assert second.wait_world(1).ranks("d") == [0]
        refused = second.cli("uncordon", "c", "--device=0")
        assert refused.returncode != 0 and "To lift it for all jobs: edl denylist remove" in refused.stderr
        removed = second.edl("denylist", "remove", "M-B", *at)
        assert removed.stdout.strip() == "removed: m-b", removed.stderr
        assert set(second.wait_world(2).nodes.values()) == {"c", "d"}
        by_hand = second.edl("denylist", "add", "m-b", "--for=1h", "--reason=fans are loud", *at)
        assert by_hand.stdout.startswith("host m-b: until "), by_hand.stderr
        second.wait_status(lambda seen: seen["world_size"] == 1 and seen["dropped"], "a world without m-b")
        second.end_soon()
        second.exit_codes()


def _until_listed(job: Job, at: list[str]) -> str:
    def look() -> str:
        text = job.edl("denylist", "list", "--json", *at).stdout
        return text if text and json.loads(text) else ""

    return until(look, "an entry in the denylist")
