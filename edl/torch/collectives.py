"""Which of this worker's collectives have failed, whatever its script makes of the exceptions.

A script may swallow what a collective raises, or never wait for one that it began. Its step is not whole then, and no
commit may be made of it; nor may the peers be given anything that was computed from it. So the first failure aborts
the round's group. It is seen where every failure passes through: the calls of torch's process groups, the waiting for
their work, and backward passes and buffer broadcasts, whose collectives C++ begins and waits for.

Functional collectives (those of DTensors, of FSDP2 and of compiled graphs) begin in C++, too. They are operators with
kernels, so they are seen in kernels of ours, which call torch's own: whoever calls an operator, it comes by, and a
compiler traces the operator as ever.
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

from edl.torch import nccl
from edl.torch.ddp import _armed

_AMONG_ALL = (
    *("allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single_coalesced", "broadcast", "gather", "scatter", "alltoall", "alltoall_base"),
    *("all_to_all_single", "barrier", "monitored_barrier"),
)
_BETWEEN_TWO = ("send", "recv", "recv_anysource")
"""Nobody waits for these on the script's behalf: what a peer sends after its next boundary must not keep this worker
from its own. Nor is their work held on to: gloo's is never complete unless somebody waits for it."""
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
"""Look for those that are complete when there are more."""


class Round(Protocol):
    """The groups of a round: ``TorchGroup``."""

    def abort(self) -> None:
        """End all of them."""
        ...

    def has(self, group: Any) -> bool:
        """Whether it is one of them."""
        ...


class Collectives:
    """Those of one round."""

    def __init__(self, group: Round) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._open: dict[Any, None] = {}
        """Begun among all ranks and not known to be complete, the eldest first. Scripts drop what they never wait for,
        so it is held here."""
        self._most = _MOST_OPEN
        self._owed = ""
        self.failed = ""
        """What the first one to fail said; empty while none has."""

    def fail(self, error: BaseException | str) -> None:
        """One has failed: no other may succeed."""
        with self._lock:
            self.failed = self.failed or f"a collective failed: {error}"
        self._group.abort()

    def owe(self, error: BaseException) -> None:
        """A backward pass that all ranks make broke off here, before it sent anything. The script may still make it, as
        with a smaller batch; but not commit without it."""
        self._owed = f"a backward pass broke off, and was not made again: {error}"

    def pay(self, outputs: Any) -> None:
        """A backward pass has succeeded: see ``owe``."""
        if self._owed and _goes_through_ddp(outputs):
            self._owed = ""

    def began(self, work: Any, among_all: bool) -> None:
        """One is under way."""
        _owners[work] = self
        if not among_all or _capturing():
            return
        with self._lock:
            full = len(self._open) >= self._most
            # They complete in order, more or less: by the eldest two, the finished ones go as new ones come.
            known = list(self._open if full else itertools.islice(self._open, 2))
            self._open[work] = None
        self._look(known)
        if full:
            self._most = max(_MOST_OPEN, 2 * len(self._open))

    def ended(self, work: Any) -> None:
        """Its result is there."""
        with self._lock:
            self._open.pop(work, None)

    def look(self) -> None:
        """Let go of what is complete, and with it of its tensors."""
        if self._open and not _capturing():
            with self._lock:
                known = list(self._open)
            self._look(known)

    def settle(self) -> None:
        """See ``edl.worker.framework.Group``. For work on an accelerator to wait is to let the streams wait, by which
        what is copied from there next is behind it."""
        with self._lock:
            left = list(self._open)
        self._wait_for(left)
        for result in _promised_to(self):
            try:
                torch.ops._c10d_functional.wait_tensor(result)
            except Exception as error:  # noqa: BLE001 - whatever it is, the result is not there
                self.fail(error)
        self.due()

    def due(self) -> None:
        """From here on a pass that broke off is missed: the others have made it, or wait for this worker's part."""
        if self._owed:
            self.fail(self._owed)

    def forget(self) -> None:
        """The round is over."""
        with self._lock:
            self._open.clear()

    def counts(self) -> list[int]:
        """How many collectives each backend of the round has begun, also from C++."""
        found = []
        for group in list(c10d._world.pg_map) if self._group_is_shared() else []:
            if self._group.has(group):
                for device in group._device_types:
                    try:
                        backend: Any = group._get_backend(device)
                        found.append(int(backend._get_sequence_number_for_group()))
                    except (AttributeError, RuntimeError):  # not formed yet, or one that does not count
                        continue
        return found

    def _group_is_shared(self) -> bool:
        return dist.is_initialized() and dist.get_world_size() > 1

    def broke_off(self, error: BaseException, outputs: Any, begun: list[int]) -> None:
        """A backward pass has raised something that is not about a peer."""
        if not self._group_is_shared():
            return
        if self.counts() != begun:
            self.fail(f"a backward pass broke off in the middle: {error}")  # where the others wait
        elif _goes_through_ddp(outputs):
            self.owe(error)

    def _look(self, works: Iterable[Any]) -> None:
        self._wait_for([work for work in works if work.is_completed()])  # returns or raises at once

    def _wait_for(self, works: Iterable[Any]) -> None:
        for work in works:
            try:
                _wait(work)
            except Exception as error:  # noqa: BLE001 - whatever it is, the result is not there
                self.fail(error)
            self.ended(work)


