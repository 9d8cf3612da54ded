"""A worker for tests of ``accumulate`` on several workers: does what its standard input says, one JSON list a line."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import json
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from edl.arithmetic.adascale import AdaScale
from edl.errors import StateError
from edl.wire.local import Seat
from edl.wire.records import Settings
from edl.worker import hyper
from tests.step_tools import Given, logical_steps, uneven

warnings.simplefilter("ignore")
WIDTH = 5


class Torch:
    """The operations of torch that the commands use."""

    def __init__(self) -> None:
        import torch

        self.torch: Any = torch
        torch.set_num_threads(1)
        self.edl: Any = importlib.import_module("edl.torch")
        self.framework: Any = importlib.import_module("edl.torch.framework").current()

    def seat(self, master: str, endpoints: list[str], **more: Any) -> Seat:
        return Seat(master=master, endpoints=(), **more)

    def model(self, dtype: str, normal: bool) -> Any:
        nn = self.torch.nn
        self.torch.manual_seed(1)
        torch = self.torch

        class Tired(nn.Module):  # type: ignore[misc, name-defined]
            """A module whose output depends on the number of calls."""

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("asked", torch.zeros(3))

            def forward(self, x: Any) -> Any:
                self.asked += x.detach().mean() ** 2 + 1
                return x / self.asked[0].clone() ** 0.5

        middle = [nn.BatchNorm1d(7), nn.Dropout(0.3), Tired()] if normal else []
        return nn.Sequential(nn.Linear(WIDTH, 7), *middle, nn.Tanh(), nn.Linear(7, 1)).to(getattr(self.torch, dtype))

    def twin(self, model: Any, dtype: str) -> Any:
        return copy.deepcopy(model)

    def loss(self, model: Any, batch: Any, dtype: str) -> Any:
        x, y = (self.torch.from_numpy(part).to(getattr(self.torch, dtype)) for part in batch)
        return ((model(x) - y) ** 2).mean() + 0.01 * random.random() * np.random.rand()

    def gradients(self, model: Any) -> Any:
        return np.concatenate([one.grad.numpy().reshape(-1) for one in model.parameters()])

    def sgd(self, model: Any) -> Any:
        return self.torch.optim.Adam(model.parameters(), lr=0.01)

    def clear(self, model: Any) -> None:
        model.zero_grad()

    def numbers(self, model: Any) -> list[Any]:
        return [value.numpy() for value in model.state_dict().values()]


class Paddle:
    """The operations of Paddle that the commands use."""

    def __init__(self) -> None:
        import paddle

        self.paddle: Any = paddle
        self.edl: Any = importlib.import_module("edl.paddle")
        self.framework: Any = importlib.import_module("edl.paddle.framework").FRAMEWORK

    def seat(self, master: str, endpoints: list[str], **more: Any) -> Seat:
        return Seat(master=master, endpoints=tuple(endpoints), **more)

    def model(self, dtype: str, normal: bool) -> Any:
        nn = self.paddle.nn
        self.paddle.seed(1)
        self.paddle.set_default_dtype(dtype)
        paddle = self.paddle

        class Tired(nn.Layer):  # type: ignore[misc, name-defined]
            """A layer whose output depends on the number of calls."""

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("asked", paddle.zeros([3]))

            def forward(self, x: Any) -> Any:
                with paddle.no_grad():
                    paddle.assign(self.asked + x.mean() ** 2 + 1, output=self.asked)
                return x / self.asked[0].clone().detach() ** 0.5

        middle = [nn.BatchNorm1D(7), nn.Dropout(0.3), Tired()] if normal else []
        return nn.Sequential(nn.Linear(WIDTH, 7), *middle, nn.Tanh(), nn.Linear(7, 1))

    def twin(self, model: Any, dtype: str) -> Any:
        twin = self.model(dtype, normal=False)
        twin.set_state_dict(model.state_dict())
        return twin

    def loss(self, model: Any, batch: Any, dtype: str) -> Any:
        x, y = (self.paddle.to_tensor(part.astype(dtype)) for part in batch)
        return ((model(x) - y) ** 2).mean() + 0.01 * random.random() * np.random.rand()

    def gradients(self, model: Any) -> Any:
        return np.concatenate([one.grad.numpy().reshape(-1) for one in model.parameters()])

    def sgd(self, model: Any) -> Any:
        return self.paddle.optimizer.Adam(0.01, parameters=model.parameters())

    def clear(self, model: Any) -> None:
        for one in model.parameters():
            one.clear_gradient(False)

    def numbers(self, model: Any) -> list[Any]:
        return [value.numpy() for value in model.state_dict().values()]


class Worker:
    """Implements the commands."""

    def __init__(self, kit: Any) -> None:
        self.kit = kit
        self.group: Any = None
        self.rank = self.size = 0

    def place(self, round: int, rank: int, size: int, master: str, endpoints: list[str]) -> str:
        seat = self.kit.seat(
            master, endpoints, round=round, rank=rank, local_rank=rank, world_size=size, local_world_size=size,
            node="n", nodes=1, position=0, era=1, restore_era=0, restore_commit=0, shards=1, stored=False,
            checkpoint_dir="", token="secret",
        )  # fmt: skip
        if self.group is not None:
            self.group.abort()
            self.group.retire()
        self.group = self.kit.framework.prepare(seat)
        self.kit.framework.connect(self.group, seat)
        self.rank, self.size = rank, size
        return "placed"

    def gradients(self, seeds: int, dtype: str, static_graph: bool = False) -> float:
        """The largest deviation from the gradient of all samples at once, over many steps, in units of its norm."""
        kit, worst, mean = self.kit, 0.0, 0.0
        model = kit.model(dtype, normal=False)
        parallel = kit.edl.parallel(model) if self.size > 1 or seeds % 2 else model
        for seed in range(seeds):
            if static_graph:  # only the first step is special
                model = kit.model(dtype, normal=False)
                parallel = kit.edl.parallel(model, static_graph=True, gradient_as_bucket_view=bool(seed % 2))
            every, samples = uneven(np.random.default_rng([seed, self.size]), self.size, WIDTH)
            for step in kit.edl.accumulate(Given([every[self.rank]]), parallel):
                for batch in step:
                    step.backward(kit.loss(parallel, batch, dtype))
                mean = step.mean_loss()
            twin = kit.twin(model, dtype)
            loss = kit.loss(twin, samples, dtype)
            loss.backward()
            expected, found = kit.gradients(twin), kit.gradients(model)
            assert abs(mean - float(loss.detach())) < 0.02
            worst = float(np.maximum(worst, np.linalg.norm(found - expected) / np.linalg.norm(expected)))  # keeps NaN
            kit.clear(model)
        return worst

    def noise(self, steps: int) -> list[float]:
        """The noise scale that AdaScale measures after this many steps; equal on all workers."""
        kit, model = self.kit, self.kit.model("float32", normal=False)
        parallel, noise = kit.edl.parallel(model), AdaScale()
        for seed in range(steps):
            every, _ = uneven(np.random.default_rng([seed, 4]), 4, WIDTH)
            # As many workers as there are: the others' micro-batches are taken by the first.
            own = [item for worker in range(self.rank, 4, self.size) for item in every[worker]]
            most = max(len(range(rank, 4, self.size)) for rank in range(self.size)) * len(every[0])
            own += [(own[0][0], _nothing(own[0][1]))] * (most - len(own))
            own = [(batch, _at(share, number, most)) for number, (batch, share) in enumerate(own)]
            for step in kit.edl.accumulate(Given([own]), parallel, noise=noise):
                for batch in step:
                    step.backward(kit.loss(parallel, batch, "float32"))
            kit.clear(model)
        return list(noise.state_dict().values())

    def logical(self, steps: int, ranks: int, wrapped: bool) -> list[str]:
        """Losses, parameters and buffers, bit for bit."""
        kit, model = self.kit, self.kit.model("float32", normal=True)
        parallel = kit.edl.parallel(model) if wrapped else model
        optimizer, noise = kit.sgd(model), AdaScale()
        found = []
        loader = Given(logical_steps(steps, ranks, self.size, self.rank, 9, WIDTH, 5))
        kit.edl.scale_lr(optimizer)
        with _logical(ranks):
            for step in kit.edl.accumulate(loader, parallel, noise=noise, seed=3):
                np.random.rand(self.rank)  # what the script draws elsewhere plays no part
                for batch in step:
                    step.backward(kit.loss(parallel, batch, "float32"))
                optimizer.step()
                kit.clear(model)
                found.append(step.mean_loss().hex())
        total = hashlib.sha256()
        for value in kit.numbers(model):
            assert np.isfinite(value).all(), "stand-ins leave no trace"
            total.update(np.ascontiguousarray(value).tobytes())
        return [*found, total.hexdigest(), noise.variance.hex(), noise.square.hex()]

    def static(self, ranks: int) -> str:
        parallel = self.kit.edl.parallel(self.kit.model("float32", normal=False), static_graph=True)
        with _logical(ranks):
            try:
                self.kit.edl.accumulate(Given([]), parallel)
            except StateError as error:
                return str(error)
        return "nothing"

    def too_many(self, ranks: int) -> str:
        model = self.kit.model("float32", normal=False)
        with _logical(ranks):
            try:
                self.kit.edl.accumulate(Given([]), model)
            except StateError as error:
                return str(error)
        return "nothing"

    def plain(self) -> str:
        try:
            self.kit.edl.accumulate(Given([]), self.kit.model("float32", normal=False))
        except StateError as error:
            return str(error)
        return "nothing"


@contextlib.contextmanager
def _logical(ranks: int) -> Iterator[None]:
    original = hyper.current
    hyper.current = lambda: Settings(number=1, logical_ranks=ranks)
    try:
        yield
    finally:
        hyper.current = original


def _nothing(share: Any) -> Any:
    return type(share)(0, share.total)


def _at(share: Any, number: int, micros: int) -> Any:
    return type(share)(share.samples, share.total, number, micros)


def main() -> None:
    worker = Worker(Torch() if sys.argv[1] == "torch" else Paddle())
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
