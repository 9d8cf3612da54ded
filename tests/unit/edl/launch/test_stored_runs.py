"""The run of a job as its launchers know it is the one that others read from the store."""

from __future__ import annotations

import pytest

from edl.launch.stored_runs import fingerprint, stored_run
from edl.ports import Put
from edl.wire.secret import Secret
from tests.unit.edl.launch.test_registration import JOB, KEYS, Bench, play


@pytest.mark.parametrize("secret", [None, Secret(b"0123456789abcdef")])
def test_the_stored_run_is_that_of_the_launchers(secret: Secret | None) -> None:
    async def scenario(bench: Bench) -> None:
        assert await stored_run(bench.store, secret, JOB) == ""
        first = bench.registration(secret=secret)
        await first.agree()
        found = await stored_run(bench.store, secret, JOB)
        assert found == fingerprint(first.run)
        assert first.token not in found, "the token is secret"
        bench.store.write_now([Put(KEYS.run if secret is not None else KEYS.token, b"another")])
        assert await stored_run(bench.store, secret, JOB) != found

    play(scenario)
