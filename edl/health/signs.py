"""Tells failures that look like defective hardware from those of programs. Pure."""

from __future__ import annotations

import re

SIGNALS = {-7: "SIGBUS", -11: "SIGSEGV", -4: "SIGILL"}
"""Signals by which workers end on defective memory, processors or devices, as exit status."""

_NOT_HARDWARE = re.compile(
    r"device-side assert|out of memory|invalid device ordinal|Assertion .* failed", re.IGNORECASE
)
"""Errors with the words below that only programs and settings cause."""
_TEXTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("ECC error", re.compile(r"uncorrectable (?:NVLink |double.bit )?(?:ECC )?error|\bECC error|cudaErrorECC")),
    (
        "device lost",
        re.compile(r"fallen off the bus|GPU is lost|no CUDA-capable device|device\(s\) is/are busy or unavailable"),
    ),
    ("Xid", re.compile(r"\bXid\b")),
    (
        "CUDA error",
        re.compile(
            r"(?:CUDA|HIP|cudaError)\w*[ :].*(?:illegal memory access|illegal instruction|misaligned address|"
            r"unspecified launch failure|hardware stack error|unknown error|launch timed out)",
            re.DOTALL,
        ),
    ),
    ("NVLink error", re.compile(r"NVLink (?:error|fatal)|nvlink_uncorrectable", re.IGNORECASE)),
    ("NCCL error", re.compile(r"ncclUnhandledCudaError|ncclSystemError|NCCL WARN .*(?:IB|NET/IB|NVLS)", re.DOTALL)),
    ("NPU error", re.compile(r"\b(?:HCCL|ACL|NPU)\b.*(?:hardware|ECC|device lost|507\d{3})", re.DOTALL)),
)
"""Names of errors and the texts by which they are recognised."""
LONGEST = 20_000
"""Characters from the end of a text that are searched."""


def hardware_sign(exit_code: int, texts: str, peer_loss: bool) -> str:
    """Why a worker's end looks like defective hardware; empty: it does not. ``texts``: exception and last output.
    ``peer_loss``: the worker only reports a lost peer, whatever words it does that with."""
    if exit_code in SIGNALS:
        return f"a worker was killed by {SIGNALS[exit_code]}"
    if peer_loss:
        return ""
    for line in texts[-LONGEST:].splitlines():
        for name, pattern in _TEXTS:
            if pattern.search(line) and not _NOT_HARDWARE.search(line):
                return f"{name} of a worker: {line.strip()[:160]}"
    return ""
