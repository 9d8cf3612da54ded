"""What a member's etcd is started with, and what is said of it, as its version needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.adapters import etcd_server
from edl.adapters.etcd_plan import plan_members
from edl.adapters.etcd_server import EtcdMember, version_of
from edl.adapters.identity import identity_of
from edl.wire.secret import Secret

GONE_IN_3_7 = ("experimental-", "snapshot-count", "max-snapshots")


def names_of(flags: list[str]) -> set[str]:
    return {flag.removeprefix("--").partition("=")[0] for flag in flags}


@pytest.mark.parametrize("version", [(3, 5, 1), (3, 6, 0), (3, 7, 0), (4, 0, 0), (0, 0, 0)])
def test_each_version_gets_the_flags_that_it_knows(
    version: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_server, "version_of", lambda binary: version)
    plan, *_ = plan_members(["h:1", "i:1", "j:1"], identity_of(Secret(b"a" * 32)))
    names = names_of(EtcdMember(plan, tmp_path, binary="/bin/true")._flags("", existing=False))
    older = version < (3, 6)
    assert ("experimental-peer-skip-client-san-verification" in names) == older
    assert ("peer-skip-client-san-verification" in names) != older
    assert ("experimental-initial-corrupt-check" in names) == older
    assert ("feature-gates" in names) != older
    assert ("snapshot-count" in names) == (version < (3, 7))
    if version >= (3, 7):
        assert not [name for name in names if name.startswith(GONE_IN_3_7)]


def test_members_compare_their_data_before_they_serve_and_an_etcd_with_a_known_flaw_is_named(tmp_path: Path) -> None:
    alone, *_ = plan_members(["h:1"])
    one_of_three, *_ = plan_members(["h:1", "i:1", "j:1"])

    def of_version(text: str) -> str:
        program = tmp_path / f"etcd-{text}"
        program.write_text(f"#!/bin/sh\necho 'etcd Version: {text}'\n")
        program.chmod(0o755)
        return str(program)

    flaws = {"3.4.23": 0, "3.5.0": 2, "3.5.2": 2, "3.5.3": 1, "3.5.12": 1, "3.5.13": 0, "3.6.1": 0}
    for text, number in flaws.items():
        member = EtcdMember(one_of_three, tmp_path, binary=of_version(text))
        assert member.flaw.count("(etcd#") == number, text
        assert not number or (f"etcd {text} may" in member.flaw and "etcd 3.5.13 or newer" in member.flaw)
        assert EtcdMember(alone, tmp_path, binary=of_version(text)).flaw == ""
    assert version_of(str(tmp_path / "missing")) == (0, 0, 0)
    flags = EtcdMember(one_of_three, tmp_path, binary=of_version("3.5.2"))._flags("", existing=False)
    assert "--experimental-initial-corrupt-check=true" in flags
    flags = EtcdMember(one_of_three, tmp_path, binary=of_version("3.6.1"))._flags("", existing=False)
    assert "--feature-gates=InitialCorruptCheck=true" in flags
