"""All contenders by name."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.common.launchers import Edl, Launcher, PaddleLaunch, Torchft, Torchrun
from benchmarks.common.more_launchers import Bare, Dlrover, Nvrx, NvrxInProcess, RayTrain

LAUNCHERS: dict[str, Callable[[str, str], Launcher]] = {
    "edl": lambda own, peer: Edl(own),
    "edl-rejoin": lambda own, peer: Edl(own, rejoins=True),
    "edl-embedded": lambda own, peer: Edl(own, embedded=True),
    "edl-secret": lambda own, peer: Edl(own, embedded=True, secret=True),
    "bare": lambda own, peer: Bare(peer),
    "torchrun-tuned": lambda own, peer: Torchrun(peer, tuned=True),
    "torchrun-default": lambda own, peer: Torchrun(peer, tuned=False),
    "torchft": lambda own, peer: Torchft(peer),
    "paddle-launch": lambda own, peer: PaddleLaunch(peer),
    "nvrx": lambda own, peer: Nvrx(peer),
    "nvrx-inprocess": lambda own, peer: NvrxInProcess(peer),
    "dlrover": lambda own, peer: Dlrover(peer),
    "ray-train": lambda own, peer: RayTrain(peer),
}
"""Created from the Python that runs edl and the one that runs the peers."""
