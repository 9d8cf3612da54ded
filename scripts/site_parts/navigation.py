"""The order in which a reader meets the pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = "README"

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Start": (
        "docs/README",
        "docs/tour",
        "examples/01-digits-torch/README",
        "examples/02-digits-paddle/README",
        "examples/03-elastic-torch/README",
        "examples/04-elastic-paddle/README",
    ),
    "Training scripts": (
        "docs/state",
        "docs/checkpoints",
        "docs/sync-dir",
        "docs/standby",
        "docs/data",
        "docs/data-formats",
        "docs/data-accounting",
        "docs/remote-readers",
        "docs/sampler",
        "docs/hyperparameters",
        "docs/local-steps",
        "docs/parameter-servers",
        "docs/recommenders",
        "docs/integrations",
        "docs/clients",
        "docs/paddle",
        "docs/python-api",
    ),
    "Starting and sizing jobs": (
        "docs/launcher",
        "docs/kubernetes",
        "docs/schedulers",
        "docs/cluster-env",
        "docs/scale",
        "docs/autoscale",
        "docs/preemption",
        "docs/slots",
        "docs/health-check",
        "docs/denylist",
        "docs/security",
        "deploy/kubernetes/README",
        "deploy/slurm/README",
        "deploy/cluster-env/README",
    ),
    "Operations": (
        "docs/operations",
        "docs/tuning",
        "docs/dashboard",
        "docs/status-and-events",
        "docs/history",
        "docs/goodput",
        "docs/stragglers",
        "docs/hangs",
        "docs/metrics",
        "docs/traces",
        "docs/notifications",
        "docs/logs-and-errors",
        "docs/failures",
        "docs/troubleshooting",
        "docs/simulate",
    ),
    "Reference": (
        "docs/reference",
        "docs/environment",
        "docs/exit-codes",
        "docs/torch-versions",
        "docs/glossary",
    ),
    "Coming from another launcher": (
        "docs/torchrun",
        "docs/horovod",
        "docs/migrate-dlrover",
        "docs/migrate-torchft",
    ),
    "More examples": (
        "examples/05-data-service/README",
        "examples/06-same-curve/README",
        "examples/07-click-through/README",
        "examples/08-sharded-torch/README",
        "examples/09-local-steps-torch/README",
        "examples/10-transformers/README",
        "examples/11-recommender/README",
        "examples/12-paddle-model/README",
        "examples/13-lightning/README",
        "examples/14-accelerate/README",
        "examples/15-torchtitan/README",
        "examples/16-fleet/README",
        "examples/17-sharded-paddle/README",
    ),
    "How it works": (
        "docs/fault-tolerance",
        "docs/benchmarks",
        "ARCHITECTURE",
        "docs/internals",
        "docs/decisions/README",
    ),
    "The project": (
        "CONTRIBUTING",
        "docs/testing",
        "docs/release",
        "benchmarks/README",
        "tests/kubernetes_fake/README",
        "CHANGELOG",
        "README.zh",
    ),
}
"""By heading: pages without their suffix."""

BELOW: Mapping[str, str] = {"docs/reference": "docs/api/*.rst", "docs/decisions/README": "docs/decisions/[0-9]*.md"}
"""Pages with others below them, and where those are; in the order of their names."""

SOURCES = ("*.md", "docs/*.md", "docs/api/*.rst", "docs/decisions/*.md", "examples/*/README.md", "deploy/*/README.md")
OTHER_SOURCES = ("benchmarks/README.md", "tests/kubernetes_fake/README.md")


def below(page: str) -> list[str]:
    """The pages below a page."""
    pattern = BELOW.get(page)
    return [name_of(path) for path in sorted(ROOT.glob(pattern))] if pattern else []


def name_of(path: Path) -> str:
    """A file's name as a page: from the root of the repository, without its suffix."""
    return path.relative_to(ROOT).with_suffix("").as_posix()


def pages() -> Iterator[str]:
    """Every page of the navigation, in its order."""
    yield HOME
    for section in SECTIONS.values():
        for page in section:
            yield page
            yield from below(page)


def contents(page: str) -> str:
    """What is appended to a page's text so that others are reached from it; empty for most."""
    if page == HOME:
        return "".join(_toctree(section, caption) for caption, section in SECTIONS.items())
    others = below(page)
    return _toctree(others) if others else ""


def _toctree(names: tuple[str, ...] | list[str], caption: str = "") -> str:
    head = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *head, "", *(f"/{name}" for name in names), "```", ""])
