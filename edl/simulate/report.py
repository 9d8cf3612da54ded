"""The results of a simulation as plain values, for tables and for JSON."""

from __future__ import annotations

from typing import Any

from edl.master.goodput.slot_times import NS
from edl.master.goodput.slot_use import SlotUse
from edl.rendezvous.phrases import amount, count, duration
from edl.simulate.accounts import SimulatedAccount
from edl.simulate.history import SimulatedHistory
from edl.simulate.scenario import SimulatedScenario

HOUR_NS = 3600 * NS


def document(scenario: SimulatedScenario, history: SimulatedHistory, found: SimulatedAccount) -> dict[str, Any]:
    """The result as JSON. Slot times are seconds of all slots; they add up to ``slot_s`` exactly before rounding."""
    slots = scenario.cluster.slots
    uses = {use.value: found.amounts.get(use, 0) * slots / NS for use in SlotUse}
    lost_ns = found.total_ns - found.amounts.get(SlotUse.USEFUL, 0) + found.slowed_ns
    wrote = found.checkpoints * scenario.saving.checkpoint_bytes
    return {
        "duration_s": history.duration_ns / NS,
        "ended": history.ended,
        "nodes": history.nodes,
        "slots": history.nodes * slots,
        "goodput": found.goodput,
        "goodput_of_cluster": found.of_cluster,
        "slot_s": found.total_ns * slots / NS,
        "uses_s": {**uses, "repair": found.repair_ns * slots / NS},
        "slowed_s": found.slowed_ns * slots / NS,
        "stalled_s": found.stalled_ns * slots / NS,
        "lost_steps": found.lost_steps,
        "faults": dict(history.faults),
        "worlds": history.worlds,
        "decisions": history.decisions,
        "restored_from": {source.value: times for source, times in found.rollbacks.items()},
        "waits_for_nodes": history.waits,
        "waited_s": history.waiting_ns / NS,
        "longest_wait_s": history.longest_wait_ns / NS,
        "checkpoints": found.checkpoints,
        "checkpoints_skipped": found.skipped,
        "checkpoint_bytes": wrote,
        "storage_busy": found.writing_ns / history.duration_ns if history.duration_ns else 0.0,
        "cost": found.total_ns * slots / HOUR_NS * scenario.price,
        "cost_lost": lost_ns * slots / HOUR_NS * scenario.price,
    }


def use_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """A row for each use: its name, slot-hours, share."""
    whole_s = result["slot_s"] or 1.0
    return [
        (name, f"{used_s / 3600:,.1f}", f"{used_s / whole_s:.3%}")
        for name, used_s in result["uses_s"].items()
        if used_s
    ]


def summary_lines(doc: dict[str, Any]) -> list[str]:
    """The result in sentences."""
    faults = ", ".join(f"{number} {name}" for name, number in doc["faults"].items() if number) or "none"
    lines = [
        f"Goodput: {doc['goodput']:.2%} of the job's slot time; {doc['goodput_of_cluster']:.2%} of the cluster's, "
        "with spares, repairs and stragglers",
        f"{count(doc['nodes'])}, {count(doc['slots'], 'slot')}, {duration(doc['duration_s'])}; faults: {faults}",
        f"{count(doc['worlds'], 'world')}; {count(doc['lost_steps'], 'step')} repeated; returned to "
        + ", ".join(f"{name} {times} times" for name, times in doc["restored_from"].items() if name != "scratch"),
    ]
    waited = f", {duration(doc['waited_s'])} in all, at most {duration(doc['longest_wait_s'])}"
    waited = waited if doc["waited_s"] else ""
    lines.append(f"Without a world for lack of nodes: {doc['waits_for_nodes']} times{waited}")
    skipped = f", {doc['checkpoints_skipped']} skipped because storage was busy" if doc["checkpoints_skipped"] else ""
    wrote = f", {amount(doc['checkpoint_bytes'])}" if doc["checkpoint_bytes"] else ""
    lines.append(f"Checkpoints: {doc['checkpoints']}{wrote}{skipped}; storage busy {doc['storage_busy']:.1%}")
    if doc["cost"]:
        lines.append(f"Cost: {doc['cost']:,.0f}, of which {doc['cost_lost']:,.0f} was wasted")
    if doc["ended"]:
        lines.append(f"The job ended early: {doc['ended']}")
    return lines
