"""One worker of a torch group, told on its standard input what to do. Answers each order with one line of JSON.

Orders: ``{"do": "traffic"}`` opens connections that are the script's own from then on, and tells what became of them;
``{"do": "round", "round", "rank", "size", "master", "work"}`` parks if need be, forms the group and does the
work, which the side thread may interrupt: ``{"do": "abort", "round"}`` aborts the group from there, at any
moment once the round has begun.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
import torch
import torch._dynamo  # DDP would import it in the first round, which takes seconds
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.nn.parallel import DistributedDataParallel

from edl.torch import group as edl_group
from edl.torch.ddp import parallel
from edl.torch.framework import TorchFramework
from edl.torch.group import TorchGroup
from edl.wire.local import Seat

torch.set_num_threads(1)
framework = TorchFramework()
orders: queue.Queue[dict[str, Any]] = queue.Queue()
group: TorchGroup | None = None
aborted_at = 0.0
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
spent: list[DistributedDataParallel] = []


def seat_of(order: dict[str, Any]) -> Seat:
    size = order["size"]
    return Seat(
        round=order["round"], rank=order["rank"], local_rank=order["rank"], world_size=size, local_world_size=size,
        node="n", nodes=1, position=0, endpoints=("",) * size, master=order["master"], era=order["round"],
        restore_era=0, restore_commit=order.get("restore", 0), shards=1, stored=False, checkpoint_dir="", token="",
    )  # fmt: skip


def listen() -> None:
    global aborted_at
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "abort":
            while group is None or group.seat.round < order["round"]:
                time.sleep(0.001)
            if group.seat.round == order["round"]:
                aborted_at = time.monotonic()
                group.abort()
        elif order["do"] == "leave":
            os._exit(0)
        else:
            orders.put(order)
    os._exit(0)


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def ddp_step(order: dict[str, Any], repeat: int = 1) -> float:
    """DDP wraps the model again in each round, as users do; the old wrappers are kept to prove that they do no harm."""
    wrapped = parallel(model) if order.get("parallel") else DistributedDataParallel(model)
    spent.append(wrapped)
    del spent[:-2]
    for _ in range(repeat):
        model.zero_grad()
        wrapped(torch.full((2, 8), float(order["rank"] + 1))).sum().backward()
    return float(sum(parameter.grad.sum() for parameter in model.parameters() if parameter.grad is not None))


def work(order: dict[str, Any]) -> Any:
    kind = order["work"]
    if kind == "once":
        total = torch.ones(4) * (order["rank"] + 1)
        dist.all_reduce(total)
        return float(total[0])
    if kind == "ddp":
        return ddp_step(order)
    if kind == "ddp-for-ever":
        say(busy=True)
        return ddp_step(order, repeat=10**9)
    if kind == "subgroup":
        pair = dist.new_group([0, 1])
        say(busy=True)
        if order["rank"] < 2:
            while True:
                dist.all_reduce(torch.ones(1 << 16), group=pair)
        time.sleep(100)
    if kind == "own-connection":
        return own_connection()
    say(busy=True)
    while True:
        dist.all_reduce(torch.ones(order.get("elements", 1 << 16)))


def own_connection() -> str:
    """Opens a connection that is the script's own, and has it survive the abort of the group."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as caller:
        answering, _ = server.accept()
        say(busy=True)
        while group is None or not group.aborted:
            time.sleep(0.001)
        time.sleep(0.3)  # connections are cut in two steps
        caller.sendall(b"still there")
        return answering.recv(20).decode()


