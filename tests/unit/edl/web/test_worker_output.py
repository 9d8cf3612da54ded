"""Output and stacks of a node's workers over HTTP."""

from __future__ import annotations

from pathlib import Path

from edl.web.settings import HttpSettings
from edl.wire.node_requests import OutputLine, OutputRequest
from tests.support.web_fixture import TOKEN, Setup, play

OUTPUT = "JOB/nodes/node-a/output"
STACKS = "JOB/nodes/node-a/stacks"


def test_lines_and_those_since_then() -> None:
    async def scenario(on: Setup) -> None:
        for rules in (True, False):
            on.web.use_master(on.master if rules else None)  # any launcher answers, also without a Master
            first = (await on.ask("GET", OUTPUT)).json
            assert first["lines"][0]["text"] == "step 1" and not first["gap"]
            assert (await on.ask("GET", f"{OUTPUT}?after={first['next']}")).json["lines"] == []
            on.output.lines.append(OutputLine(1, 1, False, "more"))
            later = (await on.ask("GET", f"{OUTPUT}?after={first['next']}&lines=5")).json
            assert [(line["rank"], line["text"]) for line in later["lines"]] == [(1, "more")]
            assert on.output.asked[-1] == OutputRequest(lines=5, after=first["next"])
        assert on.output.asked[0] == OutputRequest(lines=100)

    play(scenario)


def test_stacks() -> None:
    async def scenario(on: Setup) -> None:
        assert (await on.ask("POST", STACKS)).json["lines"][0]["text"] == 'File "train.py", line 7, in train'
        assert (await on.ask("GET", STACKS)).code == 405, "asking interrupts the workers for a moment"

    play(scenario)


def test_full_access_is_needed(tmp_path: Path) -> None:
    (tmp_path / "full").write_text(TOKEN)
    (tmp_path / "read").write_text("may-only-read")
    settings = HttpSettings(0, token_file=str(tmp_path / "full"), read_token_file=str(tmp_path / "read"))

    async def scenario(on: Setup) -> None:
        for method, path in (("GET", OUTPUT), ("POST", STACKS)):
            for token, code in ((None, 401), ("wrong-token", 401), ("may-only-read", 403), (TOKEN, 200)):
                reply = await on.ask(method, path, token=token)
                assert reply.code == code and ("step 1" in reply.text) == (code == 200 and path == OUTPUT)
        assert len(on.output.asked) == 1, "nobody else has got through"

    play(scenario, settings)


def test_what_cannot_be_answered() -> None:
    async def scenario(on: Setup) -> None:
        for node, code in (("nobody", 404), ("no%20body", 404), ("node-b", 503)):
            for method, what in (("GET", "output"), ("POST", "stacks")):
                reply = await on.ask(method, f"JOB/nodes/{node}/{what}")
                assert (reply.code, reply.json["kind"]) == (code, "Status")
        assert (await on.ask("GET", f"{OUTPUT}?lines=1001")).code == 400
        assert (await on.ask("GET", f"{OUTPUT}?after=-1")).code == 400
        on.web.deps.worker_output = None
        assert (await on.ask("GET", OUTPUT)).code == 503, "the launcher is starting"

    assert len(play(scenario).log) == 1, "nothing of it is a defect"
