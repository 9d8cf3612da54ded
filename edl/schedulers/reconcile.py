"""Decides what to ask of a scheduler, and which requests to make of the Master because of the scheduler's reports.
Pure.

Level-triggered: each step compares what the job wants with what the scheduler intends to provide, and takes one step
towards it. Nothing is planned ahead, so a new Master begins with a query and reaches the same decisions. At most one
call to the scheduler and one request to the Master are in progress at a time. While the scheduler does not answer, the
job continues with the nodes that it has.

With ``SizeOwner.MASTER`` the scheduler is asked for additional nodes at once, and nodes are released only when they are
no longer members of the running world and have been ordered to leave (a drain). With ``SizeOwner.EXTERNAL`` the
scheduler's size is reported to the Master, which follows it. Nodes that it will remove are drained in both cases.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from edl import machine
from edl.job_records import SizeOwner
from edl.machine import Tick as Tick
from edl.machine import WakeAt as WakeAt
from edl.schedulers.plan import JobSummary, RemovalPlan, release_plan, target_of
from edl.schedulers.port import Disruption, Observation, SchedulerSize, Sized
from edl.wire.scale_requests import Drain, DrainMode, Granted, Resize, ScaleRequest, Verdict

LOOK_S = 10.0
"""Seconds between two queries of the scheduler, in addition to its own reports."""
FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0
"""Bounds of the pause in seconds after a transient error; it doubles each time."""
REFUSED_S = 60.0
"""Pause in seconds after a permanent error, which an operator may have fixed by then."""
UNHEARD_S = 5.0
"""Pause in seconds after a request that the Master could not accept, because the store may be unreachable."""
DRAIN_RETRY_S = 10.0
"""Pause in seconds after the Master refused to drain nodes that will be removed; replacements may join meanwhile."""
SAME_AGAIN_S = 1.0
MOST_SAME_S = 60.0
"""Bounds of the pause in seconds before a call is repeated that had no effect; it doubles each time."""
END_RETRY_S = 0.5
END_TRIES = 4
"""Pause and number of attempts once the job has ended, because the Master stays only for a few seconds."""


@dataclass(frozen=True, slots=True)
class About:
    """Properties of the scheduler, as in ``port.Scheduler``, and who owns the size."""

    name: str
    owner: SizeOwner
    indexed: bool = False
    ask_none_at_end: bool = False


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Looked:
    """The current state of the job."""

    job: JobSummary


@dataclass(frozen=True, slots=True)
class CallSucceeded:
    """The call in progress has succeeded. ``size``: the result of ``Current``; None for other calls."""

    size: SchedulerSize | None = None


@dataclass(frozen=True, slots=True)
class CallFailed:
    """The call in progress has failed; the scheduler may have executed it nevertheless. ``retry``: whether the error is
    transient."""

    text: str
    retry: bool


@dataclass(frozen=True, slots=True)
class Replied:
    """The Master's answer to the request in progress."""

    granted: Granted


@dataclass(frozen=True, slots=True)
class Unheard:
    """The Master could not process the request in progress, or did not answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Observed:
    """The scheduler's watch has reported something."""

    observation: Observation


Event = Looked | CallSucceeded | CallFailed | Replied | Unheard | Observed | Tick


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Current:
    """Query the size that the scheduler intends to provide. ``CallSucceeded`` or ``CallFailed`` follows, as after
    ``Ask`` and ``ReleaseNodes``."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the scheduler to provide ``nodes`` nodes."""

    nodes: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseNodes:
    """Ask the scheduler to remove these nodes, so that ``nodes`` are left."""

    names: tuple[str, ...]
    nodes: int
    reason: str


Call = Current | Ask | ReleaseNodes


@dataclass(frozen=True, slots=True)
class TellMaster:
    """Submit a request to the Master. ``Replied`` or ``Unheard`` follows."""

    request: ScaleRequest


@dataclass(frozen=True, slots=True)
class Explain:
    """Set the explanation in the status why the size is not reached; empty: none."""

    text: str


@dataclass(frozen=True, slots=True)
class LogMessage:
    """Write a line to the log."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing is left to do for this job."""


Effect = Call | TellMaster | Explain | LogMessage | WakeAt | Finished


