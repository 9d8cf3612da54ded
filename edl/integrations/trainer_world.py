"""What a ``Trainer`` of Transformers needs in each world: an ``Accelerator`` on the world's group, and its model."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
from transformers.trainer_utils import enable_full_determinism, set_seed
from transformers.utils import logging

import edl.torch as edl
from edl.integrations import fsdp2
from edl.integrations.accelerate_world import check_size, forget_world, keep_types, plain
from edl.torch.warm_up import device_of


def is_sharded(args: Any) -> bool:
    """Whether these ``TrainingArguments``, or the variables of ``accelerate launch``, ask for FSDP."""
    return bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def take_own_gpu(args: Any, local_rank: int) -> None:
    """Before there is a world, ``TrainingArguments`` take the first GPU: all workers of a host would put their models
    there. Give these the GPU that the worker will have."""
    if args.device.type == "cuda":
        device = torch.device("cuda", device_of(local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        vars(args)["_setup_devices"] = device
        args._n_gpu = 1  # else the trainer would use all of them for an evaluation


def enter_world(trainer: Any) -> None:
    """Give a trainer what belongs to this world: devices, ranks, and an ``Accelerator`` on the current group. Raises
    ``StateError`` if Accelerate does not use that group."""
    args = trainer.args
    forget_world()
    vars(args).pop("_setup_devices", None)
    _ = args.device  # sets it up again
    if args.data_seed is None:
        args.data_seed = args.seed  # Accelerate would take the generator's, which differs between ranks
    if args.accelerator_config.gradient_accumulation_kwargs is not None:
        args.accelerator_config.gradient_accumulation_kwargs.pop("num_steps", None)  # the trainer puts it there
    trainer._train_batch_size = args.train_batch_size
    handle = vars(trainer).pop("neftune_hook_handle", None)
    if handle is not None:
        handle.remove()
    trainer.create_accelerator_and_postprocess()
    check_size(trainer.accelerator, edl.context().world_size, "TrainingArguments(use_cpu=True)")
    trainer.current_flos = 0
    vars(trainer).pop("_eval_dataloaders", None)
    logging.set_verbosity(args.get_process_log_level())


def place(trainer: Any, optimizer: Any) -> None:
    """Take a model that each worker has whole out of the last world's wrappers, to this world's device."""
    trainer.model = plain(trainer.model)
    keep_types(trainer.accelerator)
    if trainer.place_model_on_device:
        trainer._move_model_to_device(trainer.model, trainer.args.device)
    trainer.model_wrapped, trainer.optimizer = trainer.model, optimizer


def shard(trainer: Any) -> tuple[Any, Any]:
    """Enter this world with a model that is built and sharded now. Returns it and its optimizer, which are not restored
    yet. Raises ``StateError`` for a kind of sharding that edl cannot keep."""
    args = trainer.args
    _forget_model(trainer)
    enter_world(trainer)
    gc.collect()  # there may be no room for a second model
    accelerator = trainer.accelerator
    fsdp2.refuse(accelerator, "EDLCallback")
    trainer.place_model_on_device = False  # sharding has placed it
    # As the trainer does before it calls model_init.
    enable_full_determinism(args.seed) if args.full_determinism else set_seed(args.seed)
    trainer.model = trainer.call_model_init()
    optimizer = trainer.create_optimizer()
    trainer.model, prepared = accelerator.prepare(trainer.model, optimizer)
    trainer.model_wrapped = trainer.model
    _return_prepared(accelerator, trainer.model, prepared)
    return trainer.model, optimizer


def _forget_model(trainer: Any) -> None:
    """Drop the last world's model, and all that belongs to it."""
    trainer.model = trainer.model_wrapped = trainer.optimizer = trainer.lr_scheduler = None
    trainer._created_lr_scheduler = False
    for name in ("model", "optimizer", "lr_scheduler", "train_dataloader"):
        setattr(trainer.callback_handler, name, None)


def _return_prepared(accelerator: Any, model: Any, optimizer: Any) -> None:
    """Have ``accelerator.prepare`` return these when the trainer prepares the model: it would look for the optimizer's
    parameters by their addresses, and a worker's empty parts of small parameters have none."""
    prepare = accelerator.prepare

    def prepared(*given: Any, **named: Any) -> Any:
        if not given or given[0] is not model:
            return prepare(*given, **named)
        accelerator._models.append(model)  # the trainer has emptied the lists
        if len(given) == 1:
            return model
        accelerator._optimizers.append(optimizer)
        return model, optimizer

    accelerator.prepare = prepared
