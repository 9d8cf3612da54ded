"""Trains DistributedDataParallel in process: ``edl.torch`` with ``State`` and ``run``."""

from __future__ import annotations

import time

import edl.torch as edl
from benchmarks.scripts import soak_torch_parts as parts
from benchmarks.scripts.soak_parts import StepLog, arguments, last_step, write_reference

args = arguments()


def main() -> None:
    model, optimizer = parts.build()
    state = edl.State(model=model, optimizer=optimizer, step=0)

    @edl.run
    def train(state: edl.State) -> None:
        here = edl.context()
        parallel = edl.parallel(model)
        log = StepLog(args.folder, here.rank, here.world_size, here.node, here.round)
        try:
            while state.step < last_step(args.folder):
                loss = parts.whole_loss(model, state.step)
                parts.advance(parallel, optimizer, parts.batch(state.step)[here.rank :: here.world_size])
                state.step += 1
                log.step(state.step, loss)
                if state.step % args.save_every == 0:
                    state.save()
                else:
                    state.commit()
                time.sleep(args.pause)
        finally:
            log.close()

    train(state)


if args.reference:
    write_reference(args.folder, parts.undisturbed(args.reference))
else:
    main()