@dataclass(frozen=True, slots=True)
class ReconcileState:
    """Everything that decisions depend on."""

    about: About
    job: JobSummary | None = None
    size: SchedulerSize | None = None
    look_s: float = 0.0
    """Time of the next query."""
    call: Call | None = None
    """The call in progress."""
    request: ScaleRequest | None = None
    """The request to the Master in progress."""
    errors: int = 0
    """Number of consecutive errors."""
    trouble: str = ""
    """The last error; empty once a call of the same kind has succeeded."""
    trouble_of: Call | None = None
    """The call that caused it."""
    resume_s: float = 0.0
    """No call is made before this time."""
    last: Ask | ReleaseNodes | None = None
    """The last call that changes the size."""
    last_s: float = 0.0
    """Time of that call."""
    repeated: int = 0
    """How often that call was repeated without effect."""
    disruptions: tuple[Disruption, ...] = ()
    """Nodes whose drain has not been requested yet, or was refused."""
    disruption_s: float = 0.0
    """Their drain is not requested before this time."""
    urgent: bool = False
    """Whether the request in progress drains nodes that the scheduler will remove."""
    sent_away: frozenset[str] = frozenset()
    """Nodes that were ordered to leave and have not left yet."""
    surplus: frozenset[str] = frozenset()
    """Surplus nodes that were ordered to leave, until they have been released, even if they have left already."""
    reported: tuple[int, int, int] | None = None
    """Size and bounds when the size was last reported to the Master."""
    hush_s: float = 0.0
    """After a refusal no request is submitted before this time, except to drain nodes that will be removed."""
    refusal: str = ""
    """The last logged refusal of the Master."""
    explained: str = ""
    """The current explanation in the status."""
    finished: bool = False
    """Whether nothing is left to do for this job."""


Decision = machine.Decision[ReconcileState, Effect]


def step(state: ReconcileState, event: Event, now_s: float) -> Decision:
    """Process an event and decide what to do next."""
    turn = _Turn(state, now_s)
    turn.take(event)
    turn.proceed()
    return Decision(turn.state, tuple(turn.effects), turn.reason)


