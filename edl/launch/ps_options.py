"""The launcher's options for parameter servers, with the spellings of ``paddle.distributed.launch``.

What all launchers of a job must agree on becomes ``JobSpec.servers``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from edl.config import NodeRange, parse_nnodes
from edl.errors import SettingError
from edl.job_records import MOST_SERVERS, Mode, Replication, Training
from edl.launch.settings import ServerSettings
from edl.wire.address import address

MOST_SERVERS_HERE = 256
"""Pservers of one launcher."""

RUN_MODES = ("collective", "ps", "ps-heter", "rpc")

PS_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--run-mode",
        type=click.Choice(RUN_MODES),
        default="collective",
        help="ps: trainers with parameter servers; rpc: as collective. Default: collective.",
    ),
    click.option("--servers", default="", metavar="MIN:MAX|HOST:PORT,…", help="Pservers of the whole job, or which."),
    click.option(
        *("--trainers", "--workers"), default="", metavar="MIN:MAX|HOST:PORT,…", help="Trainers of the whole job."
    ),
    click.option("--server-nnodes", default="", metavar="N|MIN:MAX", help="Nodes with pservers, instead of --servers."),
    click.option(
        *("--servers-per-node", "--server-num"), default="", metavar="N", help="Pservers here. Default: 1 with ps."
    ),
    click.option(
        *("--trainer-num", "--worker-num"), default="", metavar="N", help="Trainers on this node: --nproc-per-node."
    ),
    # In Paddle's own spelling they are Paddle's words.
    click.option(
        *("--run_mode", "paddles_run_mode"),
        type=click.Choice(RUN_MODES),
        default="collective",
        hidden=True,
        allow_from_autoenv=False,
    ),
    click.option(*("--server_num", "paddles_server_num"), default="", hidden=True, allow_from_autoenv=False),
    click.option(
        *("--trainer_num", "--worker_num", "paddles_trainer_num"), default="", hidden=True, allow_from_autoenv=False
    ),
    click.option(
        "--pservers",
        type=click.Choice(["auto", "edl", "script"]),
        default="auto",
        help="edl's own, or processes that run the script, as under Paddle's launcher. Default: as the line is meant.",
    ),
    click.option("--pserver-memory", default="0", metavar="BYTES", help="For each pserver here. Default: see docs."),
    click.option(
        "--ps-mode",
        type=click.Choice([mode.value for mode in Mode]),
        default=Mode.ASYNC.value,
        help="How trainers go together. Default: async.",
    ),
    click.option("--staleness", default="0", metavar="STEPS", help="Most that one may be ahead; 0 for any number."),
    click.option("--staleness-lr", is_flag=True, help="The later a gradient comes, the smaller its LR."),
    click.option("--geo-steps", default="10", metavar="N", help="Steps between exchanges with --ps-mode=geo."),
    click.option(
        "--replication",
        type=click.Choice([kind.value for kind in Replication]),
        default=Replication.SYNC.value,
        help="What a push waits for. Default: sync.",
    ),
    click.option("--replication-lag", default="0.5", metavar="SECONDS", help="Most with --replication=async."),
    click.option("--ps-save-every", default="0", metavar="SECONDS", help="A checkpoint so often; 0 for none."),
]
ONLY_OURS = {
    "ps_mode": Mode.ASYNC.value,
    "staleness": "0",
    "staleness_lr": False,
    "geo_steps": "10",
    "replication": Replication.SYNC.value,
    "replication_lag": "0.5",
    "ps_save_every": "0",
    "pserver_memory": "0",
}
"""Options that say nothing without parameter servers, and their defaults."""
_SIZES = ("servers", "trainers", "server_nnodes", "servers_per_node", "trainer_num")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many trainers and pservers there are, and how many of them are here."""

    nodes: NodeRange
    """Nodes with trainers."""
    slots: int
    """Trainers here; 0: none."""
    here: ServerSettings


def wants_servers(options: Mapping[str, Any]) -> bool:
    """Whether the job has parameter servers. Raises ``SettingError`` for an option that has no meaning then."""
    wanted = options["run_mode"] == "ps" or any(options[name] for name in _SIZES)
    # A trainer alone is a job's that knows no pservers: torchrun takes any name for the role.
    wanted = wanted or options["role"] == "pserver"
    if not wanted:
        for name, default in ONLY_OURS.items():
            if options[name] != default:
                flag = "--" + name.replace("_", "-")
                raise SettingError(flag, options[name], "is for parameter servers", "Add --run-mode=ps, or drop it")
    elif options["hang_timeout"]:
        raise SettingError(
            "--hang-timeout",
            f"{options['hang_timeout']:g}",
            "trainers of --run-mode=ps do not wait for one another",
            "Drop it: each call to a pserver has a deadline of its own",
        )
    return wanted


