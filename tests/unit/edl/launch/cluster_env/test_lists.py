"""Cluster environments: Slurm's lists of hosts, and the ports and names that are made up for a job."""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.config import check_job_id
from edl.launch.cluster_env.findings import FIRST_PORT, PORTS, job_name, store_port
from edl.launch.cluster_env.slurm import hosts_of


class TestHostLists:
    @pytest.mark.parametrize(
        ("text", "hosts"),
        [
            ("n[01-03,7],gpu-[099-101]-ib", "n01 n02 n03 n7 gpu-099-ib gpu-100-ib gpu-101-ib"),
            ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
            ("n[9-11],x", "n9 n10 n11 x"),
            ("n[08-11]", "n08 n09 n10 n11"),
            (" a , b ", "a b"),
            ("a", "a"),
            ("", ""),
        ],
    )
    def test_known_ones(self, text: str, hosts: str) -> None:
        assert list(hosts_of(text)) == hosts.split()

    @pytest.mark.parametrize("text", ["n[1", "n1]", "n[]", "n[a]", "n[1-]", "n[2-1]", "n[1,]", "n[[1]]", "n[1]]"])
    def test_what_is_none(self, text: str) -> None:
        with pytest.raises(ValueError):
            list(hosts_of(text))

    def test_a_huge_one_costs_nothing_to_begin(self) -> None:
        text = "n[1-999999999]" * 3
        assert list(itertools.islice(hosts_of(text), 2)) == ["n1n1n1", "n1n1n2"]

    ranges = st.tuples(st.integers(0, 999), st.integers(0, 30), st.integers(1, 4)).map(
        lambda one: (f"{one[0]:0{one[2]}d}-{one[0] + one[1]:0{one[2]}d}", one)
    )

    @given(st.lists(st.tuples(st.sampled_from(["n", "gpu-", "r7c"]), st.lists(ranges, max_size=4)), min_size=1))
    @settings(max_examples=200)
    def test_each_is_its_expansion(self, items: list[tuple[str, list[tuple[str, tuple[int, int, int]]]]]) -> None:
        written, expanded = [], []
        for prefix, ranges in items:
            written.append(f"{prefix}[{','.join(text for text, _ in ranges)}]" if ranges else prefix)
            expanded += [
                f"{prefix}{number:0{max(width, len(str(low)))}d}"
                for _, (low, more, width) in ranges
                for number in range(low, low + more + 1)
            ] or [prefix]
        assert list(hosts_of(",".join(written))) == expanded

    @given(st.text("n[]-,019 x", max_size=40))
    @settings(max_examples=300)
    def test_no_text_harms(self, text: str) -> None:
        try:
            found = list(itertools.islice(hosts_of(text), 50))
        except ValueError:
            return
        assert all(host and not set("[]") & set(host) for host in found)

    @pytest.mark.skipif(not shutil.which("scontrol"), reason="no scontrol: apt-get install slurm-client")
    def test_as_slurm_expands_them(self, tmp_path: Path) -> None:
        conf = tmp_path / "slurm.conf"
        conf.write_text("ClusterName=edl\nSlurmctldHost=localhost\n")
        chance = random.Random(7)
        for _ in range(40):
            items = []
            for _ in range(chance.randint(1, 4)):
                width, bounds = chance.randint(1, 4), [chance.randint(0, 120) for _ in range(chance.randint(1, 3))]
                numbers = ",".join(f"{low:0{width}d}-{low + chance.randint(0, 9):0{width}d}" for low in bounds)
                items.append(chance.choice(["n", "gpu-", "r1c"]) + chance.choice(["", f"[{numbers}]", f"{width}"]))
            text = ",".join(items)
            told = subprocess.run(
                ["scontrol", "show", "hostnames", text],
                env={"SLURM_CONF": str(conf), "PATH": "/usr/bin:/bin"},
                capture_output=True,
                text=True,
                check=True,
            )
            assert list(hosts_of(text)) == told.stdout.split(), text


class TestPortsAndNames:
    @given(st.text())
    def test_ports_are_below_those_for_connections(self, job: str) -> None:
        port = store_port(job)
        assert 20_000 <= port < 30_000 and port % 2 == 0, "the next one is for peers"
        assert port == store_port(job)

    def test_they_are_spread(self) -> None:
        ports = {store_port(f"slurm-{number}-0") for number in range(2000)}
        assert len(ports) > 1500 and FIRST_PORT + 2 * PORTS == 30_000

    @given(st.lists(st.text(), min_size=1))
    def test_names_are_job_ids(self, parts: list[str]) -> None:
        if name := job_name(*parts):
            check_job_id(name)
