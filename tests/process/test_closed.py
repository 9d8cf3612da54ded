"""Who gets what from a job that did not ask for anything: nobody but its own user."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from tests.process.harness import Job, until

SECRETS = ("EDL_RDZV_CONF", "EDL_SECRET")

SCRIPT = """\
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1].partition("=")[2])
(folder / "seen.new").write_text(json.dumps(dict(os.environ)))
(folder / "seen.new").rename(folder / "seen.json")
while not (folder / "last-step").exists():
    time.sleep(0.05)
"""


def test_a_job_on_one_machine_has_a_store_that_only_its_user_reaches(tmp_path: Path) -> None:
    """etcd listens on no port, `edl status` finds it all the same, and workers do not get the store's password."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {"EDL_RDZV_CONF": "user=me,password=mine"}
    with Job(tmp_path, [], "etcd-embedded", script=(str(script),), nnodes="1", environment=environment) as job:
        job.start("a")
        seen = until((job.steps_folder / "seen.json").exists, "the worker's environment")
        assert seen and not set(SECRETS) & set(json.loads((job.steps_folder / "seen.json").read_text()))
        (etcd,) = [process for process in job.processes() if process.name() == "etcd"]
        assert [one.laddr for one in etcd.net_connections("tcp") if one.status == psutil.CONN_LISTEN] == []
        assert Path(etcd.cwd()).stat().st_mode & 0o777 == 0o700
        assert [node["node"] for node in job.status()["nodes"]] == ["a"]
        job.stop_at(1)
        assert job.exit_codes() == {"a": 0}