def sizes(options: Mapping[str, Any], slots_of: Callable[[str], int], memory: int) -> Sizes:
    """Who is here, and how many there may be. ``slots_of`` reads ``--nproc-per-node``. Raises ``SettingError``."""
    trainers, servers = options["trainers"].strip(), options["servers"].strip()
    slots = slots_of_trainers(options, slots_of)
    nodes = parse_nnodes(options["nnodes"], options["node_unit"])
    count = 0 if options["role"] == "trainer" else count_from("--servers-per-node", options["servers_per_node"] or "1")
    here = ServerSettings(count, memory_bytes=memory)
    if is_list(trainers):
        endpoints = endpoints_of("--trainers", trainers)
        slots = len(of_this_host(endpoints, options["local_addr"]))
        total = len({host for host, _ in endpoints})
        nodes = NodeRange(total, total)
    elif trainers:
        nodes = _nodes_of(trainers, slots, options)
    if is_list(servers):
        everywhere = endpoints_of("--servers", servers)
        mine = of_this_host(everywhere, options["local_addr"]) if options["role"] != "trainer" else []
        host, ports = (mine[0][0] if mine else ""), tuple(port for _, port in mine)
        here = ServerSettings(len(mine), ports, host, memory, tuple(address(*one) for one in everywhere))
    if not slots and not here.count:
        raise SettingError(
            "--trainers",
            trainers,
            "neither it nor --servers names an address of this host",
            "Name one, or --local-addr",
        )
    return Sizes(nodes, slots, here)


def training_from(options: Mapping[str, Any]) -> Training:
    """How the job trains, as all its launchers agree. Raises ``SettingError``."""
    low, high = _bounds(options)
    return Training(
        mode=Mode(options["ps_mode"]),
        staleness=_whole("--staleness", options["staleness"]),
        staleness_lr=options["staleness_lr"],
        geo_steps=_whole("--geo-steps", options["geo_steps"]),
        replication=Replication(options["replication"]),
        lag_s=_seconds("--replication-lag", options["replication_lag"]),
        servers=(low, high),
        save_every_s=_seconds("--ps-save-every", options["ps_save_every"]),
    )


# --- counts and addresses --------------------------------------------------------------------------------------------


def slots_of_trainers(options: Mapping[str, Any], slots_of: Callable[[str], int]) -> int:
    """Trainers of this node. ``slots_of`` reads ``--nproc-per-node``. Raises ``SettingError``."""
    slots = slots_of(options["nproc_per_node"])
    if options["trainer_num"]:
        number = count_from("--trainer-num", options["trainer_num"], least=1)
        if options["nproc_per_node"] not in ("1", str(number)):
            raise SettingError(
                *("--trainer-num", number, f"--nproc-per-node={options['nproc_per_node']} says the same otherwise"),
                "Give one of them",
            )
        return number
    return slots


def _nodes_of(text: str, slots: int, options: Mapping[str, Any]) -> NodeRange:
    low, high = _range("--trainers", text)
    if low % slots or high % slots:
        least, most = -(-low // slots) * slots, max(1, high // slots) * slots
        raise SettingError(
            *("--trainers", text, f"cannot be split into nodes of {slots} trainers each (--nproc-per-node={slots})"),
            f"Use multiples of {slots}, such as --trainers={min(least, most)}:{most}, or another --nproc-per-node",
        )
    nodes = NodeRange(low // slots, high // slots, options["node_unit"])
    given = parse_nnodes(options["nnodes"], options["node_unit"])
    if options["nnodes"] != "1:1" and given != nodes:
        raise SettingError(
            "--trainers", text, f"is {nodes} nodes, and --nnodes={given} says otherwise", "Give one of them"
        )
    return nodes


def _bounds(options: Mapping[str, Any]) -> tuple[int, int]:
    """Least and most pservers of the job."""
    text, nodes = options["servers"].strip(), options["server_nnodes"].strip()
    if is_list(text):
        count = len(endpoints_of("--servers", text))
        return count, count
    if text:
        low, high = _range("--servers", text)
    elif nodes:
        each = count_from("--servers-per-node", options["servers_per_node"] or "1", least=1)
        low, high = (each * number for number in _range("--server-nnodes", nodes))
    else:
        low, high = Training().servers
    if high > MOST_SERVERS:
        raise SettingError("--servers", f"{low}:{high}", f"at most {MOST_SERVERS} pservers are supported")
    return low, high


def _range(option: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,7})(?::(\d{1,7}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise SettingError(option, text, "must be N or MIN:MAX with 1 <= MIN <= MAX", "Such as 2 or 1:4")
    return low, high


def is_list(text: str) -> bool:
    """Whether it names addresses, and does not count."""
    return bool(text) and re.fullmatch(r"[\d:]*", text) is None


def endpoints_of(option: str, text: str) -> list[tuple[str, int]]:
    """``host:port,…``"""
    found: list[tuple[str, int]] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        host, _, port = item.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise SettingError(option, item, "is neither MIN:MAX nor a list of addresses", "Write HOST:PORT,HOST:PORT…")
        if (host, int(port)) in found:
            raise SettingError(option, item, "is named twice")
        found.append((host, int(port)))
    return found


def of_this_host(endpoints: list[tuple[str, int]], local_addr: str) -> list[tuple[str, int]]:
    """Those that this launcher is meant by."""
    if local_addr:
        return [one for one in endpoints if one[0] == local_addr]
    from edl.adapters.etcd_cluster import can_bind  # only now: the network libraries are not needed to print the help

    return [one for one in endpoints if can_bind(one[0], 0)]


def count_from(option: str, text: str, least: int = 0) -> int:
    """A number of processes of one launcher. Raises ``SettingError``."""
    if not text.isdecimal() or not least <= int(text) <= MOST_SERVERS_HERE:
        raise SettingError(option, text, f"must be a number from {least} to {MOST_SERVERS_HERE}")
    return int(text)


def _whole(option: str, text: str) -> int:
    if not text.isdecimal():
        raise SettingError(option, text, "must be a whole number, 0 or more")
    return int(text)


def _seconds(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingError(option, text, "must be a number of seconds") from None
