"""torchtitan's ``Trainer`` with edl: a small llama under FSDP2, on the CPU. Writes a line for each step, the samples of
each step, and the trained model's numbers at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import datasets
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from benchmarks.scripts.titan_numbers import LENGTH, VOCABULARY, Numbers
from benchmarks.scripts.titan_on_cpu import use_cpu
from edl.integrations import torchtitan
from tests.process.workers import trainer_script

parser = trainer_script.parser()
parser.add_argument("--without-edl", action="store_true", help="the trainer's own checkpoints instead")
parser.add_argument("--save-steps", type=int, default=0)
parser.add_argument("--replicas", action="store_true", help="HSDP: groups of two workers")
parser.set_defaults(batch=2)
options = parser.parse_args()


class Read:
    """Notes which samples were read."""

    numbers: ClassVar[list[int]] = []

    @classmethod
    def text(cls, sample: dict[str, str]) -> str:
        cls.numbers.append(int(sample["text"]))
        return sample["text"]


def numbers(_: str) -> Any:
    return datasets.Dataset.from_dict({"text": [str(number) for number in range(options.samples)]})


class Log(MetricsProcessor):  # type: ignore[misc]
    """Writes a line for each step, in the form that the harness reads, and the step's samples."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        pass

    def log(self, step: int, *_: Any, **__: Any) -> None:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        trainer_script.log(options, step, rank, world, Read.numbers)
        Read.numbers = []


def same_weights(_: Any, model_parts: list[torch.nn.Module], __: Any) -> None:
    """The first weights do not depend on the size of the world; on a CPU each worker draws its own part. Gradients are
    added up as gloo can."""
    for part in model_parts[0].modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
    generator = torch.Generator().manual_seed(1)
    one: Any
    for one in model_parts[0].parameters():
        whole = torch.randn(one.shape, generator=generator) * 0.02
        with torch.no_grad():
            one.copy_(distribute_tensor(whole, one.device_mesh, one.placements))


def configured() -> Any:
    config: Any = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    config.model_spec.post_optimizer_build_fn = same_weights
    model = config.model_spec.model
    model.layers = model.layers[:1]
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCABULARY
    config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    config.optimizer = default_adamw(lr=1e-3, eps=1e-5)
    config.tokenizer, config.dataloader = Numbers.Config(), HuggingFaceTextDataLoader.Config(dataset="numbers")
    config.metrics = Log.Config(log_freq=1)
    config.validator.enable = False
    config.checkpoint = CheckpointManager.Config(
        enable=options.save_steps > 0, interval=options.save_steps or 500, last_save_model_only=False
    )
    config.activation_checkpoint = None
    config.dump_folder = str(options.folder / "out")
    config.debug.seed = 0
    config.debug.enable_structured_logging = False
    config.training.local_batch_size = options.batch
    config.training.global_batch_size = options.global_batch
    config.training.seq_len = LENGTH
    config.training.steps = options.steps
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # the default one needs a newer torch than 2.13
    if options.replicas:
        config.parallelism.data_parallel_shard_degree = 2
    return config


def main() -> None:
    trainer_script.wait_until_free(options.folder)
    use_cpu()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    DATASETS["numbers"] = DatasetConfig(path="", loader=numbers, sample_processor=Read.text)
    config = configured()
    if options.without_edl:
        trainer: Trainer = config.build()
        trainer.train()
        trainer.close()
    else:
        trainer = torchtitan.train(config)
    weights = {name: one.full_tensor() for name, one in trainer.model_parts[0].named_parameters()}
    trainer_script.write_result(
        options.folder, torch.distributed.get_rank(), trainer.step, weights,
        rate=trainer.lr_schedulers.schedulers[0].get_last_lr(), tokens=trainer.ntokens_seen,
    )  # fmt: skip


if __name__ == "__main__":
    main()
