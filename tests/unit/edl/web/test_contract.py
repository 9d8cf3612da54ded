"""schemathesis against the OpenAPI document: no 5xx, and nothing that the document does not say."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.fake_master import JOB
from tests.support.web_fixture import TOKEN, Setup, play

pytestmark = pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis needs Python 3.11")

CONFIG = f"""
[parameters]
"path.job" = "{JOB}"
"path.node" = "node-a"

[checks]
# What a schema allows the job's own rules may refuse; 503 is for a job without a Master, which this one has.
positive_data_acceptance.expected-statuses = ["2xx", 404, 409, 422]
negative_data_rejection.expected-statuses = [400, 401, 404, 405, 413, 415, 422]
"""


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Exit status and what it says."""
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG)
    found: list[tuple[int, str]] = []

    async def scenario(on: Setup) -> None:
        await on.ask("GET", "/healthz")
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
        command += [f"{on.web.url}/openapi.json", f"--header=Authorization: Bearer {TOKEN}", "--seed=7", *options]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder
        )
        said, _ = await process.communicate()
        assert process.returncode is not None
        found.append((process.returncode, said.decode()))
        assert len(on.master.requests) > 20, "it has reached the Master"

    on = play(scenario, limit_s=600)
    assert on.log[1:] == [], "no defect was logged"
    return found[0]


@pytest.mark.slow
def test_the_server_keeps_what_the_document_promises(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--phases=examples,coverage,fuzzing", "--max-examples=3")
    assert code == 0, said
    assert "Tested: 21" in said or "Tested: 20" in said, said


@pytest.mark.soak
def test_the_same_for_longer(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--max-examples=300")
    assert code == 0, said
