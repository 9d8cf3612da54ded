"""Runs jobs of all kinds at once under the faults of a course, and keeps the evidence of every violation."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.common.hosts import NotAllowed, network
from benchmarks.endurance.disk import small_disk
from benchmarks.soak.checks import two_leaders
from benchmarks.soak.faults import Need
from benchmarks.soak.follow import Follower, follower, make_records
from benchmarks.soak.history import end_reason, history
from benchmarks.soak.job import SIZE_MB, Job, Place
from benchmarks.soak.kinds import KINDS, Kind
from benchmarks.soak.options import Options
from benchmarks.soak.plan import Begin, Course, JobView, Order, Replay
from benchmarks.soak.references import References
from benchmarks.soak.report import Injected, Results, Violation, grown
from benchmarks.soak.strike import Striker

POLL_S = 0.25
SAMPLE_S = 5.0
LEADERS_S = 15.0
STARTING = 2
"""Jobs that are being started at once."""


@dataclass(slots=True)
class Running:
    """A job with everything that belongs to it."""

    job: Job
    follower: Follower
    close: contextlib.ExitStack
    begun_s: float
    whole_s: float | None = None
    """When it first trained with all its nodes."""
    struck_s: float = 0.0
    """The end of the last fault, or when it first trained."""
    ending_s: float | None = None
    faults: list[Injected] = field(default_factory=list)


class Soak:
    """One soak."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self.options, self.say = options, say
        self.results = Results(options.seed, options.command)
        again = options.replay
        self.course = (
            Replay(options.seed, (), 0.0, left=list(again))
            if again
            else Course(options.seed, options.faults, options.every_s)
        )
        self.striker = Striker()
        self.jobs: dict[str, Running] = {}
        self.begun_s = time.monotonic()
        self._numbers: Counter[str] = Counter()
        self._waiting: list[str] = list(options.kinds)
        self._references = References(options)
        self._unrecovered: list[tuple[Running, int, float]] = []
        self._sampled_s = self._looked_s = 0.0
        self._all_train_s: float | None = None

    # --- the course of a soak ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run it to its end. ``results`` are complete afterwards, and true as far as they go after an error."""
        self.begun_s = time.monotonic()
        try:
            while not (over := self._is_over()) or self.jobs:
                if not over:
                    self._start_one()
                self._poll()
                views = self._views()
                for order in self.course.step(time.monotonic(), views):
                    self._carry_out(order)
                self._watch_recoveries(views)
                for running in list(self.jobs.values()):
                    self._attend(running, over)
                time.sleep(POLL_S)
        finally:
            for running in list(self.jobs.values()):
                self._remove(running)
            self._references.close()
            self.results.seconds = self._now()
            self.results.refusals = self.course.refusals

    def _is_over(self) -> bool:
        """Whether the time for faults is over. It counts from when the first job of each kind trains."""
        options = self.options
        if self._all_train_s is None:
            first = len(self.jobs) >= min(options.at_once, len(options.kinds))
            if first and all(one.whole_s is not None for one in self.jobs.values()):
                self._all_train_s = self._now()
        begun_s = options.patience_s if self._all_train_s is None else self._all_train_s
        return self._now() >= begun_s + options.seconds

    def _now(self) -> float:
        return time.monotonic() - self.begun_s

    def _start_one(self) -> None:
        """A few at a time: imports take most of a start."""
        starting = sum(one.whole_s is None for one in self.jobs.values())
        if not self._waiting or starting >= STARTING or len(self.jobs) >= self.options.at_once:
            return
        kind = KINDS[self._waiting.pop(0)]
        self._numbers[kind.name] += 1
        name = f"{kind.name}-{self._numbers[kind.name]}"
        self.jobs[name] = self._started(name, kind)
        self.say(f"{self._now():7.1f} s  {name}: started, spared is {self.jobs[name].job.spared}")

    def _started(self, name: str, kind: Kind) -> Running:
        folder = self.options.out / "jobs" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with contextlib.ExitStack() as stack:
            disk = stack.enter_context(small_disk(SIZE_MB))
            allowed = self.options.allowed
            hosts = None
            if Need.NAMESPACES in allowed:
                hosts = stack.enter_context(network(kind.nodes, prefix=name))
            place = Place(
                folder,
                disk,
                hosts,
                allowed,
                self.options.lease_s,
                self.options.pause_s,
                self.options.seed,
                self.options.clock_library,
            )
            job = Job(name, kind, place)
            stack.callback(job.close)
            make_records(job)
            job.start_all()
            return Running(
                job, follower(job, self._references.losses(kind.reference)), stack.pop_all(), time.monotonic()
            )
        raise AssertionError("unreachable")

    def _poll(self) -> None:
        now_s = time.monotonic()
        self._references.poll()
        for running in self.jobs.values():
            running.follower.poll(now_s)
            if running.whole_s is None and running.follower.whole_at_s > running.begun_s:
                running.whole_s = running.struck_s = now_s
                self.say(f"{self._now():7.1f} s  {running.job.name}: all nodes train")
        if now_s - self._sampled_s >= SAMPLE_S:
            self._sampled_s = now_s
            for running in self.jobs.values():
                if running.ending_s is None:  # a launcher that ends gives back what it holds
                    running.job.sample(now_s)
        if now_s - self._looked_s >= LEADERS_S:
            self._looked_s = now_s
            for running in self.jobs.values():
                wrong = two_leaders(history(running.job.history))
                running.follower.wrong += [one for one in wrong if one not in running.follower.wrong]

    def _views(self) -> dict[str, JobView]:
        now_s = time.monotonic()
        return {
            name: running.job.view(now_s, running.follower.whole_at_s, running.follower.copied_at_s)
            for name, running in self.jobs.items()
        }

    # --- faults ----------------------------------------------------------------------------------------------------

    def _carry_out(self, order: Order) -> None:
        strike = order.strike
        running = self.jobs.get(strike.job)
        if not isinstance(order, Begin):
            self.striker.end(strike)
            if running is not None:
                running.struck_s = time.monotonic()
            return
        assert running is not None
        try:
            done = self.striker.begin(running.job, strike)
        except NotAllowed as error:
            self.results.skipped[strike.fault] = str(error)
            done = ""
        if not done:
            self.course.withdraw(strike)
            return
        lasts_s = strike.end_s - strike.begin_s
        one = Injected(
            strike.number, strike.fault, strike.job, strike.node, time.monotonic() - (running.whole_s or 0.0), lasts_s,
            strike.strength, done,
        )  # fmt: skip
        self._unrecovered.append((running, len(running.faults), strike.end_s))
        running.faults.append(one)
        running.struck_s = max(running.struck_s, strike.end_s)
        self.say(f"{self._now():7.1f} s  {strike.job}: {done}{f', for {lasts_s:.1f} s' if lasts_s else ''}")

    def _watch_recoveries(self, views: dict[str, JobView]) -> None:
        left = []
        for running, at, end_s in self._unrecovered:
            view = views.get(running.job.name)
            if view is not None and view.whole_at_s > end_s:
                running.faults[at] = replace(running.faults[at], recovered_s=view.whole_at_s - end_s)
            elif view is not None:
                left.append((running, at, end_s))
        self._unrecovered = left

    # --- one job ---------------------------------------------------------------------------------------------------

    def _attend(self, running: Running, over: bool) -> None:
        """See whether a job is as it should be, and whether it is time for its end."""
        job, now_s = running.job, time.monotonic()
        wrong = list(running.follower.wrong)
        if running.ending_s is None:
            ended = job.ended_by_themselves()
            wrong += (
                [*ended, f"the job has ended: {end_reason(job.history) or 'no Master has said why'}"] if ended else []
            )
            wrong += self._stuck(running, now_s)
        if wrong:
            self._violated(running, wrong)
        elif running.ending_s is not None:
            self._end(running, now_s)
        elif running.whole_s is not None and (over or now_s - running.whole_s > self.options.job_s):
            job.ending = True
            if not self.course.on(job.name):
                running.ending_s = now_s
                running.follower.end_soon()
                self.say(f"{self._now():7.1f} s  {job.name}: to end")
        elif over and running.whole_s is None and not self.course.on(job.name):
            self._remove(running)  # it was just being started

    def _stuck(self, running: Running, now_s: float) -> list[str]:
        """A job that has not trained with all nodes for too long although nothing is broken any more."""
        patience_s = self.options.patience_s
        since_s = max(running.begun_s, running.struck_s, running.follower.whole_at_s)
        if self.course.pending(running.job.name) or now_s - since_s <= patience_s:
            return []
        load = f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
        return [f"not all nodes have trained together for {patience_s:.0f} s, although no fault was there ({load})"]

    def _end(self, running: Running, now_s: float) -> None:
        assert running.ending_s is not None
        statuses = running.job.statuses()
        if None in statuses.values() or not running.follower.ready():
            running.follower.end()
            if now_s - running.ending_s > self.options.patience_s:
                self._violated(running, [f"the job did not end in {self.options.patience_s:.0f} s: {statuses}"])
            return
        running.follower.poll(now_s)
        running.follower.close()
        wrong = list(running.follower.wrong) + two_leaders(history(running.job.history))
        if set(statuses.values()) != {0}:
            wrong.append(f"the launchers ended with {statuses}")
        left = running.job.left()
        if left:
            wrong.append(f"{len(left)} processes are left: {left[:3]}")
        if wrong:
            self._violated(running, wrong)
            return
        self.results.finished[running.job.kind.name] += 1
        self.say(f"{self._now():7.1f} s  {running.job.name}: ended well, {running.follower.account()}")
        self._remove(running)

    def _violated(self, running: Running, wrong: list[str]) -> None:
        job, unique = running.job, tuple(dict.fromkeys(wrong))
        self.say(f"{self._now():7.1f} s  {job.name}: VIOLATED: " + "; ".join(unique[:5]))
        evidence = keep_evidence(self.options, running, unique)
        self.results.violations.append(
            Violation(job.name, job.kind.name, self._now(), unique[:20], str(evidence.relative_to(self.options.out)))
        )
        self._remove(running)

    def _remove(self, running: Running) -> None:
        """End everything of a job, and let another of its kind start."""
        job = running.job
        for order in self.course.drop(job.name):
            self.striker.end(order.strike)
        running.close.close()
        self.results.faults += running.faults
        counts = self.results.accounts.setdefault(job.kind.name, Counter())
        counts.update(running.follower.account())
        for (node, pid), sample in job.samples.items():
            series = {"rss_mb": sample.rss_mb, "descriptors": sample.descriptors, "threads": sample.threads}
            self.results.growth += grown(f"{job.name}, launcher of {node} ({pid})", series)
        shutil.rmtree(job.place.folder, ignore_errors=True)
        del self.jobs[job.name]
        self._waiting.append(job.kind.name)


def keep_evidence(options: Options, running: Running, wrong: tuple[str, ...]) -> Path:
    """Copy everything that explains a violation: logs, steps, history, the faults with their times, and the command
    that repeats them."""
    job = running.job
    folder = options.out / "violations" / job.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    place = job.place
    for source in place.folder.glob("*.log"):
        shutil.copy(source, folder)
    for source, name in ((job.said, "steps"), (job.history, "history"), (place.disk.folder / "logs", "logs")):
        with contextlib.suppress(shutil.Error, OSError):
            shutil.copytree(source, folder / name, dirs_exist_ok=True)
    faults = {
        "kind": job.kind.name,
        "job": job.name,
        "spared": job.spared,
        "wrong": wrong,
        "faults": [asdict(one) for one in running.faults],
    }
    (folder / "faults.json").write_text(json.dumps(faults, indent=1) + "\n")
    (folder / "processes.txt").write_text("\n".join(job.left()) + "\n")
    repeat = f"scripts/soak --replay {folder / 'faults.json'} --seed {options.seed} --lease-ttl {options.lease_s:g}"
    repeat += f" --pause {options.pause_s:g} --patience {options.patience_s:g}"
    (folder / "repeat.txt").write_text(f"{repeat}\n{options.command}\n")
    return folder
