"""Probes of a health check for tests: ``--health-probe=health_probes:FUNCTION``."""

from __future__ import annotations

import os
import signal
import time

from edl.worker.probe import product


def wrong_product() -> str:
    """A processor that gets one number wrong in each product."""
    rows = range(8)
    first, second = ([[product.entry(i, j, seed) for j in rows] for i in rows] for seed in product.SEEDS)
    found = [[sum(first[i][k] * second[k][j] for k in rows) for j in rows] for i in rows]
    found[3][5] += 1
    weights = [product.weight(j) for j in rows]
    inner = [sum(second[i][j] * weights[j] for j in rows) for i in rows]
    wrong = [
        i for i in rows if sum(found[i][j] * weights[j] for j in rows) != sum(first[i][k] * inner[k] for k in rows)
    ]
    return f"{product.WRONG}: row {wrong[0]}" if wrong else ""


def crash() -> str:
    """A device whose library crashes."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return ""


def hang() -> str:
    """A device that does not answer."""
    time.sleep(3600)
    return ""
