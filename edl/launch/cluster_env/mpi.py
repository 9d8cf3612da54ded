"""MPI: ``mpirun`` or ``mpiexec`` starts one launcher on each host. MPI itself is not used, only its process starter.

Variables: Open MPI, "Environment variables set for MPI applications"; those of the process managers of MPICH, Intel MPI
(hydra) and MVAPICH2. None of them names the first process's host, so the store's host comes from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from edl.errors import SettingError
from edl.launch.cluster_env.findings import Findings, first_of, host_name, in_range, job_name, number, shortened
from edl.launch.cluster_env.slurm import hosts_of


@dataclass(frozen=True, slots=True)
class Flavour:
    """The names of one MPI implementation's variables."""

    title: str
    size: str
    rank: str
    local_size: str
    local_rank: str
    job: tuple[str, ...]
    """Variables that identify the run."""
    one_per_node: str
    """The option of mpirun for one process per host."""


FLAVOURS = (
    Flavour(
        "Open MPI",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        "--map-by ppr:1:node",
    ),
    Flavour(
        "MVAPICH2",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        (),
        "-ppn 1",
    ),
    # srun sets PMI_SIZE as well if it provides PMI; only hydra sets the local variables.
    Flavour("MPICH", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", ("PMI_KVSNAME",), "-ppn 1"),
)
HEAD = "OMPI_MCA_orte_hnp_uri"
"""The addresses of Open MPI 4's mpirun."""
BATCH_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""Ids of the surrounding batch job. They are part of the job's name, so that two runs from one host get different
ports."""


def find(env: Mapping[str, str]) -> Findings | None:
    """Findings from mpirun. Raises ``SettingError`` for several launchers on a host or broken variables."""
    flavour = next((one for one in FLAVOURS if all(env.get(name) for name in (one.size, one.local_rank))), None)
    if flavour is None:
        return None
    nnodes = number(env, flavour.size, least=1)
    rank = in_range(flavour.rank, number(env, flavour.rank), nnodes)
    here = max(number(env, flavour.local_size), number(env, flavour.local_rank) + 1)
    if here > 1:
        name = flavour.local_size if env.get(flavour.local_size) else flavour.local_rank
        raise SettingError(
            name,
            env[name],
            f"{flavour.title} has started several launchers on this host, but one starts all workers of its node",
            f"Use mpirun {flavour.one_per_node}, and --nproc-per-node for the workers. For a separate job per "
            "launcher: --cluster-env=none",
        )
    host, port, origin = _store(env, nnodes, rank)
    run, batch = first_of(env, *flavour.job), first_of(env, *BATCH_JOBS)
    job = job_name("mpi", env.get(batch, ""), env.get(run, "") or host, "" if run else str(nnodes))
    passing = "-x MASTER_ADDR=HOST" if flavour is FLAVOURS[0] else "-genv MASTER_ADDR HOST"
    alone = "For a separate job per launcher: --cluster-env=none"
    advice = f"Name that host: mpirun {passing}, or --rdzv-endpoint=HOST:PORT. {alone}"
    return Findings(flavour.title, nnodes, rank, host, port, job, origin, advice=advice)


def _store(env: Mapping[str, str], nnodes: int, rank: int) -> tuple[str, int, str]:
    """Host and port of the store, and the variable that gave the host; 0 and empty strings if unknown. Raises
    ``SettingError``."""
    if env.get("MASTER_ADDR"):
        port = max(number(env, "MASTER_PORT", least=1, most=65535), 0)
        return host_name(env, "MASTER_ADDR", nnodes), port, "MASTER_ADDR"
    listed = env.get("SLURM_JOB_NODELIST", "")
    if listed:
        name = "SLURM_JOB_NODELIST"
        try:
            return host_name({name: next(hosts_of(listed))}, name, nnodes), 0, name
        except (ValueError, StopIteration, RecursionError):
            advice = "Name the first host: mpirun -x MASTER_ADDR=HOST"
            raise SettingError(name, shortened(listed), "is not a Slurm host list", advice) from None
    return _mpirun_host(env, rank), 0, HEAD


def _mpirun_host(env: Mapping[str, str], rank: int) -> str:
    """The address of Open MPI 4's mpirun, if its first process runs on the same host; empty: unknown.

    Rank 0 checks that: mpirun itself is its daemon then. The other ranks rely on it, because all end if rank 0 fails to
    start. With addresses in several networks the one that other hosts reach is unknown.
    """
    if rank == 0 and env.get(HEAD) != env.get("OMPI_MCA_orte_local_daemon_uri"):
        return ""
    addresses = re.findall(r"tcp://([^:;/]+):", env.get(HEAD, ""))
    outward = [one for one in addresses[0].split(",") if not one.startswith("127.")] if addresses else []
    return outward[0] if len(outward) == 1 and re.fullmatch(r"[0-9.]+", outward[0]) else ""
