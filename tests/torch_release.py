"""Which PyTorch is installed: some tests need what a later one has than the oldest that edl supports."""

from __future__ import annotations

import importlib.metadata

import pytest


def release(text: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as (2, 13)."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


def installed() -> tuple[int, ...]:
    """Of torch; () where there is none."""
    try:
        return release(importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return ()


def since(text: str, why: str) -> pytest.MarkDecorator:
    """Skip with an older one."""
    return pytest.mark.skipif(() < installed() < release(text), reason=f"torch before {text}: {why}")
