"""A training script without a framework: every step needs all ranks, as an all-reduce does, and rank 0 keeps the state.

It knows nothing of edl but the environment that any launcher gives. When a peer's connection breaks it fails as gloo
does. Options make it misbehave.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="shared by all ranks: step logs and checkpoint")
    parser.add_argument("--steps", type=int, default=1_000_000, help="unless FOLDER/last-step says otherwise")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds a step takes")
    parser.add_argument("--free", action="store_true", help="ranks do not wait for each other")
    parser.add_argument("--fail", default="", metavar="RANK:STEP:HOW", help="HOW: a status, raise, or a signal's name")
    parser.add_argument("--fail-rounds", type=int, default=1, help="fail in so many first rounds")
    parser.add_argument("--bad-slot", default="", metavar="NODE/SLOT", help="fail there until FOLDER/repaired exists")
    parser.add_argument("--on-sigterm", choices=("default", "ignore", "save"), default="default")
    parser.add_argument("--ignore-sigint", action="store_true")
    parser.add_argument("--grandchild", action="store_true", help="leave processes behind, if one may")
    parser.add_argument("--say", default="", help="a line for stderr")
    return parser.parse_args()


def last_step(options: argparse.Namespace) -> int:
    """Where to stop. A file in the shared folder may set it while the job runs, well ahead of all ranks."""
    file = options.folder / "last-step"
    return int(file.read_text()) if file.exists() else int(options.steps)


class Group:
    """All ranks, by way of rank 0."""

    def __init__(self, rank: int, world: int, step: int) -> None:
        self._rank = rank
        self._peers: list[Any] = []
        self.step = step
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if rank == 0:
            with socket.create_server(address, backlog=world) as server:
                for _ in range(world - 1):
                    self._peers.append(server.accept()[0].makefile("rw"))
            self._tell(step)
        elif world > 1:
            self._peers.append(self._connect(address).makefile("rw"))
            self.step = self._hear(self._peers[0])

    def _connect(self, address: tuple[str, int]) -> socket.socket:
        deadline = time.monotonic() + 60
        while True:
            try:
                return socket.create_connection(address, timeout=None)
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def meet(self, step: int) -> None:
        """Come back when every rank is here."""
        if self._rank == 0:
            for peer in self._peers:
                self._hear(peer)
            self._tell(step)
        elif self._peers:
            self._tell(step)
            self._hear(self._peers[0])

    def _tell(self, step: int) -> None:
        for peer in self._peers:
            peer.write(f"{step}\n")
            peer.flush()

    def _hear(self, peer: Any) -> int:
        line = peer.readline()
        if not line:
            raise ConnectionResetError("Connection closed by peer")
        return int(line)


def misbehave(how: str) -> None:
    if how == "raise":
        raise ValueError("the loss is not a number")
    if how.isdigit():
        sys.stderr.write(f"giving up with status {how}\n")
        sys.exit(int(how))
    os.kill(os.getpid(), signal.Signals[how])
    time.sleep(60)


def step_logger(folder: Path, rank: int, world: int) -> Callable[[int], None]:
    node, number = os.environ["EDL_NODE_ID"], int(os.environ["EDL_ROUND"])
    fixed = {"rank": rank, "world": world, "round": number, "pid": os.getpid(), "node": node}
    file = (folder / f"{node}.{number}.{rank}.{os.getpid()}.steps").open("a", buffering=1)

    def log(step: int) -> None:
        file.write(json.dumps({"t": time.monotonic(), "step": step, **fixed}) + "\n")

    return log


def listen_to_sigterm(choice: str, folder: Path, rank: int) -> None:
    if choice == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif choice == "save":

        def save(number: int, frame: object) -> None:
            time.sleep(0.3)
            (folder / f"saved.{os.environ['EDL_ROUND']}.{rank}").write_text("saved")
            sys.exit(0)

        signal.signal(signal.SIGTERM, save)


def have_children() -> None:
    """One in this process group, one in a session of its own; both deaf to SIGTERM."""
    command = [sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(1000)"]
    subprocess.Popen(command)
    subprocess.Popen(command, start_new_session=True)


def main() -> None:
    options = read_arguments()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listen_to_sigterm(options.on_sigterm, options.folder, rank)
    if options.ignore_sigint:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.grandchild:
        have_children()
    here = f"{os.environ['EDL_NODE_ID']}/{os.environ['EDL_SLOT']}"
    if here == options.bad_slot and not (options.folder / "repaired").exists():
        raise RuntimeError(f"the card in {here} does not answer")
    if options.say:
        sys.stderr.write(options.say + "\n")
    checkpoint = options.folder / (f"checkpoint.{rank}" if options.free else "checkpoint")
    done = int(checkpoint.read_text()) if checkpoint.exists() else 0
    group = Group(rank, 1 if options.free else world, done)
    log = step_logger(options.folder, rank, world)
    bad_rank, bad_step, how = options.fail.split(":") if options.fail else (-1, -1, "")
    for step in itertools.count(group.step + 1):
        if step > last_step(options):
            break
        if (rank, step) == (int(bad_rank), int(bad_step)) and int(os.environ["EDL_ROUND"]) <= options.fail_rounds:
            misbehave(how)
        group.meet(step)
        log(step)
        if rank == 0 or options.free:
            unfinished = checkpoint.with_suffix(f".{os.getpid()}")
            unfinished.write_text(str(step))
            unfinished.replace(checkpoint)
        time.sleep(options.pause)


if __name__ == "__main__":
    main()
