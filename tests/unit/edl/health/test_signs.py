"""Which failures look like defective hardware."""

from __future__ import annotations

import pytest

from edl.health.signs import LONGEST, hardware_sign

HARDWARE = (
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "torch.AcceleratorError: CUDA error: unspecified launch failure",
    "RuntimeError: CUDA error: misaligned address",
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
    "RuntimeError: No CUDA GPUs are available: no CUDA-capable device is detected",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "torch.distributed.DistBackendError: NCCL error in: x.cpp:12, ncclUnhandledCudaError: Call to CUDA function failed",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
    "NVLink error detected on link 3",
    "RuntimeError: HCCL error 507035: device lost",
)
SOFTWARE = (
    "ValueError: shapes do not match",
    "RuntimeError: CUDA error: device-side assert triggered",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "RuntimeError: CUDA error: invalid device ordinal",
    "KeyError: 'Xidus'",
    "ConnectionResetError: Connection closed by peer",
    "out of memory: the kernel killed a process in this container",
)


@pytest.mark.parametrize("text", HARDWARE)
def test_hardware(text: str) -> None:
    assert hardware_sign(1, f"Traceback …\n{text}\nbye", peer_loss=False)
    assert not hardware_sign(1, text, peer_loss=True), "it only reports a lost peer"


@pytest.mark.parametrize("text", SOFTWARE)
def test_software(text: str) -> None:
    assert hardware_sign(1, text, peer_loss=False) == ""


@pytest.mark.parametrize(("code", "name"), [(-11, "SIGSEGV"), (-7, "SIGBUS"), (-4, "SIGILL")])
def test_signals(code: int, name: str) -> None:
    assert hardware_sign(code, "", peer_loss=False) == f"a worker was killed by {name}"
    assert hardware_sign(code, "", peer_loss=True), "a signal is no report"


@pytest.mark.parametrize("code", [0, 1, -9, -6, -15, 139])
def test_other_ends(code: int) -> None:
    assert hardware_sign(code, "", peer_loss=False) == ""


def test_an_assertion_beside_a_device_error_is_still_one() -> None:
    text = "CUDA error: device-side assert triggered\nCUDA error: uncorrectable ECC error encountered"
    assert hardware_sign(1, text, peer_loss=False).startswith("ECC error")


def test_long_outputs_are_searched_from_their_end() -> None:
    assert hardware_sign(1, HARDWARE[0] + "\n" + "x" * LONGEST, peer_loss=False) == ""
    assert hardware_sign(1, "x" * LONGEST + "\n" + HARDWARE[0], peer_loss=False)
