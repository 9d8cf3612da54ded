"""torchtitan's trainer, elastically: a small llama under FSDP2 learns to count. Nothing is downloaded."""

from dataclasses import dataclass

import datasets
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from edl.integrations.torchtitan import train


class Letters(BaseTokenizer):  # type: ignore[misc]  # a token for each character
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, tokenizer_path: str) -> None: ...

    def encode(self, text: str, **_: bool) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


lines = [" ".join(str(first + step) for step in range(100)) for first in range(1000)]
counting = datasets.Dataset.from_dict({"text": lines})
DATASETS["counting"] = DatasetConfig(path="", loader=lambda _: counting, sample_processor=lambda line: line["text"])
config = llama3_debugmodel()
config.tokenizer, config.dataloader = Letters.Config(), HuggingFaceTextDataLoader.Config(dataset="counting")
config.training.local_batch_size, config.training.global_batch_size, config.training.seq_len = 4, 16, 128
config.training.steps, config.validator.enable = 1000, False
config.parallelism.spmd_backend = "partial_dtensor"  # the default one needs a torch after 2.13
train(config)
