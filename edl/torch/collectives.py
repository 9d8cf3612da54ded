"""Detects failed collectives of this worker, even if the script swallows the exceptions.

A script may swallow an exception of a collective, or never wait for one that it started. Its step is incomplete then:
it must not be committed, and no results computed from it may reach the peers. So the first failure disconnects the
round's group, and no further collective begins. Failures are detected where all of them pass: in the calls of torch's
process groups, in waits for their work, and in backward passes and buffer broadcasts, whose collectives C++ starts and
waits for.

Functional collectives (of DTensors, FSDP2 and compiled graphs) are also started in C++. They are operators with
kernels, so edl registers kernels that wrap torch's own: every caller of the operator passes through them, and compilers
trace the operator as before.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing.reductions import StorageWeakRef

from edl.torch import backward_end, nccl
from edl.torch.ddp import _armed
from edl.worker.framework import CollectiveWaits, Moment
from edl.worker.waits import now

_AMONG_ALL = (
    *("allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single_coalesced", "broadcast", "gather", "scatter", "alltoall", "alltoall_base"),
    *("all_to_all_single", "barrier", "monitored_barrier"),
)
_BETWEEN_TWO = ("send", "recv", "recv_anysource")
"""Point-to-point operations. edl does not wait for them: a message that a peer sends only after its next step boundary
must not keep this worker from its own. Their work is not held either, since gloo's is never complete unless the script
waits for it."""
_FUNCTIONAL = (
    *("_c10d_functional::all_reduce", "_c10d_functional::all_reduce_", "_c10d_functional::all_reduce_coalesced"),
    *("_c10d_functional::all_reduce_coalesced_", "_c10d_functional::all_gather_into_tensor"),
    *("_c10d_functional::all_gather_into_tensor_out", "_c10d_functional::all_gather_into_tensor_coalesced"),
    *("_c10d_functional::reduce_scatter_tensor", "_c10d_functional::reduce_scatter_tensor_out"),
    *("_c10d_functional::reduce_scatter_tensor_coalesced", "_c10d_functional::all_to_all_single"),
    *("_c10d_functional::broadcast", "_c10d_functional::broadcast_", "_dtensor::shard_dim_alltoall"),
)
"""Operators whose last argument is the group."""
_WAITING = "_c10d_functional::wait_tensor"
_KEYS = ("CPU", "CUDA")
_MOST_OPEN = 64
"""When more are open, completed ones are removed."""


class Round(Protocol):
    """The groups of one round; implemented by ``TorchGroup``."""

    @property
    def aborted(self) -> bool:
        """Whether the round has failed here, or is over."""
        ...

    def disconnect(self) -> None:
        """Mark the round as failed, and make every call fail that can raise."""
        ...

    def refuse(self) -> None:
        """Raise if the round has failed or is over, and its backend would begin another collective nevertheless."""
        ...

    def has(self, group: Any) -> bool:
        """Whether a group belongs to the round."""
        ...


class Collectives:
    """The collectives of one round."""

    def __init__(self, group: Round) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._open: dict[Any, None] = {}
        """Started among all ranks and not known to be complete, oldest first. Held here because scripts may drop work
        that they never wait for."""
        self._most = _MOST_OPEN
        self._owed = ""
        self.failed = ""
        """The message of the first failure; empty while there is none."""
        self.waits = CollectiveWaits()
        """Of the training thread, which creates the group."""
        self._trainer = threading.get_ident()

    def fail(self, error: BaseException | str) -> None:
        """Record a failure and disconnect the round, so that no other collective begins. Those that a device is
        carrying out stay as they are: aborted here, they would end with garbage at peers that know nothing yet."""
        with self._lock:
            self.failed = self.failed or f"a collective failed: {error}"
        self._group.disconnect()

    def owe(self, error: BaseException) -> None:
        """A backward pass that all ranks run failed here before it sent anything. The script may repeat it, for example
        with a smaller batch, but must not commit without it."""
        self._owed = f"a backward pass failed and was not repeated: {error}"

    def pay(self, outputs: Any) -> None:
        """A backward pass has succeeded; see ``owe``."""
        if self._owed and _goes_through_ddp(outputs):
            self._owed = ""

    def began(self, work: Any, among_all: bool) -> None:
        """Record a collective that has been started."""
        _owners[work] = self
        if not among_all or _capturing():
            return
        with self._lock:
            full = len(self._open) >= self._most
            # Collectives complete roughly in order, so checking the oldest two keeps up with new ones.
            known = list(self._open if full else itertools.islice(self._open, 2))
            self._open[work] = None
        self._look(known)
        if full:
            self._most = max(_MOST_OPEN, 2 * len(self._open))

    def waited_since(self, began: Moment) -> None:
        """Count a wait that began at this moment and ends now, if the training thread has waited."""
        if threading.get_ident() == self._trainer:
            self.waits.add(began, now())

    def ended(self, work: Any) -> None:
        """Note that the result of a collective is available."""
        with self._lock:
            self._open.pop(work, None)

    def look(self) -> None:
        """Release completed collectives and their tensors."""
        if self._open and not _capturing():
            with self._lock:
                known = list(self._open)
            self._look(known)

    def settle(self) -> None:
        """Wait for all open collectives; see ``edl.worker.framework.Communicator``. On an accelerator only the streams
        wait, so later copies from the device come after the collectives."""
        with self._lock:
            left = list(self._open)
        began = now()
        self._wait_for(left)
        for result in _promised_to(self):
            try:
                torch.ops._c10d_functional.wait_tensor(result)
            except Exception as error:  # noqa: BLE001 - whatever the reason, there is no result
                self.fail(error)
        if left:
            self.waited_since(began)
        self.due()

    def due(self) -> None:
        """From here on a failed backward pass must have been repeated: the other ranks have run it, or wait for this
        one."""
        if self._owed:
            self.fail(self._owed)

    def forget(self) -> None:
        """The round has ended: release its collectives."""
        with self._lock:
            self._open.clear()

    def counts(self) -> list[int]:
        """Number of collectives that each backend of the round has started, including those from C++."""
        found = []
        for group in list(c10d._world.pg_map) if self._group_is_shared() else []:
            if self._group.has(group):
                for device in group._device_types:
                    try:
                        backend: Any = group._get_backend(device)
                        found.append(int(backend._get_sequence_number_for_group()))
                    except (AttributeError, RuntimeError):  # not formed yet, or without a counter
                        continue
        return found

    def _group_is_shared(self) -> bool:
        return dist.is_initialized() and dist.get_world_size() > 1

    def broke_off(self, error: BaseException, outputs: Any, begun: list[int]) -> None:
        """A backward pass raised an error that is not about a peer."""
        if not self._group_is_shared():
            return
        if self.counts() != begun:
            self.fail(f"a backward pass failed in the middle: {error}")  # where the other ranks wait
        elif _goes_through_ddp(outputs):
            self.owe(error)

    def _look(self, works: Iterable[Any]) -> None:
        self._wait_for([work for work in works if work.is_completed()])  # returns or raises at once

    def _wait_for(self, works: Iterable[Any]) -> None:
        for work in works:
            try:
                _wait(work)
            except Exception as error:  # noqa: BLE001 - whatever the reason, there is no result
                self.fail(error)
            self.ended(work)


_owners: WeakKeyDictionary[Any, Collectives] = WeakKeyDictionary()
"""The round that each work object held by scripts belongs to, including ended rounds."""
_promised: dict[int, tuple[StorageWeakRef, weakref.ref[Collectives]]] = {}
"""Results of functional collectives that have not been waited for, by the address of their memory, as torch keeps their
work. Memory that has been freed cannot be part of a state."""
_lock = threading.Lock()
_most_promised = _MOST_OPEN
_kernels: list[torch.library.Library] = []
"""Keeps the registered kernels alive."""
_wait: Callable[..., Any] = dist.Work.wait if dist.is_available() else lambda work: None
_current: Callable[[], Collectives | None] = lambda: None  # noqa: E731
_lost_peers: Callable[[BaseException], bool] = lambda error: False  # noqa: E731


def observe(current: Callable[[], Collectives | None], lost_peers: Callable[[BaseException], bool]) -> None:
    """Count failures as those of ``current()`` from now on. ``lost_peers``: whether an exception is about a peer."""
    global _current, _lost_peers
    _current, _lost_peers = current, lost_peers
    if getattr(dist.Work.wait, "_edl_observed", False):
        return
    for name in (*_AMONG_ALL, *_BETWEEN_TWO):
        if hasattr(dist.ProcessGroup, name):
            _replace(dist.ProcessGroup, name, functools.partial(_observed_call, name in _AMONG_ALL))
    _replace(dist.Work, "wait", _observed_wait)
    _replace(torch.autograd, "_engine_run_backward", _observed_backward)
    _replace(dist, "_broadcast_coalesced", _observed)
    for name in _FUNCTIONAL:
        _put_before(name, _observed_functional)
    _put_before(_WAITING, _observed_wait_tensor)


def _replace(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name, None)
    if original is None:
        return
    observed = functools.update_wrapper(wrapper(original), original)
    observed._edl_observed = True  # type: ignore[attr-defined]
    setattr(owner, name, observed)


def _put_before(name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a kernel before an operator's own. Fake tensors, with which compilers trace, have separate kernels."""
    own = "CompositeExplicitAutograd"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    namespace, _, short = name.partition("::")
    operator = getattr(getattr(torch.ops, namespace), short, None)
    if operator is None or not has(name, own):
        return
    kernel = functools.partial(operator.default._op_dk, getattr(torch._C.DispatchKey, own))
    library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    for key in _KEYS:
        if not has(name, key):
            library.impl(short, wrapper(kernel), key)  # type: ignore[no-untyped-call]
    _kernels.append(library)