_owners: WeakKeyDictionary[Any, Collectives] = WeakKeyDictionary()
"""Whose the work is that scripts hold, also of rounds that are over."""
_promised: dict[int, tuple[StorageWeakRef, weakref.ref[Collectives]]] = {}
"""What functional collectives have returned and nobody has waited for, by the address of its memory, as torch itself
remembers the work of it. Memory that is gone is no part of a state."""
_lock = threading.Lock()
_most_promised = _MOST_OPEN
_kernels: list[torch.library.Library] = []
"""They last as long as these."""
_wait: Callable[..., Any] = dist.Work.wait if dist.is_available() else lambda work: None
_current: Callable[[], Collectives | None] = lambda: None  # noqa: E731
_lost_peers: Callable[[BaseException], bool] = lambda error: False  # noqa: E731


def observe(current: Callable[[], Collectives | None], lost_peers: Callable[[BaseException], bool]) -> None:
    """From now on failures count as those of ``current()``. ``lost_peers``: whether an exception is about a peer."""
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
    """Let an operator's kernel be reached through another one. Fakes, by which compilers trace, have kernels of their
    own."""
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
    """For what begins collectives in C++ and waits for them there."""

    def observed(*arguments: Any, **named: Any) -> Any:
        try:
            return original(*arguments, **named)
        except Exception as error:
            found = _current()
            if found is not None and _lost_peers(error):
                found.fail(error)
            raise

    return observed


def _observed_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The ranks make a pass together. One that has begun collectives and breaks off, for whatever reason, leaves the
    others in the middle of theirs."""

    def backward(outputs: Any, *arguments: Any, **named: Any) -> Any:
        found = _current()
        if found is None:
            return original(outputs, *arguments, **named)
        begun = found.counts()
        try:
            result = original(outputs, *arguments, **named)
        except Exception as error:
            if _lost_peers(error):
                found.fail(error)
            else:
                found.broke_off(error, outputs, begun)
            raise
        found.pay(outputs)
        found.look()  # what DDP's communication hooks have begun is complete, and waited for in C++
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
    """For the calls of a process group. One that is refused before it has begun, as for its arguments, does not count:
    scripts find out that way what a backend can do."""

    def observed(group: Any, *arguments: Any, **named: Any) -> Any:
        found = _current()
        mine = found if found is not None and found._group.has(group) else None
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
        try:
            result = original(work, *arguments, **named)
        except Exception as error:
            found = _owners.get(work, _current())
            # Not when the caller was only impatient, and the work goes on.
            if found is not None and (work.is_completed() or _lost_peers(error)):
                found.ended(work)
                found.fail(error)
            raise
        owner = _owners.get(work)
        if owner is not None:
            owner.ended(work)
        return result

    return wait


def _observed_functional(original: Callable[..., Any]) -> Callable[..., Any]:
    def observed(*arguments: Any, **named: Any) -> Any:
        found = _current()
        mine = found if found is not None and _is_its(found, arguments[-1]) else None
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
    """Whether a group, which an operator knows by its name, is one of the round's."""
    if not isinstance(name, str):
        return True
    try:
        return found._group.has(_resolve_process_group(name))  # type: ignore[arg-type]
    except (LookupError, RuntimeError, ValueError):
        return False  # as the operator will find out, too


def _observed_wait_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(tensor: Any) -> Any:
        with _lock:
            promised = _promised.pop(tensor.untyped_storage()._cdata, None)
        try:
            return original(tensor)
        except Exception as error:
            found = _current() if promised is None else promised[1]()
            if found is not None and (promised is not None or _lost_peers(error)):
                found.fail(error)
            raise

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
    """A tensor over the memory of each result that this round still owes."""
    with _lock:
        references = [storage for storage, owner in _promised.values() if owner() is mine]
    made = []
    for reference in references:
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if storage is not None:
            made.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    return made


def _capturing() -> bool:
    """Into a CUDA graph: what is recorded is not under way, and to ask after any work would spoil the recording."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


def nccl_error(groups: Iterable[Any]) -> str:
    """What NCCL's own watchdog has found wrong with one of these groups, which it then aborts by itself."""
    return "".join(f"NCCL reports {name}" for name in nccl.errors(groups)[:1])
