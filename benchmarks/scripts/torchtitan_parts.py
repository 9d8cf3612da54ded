"""A configuration for torchtitan's ``Trainer``: a small llama under FSDP2, on the CPU, that learns numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import datasets
import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from benchmarks.scripts.titan_numbers import LENGTH, VOCABULARY, Numbers
from benchmarks.scripts.titan_on_cpu import use_cpu
from benchmarks.scripts.trainer_parts import Log, arguments

SAMPLES, BATCH, STREAMS = 96, 2, 4


def numbers(_: str) -> Any:
    return datasets.Dataset.from_dict({"text": [str(number) for number in range(SAMPLES)]})


class StepLog(MetricsProcessor):  # type: ignore[misc]
    """Writes the step log. There is a new one in each world."""

    file: ClassVar[Log]
    _began = False

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        pass

    def log(self, step: int, *_: Any, **__: Any) -> None:
        if not self._began:
            self._began = True
            self.file.world(torch.distributed.get_rank(), torch.distributed.get_world_size())
        self.file.step(step)


def add_up(_: Any, model_parts: list[torch.nn.Module], __: Any) -> None:
    """Gradients are added up as gloo can."""
    for part in model_parts[0].modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)


def configured(*, checkpoints: bool) -> Any:
    """What both scripts train; with ``checkpoints``, torchtitan writes its own and continues from them."""
    args = arguments()
    StepLog.file = Log(args)
    use_cpu()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    DATASETS["numbers"] = DatasetConfig(path="", loader=numbers, sample_processor=lambda sample: sample["text"])
    config: Any = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    config.model_spec.post_optimizer_build_fn = add_up
    model = config.model_spec.model
    model.layers = model.layers[:1]
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCABULARY
    config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    config.tokenizer, config.dataloader = Numbers.Config(), HuggingFaceTextDataLoader.Config(dataset="numbers")
    config.metrics = StepLog.Config(log_freq=1)
    config.validator.enable = False
    config.checkpoint = CheckpointManager.Config(
        enable=checkpoints, interval=args.checkpoint_every, last_save_model_only=False
    )
    config.activation_checkpoint = None
    config.dump_folder = str(args.workdir / "out")
    config.debug.seed = 0
    config.debug.enable_structured_logging = False
    config.training.local_batch_size = BATCH
    config.training.global_batch_size = BATCH * STREAMS
    config.training.seq_len = LENGTH
    config.training.steps = args.steps
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # the default one needs a newer torch than 2.13
    return config
