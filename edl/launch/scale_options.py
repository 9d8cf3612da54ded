"""The launcher's options about where its nodes come from, and the table of schedulers.

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
"""Limit of ``--node-index``, to catch typing mistakes."""
INDEX_VARIABLES = ("JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "SLURM_ARRAY_TASK_ID")
"""Variables in which schedulers number the processes that they start."""


@dataclass(frozen=True, slots=True)
class SchedulerKind:
    """One kind of scheduler. Its module is imported only when it is used."""

    shape: str
    """The form of ``--scheduler``."""
    module: str
    owners: tuple[SizeOwner, ...] = (SizeOwner.MASTER, SizeOwner.EXTERNAL)
    """The possible owners of the size; the first is the default."""
    conf: Mapping[str, str] = field(default_factory=dict)
    """The keys of ``--scheduler-conf`` with their meanings."""
    ordinal: bool = False
    """The names of its pods end in their index."""


_BOTH = (SizeOwner.EXTERNAL, SizeOwner.MASTER)
_KUBERNETES = {
    "api": "URL of the API server, if not the pod's own cluster",
    "namespace": "if not the pod's own",
    "token_file": "file with the token, read again whenever it changes",
    "ca": "file with the authority's certificates",
    "timeout": "seconds that a call may take; 10",
    "poll": "seconds between two looks at the size while no pod changes; 10",
    "selector": "labels of the pods, separated by ';', if the object does not say",
    "watch_nodes": "true: taints of hosts are notices, too",
}
_TASK = {"task": "the one whose replicas are nodes, if not the only one or worker"}
_INDEXED = {"indexed": "true: the highest index is taken away first"}
_PADDLECLOUD = {
    "server": "HOST:PORT[;…] of its etcd, if not as PADDLE_ELASTIC_SERVER says, or the job's own",
    "paddlejob": "the PaddleJob whose replicas the Master is to change; the other keys are for that",
}

_SLURM = {
    "script": "batch script of a node; else one is made of this command line",
    "options": "further options of sbatch, separated by blanks",
    "name": "of the jobs; edl-JOB",
    "timeout": "seconds that a call may take; 30",
    "poll": "seconds between two looks at the queue; 2",
}

KINDS: dict[str, SchedulerKind] = {
    "process": SchedulerKind("process", "edl.schedulers.process", (SizeOwner.MASTER,)),
    "exec": SchedulerKind("exec:COMMAND", "edl.schedulers.hook", conf={"timeout": "seconds that a call may take; 30"}),
    "discovery": SchedulerKind(
        "discovery:COMMAND",
        "edl.schedulers.hook",
        (SizeOwner.EXTERNAL,),
        {"timeout": "seconds that a call may take; 30", "poll": "seconds between two calls; 1"},
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
"""One entry per kind; ``edl.schedulers.deps`` describes what its module must provide."""


def wanted_from(options: Mapping[str, Any]) -> SchedulerChoice | None:
    """The chosen scheduler, checked as far as possible on this host; None: none is chosen. Raises ``SettingError``."""
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
    """The scheduler's number for this node; -1: not known. Raises ``SettingError``."""
    text = options["node_index"].strip()
    if text:
        if not text.isdecimal() or int(text) > MOST_INDEX:
            raise SettingError("--node-index", text, f"must be a whole number from 0 to {MOST_INDEX}")
        return int(text)
    found = [environment[name] for name in INDEX_VARIABLES if environment.get(name, "").isdecimal()]
    if not found and wanted is not None and KINDS[wanted.kind].ordinal:
        pod = environment.get("POD_NAME") or environment.get("HOSTNAME", "")
        stem = re.escape(wanted.target.rpartition("/")[2])  # with hostNetwork this is the host's name
        found = re.findall(rf"^{stem}-(?:.+-)?(\d+)$", pod)
    return int(found[0]) if found and int(found[0]) <= MOST_INDEX else -1


def node_name(wanted: SchedulerChoice | None, environment: Mapping[str, str]) -> str:
    """The default name of this node: derived from Slurm's job number, so that the adapter recognises it; empty for
    other schedulers."""
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
    """The command line for another launcher of the same job: without what applies to this node only, and with the
    store's address.

    ``arguments``: this launcher's arguments, without the program, in one spelling (see ``with_both_spellings``).
    ``elsewhere``: it will run on another host, so this host's addresses are left out.
    """
    left_out = {"--node-id", "--node-index", "--node-rank", "--rank", "--standalone", "--http-port", *fixed}
    if elsewhere:
        left_out |= {"--local-addr", "--host", "--http-host"}
    if endpoints:
        left_out |= {"--rdzv-backend", "--rdzv-endpoint", "--master", "--elastic-server"}
    kept: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        name, equals, _ = rest[0].partition("=")
        width = 2 if takes_value.get(name, False) and not equals else 1
        taken, rest = rest[:width], rest[width:]
        kept += [] if name in left_out else taken
    added = [f"{name}={value}" for name, value in fixed.items()]
    if endpoints:
        added += ["--rdzv-backend=etcd", f"--rdzv-endpoint={','.join(endpoints)}"]
    if any(argument.partition("=")[0] == "--http-port" for argument in arguments):
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
        raise SettingError("--scheduler", text, "does not have the form of this kind", f"Write {kind.shape}")
    return name, kind, target


def _unknown_kind(text: str) -> SettingError:
    known = ", ".join(one.shape for one in KINDS.values())
    return SettingError("--scheduler", text, "unknown kind of scheduler", f"Known: {known}")


def _conf(name: str, kind: SchedulerKind, text: str) -> dict[str, str]:
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
    """Import the module of a kind, which provides ``check`` and ``make``."""
    return importlib.import_module(kind.module)
