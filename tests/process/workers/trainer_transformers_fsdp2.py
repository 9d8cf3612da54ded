"""Transformers' ``Trainer`` with ``EDLCallback`` and ``fsdp=True``, on the CPU: a small GPT-2 with random weights.
Writes a line for each step, the samples of each step, and the trained model's numbers at the end."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers import Trainer

from edl.integrations.transformers import EDLCallback
from tests.process.workers import trainer_script
from tests.process.workers.trainer_transformers import Log, Tokens, arguments, gpt, options, write
from tests.support.accelerate_on_cpu import shard_on_cpu


class LogAndKeep(Log):
    """Also keeps the whole weights at the end."""

    weights: ClassVar[dict[str, Any]] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        Tokens.read = []  # without those of a step that was interrupted

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **named: Any) -> None:
        self.weights.update((name, one.full_tensor()) for name, one in model.state_dict().items())


def main() -> None:
    trainer_script.wait_until_free(options.folder)
    shard_on_cpu()
    torch.set_num_threads(1)
    callbacks = [EDLCallback(global_batch=options.global_batch), LogAndKeep()]
    sharded = arguments(fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["GPT2Block"]})
    trainer = Trainer(model_init=gpt, args=sharded, train_dataset=Tokens(), callbacks=callbacks)
    write(trainer, trainer.train(), LogAndKeep.weights)


if __name__ == "__main__":
    main()
