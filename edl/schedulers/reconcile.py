"""What the Master asks of a scheduler, and what it makes of what the scheduler says. Pure.

Level-triggered: each step looks at what the job wants and at what the scheduler means to give, and takes the one next
step from here to there; nothing is planned ahead, so a new Master begins with a look and does the same. One call to the
scheduler is under way at a time, and one wish to the Master. While the scheduler is silent the job trains on with what
it has.

With ``SizeOwner.MASTER`` the scheduler is asked for more nodes at once, and nodes are given back only when they are no
members of the running world any more and have been told to leave (a drain). With ``SizeOwner.EXTERNAL`` the scheduler's
size is a fact that the Master is told. Nodes that are doomed are drained with either.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from edl import machine
from edl.job_records import SizeOwner
from edl.machine import Tick as Tick
from edl.machine import WakeAt as WakeAt
from edl.schedulers.plan import Job, Plan, release_plan, target_of
from edl.schedulers.port import Doomed, Observation, Size, Sized
from edl.wire.wishes import Care, Drain, Granted, Resize, Verdict, Wish

LOOK_S = 10.0
"""Between two looks at the scheduler, beside what it tells by itself."""
FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0
"""Between two tries after an error that may pass; doubled from the first to the last."""
REFUSED_S = 60.0
"""After an error that will not pass by itself: somebody may have mended it."""
UNHEARD_S = 5.0
"""After a wish that the Master could not take: the store may be away."""
DOOMED_AGAIN_S = 10.0
"""After the Master has refused to let doomed nodes go: others may have come that take their places."""
SAME_AGAIN_S = 1.0
MOST_SAME_S = 60.0
"""Between two calls for the same when the first had no effect; doubled."""
END_RETRY_S = 0.5
END_TRIES = 4
"""When the job has ended the Master stays for a few seconds only."""


@dataclass(frozen=True, slots=True)
class About:
    """The scheduler; see ``port.Scheduler``."""

    name: str
    owner: SizeOwner
    indexed: bool = False
    ask_none_at_end: bool = False


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Looked:
    """The job, as it is now."""

    job: Job


@dataclass(frozen=True, slots=True)
class Answered:
    """The call under way has come back; ``size`` with a look."""

    size: Size | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The call under way has failed. It may have been carried out all the same."""

    text: str
    retry: bool


@dataclass(frozen=True, slots=True)
class Replied:
    """The Master's answer to the wish under way."""

    granted: Granted


@dataclass(frozen=True, slots=True)
class Unheard:
    """The Master could not take the wish under way, or has taken it without a word."""

    text: str


@dataclass(frozen=True, slots=True)
class Observed:
    """The scheduler tells something by itself."""

    observation: Observation


Event = Looked | Answered | Failed | Replied | Unheard | Observed | Tick


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Current:
    """Look what the scheduler means to give. ``Answered`` or ``Failed`` comes, as for the next two."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask it for so many nodes."""

    nodes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Give these back, so that ``nodes`` are left."""

    names: tuple[str, ...]
    nodes: int
    reason: str


Call = Current | Ask | Release


@dataclass(frozen=True, slots=True)
class Tell:
    """Put a wish to the Master. ``Replied`` or ``Unheard`` comes."""

    wish: Wish


@dataclass(frozen=True, slots=True)
class Explain:
    """From now on this holds the size up; empty: nothing does."""

    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """For the log."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing is left to do for this job."""


Effect = Call | Tell | Explain | Note | WakeAt | Finished


