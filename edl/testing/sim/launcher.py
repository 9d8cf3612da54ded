"""One simulated launcher: a thin shell around the real election and agent machines, and a Master while it rules."""

from __future__ import annotations

import dataclasses

from edl.agent.entitlement import Entitlement
from edl.agent.machine import events as ag
from edl.agent.machine.machine import begin, step
from edl.agent.machine.state import AgentPhase, AgentState, Outcome
from edl.errors import LeaseLost, StoreError
from edl.exit_codes import ExitCode
from edl.master import election as el
from edl.master.machine import absent
from edl.testing.sim.candidate import Candidate
from edl.testing.sim.keepers import SimKeeper
from edl.testing.sim.network import STORE, End, Stream
from edl.testing.sim.process import FAREWELL_KEY, NODES, SimDeps, SimProcess
from edl.testing.sim.store import SimStore
from edl.testing.sim.timeline import ScheduledCall
from edl.testing.sim.workers import SIGKILL, Worker
from edl.types import Incarnation, NodeId, Token
from edl.wire.messages import AgentMessage, Finish, MasterMessage, NodeInfo, Preparing, Ready, World


class Launcher(Candidate):
    """A launcher process on one node, from its start to its exit or crash."""

    def __init__(self, deps: SimDeps, info: NodeInfo, warm_s: float) -> None:
        super().__init__(deps, info)
        self.warm_s = warm_s
        """How long its fork server takes to come up."""
        self.agent: AgentState | None = None
        self.keeper = SimKeeper(self, deps.states)
        self.workers: list[Worker] = []
        self.outcome: Outcome | None = None
        """What it has decided to exit with."""
        self.store_seen_s = 0.0
        """When its lease was last granted or renewed, on its own clock."""
        self.cut_off_s: float | None = None
        """Since when it has reached neither the store nor the real Master; kept by the world."""
        self._ports: tuple[int, ...] = ()
        self._ports_good_for: object = None
        self._dial = 0
        self._target: tuple[el.Ruler, Token] | None = None
        self._line: tuple[Stream, End] | None = None
        self._timer: ScheduledCall | None = None
        self._watching = False
        self._entitlement = Entitlement(deps.spec.timeouts.lease_ttl_s, self.now_s)
        self._asked_s = self.now_s
        """When it last asked for a lease."""
        self._stay_entitled()
        self._register()

    # --- registration ------------------------------------------------------------------------------------------------

    def _register(self, error: StoreError | None = None) -> None:
        """Take the name under a new lease, clearing away what an earlier life of this address left."""

        def join(store: SimStore) -> int | Finish:
            farewell: Finish | None = store.value(FAREWELL_KEY)
            if farewell is not None:
                return farewell
            key = NODES + self.info.node
            before: NodeInfo | None = store.value(key)
            if before is not None:
                store.revoke(before.incarnation)
            lease = store.grant(self.deps.spec.timeouts.lease_ttl_s)
            store.put(key, self._named(lease), lease)
            return lease

        if not self.departing:
            self._asked_s = self.now_s
            self.ask(join, self._joined, lambda error: self.run(self._register, error))

    def _named(self, lease: int) -> NodeInfo:
        return dataclasses.replace(self.info, incarnation=Incarnation(lease))

    def _joined(self, found: int | Finish) -> None:
        if self.departing:
            return
        if isinstance(found, Finish):
            self._job_has_ended(found)
            return
        self.info = self._named(found)
        self.store_seen_s = self.now_s
        self._entitlement.leased(self._asked_s)
        self._entitle()
        self.say(f"registered as {self.info.node} incarnation {found}")
        if self.agent is None:
            spec = self.deps.spec
            self.agent = AgentState(self.info, spec.timeouts, contact_s=self.now_s, independent=spec.independent)
            self.agent = dataclasses.replace(self.agent, by_device=bool(self.info.devices))
            self._run_effects(begin(self.agent).effects)
        else:
            self.tell_agent(ag.Registered(self.info))
        self.deps.timeline.after(self.deps.spec.timeouts.lease_ttl_s / 3, self.run, self._renew, found)
        if not self._watching:
            self._watching = True
            self.look_at_key()
        self.elect(el.Registered())

    def _job_has_ended(self, outcome: Finish) -> None:
        ended = Outcome(outcome.exit_code, outcome.reason, outcome.failures)
        if self.agent is None:
            self.outcome = ended
            self.depart()
        else:
            self.tell_agent(ag.Fatal(ended))

    def _renew(self, lease: int) -> None:
        if self.departing or lease != self.info.incarnation:
            return
        deps = self.deps
        if not deps.store.away and deps.network.open(self.host, STORE):
            try:
                deps.store.renew(lease)
            except LeaseLost:
                if deps.network.open(STORE, self.host):
                    self.lease_gone()
                    return
            else:
                if deps.network.open(STORE, self.host):
                    self.store_seen_s = self.now_s
                    self._entitlement.leased(self.now_s)
                    self._entitle()
                    self.tell_agent(ag.LeaseRenewed())
        self._look_at_rule()
        self.after(deps.spec.timeouts.lease_ttl_s / 3, self._renew, lease)

    def _look_at_rule(self) -> None:
        ruling = self.ruling
        silent = self.now_s - self.store_seen_s >= self.deps.spec.timeouts.lease_ttl_s
        if silent and ruling is not None and ruling.state is not None and absent(ruling.state):
            self.elect(el.OutOfTouch())

    def lease_gone(self) -> None:
        """The store says that the lease has ended."""
        self.elect(el.Unregistered())
        self.tell_agent(ag.LeaseGone())

    # --- ruling ------------------------------------------------------------------------------------------------------

    def step_down(self) -> None:
        """Rule no longer; go if that was all that kept this launcher."""
        ruling, self.ruling = self.ruling, None
        if ruling is not None:
            ruling.stop()
        if self.outcome is not None:
            self.depart()

    def rule_concluded(self) -> None:
        """The Master has said goodbye."""
        ruling = self.ruling
        if ruling is not None:
            ruling.stop()
        if self.outcome is not None:
            self.depart()
        elif ruling is not None and ruling.state is not None and ruling.state.record.outcome is not None:
            # This node's own agent may not have heard it yet, and nobody else will tell it.
            self.tell_agent(ag.Heard(ruling.state.record.outcome))

    # --- the stream to the Master ------------------------------------------------------------------------------------

    def follow(self, ruler: el.Ruler, token: Token) -> None:
        """Attach to this Master instead of the last one."""
        self._target = (ruler, token)
        self._dial += 1
        self._hang_up()
        self._call(self._dial, ruler, token)

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            stream, end = line
            if end.open:
                stream.close(end)
                self.after(0.0, self.tell_agent, ag.Disconnected())

    def connected_to(self) -> SimProcess | None:
        """The process at the other end of its open stream."""
        if self._line is None or not self._line[1].open:
            return None
        other = self._line[0].ends[1].owner
        return other if isinstance(other, SimProcess) else None

    def _call(self, dial: int, ruler: el.Ruler, token: Token) -> None:
        if dial != self._dial or self.departing:
            return
        deps = self.deps
        if not deps.network.both(self.host, ruler.host):
            self.after(deps.rng.uniform(0.3, 1.2), self._call, dial, ruler, token)
            return
        deps.timeline.after(deps.network.delay_s(), self.run, self._called, dial, ruler, token)

    def _called(self, dial: int, ruler: el.Ruler, token: Token) -> None:
        if dial != self._dial or self.departing:
            return
        deps = self.deps
        other = deps.listening.get((ruler.host, ruler.port))
        if other is None and deps.network.both(self.host, ruler.host):
            self.elect(el.RulerRefused(token))
            self.after(0.1, self._call, dial, ruler, token)
        elif not isinstance(other, Launcher) or other.paused or other.ruling is None or not other.ruling.serving:
            self.after(deps.rng.uniform(0.05, 0.3), self._call, dial, ruler, token)
        else:
            end = End(self, self._hear, lambda: self._broke(dial, ruler, token))
            self._line = (other.ruling.accept(end), end)
            self.tell_agent(ag.Connected())

    def _hear(self, message: MasterMessage) -> None:
        self.tell_agent(ag.Heard(message))

    def _broke(self, dial: int, ruler: el.Ruler, token: Token) -> None:
        if dial == self._dial:
            self._line = None
            self.tell_agent(ag.Disconnected())
            self.after(0.02, self._call, dial, ruler, token)

    # --- the agent ---------------------------------------------------------------------------------------------------

    def tell_agent(self, event: ag.Event) -> None:
        """Feed the agent machine and do what it says."""
        if self.agent is None:
            return
        before = self.agent
        decision = step(before, event, self.now_s)
        if self.deps.trace is not None and not isinstance(event, ag.LeaseRenewed):
            self.say(f"agent <- {event}: {decision.state.phase.value}")
        self.agent = decision.state
        self.deps.checks.agent_stepped(before, event, decision, self.now_s)
        self._run_effects(decision.effects)

    def _run_effects(self, effects: tuple[ag.Effect, ...]) -> None:
        wakes = []
        for effect in effects:
            match effect:
                case ag.Say(message):
                    self._say(message)
                case ag.Announce():
                    self._announce()
                case ag.Warm():
                    self.after(self.warm_s * self.deps.rng.uniform(0.5, 1.5), self._warmed)
                case ag.Register():
                    if self._target is not None:
                        self.follow(*self._target)
                    self.elect(el.Unregistered())
                    self._register()
                case ag.WakeAt(at_s):
                    wakes.append(at_s)
                case ag.Exit(outcome):
                    self._exit(outcome)
                case _:
                    self._run_on_workers(effect)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.at_local(min(wakes), self.tell_agent, ag.Tick()) if wakes else None

    def _run_on_workers(self, effect: ag.Effect) -> None:
        training = self.deps.training
        match effect:
            case ag.Start(world, slots):
                self._start(world, slots)
            case ag.GivePlace(world, slots):
                self._enter(world)
                for worker in self._alive(slots):
                    training.give_place(worker, world)
            case ag.StartAhead(slots, born):
                owner = self.info.node, self.info.incarnation
                self._add([training.start_ahead(self, owner, born, index) for index in slots])
            case ag.SignalWorkers(number, slots):
                for worker in self._alive(slots):
                    training.signal(worker, number)
            case ag.TellWorkers(message, slots):
                for worker in self._alive(slots) if slots else ():
                    training.hear(worker, message)
            case ag.Keep(peer):
                self.keeper.keep_with(peer)
            case ag.Load():
                self.keeper.loading = True
                self.after(self.deps.rng.uniform(0.1, 2.0), self._load)
            case ag.FlushSaves(number):
                self.after(0.001, self.keeper.flush_saves, number)
            case ag.Write(version):
                self.after(self.deps.rng.uniform(0.1, 2.0), self.keeper.flush, version)

    def _alive(self, slots: tuple[int, ...]) -> list[Worker]:
        return [w for w in self.workers if w.alive and (not slots or w.slot in slots)]

    def _warmed(self) -> None:
        self.keeper.look()
        self.tell_agent(ag.Warmed())

    def _load(self) -> None:
        self.keeper.loading = False
        self.keeper.load()
        self.tell_agent(ag.StateChanged())

    def _say(self, message: AgentMessage) -> None:
        if isinstance(message, Preparing):
            message = dataclasses.replace(message, holdings=self.keeper.holdings())
        if self._line is not None:
            stream, end = self._line
            stream.send(end, message)

    def _announce(self) -> None:
        assert self.agent is not None  # noqa: S101 - an effect of the agent
        if self.keeper.busy:
            self.after(0.02, self.tell_agent, ag.StateChanged())
            return
        # A world may have been made from ports that were announced on another stream, or before the last order.
        good_for = (self._line, self.agent.seen_round)
        if not self._ports or self._ports_good_for != good_for:
            self._ports = self.deps.checks.fresh_ports(1 + self.info.slots)
            self._ports_good_for = good_for
        keeper = self.keeper
        stored, sharded = keeper.stored
        parked = self.agent.parked
        self._say(Ready(self.agent.seen_round, self._ports, parked, keeper.holdings(), stored, sharded, keeper.refused))

    def _enter(self, world: World) -> None:
        self._ports = ()
        self.keeper.enter(world)

    def _start(self, world: World, slots: tuple[int, ...]) -> None:
        member = world.member(self.info.node)
        assert member is not None  # noqa: S101 - the agent has looked
        self._enter(world)
        self._add(self.deps.training.start(self, world, member, slots))

    def _add(self, workers: list[Worker]) -> None:
        taken = [worker.slot for worker in self._alive(())]
        for worker in workers:
            if worker.slot in taken:
                self.deps.checks.fail(f"{self.node} has two processes in slot {worker.slot}")
        self.workers = [*self._alive(()), *workers]
        self._watch_for_silence()

    def worker_ended(self, worker: Worker, code: int, peer_loss: bool) -> None:
        """A worker process is gone; the fork server reports it."""
        event = ag.WorkerEnded(worker.born, worker.slot, code, peer_loss=peer_loss)
        self.after(0.001, self.tell_agent, event)

    # --- the fork server's watch over the launcher --------------------------------------------------------------------

    def _stay_entitled(self) -> None:
        self._entitle()
        self.after(self._entitlement.interval_s, self._stay_entitled)

    def _entitle(self) -> None:
        if self._entitlement.look(self.now_s) is not None:
            self._watch_for_silence()

    def _watch_for_silence(self) -> None:
        until_s = self._entitlement.until_s
        self.deps.timeline.at(until_s - self._clock_offset_s, self.silent, until_s)

    def silent(self, until_s: float) -> None:
        """The fork server does not freeze with its launcher: the time has come up to which workers may run without
        it."""
        late = self.alive and until_s >= self._entitlement.until_s
        workers = [worker for worker in self.workers if worker.alive] if late else []
        if workers:
            self.say("fork server: the launcher is silent")
            self.after(0.001, self.tell_agent, ag.WorkersKilled("the launcher was silent"))
        for worker in workers:
            self.deps.training.end(worker, -SIGKILL)

    def lose_fork_server(self) -> None:
        """The process that creates workers is killed; what it had started dies with it."""
        for worker in self.workers:
            if worker.alive:
                self.deps.checks.worker_failures += 1
                self.deps.training.end(worker, -SIGKILL)
        self.after(0.001, self.tell_agent, ag.ForkServerGone("killed by SIGKILL"))

    def interrupt(self, number: int) -> None:
        """The launcher gets a signal to leave by."""
        if self.agent is None:
            self.outcome = Outcome(128 + number, "interrupted at the start")
            self.depart()
        else:
            again = self.agent.phase is AgentPhase.LEAVING
            self.tell_agent(ag.Interrupted(number, again))

    # --- the end -----------------------------------------------------------------------------------------------------

    def _exit(self, outcome: Outcome) -> None:
        alone_s = self.now_s - self.store_seen_s
        if outcome.exit_code == ExitCode.STORE_UNREACHABLE and alone_s < self.deps.spec.timeouts.recover_s:
            self.deps.checks.fail(f"{self.node} gives up although the store answered {alone_s:g} s ago")
        self.outcome = outcome
        if (outcome.exit_code or outcome.drained) and outcome.save:
            self.keeper.save_what_is_left()
        elif not outcome.save:
            self.deps.checks.lost_memories += 1
        self._dial += 1
        self._hang_up()
        ruling = self.ruling
        ended = ruling is not None and ruling.state is not None and ruling.state.record.outcome is not None
        if not ended or ruling is None or ruling.concluded or ruling.over:
            self.depart()

    def depart(self) -> None:
        """Give the lease back and end."""
        if self.departing or not self.alive:
            return
        self.departing = True
        self.elect(el.Unregistered())
        self._hang_up()
        lease = self.info.incarnation
        self.ask(lambda store: store.revoke(lease), lambda _: self.end(), lambda _: self.end())

    def end(self) -> None:
        """The process ends in good order: no worker may be left."""
        for worker in self.workers:
            if worker.alive:
                self.deps.training.signal(worker, SIGKILL)
        self._die()

    def crash(self) -> None:
        """SIGKILL, power loss: its workers go with it."""
        self.say("crashes")
        if self.alive:
            self.deps.checks.lost_memories += 1
            self.deps.checks.trouble(0.0)
        self._die()
        for worker in self.workers:
            if worker.alive:
                self.deps.training.end(worker, -SIGKILL)

    def _die(self) -> None:
        if not self.alive:
            return
        super().end()
        self.keeper.end()
        if self.ruling is not None:
            self.ruling.stop()
        if self._line is not None:
            stream, end = self._line
            stream.close(end)

    @property
    def writes(self) -> bool:
        """Whether its node is the first of a world in training."""
        agent = self.agent
        first = agent.world.members[0].node if agent is not None and agent.world is not None else ""
        return agent is not None and agent.phase is AgentPhase.RUNNING and agent.underway and first == self.node

    @property
    def node(self) -> NodeId:
        """The node it runs on."""
        return self.info.node