class Traffic:
    """Connections that are none of the group's, opened all the time by threads of the script: from Python, from C and
    by gRPC. Each says a word through it a while after it was opened, and hears it again."""

    def __init__(self) -> None:
        self.opened = 0
        self.cut: list[str] = []
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._grpc = grpc.server(futures.ThreadPoolExecutor(2), [Echo()])
        self._grpc_port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._grpc.start()
        for work in (self._serve, self._from_python, self._from_c, self._by_grpc):
            threading.Thread(target=work, daemon=True).start()

    def _serve(self) -> None:
        while True:
            accepted, _ = self._server.accept()
            threading.Thread(target=self._echo, args=(accepted,), daemon=True).start()

    def _echo(self, accepted: socket.socket) -> None:
        with accepted:
            while data := accepted.recv(16):
                if len(data) == 8:  # what gloo's callers say
                    self.cut.append("somebody called who is none of ours")
                accepted.sendall(data)

    def _from_python(self) -> None:
        while True:
            with socket.create_connection(self._server.getsockname()) as caller:
                self._hold(lambda: caller.sendall(b"word"), lambda: caller.recv(16), "Python")

    def _from_c(self) -> None:
        port = self._server.getsockname()[1]
        address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton("127.0.0.1") + bytes(8)
        while True:
            number = self._libc.socket(socket.AF_INET, socket.SOCK_STREAM, 0)
            if self._libc.connect(number, address, len(address)):
                self.cut.append(f"C could not connect: {os.strerror(ctypes.get_errno())}")
            self._hold(
                lambda: self._libc.send(number, b"word", 4, socket.MSG_NOSIGNAL),  # noqa: B023
                lambda: self._received(number),  # noqa: B023
                "C",
            )
            self._libc.close(number)

    def _received(self, number: int) -> bytes:
        heard = ctypes.create_string_buffer(16)
        size = self._libc.recv(number, heard, 16, 0)
        return heard.raw[:size] if size >= 0 else os.strerror(ctypes.get_errno()).encode()

    def _by_grpc(self) -> None:
        while True:
            with grpc.insecure_channel(f"127.0.0.1:{self._grpc_port}", [("grpc.use_local_subchannel_pool", 1)]) as way:
                say: Any = way.unary_unary("/echo/echo")
                self._hold(lambda: say(b"word"), lambda: say(b"word"), "gRPC")  # noqa: B023

    def _hold(self, say: Callable[[], object], hear: Callable[[], bytes], how: str) -> None:
        for _ in range(4):
            time.sleep(0.05)
            try:
                say()
                heard = hear()
            except (OSError, grpc.RpcError) as error:
                heard = repr(error).encode()
            if heard != b"word":
                self.cut.append(f"{how}: {heard!r}")
                return
        self.opened += 1


class Echo(grpc.GenericRpcHandler):
    """Returns each request as the response."""

    def service(self, details: Any) -> Any:
        """Accept any method."""
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)


class Lame(Store):
    """Says where it can be reached, and never asks where the others are."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)
        say(published=True)

    def wait(self, *arguments: Any) -> None:
        time.sleep(100)

    def get(self, key: str) -> bytes:
        time.sleep(100)
        raise AssertionError(key)


def lame(prefix: str, store: Any) -> Store:
    """The store with which gloo forms the group is lame, that of the questions before it is not."""
    within = PrefixStore(prefix, store)
    return within if prefix.endswith("/gpus") else Lame(within)


def one_round(order: dict[str, Any]) -> dict[str, Any]:
    global group
    old, seat = group, seat_of(order)
    began = time.monotonic()
    fresh = framework.prepare(seat)
    group = fresh
    if order.get("lame"):
        setattr(edl_group, "PrefixStore", lame)  # noqa: B010
    try:
        framework.connect(fresh, seat)
        connected = time.monotonic()
        dist.all_reduce(torch.zeros(1))
        first = time.monotonic()
        if old is not None:
            old.retire()
        retired = time.monotonic()
        result = work(order)
    except Exception as error:  # noqa: BLE001  it is what this script reports
        raised = time.monotonic()
        return {
            "error": f"{type(error).__name__}: {error}", "lost": framework.lost_peers(error),
            "after_s": raised - aborted_at if aborted_at else -1.0,
        }  # fmt: skip
    return {
        "result": result, "connect_s": connected - began, "first_s": first - began, "retire_s": retired - first,
        "since_abort_s": first - aborted_at if aborted_at else -1.0, "step_s": time.monotonic() - retired,
    }  # fmt: skip


def sizes() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
        "kilobytes": pages * os.sysconf("SC_PAGESIZE") // 1024,
    }  # fmt: skip


def main() -> None:
    global aborted_at
    threading.Thread(target=listen, daemon=True).start()
    say(ready=True)
    traffic: Traffic | None = None
    while True:
        order = orders.get()
        if order["do"] == "traffic":
            traffic = traffic or Traffic()
            say(opened=traffic.opened, cut=traffic.cut)
            continue
        if order["do"] == "sizes":
            say(**sizes())
            continue
        answer = one_round(order)
        aborted_at = 0.0 if "error" not in answer else aborted_at
        say(**answer)


if __name__ == "__main__":
    main()
