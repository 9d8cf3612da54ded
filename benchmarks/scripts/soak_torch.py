"""Trains DistributedDataParallel in process: ``edl.torch`` with ``State`` and ``run``."""

from __future__ import annotations

import edl.torch as edl
from benchmarks.scripts import soak_torch_parts as parts
from benchmarks.scripts.soak_parts import arguments, write_reference

args = arguments()


def main() -> None:
    model, optimizer = parts.build()
    state = edl.State(model=model, optimizer=optimizer, step=0)

    @edl.run
    def train(state: edl.State) -> None:
        parts.train_from(state, args, model, edl.parallel(model), optimizer)

    train(state)


if args.reference:
    write_reference(args.folder, parts.undisturbed(args.reference))
else:
    main()
