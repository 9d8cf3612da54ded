"""Trains two parameter tables until a checkpoint is complete. Each step adds one to the rows of ``plain``, and one to
the optimizer's state of ``adaptive``."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import edl.torch.ps as ps

KEYS = (-5, 0, 7, 2**40)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, required=True)
    folder = parser.parse_args().checkpoints
    plain = ps.Embedding("plain", dim=3, optimizer=ps.SGD(1.0), initial=ps.Zeros())
    adaptive = ps.Embedding("adaptive", dim=2, optimizer=ps.Adagrad(1.0), initial=ps.Zeros())
    keys = torch.tensor(KEYS)
    steps = 0
    ps.on_save(lambda: {"steps": steps})
    while not list(folder.glob("ps/*/*/checkpoint.json")):
        (plain(keys).sum() + adaptive(keys).sum()).neg().backward()
        ps.step()
        steps += 1
        if steps == 3:
            ps.save()
