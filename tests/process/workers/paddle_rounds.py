"""A Paddle worker that does what its standard input says, one JSON list a line: ``[command, *arguments]``.

``abort`` is done at once, by a side thread; everything else in order. Each answers with one JSON line.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import warnings
from typing import Any

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import paddle  # noqa: E402

import edl.paddle  # noqa: E402
from edl.paddle import group  # noqa: E402
from edl.paddle.framework import FRAMEWORK  # noqa: E402
from edl.wire.local import Seat  # noqa: E402

commands: queue.Queue[list[Any]] = queue.Queue()


def listen() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        if command[0] == "abort":
            ring = group.current()
            assert ring is not None
            ring.abort()
        else:
            commands.put(command)
    os._exit(0)  # the test is gone


nn: Any = paddle.nn


class Net(nn.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.words = paddle.nn.Embedding(50, 8, sparse=True)
        self.first = paddle.nn.Linear(8, 600)
        self.second = paddle.nn.Linear(600, 600)
        self.last = paddle.nn.Linear(600, 1)
        self.unused = paddle.nn.Linear(3, 3)
        self.sometimes = paddle.nn.Linear(8, 1)

    def forward(self, words: Any, more: bool = False) -> Any:
        inside = self.words(words)
        found = self.last(paddle.tanh(self.second(paddle.tanh(self.first(inside)))))
        return found + self.sometimes(inside) if more else found


class Worker:
    """Implements the commands."""

    def __init__(self) -> None:
        self.rank = self.size = 0
        self.model: Any = None
        self.optimizer: Any = None

    def place(self, round: int, rank: int, endpoints: list[str]) -> float:
        old = group.current()
        if old is not None:
            old.retire()
        self.rank, self.size = rank, len(endpoints)
        seat = Seat(
            round=round, rank=rank, local_rank=rank, world_size=self.size, local_world_size=self.size, node="n",
            nodes=1, position=0,
            endpoints=tuple(endpoints), master="", era=1, restore_era=0, restore_commit=0, shards=1,
            stored=False, checkpoint_dir="", token="secret",
        )  # fmt: skip
        ring = FRAMEWORK.prepare(seat)
        started_s = time.perf_counter()
        FRAMEWORK.connect(ring, seat)
        tensor = paddle.to_tensor([float(rank)])
        edl.paddle.all_reduce(tensor)
        assert tensor.item() == sum(range(self.size))
        return time.perf_counter() - started_s

    def build(self, seed: int) -> None:
        paddle.seed(seed)
        self.model = edl.paddle.parallel(Net())
        self.optimizer = paddle.optimizer.SGD(0.01, parameters=self.model.parameters())

    def train(self, steps: int) -> float:
        """Sum of all parameters after so many steps; the data depend on rank and step."""
        for step in range(steps):
            words = paddle.to_tensor([(7 * step + 11 * self.rank + 3 * i) % 50 for i in range(6)])
            loss = self.model(words, more=self.rank == 1).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
        return self.digest()

    def train_alone(self, steps: int, size: int) -> float:
        """The same as all ranks of a world do, in one process and without edl."""
        net = self.model.layer
        for step in range(steps):
            losses = []
            for rank in range(size):
                words = paddle.to_tensor([(7 * step + 11 * rank + 3 * i) % 50 for i in range(6)])
                losses.append(net(words, more=rank == 1).square().mean())
            (sum(losses) / size).backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
        return self.digest()

    def accumulate(self, steps: int) -> float:
        """Two passes a step, one of them recomputed within the backward pass; only the second one is averaged."""
        from paddle.distributed.fleet.utils import recompute

        words = paddle.to_tensor([self.rank, 2, 3])
        for _ in range(steps):
            with self.model.no_sync():
                self.model(words).square().mean().backward()
            inside = self.model.words(words)
            inside = recompute(lambda x: paddle.tanh(self.model.first(x)), inside)
            paddle.autograd.backward([self.model.last(self.model.second(inside)).square().mean()])
            self.optimizer.step()
            self.optimizer.clear_grad()
        return self.digest()

    def tensors(self) -> list[Any]:
        """The collectives on tensors, of a kind that numpy knows and one that it does not, dense and not."""
        found = []
        for kind in ("float32", "bfloat16", "int64"):
            tensor = paddle.full([3, 4], self.rank + 1).astype(kind)
            strided = tensor.transpose([1, 0])
            edl.paddle.all_reduce(strided, "max")
            edl.paddle.all_reduce(tensor)
            gathered = edl.paddle.all_gather(paddle.full([2], self.rank).astype(kind))
            root = edl.paddle.broadcast(paddle.full([2], self.rank).astype(kind), root=1)
            edl.paddle.barrier()
            found.append([
                str(gathered[0].dtype), float(tensor.astype("float32").sum()), float(strided.astype("float32").sum()),
                [float(each.astype("float32")[1]) for each in gathered], float(root.astype("float32")[0]),
            ])  # fmt: skip
        return found

    def calls(self) -> int:
        """Collectives of this round so far."""
        ring = group.current()
        assert ring is not None
        return ring._number

    def digest(self) -> float:
        return float(sum(parameter.astype("float64").sum().item() for parameter in self.model.parameters()))

    def reduce(self, elements: int, times: int) -> float:
        tensor: Any = paddle.ones([elements])
        for _ in range(times):
            edl.paddle.all_reduce(tensor, "mean")
        return float(tensor.sum().item())

    def timed(self, elements: int, times: int) -> float:
        array = np.ones(elements, np.float32)
        ring = group.current()
        assert ring is not None
        took = []
        for _ in range(times):
            started_s = time.perf_counter()
            ring.all_reduce(array, "mean")
            took.append(time.perf_counter() - started_s)
        return sorted(took)[times // 2]

    def used(self) -> list[int]:
        """Number of descriptors and threads, and resident memory in KiB."""
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), pages * 4]


def main() -> None:
    threading.Thread(target=listen, daemon=True).start()
    worker = Worker()
    print(json.dumps("ready"), flush=True)
    while True:
        command = commands.get()
        try:
            answer = getattr(worker, command[0])(*command[1:])
        except Exception as error:  # noqa: BLE001  the test looks at what it is
            answer = {"error": type(error).__name__, "lost": FRAMEWORK.lost_peers(error), "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
