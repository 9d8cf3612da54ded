"""The launcher's options about the scheduler, and the table of supported schedulers.

The settings that all launchers of a job must agree on become ``JobSpec.scheduler``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edl.errors import SettingError
from edl.job_records import WITH_COLON, SchedulerChoice, SizeOwner
from edl.schedulers.deps import SchedulerDeps
from edl.schedulers.port import Scheduler

MOST_INDEX = 1_000_000
"""Limit on ``--node-index``, to catch typing mistakes."""
INDEX_VARIABLES = ("JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "SLURM_ARRAY_TASK_ID")
"""Variables with the index that a scheduler gives to a process."""


@dataclass(frozen=True, slots=True)
class SchedulerKind:
    """One kind of scheduler. Its module is imported only when it is used."""

    shape: str
    """The form of ``--scheduler``, such as ``statefulset/NAME``."""
    module: str
    owners: tuple[SizeOwner, ...] = (SizeOwner.MASTER, SizeOwner.EXTERNAL)
    """The possible values of ``--scale-owner``; the first is the default."""
    conf: Mapping[str, str] = field(default_factory=dict)
    """The keys of ``--scheduler-conf`` and their descriptions, for messages."""
    ordinal: bool = False
    """Whether the names of its pods end in their index."""


_BOTH = (SizeOwner.EXTERNAL, SizeOwner.MASTER)
_KUBERNETES = {
    "api": "URL of the API server; default: the pod's own cluster",
    "namespace": "default: the pod's own",
    "token_file": "file with the token, reread when it changes",
    "ca": "file with the CA certificates",
    "timeout": "timeout of a request in seconds; default: 10",
    "poll": "seconds between two reads of the size while no pod changes; default: 10",
    "selector": "labels of the pods, separated by ';'; default: the object's own selector",
    "watch_nodes": "true: taints of hosts are preemption notices as well",
}
_TASK = {"task": "the task whose replicas are nodes; default: the only one, or worker"}
_INDEXED = {"indexed": "true: the scheduler removes the highest index first"}
_PADDLECLOUD = {
    "server": "HOST:PORT[;…] of its etcd; default: PADDLE_ELASTIC_SERVER, or the job's own store",
    "paddlejob": "the PaddleJob whose replicas the Master changes; the other keys apply to it",
}

_SLURM = {
    "script": "batch script of a node; default: generated from this command line",
    "options": "further options of sbatch, separated by spaces",
    "name": "name of the Slurm jobs; default: edl-JOB",
    "timeout": "timeout of a call in seconds; default: 30",
    "poll": "seconds between two reads of the queue; default: 2",
}

KINDS: dict[str, SchedulerKind] = {
    "process": SchedulerKind("process", "edl.schedulers.process", (SizeOwner.MASTER,)),
    "exec": SchedulerKind(
        "exec:COMMAND", "edl.schedulers.hook", conf={"timeout": "timeout of a call in seconds; default: 30"}
    ),
    "discovery": SchedulerKind(
        "discovery:COMMAND",
        "edl.schedulers.hook",
        (SizeOwner.EXTERNAL,),
        {"timeout": "timeout of a call in seconds; default: 30", "poll": "seconds between two calls; default: 1"},
    ),
    "statefulset": SchedulerKind("statefulset/NAME", "edl.schedulers.kubernetes", _BOTH, _KUBERNETES, ordinal=True),
    "job": SchedulerKind("job/NAME", "edl.schedulers.kubernetes", _BOTH, _KUBERNETES),
    "custom": SchedulerKind(
        "custom:GROUP/VERSION/PLURAL/NAME",
        "edl.schedulers.kubernetes",
        _BOTH,
        {**_KUBERNETES, **_INDEXED},
        ordinal=True,
    ),
    "volcano": SchedulerKind("volcano/NAME", "edl.schedulers.kubernetes", _BOTH, {**_KUBERNETES, **_TASK}),
    "paddlejob": SchedulerKind("paddlejob/NAME", "edl.schedulers.kubernetes", _BOTH, _KUBERNETES, ordinal=True),
    "paddlecloud": SchedulerKind(
        "paddlecloud", "edl.schedulers.paddlecloud", _BOTH, {**_PADDLECLOUD, **_KUBERNETES}, ordinal=True
    ),
    "slurm": SchedulerKind("slurm", "edl.schedulers.slurm", conf=_SLURM),
}
"""All kinds by name; ``edl.schedulers.deps`` describes what a module must provide."""


def wanted_from(options: Mapping[str, Any]) -> SchedulerChoice | None:
    """The scheduler that the options choose, checked as far as this host can; None without ``--scheduler``. Raises
    ``SettingError``."""
    text = options["scheduler"].strip()
    if not text:
        for name in ("scheduler_conf", "scale_owner"):
            if options[name]:
                flag = "--" + name.replace("_", "-")
                raise SettingError(
                    flag, options[name], "has no effect without --scheduler", "Add --scheduler, or drop this option"
                )
        return None
    name, kind, target = _kind_of(text)
    if options["standalone"]:
        raise SettingError("--scheduler", text, "--standalone means exactly one node", "Drop one of the two options")
    said = options["scale_owner"].strip() or kind.owners[0].value
    if said not in {owner.value for owner in kind.owners}:
        allowed = " or ".join(owner.value for owner in kind.owners)
        raise SettingError("--scale-owner", said, f"with --scheduler={name} only {allowed} is possible")
    wanted = SchedulerChoice(name, target, _conf(name, kind, options["scheduler_conf"]), SizeOwner(said))
    _module(kind).check(wanted)
    return wanted


def make_scheduler(deps: SchedulerDeps) -> Scheduler:
    """Make the adapter of the scheduler. Raises ``SettingError``, or ``SchedulerError`` if the scheduler cannot be
    reached."""
    kind = KINDS.get(deps.wanted.kind)
    if kind is None:  # another version of edl wrote the job's specification
        raise _unknown_kind(deps.wanted.text)
    made: Scheduler = _module(kind).make(deps)
    return made


def node_index(options: Mapping[str, Any], wanted: SchedulerChoice | None, environment: Mapping[str, str]) -> int:
    """The scheduler's index of this node, from 0: ``--node-index``, or else from the environment; -1: unknown. Raises
    ``SettingError``."""
    text = options["node_index"].strip()
    if text:
        if not text.isdecimal() or int(text) > MOST_INDEX:
            raise SettingError("--node-index", text, f"must be a whole number from 0 to {MOST_INDEX}")
        return int(text)
    found = [environment[name] for name in INDEX_VARIABLES if environment.get(name, "").isdecimal()]
    if not found and wanted is not None and KINDS[wanted.kind].ordinal:
        pod = environment.get("POD_NAME") or environment.get("HOSTNAME", "")
        job = wanted.target.rpartition("/")[2] or wanted.conf.get("paddlejob", "")
        stem = re.escape(job) if job else ".+"  # with hostNetwork the pod is called like the host
        found = re.findall(rf"^{stem}-(?:.+-)?(\d+)$", pod)
    return int(found[0]) if found and int(found[0]) <= MOST_INDEX else -1


def node_name(wanted: SchedulerChoice | None, environment: Mapping[str, str]) -> str:
    """The default name of this node: with Slurm it contains the job id, by which the adapter recognises the node; empty
    with other schedulers."""
    if wanted is None or wanted.kind != "slurm":
        return ""
    return str(_module(KINDS[wanted.kind]).node_name(environment))


def launcher_again(
    python: str,
    arguments: Sequence[str],
    takes_value: Mapping[str, bool],
    endpoints: Sequence[str],
    fixed: Mapping[str, str],
    *,
    elsewhere: bool = False,
) -> tuple[str, ...]:
    """The command line for another launcher of the same job, derived from this launcher's: without options of this node
    only.

    ``arguments``: this launcher's arguments, without the program, in one spelling (see ``with_both_spellings``).
    ``takes_value``: the spellings of all options, and whether each takes a value. ``endpoints``: addresses of the store
    to add; empty: the arguments name it. ``fixed``: options to set. ``elsewhere``: the launcher will run on another
    host, so this host's addresses are left out.
    """
    left_out = {"--node-id", "--node-index", "--node-rank", "--rank", "--standalone", "--http-port", *fixed}
    if elsewhere:
        left_out |= {"--local-addr", "--host", "--http-host", "--host-id", "--rack"}
    if endpoints:
        left_out |= {"--rdzv-backend", "--rdzv-endpoint", "--master", "--elastic-server"}
    kept: list[str] = []
    serves = False
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        name, equals, _ = rest[0].partition("=")
        width = 2 if takes_value.get(name, False) and not equals else 1
        taken, rest = rest[:width], rest[width:]
        serves = serves or name == "--http-port"
        kept += [] if name in left_out else taken
    added = [f"{name}={value}" for name, value in fixed.items()]
    if endpoints:
        added += ["--rdzv-backend=etcd", f"--rdzv-endpoint={','.join(endpoints)}"]
    if serves:
        added.append("--http-port=0")  # this launcher uses the given port
    return (python, "-m", "edl.launch", *kept, *added, *rest)


def _kind_of(text: str) -> tuple[str, SchedulerKind, str]:
    """Split ``--scheduler`` into name, kind and target. Raises ``SettingError``."""
    match = re.match(r"[a-z]+", text)
    name = match[0] if match else ""
    kind = KINDS.get(name)
    if kind is None:
        raise _unknown_kind(text)
    separator, target = text[len(name) : len(name) + 1], text[len(name) + 1 :].strip()
    wants = "" if kind.shape == name else ":" if name in WITH_COLON else "/"
    if separator != wants or bool(target) != bool(wants):
        raise SettingError("--scheduler", text, f"not a valid {name} scheduler", f"Write {kind.shape}")
    return name, kind, target


def _unknown_kind(text: str) -> SettingError:
    known = ", ".join(one.shape for one in KINDS.values())
    return SettingError("--scheduler", text, "unknown kind of scheduler", f"Known: {known}")


def _conf(name: str, kind: SchedulerKind, text: str) -> dict[str, str]:
    """Parse ``--scheduler-conf``. Raises ``SettingError`` for a key that this kind does not have."""
    values: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = item.partition("=")
        if key not in kind.conf:
            known = ", ".join(f"{one} ({what})" for one, what in kind.conf.items()) or "none"
            raise SettingError("--scheduler-conf", item, f"--scheduler={name} has no key {key!r}", f"Known: {known}")
        if not separator or not value:
            raise SettingError("--scheduler-conf", item, "needs a value", f"Write {key}=VALUE")
        if key in values:
            raise SettingError("--scheduler-conf", item, "is given twice; give each key once")
        values[key] = value
    return values


def _module(kind: SchedulerKind) -> Any:
    """Import the module of a kind, which has the functions ``check`` and ``make``."""
    return importlib.import_module(kind.module)
