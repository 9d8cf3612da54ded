"""The report of a soak, as Markdown and JSON. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.endurance.verdict import Finding, growth

WARM_UP_S = 60.0
"""Of a launcher's life, in which it may grow."""
LEAST_S = 240.0
"""A launcher that lived shorter than this after its warm-up says nothing about growth."""
ALLOWED = {"rss_mb": 10.0, "descriptors": 8.0, "threads": 4.0}
"""Growth over the second half: a launcher that becomes the Master needs somewhat more than another."""
UNITS = {"rss_mb": " MB", "descriptors": "", "threads": ""}

Series = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault that was injected. ``recovered_s``: from its end until all nodes were seen training together again;
    ``None`` if the job was over before."""

    number: int
    fault: str
    job: str
    node: str
    at_s: float
    lasted_s: float
    strength: float
    done: str
    recovered_s: float | None = None


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not happen. ``evidence``: the folder with everything that was kept."""

    job: str
    kind: str
    at_s: float
    texts: tuple[str, ...]
    evidence: str = ""


@dataclass(slots=True)
class Results:
    """Everything that is reported."""

    seed: int
    command: str
    seconds: float = 0.0
    faults: list[Injected] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)
    """Jobs by kind that ended as they should."""
    accounts: dict[str, Counter[str]] = field(default_factory=dict)
    """What was counted, by kind."""
    growth: list[Finding] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Kinds and faults that this machine does not allow, with the reason."""
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def good(self) -> bool:
        """Whether everything held."""
        return not self.violations and all(one.good for one in self.growth)


def grown(name: str, series: Mapping[str, Series]) -> list[Finding]:
    """Whether the resources of one launcher process stayed flat after its warm-up; nothing if it did not live long
    enough."""
    found = []
    for what, values in series.items():
        warm = [(t, value) for t, value in values if t >= WARM_UP_S]
        if warm and warm[-1][0] - warm[0][0] >= LEAST_S:
            found.append(growth(f"{name}: {what}", warm, ALLOWED[what], UNITS[what]))
    return found


def recovery(faults: Sequence[Injected]) -> dict[str, dict[str, float]]:
    """Median, 90th percentile and maximum of the recovery times in seconds, by fault."""
    times: dict[str, list[float]] = {}
    for one in faults:
        if one.recovered_s is not None:
            times.setdefault(one.fault, []).append(one.recovered_s)
    return {
        fault: {"count": len(found), "median": statistics.median(found), "90%": _percentile(found), "max": max(found)}
        for fault, found in sorted(times.items())
    }


def _percentile(values: Sequence[float], share: float = 0.9) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def as_json(results: Results) -> dict[str, Any]:
    """Everything, for a tool."""
    return {
        "seed": results.seed,
        "command": results.command,
        "seconds": results.seconds,
        "good": results.good,
        "faults": [asdict(one) for one in results.faults],
        "recovery": recovery(results.faults),
        "finished": dict(results.finished),
        "accounts": {kind: dict(counts) for kind, counts in results.accounts.items()},
        "growth": [asdict(one) for one in results.growth],
        "violations": [asdict(one) for one in results.violations],
        "skipped": results.skipped,
        "refusals": [[fault, reason, count] for (fault, reason), count in sorted(results.refusals.items())],
    }


def as_markdown(results: Results) -> str:
    """The same for a reader."""
    grew = sum(not one.good for one in results.growth)
    bad = f"**Violated: {len(results.violations)} jobs. Grown: {grew} figures of launchers.**"
    verdict = "Nothing was violated." if results.good else bad
    minutes = results.seconds / 60
    parts = [
        f"# Soak with seed {results.seed}\n",
        f"{minutes:.1f} minutes, {len(results.faults)} faults, {sum(results.finished.values())} jobs. {verdict}\n",
        f"```console\n$ {results.command}\n```\n",
        "## Jobs that ended as they should\n",
        _table(("kind", "jobs", "counted"), _jobs(results)),
        "## Faults\n",
        "Recovery: from the end of the fault until all nodes were seen training together.\n",
        _table(("fault", "injected", "recovered", "median", "90 %", "longest"), _faults(results)),
    ]
    if results.growth:
        parts += ["## Launchers\n", _table(("what", "flat", "figures"), _growth(results.growth))]
    if results.skipped:
        parts += ["## Left out\n", *(f"- {what}: {why}" for what, why in sorted(results.skipped.items())), ""]
    if results.violations:
        parts.append("## Violations\n")
        parts += [
            f"- {one.job} at {one.at_s:.0f} s ({one.evidence}): {'; '.join(one.texts)}" for one in results.violations
        ]
    return "\n".join(parts) + "\n"


def _jobs(results: Results) -> list[list[str]]:
    kinds = sorted({*results.finished, *results.accounts})
    return [
        [
            kind,
            str(results.finished[kind]),
            ", ".join(f"{count:,} {what}" for what, count in results.accounts.get(kind, {}).items()),
        ]
        for kind in kinds
    ]


def _faults(results: Results) -> list[list[str]]:
    counts = Counter(one.fault for one in results.faults)
    times = recovery(results.faults)
    rows = []
    for fault, count in sorted(counts.items()):
        found = times.get(fault)
        figures = [f"{found[what]:.1f} s" for what in ("median", "90%", "max")] if found else ["-"] * 3
        rows.append([fault, str(count), str(int(found["count"])) if found else "0", *figures])
    return rows


def _growth(findings: Sequence[Finding]) -> list[list[str]]:
    return [[one.what, "yes" if one.good else "**no**", one.figures] for one in findings]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
