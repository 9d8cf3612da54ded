"""Real frameworks in workers of a real fork server: two ranks on gloo, data loaders, and Paddle without its pauses."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from edl.config import Standby
from tests.process.fork_server_fixture import Bench, Outcome, run, script_bench
from tests.process.free_ports import free_endpoints


def needs(framework: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(framework) is None
    return pytest.mark.skipif(missing, reason=f"{framework} is not installed")


def free_ports(count: int) -> list[int]:
    """Free ports, none twice."""
    return [int(endpoint.rpartition(":")[2]) for endpoint in free_endpoints(count)]


def rank_environment(rank: int, size: int, ports: list[int]) -> dict[str, str]:
    """Environment of a rank, for both frameworks."""
    endpoints = [f"127.0.0.1:{port}" for port in ports[1 : size + 1]]
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]),
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(size),
        "PADDLE_MASTER": f"127.0.0.1:{ports[0]}",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
    }


async def world(bench: Bench, size: int, each: Callable[[int], dict[str, str]]) -> list[Outcome]:
    """One world of workers, the last rank started first. ``each``: what a rank's environment has besides."""
    ports = free_ports(size + 1)
    ranks = list(reversed(range(size)))
    environments = [{**rank_environment(rank, size, ports), **each(rank)} for rank in ranks]
    pids = [await bench.spawn(f"rank{rank}", rank, (), **more) for rank, more in zip(ranks, environments, strict=True)]
    codes = await bench.codes(pids)
    return [bench.outcome(code, f"rank{rank}") for rank, code in sorted(zip(ranks, codes, strict=True))]


async def worlds(
    bench: Bench, rounds: int, size: int = 2, each: Callable[[int], dict[str, str]] = lambda rank: {}
) -> list[Outcome]:
    async with bench.open():
        return [outcome for _ in range(rounds) for outcome in await world(bench, size, each)]


TORCH = """
    import os
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    def main():
        dist.init_process_group("gloo")
        data = TensorDataset(torch.arange(64.0).reshape(64, 1))
        loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), num_workers=2)
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        # Large enough for every thread pool to be used.
        torch.rand(700, 700) @ torch.rand(700, 700)
        steps = 0
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            steps += 1
        weight = model.module.weight.item()
        del model, optimizer
        dist.destroy_process_group()
        print(steps, f"{weight:.6f}", torch.get_num_threads())

    if __name__ == "__main__":
        main()
"""


@pytest.mark.slow
@needs("torch")
@pytest.mark.torch
@pytest.mark.parametrize(  # what a start has nothing of torch in is seen with Paddle
    "standby",
    [pytest.param(one, marks=() if one is Standby.FORK else pytest.mark.soak, id=one.value) for one in Standby],
)
def test_torch_trains_on_two_ranks_with_data_loaders(tmp_path: Path, standby: Standby) -> None:
    bench = script_bench(tmp_path, standby, TORCH, slots=2)
    threads = ("1", "3")
    rounds = 3 if standby is Standby.FORK else 1
    outcomes = run(worlds(bench, rounds, each=lambda rank: {"OMP_NUM_THREADS": threads[rank]}))
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0, outcome.err
        steps, weight, count = outcome.out.split()
        assert (steps, weight, count) == ("4", outcomes[0].out.split()[1], threads[rank % 2])
    if standby is not Standby.NONE:
        assert "torch" in bench.warmed


PADDLE = """
    import os, socket, time
    import paddle
    import paddle.distributed as dist

    dist.init_parallel_env()
    layer = paddle.nn.Linear(4, 4)
    model = paddle.DataParallel(layer)
    optimizer = paddle.optimizer.SGD(0.01, parameters=model.parameters())
    for _ in range(3):
        model(paddle.ones([2, 4])).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
    dist.barrier()
    quick = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            peer = socket.socket(fileno=os.dup(int(name)))
            to_store = peer.getpeername()[1] == int(os.environ["MASTER_PORT"])
            quick += to_store and peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        except OSError:
            pass
    print(f"{float(layer.weight.sum()):.5f} quick={quick}")
"""


@pytest.mark.soak_but("fork")
@pytest.mark.slow
@needs("paddle")
@pytest.mark.paddle
@pytest.mark.parametrize("standby", list(Standby), ids=lambda standby: standby.value)
def test_paddle_trains_on_two_ranks_without_its_pauses(tmp_path: Path, standby: Standby) -> None:
    bench = script_bench(tmp_path, standby, PADDLE, slots=2)
    outcomes = run(worlds(bench, rounds=3 if standby is Standby.FORK else 1))
    for outcome in outcomes:
        assert outcome.code == 0, outcome.err
        # Paddle says so before it sleeps for three seconds.
        assert "Retry to connect" not in outcome.err
        assert "quick=1" in outcome.out
    assert outcomes[0].out == outcomes[1].out
    if standby is not Standby.NONE:
        assert "paddle" in bench.warmed


@needs("paddle")
@pytest.mark.paddle
def test_paddles_wait_for_the_store_ends(tmp_path: Path) -> None:
    from edl.worker.wait_until_open import wait_until_open

    (port,) = free_ports(1)
    assert not wait_until_open(("127.0.0.1", port), longest_s=0.01)
    with socket.create_server(("127.0.0.1", port)):
        assert wait_until_open(("127.0.0.1", port), longest_s=60.0)


@pytest.mark.slow
@needs("paddle")
@pytest.mark.paddle
def test_paddle_gets_the_flags_of_its_worker(tmp_path: Path) -> None:
    text = "import paddle; print(paddle.get_flags('FLAGS_check_nan_inf'))"
    bench = script_bench(tmp_path, Standby.FORK, text)

    async def main() -> list[str]:
        async with bench.open():
            return [(await bench.run(FLAGS_check_nan_inf=value, FLAGS_selected_nothing="1")).out for value in "01"]

    assert run(main()) == ["{'FLAGS_check_nan_inf': False}\n", "{'FLAGS_check_nan_inf': True}\n"]
