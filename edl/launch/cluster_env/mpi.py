"""Plain MPI: ``mpirun`` or ``mpiexec`` with one launcher on each host. MPI itself is not used, only what starts it.

Variables: Open MPI, "Environment variables set for MPI applications"; MPICH's and Intel's hydra and MVAPICH2 as their
process managers set them. None of them says where the first process runs, so the store's host comes from elsewhere.
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
    """Variables of one MPI implementation."""

    title: str
    size: str
    rank: str
    local_size: str
    local_rank: str
    job: tuple[str, ...]
    """Variables that name the run."""
    one_a_node: str
    """The option for one process on each host."""


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
    # Slurm's srun sets PMI_SIZE, too, where it serves PMI; the local numbers are hydra's.
    Flavour("MPICH", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", ("PMI_KVSNAME",), "-ppn 1"),
)
HEAD = "OMPI_MCA_orte_hnp_uri"
BATCH_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""Numbers of batch jobs around it: with them two runs from one host have ports of their own."""


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
            f"{flavour.title} has started several launchers on this host; one starts all workers of its node",
            f"Write mpirun {flavour.one_a_node}, and --nproc-per-node for the workers; --cluster-env=none for a job of "
            "each one's own",
        )
    host, port, origin = _store(env, nnodes, rank)
    run, batch = first_of(env, *flavour.job), first_of(env, *BATCH_JOBS)
    job = job_name("mpi", env.get(batch, ""), env.get(run, "") or host, "" if run else str(nnodes))
    passing = "-x MASTER_ADDR=HOST" if flavour is FLAVOURS[0] else "-genv MASTER_ADDR HOST"
    alone = "--cluster-env=none for a job of each one's own"
    advice = f"Name that host: mpirun {passing}, or --rdzv-endpoint=HOST:PORT; {alone}"
    return Findings(flavour.title, nnodes, rank, host, port, job, origin, advice=advice)


def _store(env: Mapping[str, str], nnodes: int, rank: int) -> tuple[str, int, str]:
    """Host, port, and where they were said; the port is 0 and the rest empty where nothing is."""
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
            raise SettingError(name, shortened(listed), "is no list of hosts as Slurm writes them", advice) from None
    return _mpirun_host(env, rank), 0, HEAD


def _mpirun_host(env: Mapping[str, str], rank: int) -> str:
    """Where Open MPI 4's mpirun runs, if that is where its first process runs; empty: not known.

    The first process can tell, as then its daemon is mpirun itself, and where it cannot start the others end with it.
    With several networks there is no saying which address the others reach.
    """
    if rank == 0 and env.get(HEAD) != env.get("OMPI_MCA_orte_local_daemon_uri"):
        return ""
    addresses = re.findall(r"tcp://([^:;/]+):", env.get(HEAD, ""))
    outward = [one for one in addresses[0].split(",") if not one.startswith("127.")] if addresses else []
    return outward[0] if len(outward) == 1 and re.fullmatch(r"[0-9.]+", outward[0]) else ""
