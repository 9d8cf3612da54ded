"""Pservers that run the script, as under paddle.distributed.launch: decides whether a command line means them, and how
many there are.

They occupy slots of a node, as trainers do. All of them form one world, and a failure of one restarts all, as under
Paddle's launcher. What they hold is up to the script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edl.agent.workers.paddle_environment import ScriptPlaces
from edl.config import NodeRange, ScriptServers, parse_nnodes
from edl.errors import SettingError
from edl.launch.options import is_default
from edl.launch.ps_options import ONLY_OURS, count_from, endpoints_of, is_list, of_this_host, slots_of_trainers
from edl.launch.resolved_options import ResolvedOptions
from edl.launch.settings import Sizes
from edl.launch.torchrun_options import OWN_ROLES
from edl.wire.address import address

WORDS = {
    "paddles_run_mode": ("run_mode", "--run_mode"),
    "paddles_server_num": ("servers_per_node", "--server_num"),
    "paddles_trainer_num": ("trainer_num", "--trainer_num"),
}
"""Options in Paddle's own spelling: the corresponding option of edl, and the name for messages."""
CLIENTS = ("edl.torch.ps", "edl.paddle.ps", "ps")
"""A script that imports one of these modules uses edl's own pservers."""
_GLOO = ("0", "1", "2")
"""Values of ``--with_gloo``."""


def take_words(resolved: ResolvedOptions) -> None:
    """Offer the options in ``WORDS``, which are in Paddle's own spelling, as edl's options."""
    for word, (ours, name) in WORDS.items():
        if resolved.given(word):
            resolved.offer(ours, resolved.values[word], resolved.source(word), name)


def named_in_paddles_words(resolved: ResolvedOptions) -> bool:
    """Whether the command line gives pservers or trainers in a form that only Paddle has: lists of addresses, or an
    option in ``WORDS``."""
    lists = all(is_list(resolved.values[name].strip()) for name in ("servers", "trainers"))
    return lists or any(resolved.given(word) for word in WORDS)


def settle(resolved: ResolvedOptions, paddle: bool, imported: Callable[[ResolvedOptions], frozenset[str]]) -> None:
    """Resolve ``--pservers=auto``. ``paddle``: whether Paddle's dialect is used. ``imported``: ``imports_of``, or a
    fake of it."""
    chosen = resolved.values["pservers"]
    if chosen == "auto":
        meant = paddle and _wanted(resolved) and bool(resolved.script) and not _needs_ours(resolved)
        chosen = "script" if meant and not _uses_ours(imported(resolved)) else "edl"
        if chosen == "script":
            resolved.remark(
                f"pservers run {resolved.script}, as under Paddle's launcher; use --pservers=edl for edl's own"
            )
    resolved.values["pservers"] = chosen
    if chosen == "edl" and resolved.given("with_gloo") and str(resolved.values["with_gloo"]) != "0":
        gloo = f"{resolved.origin('with_gloo') or '--with_gloo'}={resolved.values['with_gloo']}"
        resolved.remark(f"{gloo} is not used: edl's own pservers do not run the script, so they cannot serve gloo")
    if chosen == "script" and not resolved.given("slot_strikes"):
        resolved.values["slot_strikes"] = 0  # the job cannot continue without one of its pservers


def imports_of(resolved: ResolvedOptions) -> frozenset[str]:
    """The modules that the script imports, according to static analysis; empty for a program."""
    if resolved.values["no_python"]:
        return frozenset()
    from edl.worker.warm import imported_by  # imported late: most launchers do not need it

    return imported_by("module" if resolved.values["module"] else "script", resolved.script)


def sizes_with_script_servers(options: Mapping[str, Any]) -> Sizes | None:
    """The sizes of a job whose pservers run the script; None for any other job. Raises ``SettingError``."""
    if options["pservers"] != "script":
        return None
    for name in ONLY_OURS:
        if not is_default(name, options):
            flag = "--" + name.replace("_", "-")
            raise SettingError(
                flag, options[name], "applies to edl's own pservers only", "Drop it, or add --pservers=edl"
            )
    gloo = str(options["with_gloo"])
    if gloo not in _GLOO:
        raise SettingError("--with_gloo", gloo, f"must be {', '.join(_GLOO)}")
    servers, trainers = options["servers"].strip(), options["trainers"].strip()
    if servers or trainers:
        return _listed(servers, trainers, options["local_addr"], gloo)
    each = count_from("--servers-per-node", options["servers_per_node"] or "1", least=1)
    slots = each + slots_of_trainers(options)
    nodes = parse_nnodes(options["nnodes"], options["node_unit"])
    return Sizes(nodes, slots, scripts=ScriptPlaces(each), script_servers=ScriptServers(each, gloo=gloo))


def _listed(servers: str, trainers: str, local_addr: str, gloo: str) -> Sizes:
    """The sizes for lists of addresses in ``--servers`` and ``--trainers``. Raises ``SettingError``."""
    for option, text in (("--servers", servers), ("--trainers", trainers)):
        if not is_list(text):
            why = "must be a list of HOST:PORT, because pservers run the script"
            raise SettingError(option, text or "''", why, "Write HOST:PORT,…, or use --server_num=N --trainer_num=N")
    named = endpoints_of("--servers", servers), endpoints_of("--trainers", trainers)
    here = [[address(*one) for one in of_this_host(part, local_addr)] for part in named]
    if not any(here):
        why = "neither it nor --servers names an address of this host"
        raise SettingError("--trainers", trainers, why, "Name an address of this host, or give --local-addr")
    total = len({host for part in named for host, _ in part})
    all_servers, all_trainers = (tuple(address(*one) for one in part) for part in named)
    job = ScriptServers(0, all_servers, all_trainers, gloo)
    scripts = ScriptPlaces(len(here[0]), (*here[0], *here[1]))
    return Sizes(NodeRange(total, total), sum(map(len, here)), scripts=scripts, script_servers=job)


def _wanted(resolved: ResolvedOptions) -> bool:
    sizes = ("servers", "trainers", "servers_per_node", "trainer_num")
    return resolved.values["run_mode"] == "ps" or any(resolved.values[name] for name in sizes)


def _needs_ours(resolved: ResolvedOptions) -> bool:
    """Whether a size, option or role is given that only edl's own pservers support."""
    texts = [resolved.values[name].strip() for name in ("servers", "trainers")]
    counted = any(texts) and not all(map(is_list, texts))
    ours = any(resolved.given(name) for name in (*ONLY_OURS, "server_nnodes"))
    return counted or ours or resolved.values["role"] in OWN_ROLES


def _uses_ours(imported: frozenset[str]) -> bool:
    return any(name == client or name.startswith(f"{client}.") for name in imported for client in CLIENTS)
