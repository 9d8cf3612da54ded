"""The simulated world: nodes, a store, a network and a job, with faults, periodic checks and the final checks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections.abc import Callable, Iterable, Sequence
from itertools import product

from edl.agent.entitlement import LEASE_SHARE, LIFE_SHARE
from edl.agent.machine import events as ag
from edl.agent.machine.state import AgentPhase
from edl.checkpoint.memory.copy_policy import Copying
from edl.config import FaultTolerance, JobSpec
from edl.errors import FencedOut
from edl.exit_codes import ExitCode
from edl.master.policies.slots import places
from edl.master.restoring import newest_in_memory
from edl.master.sizing import NO_SIZING, Sizing
from edl.master.state import MasterState, Phase, Record
from edl.rendezvous.rules import next_size
from edl.testing.sim.alarming import SimWatchdogs
from edl.testing.sim.checks import Checks
from edl.testing.sim.independent_job import IndependentJob
from edl.testing.sim.launcher import SimLauncher
from edl.testing.sim.memory_checkpoints import Directory, StateNet
from edl.testing.sim.network import STORE, Network, Pair
from edl.testing.sim.plugins import Plugin
from edl.testing.sim.process import SimDeps
from edl.testing.sim.stepping import LONGEST_TIMEOUT_S, Script, SteppingJob
from edl.testing.sim.store import SimStore
from edl.testing.sim.timeline import Timeline
from edl.testing.sim.workers import SIGKILL, Job, PlainJob, SimWorker
from edl.types import Incarnation, NodeId, Round
from edl.wire.messages import Asked, Hanging
from edl.wire.purpose import Purpose
from edl.wire.records import NO_STATE, NodeInfo, Version, World
from edl.wire.scale_requests import Cordon, Drain, Granted, ScaleRequest, Suspend

LOOK_EVERY_S = 0.5
DEAF_S = 3.0
"""Seconds within which a Master that can write must detect the end of a stream."""
COPYING_SEEDS = 3
"""Every fourth seed, those with this remainder, uses ``--copies=always``."""
KEEPALIVE_S = 5.0
"""Longest time in seconds until the end of a blocked stream is detected."""
SETTLE_S = KEEPALIVE_S + 6.0
_OWN_ENDS = (ExitCode.TERMINATED, ExitCode.STORE_UNREACHABLE, ExitCode.JOB_CONFLICT)
"""Statuses with which a launcher may exit although its job has another: on request, or isolated for too long."""


class SimWorld:
    """A simulated world. The same seed, specification and calls give the same history."""

    def __init__(
        self,
        seed: int,
        spec: JobSpec,
        *,
        total_s: float = 20.0,
        warm_s: float = 0.3,
        script: Script | None = None,
        directory: Directory | None = None,
        trace: Callable[[str], None] | None = None,
        plugin: Plugin | None = None,
    ) -> None:
        rng = random.Random(seed)  # noqa: S311 - not for secrets
        timeline = Timeline()
        self.rng = rng
        self.spec = spec
        self.timeline = timeline
        self.network = Network(timeline, rng)
        self.store = SimStore(timeline)
        self.checks = checks = Checks(spec, timeline)
        self.directory = directory or Directory()
        self.states = StateNet(timeline, rng, self.network, self.directory)
        self.states.copying = Copying.ALWAYS if seed % 4 == COPYING_SEEDS else Copying.AUTO
        self.plugin = plugin or Plugin()
        self.training = self._job(total_s, script)
        checks.training, checks.states = self.training, self.states
        checks.directory = self.directory
        self.warm_s = warm_s
        shown = None if trace is None else lambda text: trace(f"{timeline.now_s:9.3f} {text}")
        self.deps = SimDeps(spec, timeline, rng, self.network, self.store, self.training, checks, self.states)
        self.deps.trace, self.deps.plugin, self.deps.watchdogs = shown, self.plugin, SimWatchdogs.of_seed(seed)
        self.launchers: dict[NodeId, SimLauncher] = {}
        """The latest launcher of each node, alive or not."""
        self.retired: list[SimLauncher] = []
        """Earlier launchers."""
        self._healed = False
        self.sized = False
        """Whether users request sizes: the job then runs until the size they want is reached."""
        self.slotted = False
        """Whether slots are dropped: once healed, all of them must be in use again."""
        self._deaf_s: dict[tuple[NodeId, NodeId], float] = {}
        """Since when a Master has considered a node attached that has no stream to it."""
        self._world_since = (Round(0), 0.0)
        """Round of the newest world, and when it was first seen."""
        self.network.changed.append(self.store.wake)
        timeline.after(LOOK_EVERY_S, self._look_around)
        self.plugin.start(self)

    def _job(self, total_s: float, script: Script | None) -> Job:
        if (job := self.plugin.job(self, total_s, script)) is not None:
            return job
        parts = self.timeline, self.rng, self.checks, self.directory, total_s
        if self.spec.independent:
            return IndependentJob(*parts, lambda: self.checks.record.world if self.checks.record else None)
        return PlainJob(*parts) if script is None else SteppingJob(*parts, script)

    def close(self) -> None:
        """Dispose of all processes at the end of the simulation."""
        for launcher in [*self.retired, *self.launchers.values()]:
            launcher.loop.finish()
        self.plugin.close()

    # --- faults and requests ------------------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        slots: int = 2,
        node_rank: int = -1,
        rack: str = "",
        index: int = -1,
        spare_slots: int = 0,
        devices: tuple[str, ...] = (),
    ) -> SimLauncher:
        """Start a launcher on a node that has none running."""
        node = NodeId(name)
        before = self.launchers.get(node)
        if before is not None:
            assert not before.alive, f"{name} runs already"  # noqa: S101 - a mistake in the scenario
            self.retired.append(before)
        port = before.port if before is not None and self.rng.random() < 0.5 else 1000 + len(self.retired)
        place = node_rank, port + 5000, rack, index, 0, spare_slots, devices, "", name
        info = NodeInfo(node, Incarnation(0), name, port, slots, *place)
        launcher = SimLauncher(self.deps, info, self.warm_s)
        self.launchers[node] = launcher
        return launcher

    def crash(self, name: str) -> None:
        """Kill a launcher with its workers."""
        self.launchers[NodeId(name)].crash()

    def kill_worker(self, name: str, slot: int = 0) -> None:
        """Kill a worker with SIGKILL."""
        self.fail_worker(name, slot, -SIGKILL)

    def fail_worker(self, name: str, slot: int = 0, code: int = 1) -> None:
        """Let a worker exit with this status."""
        worker = self.worker(name, slot)
        self.checks.worker_failures += 1
        self.training.end(worker, code)

    def worker(self, name: str, slot: int = 0) -> SimWorker:
        """The living worker in a node's slot. Raises ``StopIteration`` if there is none."""
        return next(w for w in self.launchers[NodeId(name)].workers if w.alive and w.slot == slot)

    def spoil_slot(self, node: NodeId, slot: int, for_s: float) -> None:
        """For ``for_s`` seconds, or until the world is healed, let every worker in this slot fail."""
        until_s = self.timeline.now_s + for_s

        def strike() -> None:
            launcher = self.launchers[node]
            if self._healed or self.timeline.now_s > until_s:
                return
            for worker in launcher.workers:
                if worker.alive and worker.slot == slot and worker.up and not worker.done:
                    self.checks.worker_failures += 1
                    self.training.end(worker, 1)
            self.timeline.after(self.rng.uniform(0.05, 0.6), strike)

        strike()

    def freeze(self, worker: SimWorker, for_s: float) -> None:
        """Stop a worker with SIGSTOP and continue it after ``for_s`` seconds."""
        training = self.training
        training.freeze(worker)
        launcher = self.launchers[worker.node]
        if worker in launcher.workers:
            launcher.group.froze(worker)

        def go_on() -> None:
            if worker.alive and worker.frozen:
                training.thaw(worker)
                launcher.group.thawed(worker)

        self.timeline.after(for_s, go_on)

    def partition(self, ones: Iterable[str], rest: Iterable[str] | None = None, *, one_way: bool = False) -> list[Pair]:
        """Block the paths between these hosts and the others (default: all). Returns the argument for
        ``network.heal``."""
        inside = set(ones)
        outside = set(rest) if rest is not None else {*self.launchers, STORE} - inside
        pairs: list[Pair] = [(str(a), str(b)) for a, b in product(sorted(inside), sorted(outside))]
        if not one_way:
            pairs += [(b, a) for a, b in pairs]
        self.network.block(pairs)
        return pairs

    def ask(self, purpose: Purpose, *, by_file: bool) -> None:
        """Request a checkpoint or the end of the job: with a file that all agents watch, or from the Master."""
        if by_file and purpose is Purpose.SAVE:
            self.directory.save_asked = "file"
        elif by_file:
            self.directory.kill_asked = "file"
        else:
            self._ask_master(Asked(purpose, "somebody"))

    def _ask_master(self, asked: Asked) -> None:
        """Send a request to the Master, as ``edl save`` does."""
        master = self.master
        shell = master.master_shell if master is not None else None
        if master is None or shell is None or not shell.serving:
            return

        async def ask() -> None:
            with contextlib.suppress(FencedOut):
                await shell.ask(asked)

        master.loop.create_task(ask())

    def request_settings(self, text: str) -> None:
        """Request a change of settings from the Master."""
        self._ask_master(Asked(Purpose.SET, "somebody", text))

    def ask_for(self, request: ScaleRequest, heard: Callable[[Granted], None] = lambda granted: None) -> None:
        """Request another size. ``heard`` gets the answer, unless there is no Master or it ends before it answers."""
        master = self.master
        shell = master.master_shell if master is not None else None
        if master is None or shell is None or not shell.serving:
            return

        async def ask() -> None:
            with contextlib.suppress(FencedOut):
                granted = await shell.submit(request)
                named = request.nodes if isinstance(request, Drain) else ()
                nodes = shell.state.nodes if shell.state is not None else {}
                here = {NodeId(node): nodes[NodeId(node)].info.incarnation for node in named if node in nodes}
                if self.deps.trace is not None:
                    self.deps.trace(f"  ANSWER {granted.verdict.value}: {granted.text}")
                self.checks.promises.answered(request, granted, here)
                heard(granted)

        master.loop.create_task(ask())

    @property
    def scaled(self) -> int:
        """Revision of the size in the store."""
        return self.store.modified(self.deps.keys.scale)

    def hang(self, after_s: float) -> None:
        """Let the running round's collectives hang. Agents report it after ``after_s`` s, in even rounds as learnt."""
        record = self.checks.record
        if record is None or record.phase is not Phase.RUNNING or not isinstance(self.training, SteppingJob):
            return
        crew = self.training.group(record.round)
        if crew is None or crew.broken or any(worker.done for worker in crew.workers.values()):
            return
        self.checks.worker_failures += 1
        crew.stalled = True
        crew.look()

        def notice(launcher: SimLauncher) -> None:
            agent = launcher.agent
            running = agent is not None and agent.phase is AgentPhase.RUNNING
            if crew.stalled and running and agent is not None and agent.running_round == crew.world.round:
                launcher.tell_agent(ag.Report(Hanging(crew.world.round, "no progress", after_s, record.round % 2 == 0)))
                launcher.after(1.0, notice, launcher)

        for launcher in self.alive():
            launcher.after(after_s + self.rng.uniform(0.0, 0.5), notice, launcher)

    def spoil(self) -> None:
        """Corrupt the newest checkpoint."""
        whole = [saved for _, saved in self.directory.complete() if not saved.corrupt]
        if whole:
            whole[0].corrupt = True
            self.checks.corrupted = True

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def master(self) -> SimLauncher | None:
        """The launcher whose Master is the elected one according to the store."""
        token = self.store.created(self.deps.keys.master)
        for launcher in self.launchers.values():
            if launcher.alive and launcher.master_shell is not None and launcher.master_shell.token == token:
                return launcher
        return None

    def alive(self) -> list[SimLauncher]:
        """Launchers that are alive."""
        return [launcher for launcher in self.launchers.values() if launcher.alive]

    def usable(self) -> list[SimLauncher]:
        """Launchers whose node could be in a world."""
        idle = (AgentPhase.LEAVING, AgentPhase.OVER)
        return [one for one in self.alive() if (agent := one.agent) is not None and agent.phase not in idle]

    def picture(self) -> str:
        """The state of all launchers, for the message of a failed check."""
        lines = [f"store: {self.checks.record}"]
        for launcher in self.launchers.values():
            agent = launcher.agent
            seen = f"{agent.phase.value} seen {agent.seen_round} connected {agent.connected}" if agent else "joining"
            followed = launcher.candidate.master if launcher.candidate is not None else None
            lines.append(
                f"{launcher.node}: alive {launcher.alive}, {seen}, follows {followed}, outcome {launcher.outcome}"
            )
            if launcher.master_shell is not None and launcher.alive:
                lines.append(f"    rules {launcher.master_shell.token}: {describe(launcher.master_shell.state)}")
        return "\n".join(lines)

    # --- time ---------------------------------------------------------------------------------------------------------

    def run(self, for_s: float, stop: Callable[[], bool] | None = None) -> None:
        """Advance time by ``for_s`` seconds, or until ``stop`` returns true."""
        self.timeline.run(self.timeline.now_s + for_s, stop)

    def run_until(self, holds: Callable[[], bool], within_s: float, what: str) -> None:
        """Advance time until ``holds`` returns true; a violation if it does not within ``within_s`` seconds."""
        self.run(within_s, holds)
        if not holds():
            self.checks.fail(f"not within {within_s:g} s: {what}\n{self.picture()}")

    def _look_around(self) -> None:
        """Run the periodic checks; among them that isolated or frozen launchers have no running workers (B11). An agent
        stops its workers a lease after it has noticed that it is cut off; they may take their time to end."""
        master = self.master
        for launcher in self.alive():
            notice_s = launcher.lease_s + KEEPALIVE_S + 2 * LOOK_EVERY_S
            limit_s = notice_s + 2 * launcher.lease_s + self.spec.timeouts.shutdown_s
            self._note_contact(launcher, master)
            self._look_at_spare(launcher, limit_s)
            self._look_at_frozen(launcher)
            self._look_at_streams(launcher)
            alone_s = self.timeline.now_s - launcher.isolated_s if launcher.isolated_s is not None else 0.0
            if alone_s > (notice_s if launcher.lets_train else limit_s) and launcher.trains:
                self.checks.fail(f"{launcher.node} has been isolated for {alone_s:g} s and its workers still run")
        self.plugin.check()
        if self._healed:
            self._replenish()
        self.timeline.after(LOOK_EVERY_S, self._look_around)

    def _look_at_streams(self, launcher: SimLauncher) -> None:
        """A Master must not consider a node attached whose stream has ended."""
        shell = launcher.master_shell
        attached: set[NodeId] = set()
        writes = not self.store.away and not launcher.paused and self.network.both(launcher.host, STORE)
        if writes and shell is not None and shell.serving and shell.state is not None:
            clients = launcher.clients()
            attached = {node for node, entry in shell.state.nodes.items() if entry.attached and node not in clients}
        since_s = {node: self._deaf_s.get((launcher.node, node), self.timeline.now_s) for node in attached}
        self._deaf_s = {key: at_s for key, at_s in self._deaf_s.items() if key[0] != launcher.node}
        self._deaf_s |= {(launcher.node, node): at_s for node, at_s in since_s.items()}
        if any(self.timeline.now_s - at_s > DEAF_S for at_s in since_s.values()):
            self.checks.fail(f"the Master on {launcher.node} takes {sorted(attached)} for attached without a stream")

    def _look_at_spare(self, launcher: SimLauncher, limit_s: float) -> None:
        """Independent workers are not stopped with their round, but those of a node outside the world must end."""
        record = self.checks.record
        if not self.spec.independent or record is None or record.world is None:
            return
        if record.phase is Phase.RUNNING and self._world_age_s(record) > limit_s:
            spare = record.world.member(launcher.node) is None and launcher.isolated_s is None and not launcher.paused
            if spare and any(worker.alive and not worker.frozen for worker in launcher.workers):
                self.checks.fail(f"{launcher.node} has no place in round {record.round} and its workers still run")

    def _look_at_frozen(self, launcher: SimLauncher) -> None:
        """The workers of a frozen launcher must have ended before there is a world without it, or within the extra half
        lease that a running launcher grants them when the store does not answer. A lease that the store revokes early
        has granted that share."""
        record = self.checks.record
        if not launcher.paused or record is None or record.world is None or record.phase is not Phase.RUNNING:
            return
        member = record.world.member(launcher.node)
        gone = member is None or member.incarnation != launcher.info.incarnation
        lease_s, frozen_s = launcher.lease_s, self.timeline.now_s - launcher.paused_s
        if not gone or self._world_age_s(record) <= lease_s * LIFE_SHARE or frozen_s <= lease_s * LEASE_SHARE:
            return
        if any(worker.alive and worker.round and not worker.frozen for worker in launcher.workers):
            self.checks.fail(f"{launcher.node} is frozen, and its workers train beside round {record.round}")

    def _world_age_s(self, record: Record) -> float:
        """Seconds since the recorded world was first seen."""
        if self._world_since[0] != record.round:
            self._world_since = record.round, self.timeline.now_s
        return self.timeline.now_s - self._world_since[1]

    def _note_contact(self, launcher: SimLauncher, master: SimLauncher | None) -> None:
        reaches_store = self.store.away or self.network.both(launcher.host, STORE)
        if not launcher.paused and (reaches_store or self._led_well(launcher, master)):
            launcher.isolated_s = None
        elif launcher.isolated_s is None:
            launcher.isolated_s = self.timeline.now_s

    def _led_well(self, launcher: SimLauncher, master: SimLauncher | None) -> bool:
        """Whether it is attached to the elected Master, or to one that misses no node."""
        leader = launcher.connected_to()
        if leader is None or not isinstance(leader, SimLauncher) or leader.master_shell is None:
            return False
        nodes = leader.master_shell.state.nodes if leader.master_shell.state is not None else {}
        missed = [entry for entry in nodes.values() if entry.registered and entry.info.node not in leader.clients()]
        return leader is master or (bool(nodes) and not missed)

    # --- whole schedules ----------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Undo every fault and provide enough nodes."""
        self.training.shorten(max(60.0 if self.sized else 5.0, self.plugin.settle_s))
        self.network.slowness = self.network.usual_slowness
        self.deps.kill_on_write = self.deps.kill_on_hold = self.deps.kill_on_switch = False
        self.states.kill_source = False
        self.network.heal_all()
        if self.store.away:
            self.store.come_back()
        for launcher in self.alive():
            launcher.resume()
        self.training.heal()
        self.plugin.heal()
        self._healed = self.deps.healed = True
        self._replenish()

    def _replenish(self) -> None:
        """Start a launcher on each host without one while the job runs and needs nodes."""
        for node, launcher in [] if self.plugin.replenishes else list(self.launchers.items()):
            missing = len(self.able()) < self._sizing.bounds(self.spec.nodes).highest
            if not self.ended() and missing and not launcher.alive:
                info = launcher.info
                place = info.node_rank, info.rack, info.index
                self.start(node, info.slots, *place, info.spare_slots, info.devices)

    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.checks.record is not None and self.checks.record.phase is Phase.ENDED

    @property
    def _sizing(self) -> Sizing:
        return self.checks.record.sizing if self.checks.record is not None else NO_SIZING

    def able(self, usable: Sequence[SimLauncher] = ()) -> list[SimLauncher]:
        """Launchers whose node may be in a world, given the users' requests."""
        stay = [one for one in usable or self.usable() if (agent := one.agent) is not None and agent.draining is None]
        dropped, whole = self.checks.record.dropped if self.checks.record is not None else (), self.spec.replicas
        return [one for one in stay if not self._sizing.excludes(one.node) and places(dropped, one.info, whole)]

    def settled(self) -> bool:
        """Whether the job has ended, runs a world as large as requested and possible, or waits for a valid reason."""
        record, usable = self.checks.record, self.usable()
        if record is None:
            return False
        if record.phase is Phase.ENDED:
            return True
        if any(one.info.incarnation in self.checks.promises.evicted.values() for one in usable):
            return False
        if self._sizing.suspended:
            return self._rests(record)
        bounds, requested = self._sizing.bounds(self.spec.nodes), self._sizing.requested(self.spec.nodes)
        able, previous = self.able(usable), len(record.world.members) if record.world else 0
        size = next_size(bounds, self.spec.fault_tolerance, previous, len(able), requested).nodes
        if record.phase is not Phase.RUNNING or record.world is None:
            return size == 0
        agents = {one.node: one.agent for one in usable}
        for member in record.world.members:
            agent = agents.get(member.node)
            if agent is None or agent.info.incarnation != member.incarnation or agent.running_round != record.round:
                return False
        if record.done or not size:
            return True
        if self.slotted and any(member.places for member in record.world.members):
            return False
        if any(self._sizing.excludes(member.node) for member in record.world.members):
            return False
        unseen = record.observed < record.sizing.generation and not record.departing
        if unseen or previous > (requested or bounds.highest):
            return False
        return previous >= size or not (requested or self.spec.fault_tolerance is FaultTolerance.ELASTIC)

    def _all_settled(self) -> bool:
        return self.settled() and self.plugin.settled()

    def _rests(self, record: Record) -> bool:
        """Whether the job is suspended and no worker is alive."""
        idle = not any(worker.alive for launcher in self.usable() for worker in launcher.workers)
        known = record.observed == record.sizing.generation or bool(record.departing)  # some wait for a checkpoint
        return record.phase is Phase.FORMING and idle and known

    def _written(self) -> bool:
        """Whether the newest commit that the Master of a suspended job knows to be complete is in the directory."""
        if self.ended() or not self._sizing.suspended:
            return True  # resumed by another request
        shell = self.master.master_shell if self.master is not None else None
        if shell is None or shell.state is None:
            return False
        known = newest_in_memory([entry for entry in shell.state.nodes.values() if entry.attached]).version
        return known <= max((version for version, _ in self.directory.complete()), default=NO_STATE)

    def _mend(self) -> None:
        """Uncordon dropped slots, as after their repair, until all are in use again."""
        record = self.checks.record
        for one in record.dropped if record is not None and not self.ended() else ():
            self.ask_for(Cordon(one.node, False, "somebody", device=str(one.slot)))
        if not self.ended():
            self.timeline.after(1.0, self._mend)

    def _go_on(self) -> None:
        """Resume the job, repeating the request until it is granted."""

        def again() -> None:
            if self._sizing.suspended and not self.ended():
                self.ask_for(Suspend(False, "somebody"))
                self.timeline.after(1.0, again)

        again()
        self.run_until(lambda: not self._sizing.suspended or self.ended(), 30.0, "the job is resumed")

    def judge(self) -> None:
        """Check liveness: the job progresses and ends, and all launchers exit with its outcome."""
        times, lease_s = self.spec.timeouts, max((one.lease_s for one in self.alive()), default=0.0)
        settle_s = 4 * lease_s + 2 * times.shutdown_s + 3 * self.warm_s + SETTLE_S + self.plugin.settle_s
        if isinstance(self.training, SteppingJob):
            settle_s += 2 * (times.boundary_s + times.rejoin_s) + LONGEST_TIMEOUT_S + 6.0
        if self.sized:
            self.run(3.0)  # what was requested last is on its way
        if self.slotted:
            self._mend()
        self.run_until(self._all_settled, settle_s, "the job settles")
        if self._sizing.suspended and not self.ended():
            self.run_until(self._written, settle_s, "what is in memory is in the checkpoint directory")
            self._go_on()
            self.run_until(self._all_settled, settle_s, "the job settles once it is resumed")
        if self.sized:
            self.training.shorten(5.0)
        work_s = 2 * self.training.longest_s + times.recover_s + 4 * settle_s
        if self.training.may_keep_failing:
            work_s += self.spec.max_restarts * times.restart_s
        if self.directory.save_asked:
            self.run_until(lambda: not self.directory.save_asked or self.ended(), work_s, "what was asked for is saved")
        self.run_until(self.ended, work_s, "the job ends")
        home_s = times.shutdown_s + 3 * lease_s + KEEPALIVE_S + 20.0
        self.run_until(lambda: not self.alive(), home_s, "every launcher exits")
        self._judge_outcome()
        self.plugin.finish()

    def _newest_acknowledged(self, world: World | None) -> Version:
        """The newest commit whose save was acknowledged to workers of this world or of those that it continues."""
        worlds, upto = {one.era: one for one in self.checks.worlds.values()}, math.inf
        while world is not None:
            known = [version for version in self.states.acknowledged if version.era == world.era]
            found = max((version for version in known if version.commit <= upto), default=NO_STATE)
            if found != NO_STATE:
                return found
            upto = world.restore.commit
            world = worlds.get(world.restore.era)
        return NO_STATE

    def _judge_outcome(self) -> None:
        """Check that the job ended for a valid reason and that all launchers report it."""
        assert self.checks.record is not None and self.checks.record.outcome is not None  # noqa: S101 - ended
        outcome = self.checks.record.outcome
        expected = outcome.exit_code
        if expected == ExitCode.OK and self.training.left_s > 0:
            self.checks.fail(f"success with {self.training.left_s:g} s of work left")
        if expected == ExitCode.CHECKPOINT_UNUSABLE and not self.checks.corrupted:
            self.checks.fail(f"{outcome.reason}, but nothing has been spoilt")
        if self.checks.owed is not None:
            version, lost = self.checks.owed
            if lost == self.checks.lost_memories and max(self.directory.entries, default=NO_STATE) < version:
                self.checks.fail(f"killed with {version} in memory, and the checkpoint directory has less")
        if expected in (ExitCode.OK, ExitCode.INCOMPLETE):
            saved = self._newest_acknowledged(self.checks.record.world)
            missing = max(self.directory.entries, default=NO_STATE) < saved
            flawed = missing or bool(self.checks.record.flaws)
            if flawed != (expected == ExitCode.INCOMPLETE) and not (self.plugin.excused and not missing):
                self.checks.fail(f"{outcome.reason}, and {saved}, saved by the workers, is {'not ' * missing}there")
        few = self.checks.worker_failures <= self.spec.max_restarts
        if expected == ExitCode.WORKER_FAILED and few and not self.checks.gave_up:
            self.checks.fail(f"{outcome.reason}, but only {self.checks.worker_failures} workers failed")
        for launcher in [*self.launchers.values(), *self.retired]:
            own = launcher.outcome
            if own is not None and not own.drained and own.exit_code not in (expected, *_OWN_ENDS):
                self.checks.fail(f"{launcher.node} exits with {own}, the job with {expected}")
        if self.training.alive():
            self.checks.fail(f"workers outlive the job: {self.training.alive()}")


def describe(state: MasterState | None) -> str:
    """A Master's state in one line, for messages of failed checks."""
    if state is None:
        return "no state"
    nodes = ", ".join(
        f"{n}:{e.status.value}{'' if e.attached else ' away'}{'' if e.registered else ' unregistered'}"
        for n, e in state.nodes.items()
    )
    record = dataclasses.replace(state.record, failures=(), world=None)
    return f"{record} | {nodes} | {state.reason}"