def _observed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that starts collectives in C++ and waits for them there."""

    def observed(*arguments: Any, **named: Any) -> Any:
        began, found = now(), _current()
        if found is not None:
            found._group.refuse()
        try:
            result = original(*arguments, **named)
        except Exception as error:
            if found is not None and _lost_peers(error):
                found.fail(error)
            raise
        if found is not None:
            found.waited_since(began)
        return result

    return observed


def _observed_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backward pass, which all ranks run together. One that fails after it has started collectives, for any
    reason, leaves the other ranks waiting."""

    def backward(outputs: Any, *arguments: Any, **named: Any) -> Any:
        found = _current()
        if found is None:
            return original(outputs, *arguments, **named)
        begun, computed = found.counts(), backward_end.computed
        if found._group.aborted and _goes_through_ddp(outputs):
            found._group.refuse()
        try:
            result = original(outputs, *arguments, **named)
        except Exception as error:
            if _lost_peers(error):
                found.fail(error)
            else:
                found.broke_off(error, outputs, begun)
            raise
        if backward_end.computed is not computed:
            found.waited_since(backward_end.computed)
        found.pay(outputs)
        found.look()  # C++ has waited for what DDP's communication hooks started
        return result

    return backward


def _goes_through_ddp(outputs: Any) -> bool:
    """Whether a backward pass from here sends gradients of a DDP."""
    sent = {id(one) for ddp in list(_armed) if ddp.require_backward_grad_sync for one in ddp.parameters()}
    if not sent:
        return False
    left = [getattr(one, "grad_fn", None) or getattr(one, "node", None) for one in outputs]
    seen = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in sent:
            return True
        seen.add(node)
        left += [following for following, _ in node.next_functions]
    return False


