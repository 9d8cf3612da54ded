"""Carries out the faults of a plan in a simulated world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from edl.agent.machine import events as ag
from edl.exit_codes import ExitCode
from edl.master import events as ms
from edl.master.policies.slots import slots_of
from edl.testing.sim.faults import SIZES, SLOTS, Fault, FaultKind, FaultPlan
from edl.testing.sim.launcher import SimLauncher
from edl.testing.sim.network import STORE
from edl.testing.sim.stepping import Stepper
from edl.testing.sim.workers import SimWorker
from edl.testing.sim.world import SimWorld
from edl.wire.purpose import Purpose
from edl.wire.scale_requests import Cordon, Drain, DrainMode, Resize, SetBounds, Suspend

T = TypeVar("T")
MAX_NODES = 7
ALL_LEASES = 0.3
"""Share of lost leases with which all others are lost."""


def play_out(world: SimWorld, plan: FaultPlan) -> None:
    """Run a plan of faults to its end, then heal all of them."""
    for fault in plan.faults:
        world.timeline.at(fault.at_s, inject, world, fault)
    world.run(plan.quiet_s - world.timeline.now_s)
    world.heal()


def inject(world: SimWorld, fault: Fault) -> None:
    """Carry out a fault. Does nothing if its target does not exist."""
    if world.deps.trace is not None:
        world.deps.trace(f"  FAULT  {fault}")
    if fault.kind not in (*SIZES, *SLOTS[1:]):
        world.checks.trouble(fault.for_s)
    _HANDLERS[fault.kind](world, fault)


def _choose(options: Sequence[T], pick: float) -> T | None:
    return options[min(int(pick * len(options)), len(options) - 1)] if options else None


def _launcher(world: SimWorld, fault: Fault) -> SimLauncher | None:
    return _choose(world.alive(), fault.pick)


def _crash(world: SimWorld, fault: Fault) -> None:
    victim = _launcher(world, fault)
    if victim is not None:
        victim.crash()


def _crash_master(world: SimWorld, fault: Fault) -> None:
    if world.master is not None:
        world.master.crash()


def _crash_on_write(world: SimWorld, fault: Fault) -> None:
    world.deps.kill_on_write = True


def _restart(world: SimWorld, fault: Fault) -> None:
    down = _choose([one for one in world.launchers.values() if not one.alive], fault.pick)
    if down is not None and not world.ended():
        info = down.info
        place = info.node_rank, info.rack, info.index
        world.start(down.node, info.slots, *place, info.spare_slots, info.devices)


def _new_node(world: SimWorld, fault: Fault) -> None:
    if len(world.launchers) < MAX_NODES and not world.ended():
        world.start(f"x{len(world.launchers)}", slots=world.spec.replicas.slots or 1 + int(fault.pick * 2))


def _worker(world: SimWorld, fault: Fault) -> SimWorker | None:
    return _choose([worker for worker in world.training.alive() if worker.round and not worker.done], fault.pick)


def _kill_worker(world: SimWorld, fault: Fault) -> None:
    _end_worker(world, fault, -9)


def _fail_worker(world: SimWorld, fault: Fault) -> None:
    _end_worker(world, fault, 1)


def _end_worker(world: SimWorld, fault: Fault, code: int) -> None:
    victim = _worker(world, fault)
    if victim is not None:
        world.checks.worker_failures += 1
        world.training.end(victim, code)


def _freeze_worker(world: SimWorld, fault: Fault) -> None:
    victim = _worker(world, fault)
    if victim is not None:
        world.checks.worker_failures += 1
        world.freeze(victim, fault.for_s)


def _partition(world: SimWorld, fault: Fault, *, one_way: bool = False) -> None:
    hosts = [one.host for one in world.alive()]
    number = max(1, int(fault.pick * len(hosts)))
    turn = int(fault.pick2 * len(hosts))
    inside = (hosts[turn:] + hosts[:turn])[:number]
    outside = [host for host in hosts if host not in inside]
    store = [STORE] if fault.pick2 * 10 % 1 < 0.7 else []
    _heal_later(world, fault, world.partition(inside, outside + store, one_way=one_way))


def _one_way(world: SimWorld, fault: Fault) -> None:
    _partition(world, fault, one_way=True)


def _isolate(world: SimWorld, fault: Fault) -> None:
    victim = _launcher(world, fault)
    if victim is not None:
        _heal_later(world, fault, world.partition([victim.host]))


def _partition_store(world: SimWorld, fault: Fault) -> None:
    victim = _launcher(world, fault)
    if victim is not None:
        _heal_later(world, fault, world.partition([victim.host], [STORE]))


def _heal_later(world: SimWorld, fault: Fault, pairs: list[tuple[str, str]]) -> None:
    world.timeline.after(fault.for_s, world.network.heal, pairs)


def _store_away(world: SimWorld, fault: Fault) -> None:
    if not world.store.away:
        world.store.away = True
        world.timeline.after(fault.for_s, world.store.come_back)


def _slow_network(world: SimWorld, fault: Fault) -> None:
    world.network.slowness = world.network.usual_slowness + 60.0 * fault.pick

    def back() -> None:
        world.network.slowness = world.network.usual_slowness

    world.timeline.after(fault.for_s, back)


def _pause(world: SimWorld, fault: Fault) -> None:
    _stop(world, fault, _launcher(world, fault))


def _pause_master(world: SimWorld, fault: Fault) -> None:
    _stop(world, fault, world.master)


def _stop(world: SimWorld, fault: Fault, victim: SimLauncher | None) -> None:
    if victim is not None and not victim.paused:
        victim.pause()
        world.timeline.after(fault.for_s, victim.resume)


def _lose_lease(world: SimWorld, fault: Fault) -> None:
    victim = _launcher(world, fault)
    victims = world.alive() if fault.pick2 < ALL_LEASES else [victim]
    for one in victims:
        if one is not None and one.info.incarnation:
            world.store.revoke(one.info.incarnation)


def _drain(world: SimWorld, fault: Fault) -> None:
    victim = _launcher(world, fault)
    if victim is not None:
        victim.run(victim.interrupt, 15)


def _kill_fork_server(world: SimWorld, fault: Fault) -> None:
    victim = _launcher(world, fault)
    if victim is not None and victim.agent is not None:
        victim.lose_fork_server()


def _kill_waiting(world: SimWorld, fault: Fault) -> None:
    victim = _choose([worker for worker in world.training.alive() if not worker.round], fault.pick)
    if victim is not None:
        world.checks.worker_failures += 1
        world.training.end(victim, -9 if fault.pick2 < 0.5 else 1)


def _stuck_worker(world: SimWorld, fault: Fault) -> None:
    victim = _worker(world, fault)
    if isinstance(victim, Stepper):
        victim.stuck = True


def _hang(world: SimWorld, fault: Fault) -> None:
    world.hang(fault.for_s)


def _save(world: SimWorld, fault: Fault) -> None:
    world.ask(Purpose.SAVE, by_file=fault.pick < 0.5)


def _kill(world: SimWorld, fault: Fault) -> None:
    world.ask(Purpose.KILL, by_file=fault.pick < 0.5)


_SMALLEST_BATCH = 32
"""Readers of a data service refuse a step with fewer records than workers."""


def _set(world: SimWorld, fault: Fault) -> None:
    name = _choose(("global-batch", "lr-scale", "lr-rule"), fault.pick)
    values = {"global-batch": max(_SMALLEST_BATCH, int(fault.pick2 * 500)), "lr-scale": 0.1 + fault.pick2}
    rule = _choose(("none", "linear", "sqrt"), fault.pick2)
    world.request_settings(f"{name}={values.get(str(name), rule)} lr-warmup={int(fault.pick2 * 30)}")


_KEYS = ("", "", "", "k1", "k2")
_WHO = "somebody"
_AMPLE_S = 60.0
"""Seconds in which workers surely reach a step boundary."""


def _resize(world: SimWorld, fault: Fault) -> None:
    digits = int(fault.pick2 * 1e6)
    seen = world.scaled
    revision = (0, 0, seen, max(seen - 3, 1))[digits % 4]
    key = _KEYS[digits // 4 % len(_KEYS)]
    external = digits // 32 % 8 == 0
    nodes = int(fault.pick * 9) if digits % 7 == 0 else max(1, int(fault.pick * (world.spec.nodes.highest + 1)))
    world.ask_for(Resize(nodes, _WHO, "", revision, key, external))


def _set_bounds(world: SimWorld, fault: Fault) -> None:
    lowest = 1 + int(fault.pick * world.spec.nodes.lowest)
    world.ask_for(SetBounds(lowest, lowest + int(fault.pick2 * 4), _WHO))


def _member(world: SimWorld, pick: float) -> str:
    found = _choose(world.usable(), pick)
    return found.node if found is not None else "n0"


def _evict(world: SimWorld, fault: Fault) -> None:
    nodes = [_member(world, fault.pick)]
    if fault.pick2 < 0.4:
        nodes.append(_member(world, fault.pick2 / 0.4))
    mode = _choose(tuple(DrainMode), fault.pick2 * 10 % 1)
    assert mode is not None  # noqa: S101 - there are three
    deadline_s = (fault.for_s, 0.0, _AMPLE_S, _AMPLE_S)[int(fault.pick * 97) % 4]
    if deadline_s != _AMPLE_S:
        world.checks.trouble(deadline_s)  # it may not get away in time
        nodes = nodes[:1]
    world.ask_for(Drain(tuple(dict.fromkeys(nodes)), _WHO, "", deadline_s, mode))


def _cordon(world: SimWorld, fault: Fault) -> None:
    node = _member(world, fault.pick)
    world.ask_for(Cordon(node, True, _WHO))
    if fault.pick2 < 0.6:
        world.timeline.after(fault.for_s, world.ask_for, Cordon(node, False, _WHO))


def _slot(world: SimWorld, fault: Fault) -> tuple[SimLauncher, int] | None:
    """A launcher and a slot of it, if there is any."""
    found = _choose(world.usable(), fault.pick)
    if found is None:
        return None
    slots = slots_of(found.info)
    return found, min(int(fault.pick2 * slots), slots - 1)


def _bad_slot(world: SimWorld, fault: Fault) -> None:
    found = _slot(world, fault)
    if found is not None:
        world.spoil_slot(found[0].node, found[1], fault.for_s)


def _drop_slot(world: SimWorld, fault: Fault) -> None:
    found = _slot(world, fault)
    if found is None:
        return
    launcher, slot = found
    device = launcher.info.devices[slot] if launcher.info.devices else str(slot)
    world.ask_for(Cordon(launcher.node, True, _WHO, device=device))
    if fault.pick * 10 % 1 < 0.6:
        world.timeline.after(fault.for_s, world.ask_for, Cordon(launcher.node, False, _WHO, device=device))


def _unfit(world: SimWorld, fault: Fault) -> None:
    found, master = _slot(world, fault), world.master
    if found is not None and master is not None and master.master_shell is not None:
        launcher, slot = found
        event = ms.Unfit(launcher.node, launcher.info.incarnation, slot, "does not pass its check")
        master.run(master.master_shell._events.put_nowait, event)  # no part of edl checks cards yet


def _notice(world: SimWorld, fault: Fault) -> None:
    victim = _launcher(world, fault)
    if victim is not None and victim.shell is not None:
        victim.run(victim.shell.post, ag.Noticed("the cloud takes it away", fault.for_s))
        world.timeline.after(fault.for_s, victim.crash)


def _no_room(world: SimWorld, fault: Fault) -> None:
    victim = _launcher(world, fault)
    if victim is not None and victim.shell is not None:
        victim.run(victim.shell.room, "no memory")
        victim.after(fault.for_s, victim.shell.room, "")


def _no_logs(world: SimWorld, fault: Fault) -> None:
    victim = _launcher(world, fault)
    if victim is not None and victim.shell is not None:
        victim.run(victim.group.warn, "no room on the disk")
        victim.after(fault.for_s, victim.group.warn, "")


def _give_up(world: SimWorld, fault: Fault) -> None:
    victim = _worker(world, fault)
    if victim is not None and not victim.frozen:
        world.checks.gave_up = True
        victim.parent.run(victim.parent.tell_agent, ag.WorkerGaveUp(victim.born, victim.slot, ExitCode.WORKER_FAILED))
        world.checks.worker_failures += 1
        world.timeline.after(0.02, world.training.end, victim, 1)


def _service_flaw(world: SimWorld, fault: Fault) -> None:
    _report(world, ms.Flawed("service", "a flaw" if fault.pick < 0.7 else ""))


def _service_fails(world: SimWorld, fault: Fault) -> None:
    world.checks.gave_up = True
    _report(world, ms.Failed("a service cannot continue"))


def _report(world: SimWorld, event: ms.Event) -> None:
    master = world.master
    if master is not None and master.master_shell is not None:
        master.run(master.master_shell._events.put_nowait, event)  # the simulated jobs have no services


def _suspend(world: SimWorld, fault: Fault) -> None:
    world.ask_for(Suspend(True, _WHO))
    if fault.pick2 < 0.7:
        world.timeline.after(fault.for_s, world.ask_for, Suspend(False, _WHO))


def _crash_on_hold(world: SimWorld, fault: Fault) -> None:
    world.deps.kill_on_hold = True


def _crash_on_switch(world: SimWorld, fault: Fault) -> None:
    world.deps.kill_on_switch = True


def _crash_source(world: SimWorld, fault: Fault) -> None:
    world.states.kill_source = True


def _spoil(world: SimWorld, fault: Fault) -> None:
    world.spoil()


_HANDLERS: dict[FaultKind, Callable[[SimWorld, Fault], None]] = {
    FaultKind.CRASH: _crash,
    FaultKind.CRASH_MASTER: _crash_master,
    FaultKind.CRASH_ON_WRITE: _crash_on_write,
    FaultKind.RESTART: _restart,
    FaultKind.NEW_NODE: _new_node,
    FaultKind.KILL_WORKER: _kill_worker,
    FaultKind.FAIL_WORKER: _fail_worker,
    FaultKind.FREEZE_WORKER: _freeze_worker,
    FaultKind.PARTITION: _partition,
    FaultKind.ISOLATE: _isolate,
    FaultKind.ONE_WAY: _one_way,
    FaultKind.PARTITION_STORE: _partition_store,
    FaultKind.STORE_AWAY: _store_away,
    FaultKind.SLOW_NETWORK: _slow_network,
    FaultKind.PAUSE: _pause,
    FaultKind.PAUSE_MASTER: _pause_master,
    FaultKind.LOSE_LEASE: _lose_lease,
    FaultKind.DRAIN: _drain,
    FaultKind.KILL_FORK_SERVER: _kill_fork_server,
    FaultKind.KILL_WAITING: _kill_waiting,
    FaultKind.STUCK_WORKER: _stuck_worker,
    FaultKind.HANG: _hang,
    FaultKind.SAVE: _save,
    FaultKind.SET: _set,
    FaultKind.KILL: _kill,
    FaultKind.CRASH_ON_HOLD: _crash_on_hold,
    FaultKind.CRASH_ON_SWITCH: _crash_on_switch,
    FaultKind.CRASH_SOURCE: _crash_source,
    FaultKind.SPOIL: _spoil,
    FaultKind.RESIZE: _resize,
    FaultKind.SET_BOUNDS: _set_bounds,
    FaultKind.EVICT: _evict,
    FaultKind.CORDON: _cordon,
    FaultKind.SUSPEND: _suspend,
    FaultKind.BAD_SLOT: _bad_slot,
    FaultKind.DROP_SLOT: _drop_slot,
    FaultKind.UNFIT: _unfit,
    FaultKind.NOTICE: _notice,
    FaultKind.NO_ROOM: _no_room,
    FaultKind.NO_LOGS: _no_logs,
    FaultKind.GIVE_UP: _give_up,
    FaultKind.SERVICE_FLAW: _service_flaw,
    FaultKind.SERVICE_FAILS: _service_fails,
}
