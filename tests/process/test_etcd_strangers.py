"""A foreign etcd listens on the port of a member that is down for a moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.adapters.etcd import EtcdStore
from edl.adapters.etcd_plan import plan_members
from edl.adapters.etcd_server import EtcdMember
from edl.errors import StoreUnavailable
from edl.ports import ModifiedAt, Put
from tests.process.etcd_fixture import kill, run
from tests.process.harness import lone_member


@pytest.mark.slow
def test_an_etcd_of_others_that_has_taken_the_port_of_a_member_is_not_believed(tmp_path: Path) -> None:
    """It knows no key and no lease of this job, which therefore is neither over nor lost."""

    async def body() -> None:
        member = await lone_member(tmp_path / "ours")
        (plan,) = plan_members([member.endpoint])
        stranger = EtcdMember(plan, tmp_path / "theirs", token="another job")
        store = EtcdStore([member.endpoint], request_timeout_s=2.0, one_cluster=True)
        store.expect(ours := await member.cluster_id())
        watch = store.watch("a", 0)
        try:
            await store.write([Put("a", b"1")])
            assert (await anext(watch)).entry.key == "a"
            lease = await store.grant_lease(60)
            kill(member)
            await member.stop(0)
            stranger.start()
            await stranger.wait_ready(60)
            assert await stranger.cluster_id() not in (0, ours)
            for call in (lambda: store.read("a"), lambda: store.renew_lease(lease), lambda: store.revoke_lease(lease)):
                with pytest.raises(StoreUnavailable, match="an etcd of another cluster"):
                    await call()
            with pytest.raises(StoreUnavailable, match="an etcd of another cluster"):
                await store.write([Put("b", b"")], [ModifiedAt("a", 2)])
            await stranger.stop(0)
            member.start()
            await member.wait_ready(60)
            assert [entry.value for entry in (await store.read("a")).entries] == [b"1"]
            assert await store.renew_lease(lease) > 0
            await store.write([Put("a", b"2")])
            assert (await anext(watch)).entry.value == b"2", "the watch has gone on, and told nothing else"
        finally:
            await store.close()
            for one in (stranger, member):
                await one.stop(0)

    run(body())
