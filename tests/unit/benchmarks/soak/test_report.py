"""The soak's report: recovery times, growth, and the same facts as Markdown and as JSON."""

from __future__ import annotations

import json
import random
from collections import Counter

from benchmarks.soak.report import (
    Injected,
    Results,
    Violation,
    as_json,
    as_markdown,
    grown,
    recovery,
)


def injected(number: int, fault: str, recovered_s: float | None) -> Injected:
    return Injected(number, fault, "torch-1", "a", 1.0 * number, 2.0, 0.5, "killed it", recovered_s)


FAULTS = [injected(n, "cut", float(n)) for n in range(1, 11)] + [injected(11, "clock", None)]


def test_recovery_times_are_by_fault_and_leave_out_what_was_not_seen() -> None:
    assert recovery(FAULTS) == {"cut": {"count": 10, "median": 5.5, "90%": 10.0, "max": 10.0}}
    assert recovery([]) == {}


def line(per_second: float, seconds: int, noise: float = 0.5) -> list[tuple[float, float]]:
    draw = random.Random(1)
    return [(float(t), 80 + per_second * t + draw.uniform(-noise, noise)) for t in range(0, seconds, 5)]


def test_a_launcher_that_grows_is_found_and_a_short_life_says_nothing() -> None:
    (leak,) = grown("launcher", {"rss_mb": line(0.05, 1200)})
    assert not leak.good and "launcher: rss_mb" in leak.what
    (flat,) = grown("launcher", {"rss_mb": line(0.0, 1200)})
    assert flat.good
    assert grown("launcher", {"rss_mb": line(0.05, 200), "threads": []}) == []


def test_what_grows_in_the_warm_up_does_not_count() -> None:
    series = [(float(t), 30.0 + min(t, 55)) for t in range(0, 1200, 5)]
    (flat,) = grown("launcher", {"rss_mb": series})
    assert flat.good


def results() -> Results:
    found = Results(7, "scripts/soak --hours 2 --seed 7", 7200.0, list(FAULTS))
    found.finished["torch"] = 8
    found.accounts["torch"] = Counter({"steps": 12345, "losses": 37000})
    found.skipped["loss"] = "no netem here"
    return found


def test_both_forms_tell_the_same() -> None:
    text, told = as_markdown(results()), json.loads(json.dumps(as_json(results())))
    assert told["good"] and "Nothing was violated." in text
    assert "| torch | 8 | 12,345 steps, 37,000 losses |" in text and told["accounts"]["torch"]["steps"] == 12345
    assert "| cut | 10 | 10 | 5.5 s | 10.0 s | 10.0 s |" in text and "| clock | 1 | 0 | - | - | - |" in text
    assert "- loss: no netem here" in text


def test_a_violation_is_named_with_its_evidence() -> None:
    found = results()
    found.violations.append(Violation("torch-3", "torch", 81.0, ("step 7 came twice",), "violations/torch-3"))
    text = as_markdown(found)
    assert not found.good and "**Violated: 1 jobs. Grown: 0 figures of launchers.**" in text
    assert "- torch-3 at 81 s (violations/torch-3): step 7 came twice" in text