@dataclass(frozen=True, slots=True)
class State:
    """What is known and under way."""

    about: About
    job: Job | None = None
    size: Size | None = None
    look_s: float = 0.0
    """When to look again at the latest."""
    call: Call | None = None
    wish: Wish | None = None
    errors: int = 0
    """In a row."""
    trouble: str = ""
    """The last of them; empty when the last call of its kind went well."""
    trouble_of: Call | None = None
    """The call that it came from."""
    resume_s: float = 0.0
    """No call before."""
    last: Ask | Release | None = None
    """What was asked for last, when, and how often without effect."""
    last_s: float = 0.0
    repeated: int = 0
    doomed: tuple[Doomed, ...] = ()
    """About whom the Master has not been told yet, or has not let them go."""
    doomed_s: float = 0.0
    """It is not told about them before."""
    urgent: bool = False
    """The wish under way is about doomed nodes."""
    sent_away: frozenset[str] = frozenset()
    """Nodes that are told to leave, until they are gone."""
    surplus: frozenset[str] = frozenset()
    """Of these, gone or not, those that are too many, until they have been given back."""
    told: tuple[int, int, int] | None = None
    """Size and bounds at which the Master was told the size."""
    hush_s: float = 0.0
    """The Master has refused another wish: none before, but for doomed nodes."""
    refusal: str = ""
    explained: str = ""
    finished: bool = False


Decision = machine.Decision[State, Effect]


def step(state: State, event: Event, now_s: float) -> Decision:
    """Take an event in, and do what is to be done next."""
    turn = _Turn(state, now_s)
    turn.take(event)
    turn.proceed()
    return Decision(turn.state, tuple(turn.effects), turn.reason)


