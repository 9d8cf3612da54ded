"""The launcher's options for parameter servers, with the spellings of ``paddle.distributed.launch``.

The settings that all launchers of a job must agree on become ``JobSpec.servers``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edl.config import NodeRange, parse_nnodes
from edl.errors import SettingError
from edl.job_records import MOST_SERVERS, Training
from edl.launch.options import is_default, of_record, record, value
from edl.launch.settings import ServerSettings, Sizes
from edl.launch.slot_options import slots_from
from edl.wire.address import address

MOST_SERVERS_HERE = 256
"""Largest number of pservers of one launcher."""

ONLY_OURS = ("pserver_memory", *(option.name for option in of_record(Training)))
"""Options that have no meaning without edl's own parameter servers."""
_SIZES = ("servers", "trainers", "server_nnodes", "servers_per_node", "trainer_num")


def wants_servers(options: Mapping[str, Any]) -> bool:
    """Whether the job has parameter servers. Raises ``SettingError`` for an option that has no meaning in such a job,
    or without them."""
    wanted = options["run_mode"] == "ps" or any(options[name] for name in _SIZES)
    # The role "trainer" does not imply pservers: torchrun accepts any name as the role.
    wanted = wanted or options["role"] == "pserver"
    if not wanted:
        for name in ONLY_OURS:
            if not is_default(name, options):
                flag = "--" + name.replace("_", "-")
                raise SettingError(
                    flag, options[name], "applies to parameter servers only", "Add --run-mode=ps, or drop it"
                )
    elif not is_default("hang_timeout", options) and value("hang_timeout", options).on:
        raise SettingError(
            "--hang-timeout",
            options["hang_timeout"],
            "trainers of --run-mode=ps do not wait for one another",
            "Drop it: each call to a pserver has its own timeout",
        )
    return wanted


def sizes_with_servers(options: Mapping[str, Any]) -> Sizes:
    """The trainers and pservers of this launcher, the range of nodes, and the training settings. Raises
    ``SettingError``."""
    trainers, servers = options["trainers"].strip(), options["servers"].strip()
    memory, slots = value("pserver_memory", options), slots_of_trainers(options)
    nodes = parse_nnodes(options["nnodes"], options["node_unit"])
    count = 0 if options["role"] == "trainer" else count_from("--servers-per-node", options["servers_per_node"] or "1")
    here = ServerSettings(count, memory_bytes=memory)
    if is_list(trainers):
        endpoints = endpoints_of("--trainers", trainers)
        slots = len(of_this_host(endpoints, options["local_addr"]))
        total = len({host for host, _ in endpoints})
        nodes = NodeRange(total, total)
    elif trainers:
        nodes = _nodes_of(trainers, slots, nodes, options)
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
            "Name an address of this host, or give --local-addr",
        )
    return Sizes(nodes, slots, here, record(Training, options, servers=_bounds(options)))


# --- counts and addresses --------------------------------------------------------------------------------------------


def slots_of_trainers(options: Mapping[str, Any]) -> int:
    """Number of trainers of this node. Raises ``SettingError``."""
    slots = slots_from(options["nproc_per_node"])
    if options["trainer_num"]:
        number = count_from("--trainer-num", options["trainer_num"], least=1)
        if not is_default("nproc_per_node", options) and options["nproc_per_node"] != str(number):
            raise SettingError(
                *("--trainer-num", number, f"--nproc-per-node={options['nproc_per_node']} contradicts it"),
                "Give only one of them",
            )
        return number
    return slots


def _nodes_of(text: str, slots: int, given: NodeRange, options: Mapping[str, Any]) -> NodeRange:
    """The range of nodes for ``--trainers=MIN:MAX`` with ``slots`` trainers per node. ``given``: the range of
    ``--nnodes``. Raises ``SettingError``."""
    low, high = _range("--trainers", text)
    if low % slots or high % slots:
        least, most = -(-low // slots) * slots, max(1, high // slots) * slots
        raise SettingError(
            *("--trainers", text, f"cannot be split into nodes of {slots} trainers each (--nproc-per-node={slots})"),
            f"Use multiples of {slots}, such as --trainers={min(least, most)}:{most}, or another --nproc-per-node",
        )
    nodes = NodeRange(low // slots, high // slots, options["node_unit"])
    if not is_default("nnodes", options) and given != nodes:
        raise SettingError(
            "--trainers", text, f"means {nodes} nodes, but --nnodes={given} is given", "Give only one of them"
        )
    return nodes


def _bounds(options: Mapping[str, Any]) -> tuple[int, int]:
    """Minimum and maximum number of pservers of the job. Raises ``SettingError``."""
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
        raise SettingError(option, text, "must be N or MIN:MAX with 1 <= MIN <= MAX", "Write 2 or 1:4, for example")
    return low, high


def is_list(text: str) -> bool:
    """Whether the text is a list of addresses, not a count."""
    return bool(text) and re.fullmatch(r"[\d:]*", text) is None


def endpoints_of(option: str, text: str) -> list[tuple[str, int]]:
    """Parse ``host:port,…``. Raises ``SettingError``."""
    found: list[tuple[str, int]] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        host, _, port = item.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise SettingError(option, item, "is neither MIN:MAX nor a list of addresses", "Write HOST:PORT,HOST:PORT…")
        if (host, int(port)) in found:
            raise SettingError(option, item, "is listed twice; list each address once")
        found.append((host, int(port)))
    return found


def of_this_host(endpoints: list[tuple[str, int]], local_addr: str) -> list[tuple[str, int]]:
    """The addresses of the list that belong to this host: equal to ``local_addr`` if that is given, otherwise those
    that a socket can be bound to."""
    if local_addr:
        return [one for one in endpoints if one[0] == local_addr]
    from edl.adapters.etcd_cluster import can_bind  # imported late: printing the help does not need it

    return [one for one in endpoints if can_bind(one[0], 0)]


def count_from(option: str, text: str, least: int = 0) -> int:
    """Parse a number of processes of one launcher, from ``least`` to ``MOST_SERVERS_HERE``. Raises
    ``SettingError``."""
    if not text.isdecimal() or not least <= int(text) <= MOST_SERVERS_HERE:
        raise SettingError(option, text, f"must be a number from {least} to {MOST_SERVERS_HERE}")
    return int(text)
