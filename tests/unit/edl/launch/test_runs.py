"""The runs of a job of one name: none of them takes what belongs to another."""

from __future__ import annotations

import asyncio

import pytest

from edl.launch import registration as registration_module
from edl.master.stored import whole_job
from edl.ports import Put
from edl.wire.secret import Secret
from tests.unit.edl.launch.test_registration import KEYS, TTL_S, Bench, info, play, refused

SECRET = Secret(b"0123456789abcdef")


@pytest.mark.parametrize("secret", [None, SECRET])
def test_all_launchers_of_a_run_know_it_by_the_same_text(secret: Secret | None) -> None:
    async def scenario(bench: Bench) -> None:
        first, second = bench.registration(secret=secret), bench.registration(secret=secret)
        await first.agree()
        await second.agree()
        assert first.run and first.run == second.run
        assert (await second.rejoin(info("a"))).node == "a"

    play(scenario)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("secret", [None, SECRET])
def test_runs_of_a_job_differ_although_a_secret_gives_them_one_token(secret: Secret | None, in_order: bool) -> None:
    async def scenario(bench: Bench) -> None:
        before, after = bench.registration(secret=secret), bench.registration(secret=secret)
        await before.agree()
        bench.store.write_now(whole_job(KEYS) if in_order else [Put(KEYS.over, b"")])
        await after.agree()
        assert (before.token == after.token) is (secret is not None)
        assert after.run and after.run != before.run

    play(scenario)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_node_that_was_isolated_does_not_join_the_next_run(secret: Secret | None) -> None:
    async def scenario(bench: Bench) -> None:
        isolated = bench.registration(secret=secret)
        await isolated.agree()
        await isolated.join(info("a"))
        bench.clock.advance(TTL_S)
        bench.store.write_now(whole_job(KEYS))
        await bench.registration(secret=secret).agree()
        assert "has ended while this node was isolated" in await refused(isolated.rejoin(info("a")))

    play(scenario)


def test_whom_the_next_run_waits_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration_module, "RETRY_S", 0)

    async def scenario(bench: Bench) -> None:
        await bench.registration().agree()
        leases = [bench.leave_key(node, 5000) for node in ("b", "c")]
        bench.store.write_now([Put(KEYS.over, b"")])
        waiting = asyncio.ensure_future(bench.registration().agree())
        while not bench.said:  # noqa: ASYNC110 - of the code under test
            await asyncio.sleep(0)
        assert bench.said == ["job my-job has ended: waiting for its launchers to leave (b, c)"]
        for lease in leases:
            bench.store.revoke_now(lease)
        await waiting
        assert len(bench.said) == 1

    play(scenario)
