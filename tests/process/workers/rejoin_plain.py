"""``rejoin_torch.py`` without a framework, for stories in which none has a part: a worker that stays in its process,
commits at each step and goes where the world goes.

Its imports take a hundredth of a framework's. The group is sockets to rank 0, the model a list of numbers of which
every step adds the same to each, whatever the size of the world; in each world, and at its end, the script checks that
they are what its step makes them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import socket
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from edl.wire.local import Seat
from edl.worker.context import context
from edl.worker.exchange import exchange
from edl.worker.framework import Accelerator, ArrayInfo, Arrays
from edl.worker.loop import make_run
from edl.worker.state import BaseState

BATCH = 24
"""Divisible by every world size that the tests use."""
WEIGHTS = 64


class PeerGone(Exception):
    """Raised by a collective after the loss of a peer."""


class Numbers:
    """``edl.worker.framework.Arrays`` for ``array("d")``."""

    def is_array(self, value: object) -> bool:
        return isinstance(value, array)

    def info(self, value: Any) -> ArrayInfo:
        return ArrayInfo("F64", (len(value),), len(value) * value.itemsize)

    def copy_out(self, values: Sequence[Any], buffers: Iterable[memoryview]) -> None:
        for value, buffer in zip(values, buffers, strict=True):
            buffer[:] = memoryview(value).cast("B")

    def view(self, info: ArrayInfo, data: memoryview) -> Any:
        return array("d", data.tobytes())

    def copy(self, value: Any) -> Any:
        return array("d", value)

    def digest(self, values: Sequence[Any]) -> int:
        return zlib.crc32(b"".join(value.tobytes() for value in values))

    def finite(self, values: Sequence[Any]) -> list[bool]:
        return [all(math.isfinite(number) for number in value) for value in values]


class Group:
    """All ranks of a round, by way of rank 0."""

    def __init__(self, seat: Seat) -> None:
        host, _, port = seat.master.rpartition(":")
        self._rank, self._world, self._address = seat.rank, seat.world_size, (host, int(port))
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._files: list[Any] = []
        self._aborted = False
        self._failure = ""

    def connect(self) -> None:
        try:
            if self._rank == 0 and self._world > 1:
                server = self._keep(socket.create_server(self._address, backlog=self._world))
                for _ in range(self._world - 1):
                    self._files.append(self._keep(server.accept()[0]).makefile("rwb"))
            elif self._rank > 0:
                self._files.append(self._reached().makefile("rwb"))
        except OSError as error:
            raise PeerGone(f"no group: {error}") from error

    def gather(self, data: bytes) -> list[bytes]:
        """All-gather of equally many bytes, by rank."""
        head = self._rank.to_bytes(2, "big")
        try:
            if self._rank == 0:
                given = [head + data, *(self._read(file, len(head + data)) for file in self._files)]
                whole = b"".join(sorted(given))
                for file in self._files:
                    self._write(file, whole)
            else:
                self._write(self._files[0], head + data)
                whole = self._read(self._files[0], self._world * len(head + data))
        except (OSError, ValueError) as error:
            self._failure = self._failure or f"connection lost: {error}"
            raise PeerGone(f"connection lost: {error}") from error
        size = len(head + data)
        return [whole[start + len(head) : start + size] for start in range(0, len(whole), size)]

    def failure(self) -> str:
        return self._failure

    def settle(self) -> None:
        """Nothing to wait for: each collective has ended when its call returns."""

    def waits(self) -> None:
        """Not measured."""

    def disconnect(self) -> None:
        self.abort()

    def abort(self) -> None:
        with self._lock:
            self._aborted, self._failure = True, self._failure or "the group was aborted"
            for one in self._sockets:
                with contextlib.suppress(OSError):  # not connected any more
                    one.shutdown(socket.SHUT_RDWR)

    def retire(self) -> None:
        for one in (*self._files, *self._sockets):
            with contextlib.suppress(OSError):  # what was to be written is for nobody any more
                one.close()

    def _keep(self, one: socket.socket) -> socket.socket:
        with self._lock:
            self._sockets.append(one)
            if self._aborted:
                one.close()
        return one

    def _reached(self) -> socket.socket:
        while not self._aborted:
            try:
                return self._keep(socket.create_connection(self._address))
            except ConnectionRefusedError:
                time.sleep(0.01)
        raise ConnectionAbortedError("aborted")

    def _read(self, file: Any, size: int) -> bytes:
        data: bytes = file.read(size)
        if len(data) < size:
            raise ConnectionResetError("closed by peer")
        return data

    def _write(self, file: Any, data: bytes) -> None:
        file.write(data)
        file.flush()


class Plain:
    """``edl.worker.framework.Framework`` without any framework."""

    name = "plain"
    accelerator: Accelerator | None = None

    def __init__(self) -> None:
        self.arrays: Arrays = Numbers()
        self.group: Group | None = None

    def why_not_in_process(self) -> str:
        return ""

    def synchronize(self) -> None:
        """There is no device."""

    def warm_up(self, local_rank: int, enough: Callable[[], bool]) -> str:
        if options.slow_device:
            with (options.folder / "warming").open("a") as file:
                print(os.environ["EDL_NODE_ID"], local_rank, file=file)
            while not (options.folder / "warm").exists():
                time.sleep(0.02)
        return "it is no device"

    def prepare(self, seat: Seat) -> Group:
        self.group = Group(seat)
        return self.group

    def connect(self, group: Group, seat: Seat) -> None:
        group.connect()

    def lost_peers(self, error: BaseException) -> bool:
        return isinstance(error, PeerGone)

    def out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def exchange(self, data: bytes) -> list[bytes]:
        return [data] if self.group is None else exchange(data, self.group.gather)

    def broadcast(self, data: bytes, root: int) -> bytes:
        return self.exchange(data)[root]


class Model:
    """A model with parameters."""

    def __init__(self) -> None:
        self.weights = array("d", bytes(8 * WEIGHTS))

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, plain: dict[str, Any]) -> None:
        self.weights = array("d", plain["weights"])


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000, help="unless FOLDER/last-step says otherwise")
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--ballast", type=int, default=0, help="megabytes that the state takes besides")
    parser.add_argument("--hang-at", type=int, default=0, help="rank 1 makes no progress after this step, once")
    parser.add_argument("--slow-device", action="store_true", help="warming it up takes until there is FOLDER/warm")
    return parser.parse_args()


options = read_arguments()
framework = Plain()
model = Model()
ballast = {"ballast": array("d", bytes(options.ballast << 20))} if options.ballast else {}
state = BaseState(framework, {"model": model, "step": 0, **ballast})


def last_step() -> int:
    """Where to stop. A file in the shared folder may set it while the job runs, well ahead of all ranks."""
    file = options.folder / "last-step"
    return int(file.read_text()) if file.exists() else int(options.steps)


def check() -> None:
    """Each weight is what it has to be after so many steps."""
    expected = sum(BATCH * step + BATCH * (BATCH - 1) // 2 for step in range(state.step))
    assert list(model.weights) == [float(expected)] * WEIGHTS, "the state is not that of its step"


@make_run(framework)
def train(state: BaseState) -> None:
    here = context()
    group = framework.group
    assert group is not None
    check()
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node, "round": here.round}
    with (options.folder / f"{here.node}.{here.round}.{here.rank}.{os.getpid()}.steps").open("a", buffering=1) as log:
        while state.step < last_step():
            mine = sum(state.step + sample for sample in range(here.rank, BATCH, here.world_size))
            total = sum(int.from_bytes(part, "big") for part in group.gather(mine.to_bytes(8, "big")))
            for index in range(WEIGHTS):
                model.weights[index] += total
            state.step += 1
            log.write(json.dumps({"t": time.monotonic(), "step": state.step, **fixed}) + "\n")
            if options.save_every and state.step % options.save_every == 0:
                state.save()
            else:
                state.commit()
            if state.step == options.hang_at and here.rank == 1 and not (options.folder / "hung").exists():
                (options.folder / "hung").touch()
                time.sleep(3600)
            if options.pause:
                time.sleep(options.pause)


train(state)
check()
if context().rank == 0:
    (options.folder / "result.json").write_text(json.dumps({"step": state.step, "sum": sum(model.weights)}))
