"""A launcher joins no job of another user or script unless told to by an option."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from edl.errors import ForeignJob, JobConflict, SettingError
from edl.exit_codes import ExitCode
from edl.launch.options import value
from edl.launch.origin import origin_of
from edl.launch.registration import Registration
from edl.ports import CommandKind, Put, WorkerCommand
from edl.types import NodeId
from edl.wire import plain
from edl.wire.origin import ASPECTS, Origin, refused
from edl.wire.secret import Secret
from tests.unit.edl.launch.test_registration import KEYS, SPEC, Bench, info, play

ALICE = Origin("a", "h1", 1000, "alice", "train.py", "d1" * 32, "0.1.0", "3.12", ("torch 2.9.0",))
SECRET = Secret(b"s" * 32)


def other(**changes: object) -> Origin:
    return dataclasses.replace(ALICE, node="b", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mine", "aspects"), [
    (other(), []),
    (other(host="h2"), []),
    (other(host="h2", uid=2000), []),  # hosts number their users differently
    (other(host="h2", user=""), []),
    (other(uid=2000), ["owner"]),
    (other(uid=2000, user="bob"), ["owner"]),
    (other(host="h2", uid=2000, user="bob"), ["owner"]),
    (other(host="h2", uid=2000, user=""), ["owner"]),
    (other(script="/elsewhere/train.py"), []),
    (other(digest="d2" * 32), ["script"]),
    (other(digest=""), []),
    (other(edl="0.2.0"), []),  # see wire/test_release.py
    (other(python="3.11"), ["versions"]),
    (other(frameworks=("torch 2.8.0",)), ["versions"]),
    (other(frameworks=(), python=""), []),
    (other(uid=2000, user="bob", digest="d2" * 32, python="3.9"), ["owner", "script", "versions"]),
])  # fmt: skip
def test_what_is_another_job(mine: Origin, aspects: list[str]) -> None:
    found = mine.differences(ALICE, proved=False)
    assert list(found) == aspects
    assert list(mine.differences(ALICE, proved=True)) == [one for one in aspects if one != "owner"]
    assert not refused(found, aspects)


def registration(bench: Bench, origin: Origin, *allowed: str, secret: Secret | None = None) -> Registration:
    hosts, node = bench.hosts, NodeId(origin.node)
    return Registration(
        *(bench.store, KEYS, SPEC, node, hosts.refuses, hosts.answers), secret=secret, origin=origin, allowed=allowed
    )


async def founded(bench: Bench, secret: Secret | None = None) -> None:
    first = registration(bench, ALICE, secret=secret)
    await first.agree()
    await first.join(info("a"))


BOB = other(uid=2000, user="bob", digest="d2" * 32)


def test_a_second_user_with_the_same_id_is_refused_and_nothing_is_touched() -> None:
    async def scenario(bench: Bench) -> None:
        await founded(bench)
        revision = bench.store.revision
        with pytest.raises(ForeignJob) as caught:
            await registration(bench, BOB).agree()
        text = str(caught.value)
        assert caught.value.exit_code is ExitCode.FOREIGN_JOB
        assert (
            "bob (uid 2000) at h1 here, alice (uid 1000) at h1 in the job (the job was started by node a on h1)" in text
        )
        assert "script: train.py (sha256 d2d2" in text and "--allow-differences=owner,script" in text
        assert bench.store.revision == revision

    play(scenario)


def test_what_is_allowed_is_no_reason() -> None:
    async def scenario(bench: Bench) -> None:
        await founded(bench)
        with pytest.raises(ForeignJob, match="--allow-differences=owner"):
            await registration(bench, BOB, "script").agree()
        await registration(bench, BOB, "script", "owner").agree()
        assert plain.loads(Origin, bench.value(KEYS.origin) or b"") == ALICE

    play(scenario)


def test_who_holds_the_secret_may_be_another_user_but_not_run_another_script() -> None:
    async def scenario(bench: Bench) -> None:
        await founded(bench, SECRET)
        await registration(bench, other(uid=2000, user="bob"), secret=SECRET).agree()
        with pytest.raises(ForeignJob, match="script"):
            await registration(bench, BOB, secret=SECRET).agree()

    play(scenario)


def test_a_job_whose_launchers_are_gone_is_founded_again_under_the_new_owner() -> None:
    async def scenario(bench: Bench) -> None:
        await registration(bench, ALICE).agree()
        await bench.store.write([Put(KEYS.record, b"of alice")], [])
        await registration(bench, BOB).agree()
        assert bench.value(KEYS.record) is None
        assert plain.loads(Origin, bench.value(KEYS.origin) or b"") == BOB

    play(scenario)


def test_a_running_job_of_an_unknown_version_is_not_joined() -> None:
    async def scenario(bench: Bench) -> None:
        old = bench.registration()  # says nothing of itself
        await old.agree()
        await old.join(info("a"))
        revision = bench.store.revision
        for allowed in ((), ASPECTS):
            with pytest.raises(
                ForeignJob, match=r"started by an unknown version of edl, and this launcher is edl 0\.1\.0"
            ):
                await registration(bench, BOB, *allowed).agree()
        assert bench.store.revision == revision

    play(scenario)


NEXT = other(edl="0.2.0")


def test_a_launcher_of_another_version_is_refused_whatever_it_allows_and_nothing_is_touched() -> None:
    async def scenario(bench: Bench) -> None:
        await founded(bench)
        revision = bench.store.revision
        for allowed in ((), ASPECTS):
            with pytest.raises(ForeignJob) as caught:
                await registration(bench, NEXT, *allowed).agree()
            text = str(caught.value)
            assert "runs edl 0.1.0 (started by node a on h1), and this launcher is edl 0.2.0" in text
            assert "Install edl 0.1.0 on this node" in text and "start all launchers with edl 0.2.0" in text
            assert "--allow-differences" not in text
        assert bench.store.revision == revision

    play(scenario)


def test_a_job_whose_settings_this_version_cannot_read_is_refused_for_its_version() -> None:
    async def scenario(bench: Bench) -> None:
        await founded(bench)
        lease = bench.leave_key("a2", 1)
        unreadable = [Put(KEYS.spec, b"2"), Put(KEYS.node(NodeId("0")), b"2", lease)]
        for origin, text in ((b'{"edl":"3.0.0","uid":"x"}', "runs edl 3.0.0"), (b'{"edl":3}', "an unknown version")):
            await bench.store.write([*unreadable, Put(KEYS.origin, origin)], [])
            revision = bench.store.revision
            with pytest.raises(ForeignJob, match=text):
                await registration(bench, ALICE).agree()
            assert bench.store.revision == revision

    play(scenario)


def test_a_later_patch_of_the_same_version_joins() -> None:
    async def scenario(bench: Bench) -> None:
        await founded(bench)
        patched = registration(bench, other(edl="0.1.7"))
        await patched.agree()
        await patched.join(info("b", 5001))

    play(scenario)


def test_a_job_whose_launchers_are_gone_is_founded_again_by_another_version() -> None:
    async def scenario(bench: Bench) -> None:
        await founded(bench)
        bench.hosts.dead.add(5000)
        await bench.store.write([Put(KEYS.record, b"of another form")], [])
        await registration(bench, NEXT).agree()
        assert bench.value(KEYS.record) is None
        assert plain.loads(Origin, bench.value(KEYS.origin) or b"") == NEXT

    play(scenario)


def test_two_that_found_at_once_agree_on_one_founder() -> None:
    async def scenario(bench: Bench) -> None:
        twin = other(host="h2")
        await asyncio.gather(registration(bench, ALICE).agree(), registration(bench, twin).agree())
        assert plain.loads(Origin, bench.value(KEYS.origin) or b"") in (ALICE, twin)

    play(scenario)


def test_what_a_launcher_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"a.py": "1", "b.py": "2", "copy.py": "1", "pack/__main__.py": "3", "s.sh": "#!/bin/sh", "elf": "\x7fELF"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def digest(kind: CommandKind, target: str) -> str:
        return origin_of(WorkerCommand(kind, target), "n", "").digest

    script, module, program = CommandKind.SCRIPT, CommandKind.MODULE, CommandKind.PROGRAM
    assert digest(script, "a.py") == digest(script, "copy.py") == digest(module, "a") != digest(script, "b.py")
    assert digest(module, "pack") and digest(program, "s.sh")
    assert not digest(program, "elf") and not digest(module, "none") and not digest(CommandKind.CALL, "a.py")
    elsewhere = origin_of(WorkerCommand(script, "a.py"), "n", "/other/python")
    assert not elsewhere.python and not elsewhere.frameworks and elsewhere.edl


def test_the_option() -> None:
    assert value("allow_differences", {"allow_differences": " script,owner,"}) == ("script", "owner")
    with pytest.raises(SettingError, match="owner, script, versions"):
        value("allow_differences", {"allow_differences": "all"})


def test_a_wrong_secret_on_one_node_of_four_is_named_and_the_three_lose_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        for name, port in (("a", 1), ("b", 2), ("c", 3)):
            hosts, node = bench.hosts, NodeId(name)
            one = Registration(*(bench.store, KEYS, SPEC, node, hosts.refuses, hosts.answers), secret=SECRET)
            await one.agree()
            await one.join(info(name, port))
        revision = bench.store.revision
        wrong, hosts = Secret(b"w" * 32), bench.hosts
        for other_secret, ours in ((wrong, wrong.fingerprint), (None, "none")):
            last = Registration(
                *(bench.store, KEYS, SPEC, NodeId("d"), hosts.refuses, hosts.answers), secret=other_secret
            )
            with pytest.raises(
                JobConflict, match=f"--secret-file: .*{ours}.*the running job has .*{SECRET.fingerprint}"
            ):
                await last.agree()
        assert bench.store.revision == revision
        assert sum(key.startswith(KEYS.nodes) for key in bench.keys()) == 3  # noqa: SIM118 - no dict

    play(scenario)
