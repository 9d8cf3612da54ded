"""``train_torch.py`` under Ray Train: this is the driver, which waits for the first nodes and then trains on all there
are. Checkpoints are the script's own, in the shared folder."""

from __future__ import annotations

import argparse
import time
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from benchmarks.scripts.train_torch import arguments


def worker(config: dict[str, Any]) -> None:
    """One worker, in the process group that Ray Train has formed."""
    import torch

    from benchmarks.scripts.card import device
    from benchmarks.scripts.step_writer import StepWriter
    from benchmarks.scripts.train_torch import train

    args: argparse.Namespace = config["args"]
    torch.set_num_threads(1)
    train(args, StepWriter(args.workdir), device())


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--least", "--most", "--first", "--max-failures"):
        parser.add_argument(option, type=int, required=True)
    parser.add_argument("--resize-s", type=float, required=True, help="between two looks for more nodes")
    parser.add_argument("--address", required=True)
    args = arguments(parser)
    ray.init(address=args.address, log_to_driver=False)
    while ray.cluster_resources().get("CPU", 0) < args.first:
        time.sleep(0.05)
    elastic = {"num_workers": (args.least, args.most), "elastic_resize_monitor_interval_s": args.resize_s}
    fixed = {"num_workers": args.least}
    TorchTrainer(
        worker,
        train_loop_config={"args": args},
        torch_config=TorchConfig(backend="gloo", timeout_s=30),
        scaling_config=ScalingConfig(**(fixed if args.least == args.most else elastic)),
        run_config=RunConfig(
            name="bench",
            storage_path=str(args.workdir / "ray"),
            failure_config=FailureConfig(max_failures=args.max_failures),
        ),
    ).fit()


if __name__ == "__main__":
    main()