class _Turn:
    """One step in progress: the changing state, and the effects collected so far."""

    def __init__(self, state: ReconcileState, now_s: float) -> None:
        self.state = state
        self.effects: list[Effect] = []
        self.reason = ""
        self._now_s = now_s

    def _set(self, **changes: object) -> None:
        self.state = dataclasses.replace(self.state, **changes)  # type: ignore[arg-type]

    def _note(self, text: str) -> None:
        self.effects.append(LogMessage(text))

    # --- events ------------------------------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        match event:
            case Looked(job):
                self._looked(job)
            case CallSucceeded(size):
                self._answered(size)
            case CallFailed(text, retry):
                self._failed(text, retry)
            case Replied(granted):
                self._replied(granted)
            case Unheard(text):
                self._unheard(text)
            case Observed(Sized(size)):
                self._sized(size)
            case Observed(Disruption() as disruption):
                others = (one for one in self.state.disruptions if one.node != disruption.node)
                self._set(disruptions=(*others, disruption), disruption_s=0.0)
            case Tick():
                pass

    def _looked(self, job: JobSummary) -> None:
        there = {node.name for node in job.nodes}
        if job.ended and not self._ended:
            self._set(resume_s=0.0, errors=0)  # no time is left for the pause after an earlier error
        self._set(job=job, sent_away=self.state.sent_away & there)

    def _answered(self, size: SchedulerSize | None) -> None:
        call, of = self.state.call, self.state.trouble_of
        self._set(call=None, resume_s=0.0)
        if isinstance(of, Current) == isinstance(call, Current):  # a query may succeed although changes fail
            self._recovered()
        if size is not None:
            self._sized(size)
        elif isinstance(call, Ask | ReleaseNodes):
            self._set(look_s=self._now_s, surplus=frozenset() if isinstance(call, ReleaseNodes) else self.state.surplus)
            if _is_last(call):
                self._set(finished=True)

    def _recovered(self) -> None:
        if self.state.trouble:
            self._note(f"{self.state.about.name} answers again")
        self._set(errors=0, trouble="", trouble_of=None)

    def _failed(self, text: str, retry: bool) -> None:
        if self._ended:
            self._failed_at_end(text, retry)
            return
        errors = self.state.errors + 1
        pause_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(errors - 1, 16)) if retry else REFUSED_S
        if not self.state.trouble or (errors > 1 and text != self.state.trouble and not retry):
            again = "retrying" if retry else f"retrying every {REFUSED_S:g} s"
            self._note(f"{text} ({again}; the job continues with the nodes that it has)")
        self._set(call=None, errors=errors, trouble=text, trouble_of=self.state.call)
        self._set(resume_s=self._now_s + pause_s)

    def _failed_at_end(self, text: str, retry: bool) -> None:
        """Repeat the release of all nodes a few times. A call that began before the job ended is not one of them."""
        call = self.state.call
        self._set(call=None)
        if not _is_last(call):
            return
        errors = self.state.errors + 1
        self._set(errors=errors, trouble=text, trouble_of=call, resume_s=self._now_s + END_RETRY_S)
        self._set(finished=not retry or errors >= END_TRIES)
        name = self.state.about.name
        if self.state.finished:
            self._note(f"{text} (given up: scale {name} to 0 nodes, or it starts the nodes of the ended job again)")
        elif errors == 1:
            self._note(f"{text} (retrying to scale {name} to 0 nodes, because the job has ended)")

    def _sized(self, size: SchedulerSize) -> None:
        state, last = self.state, self.state.last
        changed = state.size is not None and size.nodes != state.size.nodes
        by_us = last is not None and last.nodes == size.nodes
        if changed and not by_us and state.about.owner is SizeOwner.MASTER and isinstance(last, Ask | ReleaseNodes):
            self._note(f"{state.about.name} was changed by others to {size.nodes} nodes")
        self._set(size=size, look_s=self._now_s + LOOK_S)

    def _replied(self, granted: Granted) -> None:
        request, done = self.state.request, granted.verdict in (Verdict.ACCEPTED, Verdict.KNOWN)
        self._set(request=None)
        if isinstance(request, Drain) and done:
            self._set(sent_away=self.state.sent_away | set(request.nodes))
        if isinstance(request, Resize) and done and self.state.size is not None:
            current = self.state.size.nodes == request.nodes
            self._set(reported=self._with_bounds(request.nodes) if current else None)
        if done:
            self._set(refusal="")
        elif granted.verdict is Verdict.UNKNOWN:  # one of the nodes has just left; the others must still be drained
            self._set(disruption_s=self._now_s + FIRST_RETRY_S)
        elif self.state.urgent:
            self._refused(granted.text)
            self._set(disruption_s=self._now_s + DRAIN_RETRY_S)
        else:
            self._refused(granted.text)
            self._set(hush_s=self._now_s + REFUSED_S)

    def _unheard(self, text: str) -> None:
        self._refused(text)
        self._set(request=None, hush_s=self._now_s + UNHEARD_S, disruption_s=self._now_s + UNHEARD_S)

    def _refused(self, text: str) -> None:
        if text != self.state.refusal:
            self._note(f"{self.state.about.name}: {text}")
            self._set(refusal=text)

    # --- decisions ---------------------------------------------------------------------------------------------------

    @property
    def _ended(self) -> bool:
        return self.state.job is not None and self.state.job.ended

    def proceed(self) -> None:
        if self.state.job is None:
            self.reason = "the job has not been seen yet"
            return
        if self._ended and not self.state.about.ask_none_at_end:
            self._set(finished=True)
        if self.state.finished:
            self.reason = "the job has ended"
            self.effects.append(Finished())
            return
        plan = self._plan(self.state.job)
        if self.state.request is None and not self._ended:
            request = self._next_request(self.state.job, plan)
            if request is not None:
                self._set(request=request)
                self.effects.append(TellMaster(request))
        if self.state.call is None and self._now_s >= self.state.resume_s:
            call = self._next_call(self.state.job, plan)
            if call is not None:
                self._set(call=call)
                self.effects.append(call)
        self._explain(self.state.job, plan)
        self._sleep()

    def _plan(self, job: JobSummary) -> RemovalPlan | None:
        """How to remove surplus nodes; None if there are none, or none can be removed now."""
        state = self.state
        if state.about.owner is not SizeOwner.MASTER or state.size is None or job.ended or job.suspended:
            return None
        return release_plan(job, state.size.nodes, state.about.indexed)

    def _next_request(self, job: JobSummary, plan: RemovalPlan | None) -> ScaleRequest | None:
        name = self.state.about.name
        drain = self._urgent_drain(job)
        self._set(urgent=drain is not None)
        if drain is not None:
            return drain
        if self._now_s < self.state.hush_s:
            return None
        if self.state.about.owner is SizeOwner.EXTERNAL:
            return self._resize(job)
        away = sorted(set(plan.drain) - self.state.sent_away) if plan is not None else []
        if plan is None or not away:
            return None
        self._set(surplus=self.state.surplus | set(away))
        return Drain(tuple(away), name, plan.reason, mode=DrainMode.TRY)

    def _urgent_drain(self, job: JobSummary) -> Drain | None:
        """A drain of all nodes that the scheduler will remove, at one step boundary; None: none, or not now. Nodes that
        no longer exist are forgotten, because a later node with the same name is a different one."""
        found: dict[str, Disruption] = {}
        for one in self.state.disruptions:
            found |= {node.name: one for node in job.nodes if node.is_called(one.node)}
        names = sorted(set(found) - self.state.sent_away)
        self._set(disruptions=tuple(one for one in self.state.disruptions if any(found[name] == one for name in names)))
        if not names or self._now_s < self.state.disruption_s:
            return None
        leads = [found[name].lead_s for name in names if found[name].lead_s > 0]
        reason = "; ".join(sorted({found[name].reason for name in names}))
        return Drain(tuple(names), self.state.about.name, reason, min(leads, default=0.0), DrainMode.TRY)

    def _resize(self, job: JobSummary) -> Resize | None:
        """A request that reports the scheduler's size, if the Master does not know it."""
        if self.state.size is None or self.state.size.nodes < 1:
            return None  # with a size of 0 the nodes are removed anyway
        nodes = self.state.size.nodes
        if self.state.reported == self._with_bounds(nodes) or (self.state.reported is None and nodes == job.desired):
            return None
        return Resize(nodes, self.state.about.name, f"{self.state.about.name} has {nodes} nodes", external=True)

    def _with_bounds(self, nodes: int) -> tuple[int, int, int]:
        assert self.state.job is not None  # noqa: S101 - set before any request
        return nodes, self.state.job.minimum, self.state.job.maximum

    def _next_call(self, job: JobSummary, plan: RemovalPlan | None) -> Call | None:
        if job.ended:
            self.reason = "the job has ended: no nodes are needed"
            return ReleaseNodes(tuple(sorted(node.name for node in job.nodes)), 0, "the job has ended")
        size = self.state.size
        if size is None or self._now_s >= self.state.look_s:
            self.reason = "querying the size"
            return Current()
        if self.state.about.owner is SizeOwner.EXTERNAL or job.suspended:
            self.reason = "the size is external" if not job.suspended else "the job is suspended: nodes stay"
            return None
        target = target_of(job, size.nodes)
        if size.nodes < target:
            self.reason = f"{size.nodes} of {target} nodes are requested"
            return self._paced(Ask(target, job.reason or f"the job wants {target} nodes"))
        if plan is not None and plan.drain:
            self.reason = f"{', '.join(plan.drain)} must leave first"
        if plan is None or plan.left >= size.nodes:
            self.reason = self.reason or "the size is as wanted"
            if size.nodes == target:
                self._set(surplus=frozenset())
                if not isinstance(self.state.trouble_of, Current):
                    self._recovered()
            return None
        members = {node.name for node in job.nodes if node.member}
        if set(plan.names) - self.state.sent_away or set(plan.names) & members:
            self.reason = f"{', '.join(plan.names)} must leave first"
            return None
        self.reason = f"{size.nodes - plan.left} nodes too many"
        # Nodes that have already left are named as well, because a scheduler may not notice that by itself.
        gone = self.state.surplus - {node.name for node in job.nodes}
        return self._paced(ReleaseNodes((*plan.names, *sorted(gone)), plan.left, plan.reason))

    def _paced(self, call: Ask | ReleaseNodes) -> Call | None:
        """Return the call, or None if it is too early to repeat the same one: it may take time to have an effect, or
        others may be changing the size."""
        last, waited_s = self.state.last, self._now_s - self.state.last_s
        same = last is not None and type(last) is type(call) and last.nodes == call.nodes
        if same and waited_s < 2 * MOST_SAME_S:
            if waited_s < self._same_pause_s:
                return None
            self._set(repeated=self.state.repeated + 1)
        else:
            self._set(repeated=0)
            name = self.state.about.name
            if isinstance(call, Ask):
                self._note(f"asking {name} for {call.nodes} nodes: {call.reason}")
            else:
                who = f" ({', '.join(call.names)})" if call.names else ""
                self._note(f"releasing nodes of {name}{who}; {call.nodes} will be left: {call.reason}")
        self._set(last=call, last_s=self._now_s)
        return call

    @property
    def _same_pause_s(self) -> float:
        return min(MOST_SAME_S, SAME_AGAIN_S * 2.0 ** min(self.state.repeated, 16))

    def _explain(self, job: JobSummary, plan: RemovalPlan | None) -> None:
        text, size, name = "", self.state.size, self.state.about.name
        there = len(job.nodes)
        if self.state.trouble:
            text = self.state.trouble
        elif plan is not None and plan.blocked:
            text = f"{name}: {plan.blocked}"
        elif size is not None and not job.suspended and size.nodes > there and job.desired > there:
            text = f"{name}: {there} of {size.nodes} nodes have joined" + (f" ({size.detail})" if size.detail else "")
        if text != self.state.explained:
            self._set(explained=text)
            self.effects.append(Explain(text))

    def _sleep(self) -> None:
        """Request a tick at the next deadline."""
        state = self.state
        times = []
        if state.call is None:
            times = [state.resume_s, max(state.look_s, state.resume_s), state.last_s + self._same_pause_s]
        if state.request is None:
            times.append(state.hush_s)
            times += [state.disruption_s] if state.disruptions else []
        due_s = min((at_s for at_s in times if at_s > self._now_s), default=None)
        if due_s is not None:
            self.effects.append(WakeAt(due_s))


def _is_last(call: Call | None) -> bool:
    """Whether this is the call that scales an ended job to 0 nodes, the only one for so few."""
    return isinstance(call, ReleaseNodes) and call.nodes == 0
