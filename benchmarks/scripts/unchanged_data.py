"""Writes the data of the scripts that ``benchmarks.unchanged`` starts."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = (
    "a",
    "node",
    "leaves",
    "and",
    "another",
    "one",
    "comes",
    "while",
    "the",
    "model",
    "learns",
    "what",
    "comes",
    "next",
)
LINES, PICTURES, SIDE = 4000, 64, 32


def write_text(folder: Path) -> None:
    """Lines of random words in ``text.txt``."""
    draw = random.Random(0)
    lines = (" ".join(draw.choices(WORDS, k=12)) for _ in range(LINES))
    (folder / "text.txt").write_text("".join(f"{line}\n" for line in lines))


def write_pictures(folder: Path) -> None:
    """Random pictures with a class for each point, and ``train.txt`` with their names."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for number in range(PICTURES):
        for name, shape, most in (("picture", (SIDE, SIDE, 3), 256), ("label", (SIDE, SIDE), 2)):
            Image.fromarray(draw.integers(0, most, shape, dtype=np.uint8)).save(folder / f"{name}{number}.png")
    names = (f"picture{number}.png label{number}.png\n" for number in range(PICTURES))
    (folder / "train.txt").write_text("".join(names))
