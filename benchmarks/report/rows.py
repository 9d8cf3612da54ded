"""The rows of the report: what is measured, and what is compared in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a run. ``name``: its key in ``Outcome.values``. ``unit``: ``s``, ``MB`` or ``%`` of a core."""

    name: str
    unit: str = "s"


@dataclass(frozen=True, slots=True)
class Row:
    """``metrics``: the first one is drawn and gets ratios. ``base``: the contender whose median is 1, by framework."""

    name: str
    title: str
    text: str
    metrics: tuple[Metric, ...]
    base: tuple[tuple[str, str], ...] = (("torch", "edl-rejoin"), ("paddle", "edl-rejoin-paddle"))


_RECOVERY = (Metric("recovery"),)
_PLANNED = (Metric("pause"), Metric("longest gap of who stays"))

ROWS = (
    Row(
        "worker",
        "A worker is killed",
        "2 nodes of `2:2`, one worker each. SIGKILL to one worker, until the last rank of the next world of 2 has "
        "completed its first step.",
        _RECOVERY,
    ),
    Row(
        "node",
        "A node is killed",
        "3 nodes of `1:4`. SIGKILL to the launcher, the worker and all helpers of the node started last, until the "
        "last rank of the next world of 2 has completed its first step.",
        _RECOVERY,
    ),
    Row(
        "leader",
        "The leader is killed",
        "3 nodes of `1:4`. SIGKILL to what decides: the node with edl's Master, the node with the store of "
        "torchrun and NVRx, torchft's lighthouse, DLRover's master, Ray's head with controller and driver. If it is "
        "part of a node, until the others step again; if not, the longest time without a step in the 20 s after. A job "
        "that goes on may still be unable to recover from a later failure.",
        (Metric("training stalls for"),),
    ),
    Row(
        "store",
        "The store is killed",
        "3 nodes of `1:4`. SIGKILL to the etcd outside the nodes; the longest time without a step in the 20 s after.",
        (Metric("training stalls for"),),
    ),
    Row(
        "join",
        "A node joins",
        "A fourth launcher is started beside 3 nodes of `1:4`: from the last step of the old world to the first "
        "step of the last rank in the world of 4.",
        (*_PLANNED, Metric("from launch")),
    ),
    Row(
        "drain",
        "A node is drained",
        "SIGTERM to the launcher started last of 4 nodes of `1:4`: the same until the world of 3.",
        (*_PLANNED, Metric("from signal")),
    ),
    Row(
        "start",
        "From the command to the first step",
        "2 nodes with a worker each, started at the same time, everything cold; what runs outside the nodes (etcd, "
        "lighthouse, master, head) runs already.",
        (Metric("first step"),),
    ),
    Row(
        "steady",
        "The time of a step",
        "2 nodes with a worker each, without the sleep between steps: the median over 10 s. Compared with the same "
        "script without a launcher. edl-rejoin commits in each step, torchft decides about each step, the others "
        "save every fifth step to a file.",
        (Metric("step"),),
        (("torch", "bare"), ("paddle", "bare-paddle")),
    ),
    Row(
        "idle",
        "Memory and CPU of all that does not train",
        "2 nodes with a worker each that sleeps 10 ms per step, over 10 s: all processes of a node but its worker "
        "(launcher, monitors, fork server, raylet …), and what runs outside the nodes (etcd, lighthouse, master, "
        "head and driver). Memory is the proportional set size: pages that several processes share are counted "
        "once.",
        (
            Metric("memory per node", "MB"),
            Metric("CPU per node", "%"),
            Metric("memory outside", "MB"),
            Metric("CPU outside", "%"),
        ),
    ),
)
