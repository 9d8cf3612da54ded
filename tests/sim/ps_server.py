"""A simulated pserver: the ``ParameterServer`` that ships, on deterministic threads and simulated connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from edl.testing.sim.disk import SimFiles
from edl.testing.sim.process import BareProcess
from edl.testing.sim.sockets import SimSockets
from edl.testing.sim.threads import SimThreads
from ps.net.caller import EndpointPeer, FrameReply
from ps.protocol import messages
from ps.protocol.frames import Frame, FrameOp
from ps.server.bucket_machine import BucketMachine
from ps.server.server import ParameterServer, Setup
from tests.sim.ps_net import Net

if TYPE_CHECKING:
    from tests.sim.ps_world import PsSim

SECRET = "a secret of the job"
JOB = "job"
PORT = 7000


class ObservedServer(ParameterServer):
    """Shows what is said to the Master and acknowledged to trainers before it leaves."""

    def __init__(self, pserver: Pserver, setup: Setup) -> None:
        self.pserver = pserver
        super().__init__(setup, pserver.may_go, pserver.failed)

    def say(self, message: Any) -> None:
        """See ``ParameterServer.say``."""
        with self.pserver.threads.aside():
            self.pserver.sim.disk.said(message)
        super().say(message)

    def _handle(self, peer: EndpointPeer, frame: Frame) -> FrameReply:
        reply = super()._handle(peer, frame)
        if frame.op is FrameOp.PUSH and reply.op is FrameOp.OK:
            self.pserver.acknowledges(peer, frame)
        return reply


class Pserver:
    """A pserver process on a host of its own."""

    def __init__(self, sim: PsSim, name: str, machine: str) -> None:
        self.sim, self.name, self.machine = sim, name, machine
        self.draining = False
        host = name.rpartition("/")[2]
        self.process: BareProcess[Net] = BareProcess(sim.net, host)
        sim.net.add_host(host)
        self.threads = SimThreads(self.process, sim.net.timeline, sim.net.rng, self._thread_failed)
        self.sockets = SimSockets(self.process, self.threads, sim.net.listening)
        setup = Setup(
            name,
            JOB,
            SECRET,
            files=SimFiles(sim.disk.storage, host, self.threads.sleep),
            kernels="numpy",
            clock=self.threads,
            threads=self.threads,
            sockets=self.sockets,
            restore_threads=0,
            buckets=sim.buckets,
        )
        self.server = ObservedServer(self, setup)
        self.server.start(host, PORT)

    @property
    def host(self) -> str:
        return self.process.host

    @property
    def alive(self) -> bool:
        return self.process.alive

    @property
    def bucket_machine(self) -> BucketMachine:
        return self.server.bucket_machine

    @property
    def number(self) -> int:
        return self.server.bucket_machine.number

    def end(self, host_lost: bool) -> None:
        """The process is gone, perhaps with its host."""
        net = self.sim.net
        net.listening.pop((self.host, PORT), None)
        self.process.end()
        self.threads.end()
        if host_lost:
            net.lose(self.host)
            self.sim.disk.storage.crash(self.host)
        else:
            self.sockets.opened.close()

    def may_go(self) -> None:
        """Its orders let it exit."""
        self.sim.net.at(0.0, self.sim.leave, self)

    def failed(self, what: str) -> None:
        """A thread of it has failed; the process exits."""
        self.sim.net.note(f"{self.name}: {what}")

    def _thread_failed(self, name: str, error: BaseException) -> None:
        self.sim.net.note(f"{self.name}: thread {name} ended with {error!r}")

    # --- what is seen of it ------------------------------------------------------------------------------------------

    def followers(self, bucket: int) -> tuple[set[int], set[int]]:
        """Where pieces of a bucket go, and which of these are waited for."""
        streams = self.server.bucket_shell._to_followers.items()
        to = {number for number, one in streams if one.to[bucket]}
        return to, {number for number, one in streams if one.wait[bucket]}

    def copied(self) -> bool:
        """True if, as far as it knows, its backups have all that it owns; the Master may hear otherwise later."""
        return not any(follower.broken for follower in self.server.bucket_machine._followers.values())

    def acknowledges(self, peer: EndpointPeer, frame: Frame) -> None:
        """A push, or a part of one, is acknowledged."""
        head = frame.json()
        count = sum(int(part[1]) for part in head["parts"])
        keys = np.frombuffer(frame.body, np.int64, count) if count else np.zeros(0, np.int64)
        push = (peer.number, int(head["seq"]))
        with self.threads.aside():
            self.sim.acknowledged(self, push, int(head["history"]), self.sim.ledger.parts(keys))

    def rows(self, bucket: int) -> dict[int, dict[tuple[int, int], int]]:
        """By row: the pushes in it, and how often each was applied."""
        return {row: self.sim.ledger.row(self.server.store, bucket, row) for row in (0, 1)}

    def idle(self) -> bool:
        """True if it follows the newest orders and runs."""
        return not self.process.paused

    def orders(self) -> messages.Orders | None:
        """The newest."""
        return self.bucket_machine.orders