class _Turn:
    """One step under way."""

    def __init__(self, state: State, now_s: float) -> None:
        self.state = state
        self.effects: list[Effect] = []
        self.reason = ""
        self._now_s = now_s

    def _set(self, **changes: object) -> None:
        self.state = dataclasses.replace(self.state, **changes)  # type: ignore[arg-type]

    def _note(self, text: str) -> None:
        self.effects.append(Note(text))

    # --- what has happened -----------------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        match event:
            case Looked(job):
                self._looked(job)
            case Answered(size):
                self._answered(size)
            case Failed(text, retry):
                self._failed(text, retry)
            case Replied(granted):
                self._replied(granted)
            case Unheard(text):
                self._unheard(text)
            case Observed(Sized(size)):
                self._sized(size)
            case Observed(Doomed() as doomed):
                others = (one for one in self.state.doomed if one.node != doomed.node)
                self._set(doomed=(*others, doomed), doomed_s=0.0)
            case Tick():
                pass

    def _looked(self, job: Job) -> None:
        there = {node.name for node in job.nodes}
        if job.ended and not self._ended:
            self._set(resume_s=0.0, errors=0)  # there is no time to wait after an error of before
        self._set(job=job, sent_away=self.state.sent_away & there)

    def _answered(self, size: Size | None) -> None:
        call, of = self.state.call, self.state.trouble_of
        self._set(call=None, resume_s=0.0)
        if isinstance(of, Current) == isinstance(call, Current):  # that one may look says nothing about asking
            self._recovered()
        if size is not None:
            self._sized(size)
        elif isinstance(call, Ask | Release):
            self._set(look_s=self._now_s, surplus=frozenset() if isinstance(call, Release) else self.state.surplus)
            if self._ended:
                self._set(finished=True)

    def _recovered(self) -> None:
        if self.state.trouble:
            self._note(f"{self.state.about.name} answers again")
        self._set(errors=0, trouble="", trouble_of=None)

    def _failed(self, text: str, retry: bool) -> None:
        errors = self.state.errors + 1
        pause_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(errors - 1, 16)) if retry else REFUSED_S
        if self._ended:
            pause_s = END_RETRY_S
            self._set(finished=not retry or errors >= END_TRIES)
        if not self.state.trouble or (errors > 1 and text != self.state.trouble and not retry):
            again = "trying again" if retry else f"it is asked again every {REFUSED_S:g} s"
            self._note(f"{text} ({again}; the job goes on as it is)")
        self._set(call=None, errors=errors, trouble=text, trouble_of=self.state.call)
        self._set(resume_s=self._now_s + pause_s)

    def _sized(self, size: Size) -> None:
        state, last = self.state, self.state.last
        changed = state.size is not None and size.nodes != state.size.nodes
        by_us = last is not None and last.nodes == size.nodes
        if changed and not by_us and state.about.owner is SizeOwner.MASTER and isinstance(last, Ask | Release):
            self._note(f"somebody else has changed {state.about.name} to {size.nodes} nodes")
        self._set(size=size, look_s=self._now_s + LOOK_S)

    def _replied(self, granted: Granted) -> None:
        wish, done = self.state.wish, granted.verdict in (Verdict.ACCEPTED, Verdict.KNOWN)
        self._set(wish=None)
        if isinstance(wish, Drain) and done:
            self._set(sent_away=self.state.sent_away | set(wish.nodes))
        if isinstance(wish, Resize) and done and self.state.size is not None:
            self._set(told=self._told(self.state.size.nodes) if self.state.size.nodes == wish.nodes else None)
        if done:
            self._set(refusal="")
        elif granted.verdict is Verdict.UNKNOWN:  # one of the nodes has gone meanwhile; the others are still to go
            self._set(doomed_s=self._now_s + FIRST_RETRY_S)
        elif self.state.urgent:
            self._refused(granted.text)
            self._set(doomed_s=self._now_s + DOOMED_AGAIN_S)
        else:
            self._refused(granted.text)
            self._set(hush_s=self._now_s + REFUSED_S)

    def _unheard(self, text: str) -> None:
        self._refused(text)
        self._set(wish=None, hush_s=self._now_s + UNHEARD_S, doomed_s=self._now_s + UNHEARD_S)

    def _refused(self, text: str) -> None:
        if text != self.state.refusal:
            self._note(f"{self.state.about.name}: {text}")
            self._set(refusal=text)

    # --- what is to be done ----------------------------------------------------------------------------------------

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
        if self.state.wish is None and not self._ended:
            wish = self._next_wish(self.state.job, plan)
            if wish is not None:
                self._set(wish=wish)
                self.effects.append(Tell(wish))
        if self.state.call is None and self._now_s >= self.state.resume_s:
            call = self._next_call(self.state.job, plan)
            if call is not None:
                self._set(call=call)
                self.effects.append(call)
        self._explain(self.state.job, plan)
        self._sleep()

    def _plan(self, job: Job) -> Plan | None:
        """How to get rid of what is too much; None when nothing is, or it is not the time."""
        state = self.state
        if state.about.owner is not SizeOwner.MASTER or state.size is None or job.ended or job.suspended:
            return None
        return release_plan(job, state.size.nodes, state.about.indexed)

    def _next_wish(self, job: Job, plan: Plan | None) -> Wish | None:
        name = self.state.about.name
        doomed = self._doomed(job)
        self._set(urgent=doomed is not None)
        if doomed is not None:
            return doomed
        if self._now_s < self.state.hush_s:
            return None
        if self.state.about.owner is SizeOwner.EXTERNAL:
            return self._resize(job)
        away = sorted(set(plan.drain) - self.state.sent_away) if plan is not None else []
        if plan is None or not away:
            return None
        self._set(surplus=self.state.surplus | set(away))
        return Drain(tuple(away), name, plan.reason, care=Care.TRY)

    def _doomed(self, job: Job) -> Drain | None:
        """All that are going to be taken away leave at one boundary. Those that are not there (any more) are forgotten:
        what comes under their name later is another one."""
        found: dict[str, Doomed] = {}
        for one in self.state.doomed:
            found |= {node.name: one for node in job.nodes if node.is_called(one.node)}
        names = sorted(set(found) - self.state.sent_away)
        self._set(doomed=tuple(one for one in self.state.doomed if any(found[name] == one for name in names)))
        if not names or self._now_s < self.state.doomed_s:
            return None
        leads = [found[name].lead_s for name in names if found[name].lead_s > 0]
        reason = "; ".join(sorted({found[name].reason for name in names}))
        return Drain(tuple(names), self.state.about.name, reason, min(leads, default=0.0), Care.TRY)

    def _resize(self, job: Job) -> Resize | None:
        """The scheduler's size, if the Master does not know it."""
        if self.state.size is None or self.state.size.nodes < 1:
            return None  # nodes are going anyway
        nodes = self.state.size.nodes
        if self.state.told == self._told(nodes) or (self.state.told is None and nodes == job.desired):
            return None
        return Resize(nodes, self.state.about.name, f"{self.state.about.name} has {nodes} nodes", external=True)

    def _told(self, nodes: int) -> tuple[int, int, int]:
        assert self.state.job is not None  # noqa: S101 - seen before any wish
        return nodes, self.state.job.minimum, self.state.job.maximum

    def _next_call(self, job: Job, plan: Plan | None) -> Call | None:
        if job.ended:
            self.reason = "the job has ended: nothing is needed any more"
            return Release(tuple(sorted(node.name for node in job.nodes)), 0, "the job has ended")
        size = self.state.size
        if size is None or self._now_s >= self.state.look_s:
            self.reason = "looking"
            return Current()
        if self.state.about.owner is SizeOwner.EXTERNAL or job.suspended:
            self.reason = "the size is not ours" if not job.suspended else "the job is suspended: nodes stay"
            return None
        target = target_of(job, size.nodes)
        if size.nodes < target:
            self.reason = f"{size.nodes} of {target} nodes are asked for"
            return self._paced(Ask(target, job.reason or f"the job wants {target} nodes"))
        if plan is not None and plan.drain:
            self.reason = f"{', '.join(plan.drain)} is in the way"
        if plan is None or plan.left >= size.nodes:
            self.reason = self.reason or "as it should be"
            if size.nodes == target:
                self._set(surplus=frozenset())
                if not isinstance(self.state.trouble_of, Current):
                    self._recovered()
            return None
        members = {node.name for node in job.nodes if node.member}
        if set(plan.names) - self.state.sent_away or set(plan.names) & members:
            self.reason = f"{', '.join(plan.names)} is to leave first"
            return None
        self.reason = f"{size.nodes - plan.left} nodes too many"
        # Those that were quick to leave are named as well: a scheduler may not know by itself who has gone.
        gone = self.state.surplus - {node.name for node in job.nodes}
        return self._paced(Release((*plan.names, *sorted(gone)), plan.left, plan.reason))

    def _paced(self, call: Ask | Release) -> Call | None:
        """Not the same again and again: it may take its time, or somebody else may want something else."""
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
                self._note(f"giving nodes back to {name}{who}, {call.nodes} are left: {call.reason}")
        self._set(last=call, last_s=self._now_s)
        return call

    @property
    def _same_pause_s(self) -> float:
        return min(MOST_SAME_S, SAME_AGAIN_S * 2.0 ** min(self.state.repeated, 16))

    def _explain(self, job: Job, plan: Plan | None) -> None:
        text, size, name = "", self.state.size, self.state.about.name
        there = len(job.nodes)
        if self.state.trouble:
            text = self.state.trouble
        elif plan is not None and plan.blocked:
            text = f"{name}: {plan.blocked}"
        elif size is not None and not job.suspended and size.nodes > there and job.desired > there:
            text = f"{name}: {there} of {size.nodes} nodes have come" + (f" ({size.detail})" if size.detail else "")
        if text != self.state.explained:
            self._set(explained=text)
            self.effects.append(Explain(text))

    def _sleep(self) -> None:
        """Wake up when something becomes due that no other event brings."""
        state = self.state
        times = []
        if state.call is None:
            times = [state.resume_s, max(state.look_s, state.resume_s), state.last_s + self._same_pause_s]
        if state.wish is None:
            times.append(state.hush_s)
            times += [state.doomed_s] if state.doomed else []
        due_s = min((at_s for at_s in times if at_s > self._now_s), default=None)
        if due_s is not None:
            self.effects.append(WakeAt(due_s))