def _observed_call(among_all: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call of a process group. A call that is refused before it starts, for example because of its arguments, is
    not a failure: scripts probe a backend's features that way."""

    def observed(group: Any, *arguments: Any, **named: Any) -> Any:
        found = _current()
        mine = found if found is not None and found._group.has(group) else None
        if mine is not None:
            mine._group.refuse()
        try:
            work = original(group, *arguments, **named)
        except Exception as error:
            if mine is not None and _lost_peers(error):
                mine.fail(error)
            raise
        if mine is not None and isinstance(work, dist.Work):
            mine.began(work, among_all)
        return work

    return observed


def _observed_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Any, *arguments: Any, **named: Any) -> Any:
        began = now()
        try:
            result = original(work, *arguments, **named)
        except Exception as error:
            found = _owners.get(work, _current())
            # not if only the caller's timeout expired and the work continues
            if found is not None and (work.is_completed() or _lost_peers(error)):
                found.ended(work)
                found.fail(error)
            raise
        owner = _owners.get(work)
        if owner is not None:
            owner.ended(work)
            owner.waited_since(began)
        return result

    return wait


def _observed_functional(original: Callable[..., Any]) -> Callable[..., Any]:
    def observed(*arguments: Any, **named: Any) -> Any:
        found = _current()
        mine = found if found is not None and _is_its(found, arguments[-1]) else None
        if mine is not None:
            mine._group.refuse()
        try:
            results = original(*arguments, **named)
        except Exception as error:
            if mine is not None and _lost_peers(error):
                mine.fail(error)
            raise
        if mine is not None:
            _promise(results if isinstance(results, (list, tuple)) else [results], mine)
        return results

    return observed


def _is_its(found: Collectives, name: Any) -> bool:
    """Whether a group, which an operator refers to by name, belongs to the round."""
    if not isinstance(name, str):
        return True
    try:
        return found._group.has(_resolve_process_group(name))  # type: ignore[arg-type]
    except (LookupError, RuntimeError, ValueError):
        return False  # the operator will fail in the same way


def _observed_wait_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(tensor: Any) -> Any:
        with _lock:
            promised = _promised.pop(tensor.untyped_storage()._cdata, None)
        began = now()
        found = _current() if promised is None else promised[1]()
        try:
            result = original(tensor)
        except Exception as error:
            if found is not None and (promised is not None or _lost_peers(error)):
                found.fail(error)
            raise
        if found is not None:
            found.waited_since(began)
        return result

    return wait


def _promise(results: Iterable[Any], mine: Collectives) -> None:
    global _most_promised
    owner = weakref.ref(mine)
    with _lock:
        for result in results:
            storage = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]
            _promised[storage.cdata] = storage, owner
        if len(_promised) > _most_promised:
            for key, (storage, _) in list(_promised.items()):
                if storage.expired():  # type: ignore[no-untyped-call]
                    del _promised[key]
            _most_promised = max(_MOST_OPEN, 2 * len(_promised))


def _promised_to(mine: Collectives) -> list[torch.Tensor]:
    """A tensor over the memory of each result of this round that has not been waited for."""
    with _lock:
        references = [storage for storage, owner in _promised.values() if owner() is mine]
    made = []
    for reference in references:
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if storage is not None:
            made.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    return made


def _capturing() -> bool:
    """Whether a CUDA graph is being captured. Recorded work is not under way, and querying work would break the
    capture."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


def nccl_error(groups: Iterable[Any]) -> str:
    """The errors that NCCL's own watchdog has found in these groups, which it then aborts by itself."""
    return "".join(f"NCCL reports {name}" for name in nccl.errors(groups)[:1])
