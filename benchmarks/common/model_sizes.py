"""The layers of the recovery benchmarks' model: a tiny MLP, or one whose parameters take a given number of megabytes.
Without torch, so that a program may count bytes that its workers move."""

from __future__ import annotations

WIDTH = 1024
"""Of the hidden layers of a model of a given size: 4 MiB each."""
INPUTS = 32


def layers(megabytes: int) -> list[tuple[int, int]]:
    """The inputs and outputs of each linear layer. ``megabytes=0``: 32 to 64 to 1."""
    if not megabytes:
        return [(INPUTS, 64), (64, 1)]
    hidden = max(1, round(megabytes * 1e6 / (4 * WIDTH * WIDTH)))
    return [(INPUTS, WIDTH), *[(WIDTH, WIDTH)] * hidden, (WIDTH, 1)]


def shapes(megabytes: int) -> dict[str, tuple[int, ...]]:
    """The shapes of its parameters, by name. Between two linear layers there is one without parameters."""
    found: dict[str, tuple[int, ...]] = {}
    for at, (inputs, outputs) in enumerate(layers(megabytes)):
        found |= {f"{2 * at}.weight": (outputs, inputs), f"{2 * at}.bias": (outputs,)}
    return found
