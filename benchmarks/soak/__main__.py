"""Random real faults on jobs of all kinds at once, for hours.

    python -m benchmarks.soak --hours 2

Jobs are small (one worker a node, a tiny model), each with network namespaces for hosts, a store of three members and a
disk of its own. Faults are drawn from a seed, and only those that every job in their way is promised to survive. What
must hold is checked all the time and at the end of each job; a job that violates it is kept with everything that
explains it. The exit status is 1 if anything was violated.
"""

from __future__ import annotations

import json
import random
import shlex
import signal
import sys
from pathlib import Path

import click

from benchmarks.soak.allowed import allowed, missing
from benchmarks.soak.clock import build
from benchmarks.soak.faults import FAULTS, Need
from benchmarks.soak.kinds import KINDS
from benchmarks.soak.options import Options
from benchmarks.soak.plan import Strike
from benchmarks.soak.report import Results, as_json, as_markdown
from benchmarks.soak.running import Soak

REPLAY_AFTER_S = 30.0
"""How long a job goes on after the faults that are repeated."""


def chosen(text: str, known: dict[str, object], option: str) -> tuple[str, ...]:
    """The names of a comma list, or all."""
    names = tuple(dict.fromkeys(name for name in text.split(",") if name)) or tuple(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.UsageError(f"{option}: no {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def replayed(path: Path) -> tuple[str, tuple[Strike, ...]]:
    """The kind and the faults of a file of evidence."""
    told = json.loads(path.read_text())
    strikes = tuple(
        Strike(
            one["number"], one["fault"], told["job"], one["node"], one["at_s"], one["at_s"] + one["lasted_s"],
            one["strength"],
        )
        for one in told["faults"]
    )  # fmt: skip
    return told["kind"], strikes


def left_out(names: tuple[str, ...], wanted: tuple[str, ...], reasons: dict[Need, str]) -> dict[str, str]:
    """Kinds and faults that are not possible here, with the reason."""
    skipped = {f"jobs of kind {name}": f"without {lack}" for name in names if (lack := missing(KINDS[name]))}
    skipped |= {name: reasons[need] for name in wanted if (need := FAULTS[name].needs) is not None and need in reasons}
    if Need.NAMESPACES in reasons:
        skipped["hosts of their own"] = f"{reasons[Need.NAMESPACES]}; all launchers share the loopback device"
    return skipped


def write(out: Path, results: Results) -> None:
    """Write and print the report."""
    (out / "report.md").write_text(as_markdown(results))
    (out / "report.json").write_text(json.dumps(as_json(results), indent=1) + "\n")
    print(as_markdown(results), flush=True)


@click.command()
@click.option(
    "--hours",
    type=float,
    default=None,
    help="How long faults go on, counted from when the first job of each kind trains.",
)
@click.option("--minutes", type=float, default=None, help="The same in minutes.")
@click.option("--seed", type=int, default=None, help="Of the faults. Default: a new one, which is printed.")
@click.option("--kinds", default="", help=f"Comma list of kinds of jobs: {', '.join(KINDS)}. Default: all.")
@click.option("--faults", default="", help=f"Comma list of faults: {', '.join(FAULTS)}. Default: all.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=None,
              help="New folder for the report and the evidence of violations. Default: soak-SEED.")  # fmt: skip
@click.option("--at-once", type=click.IntRange(1), default=len(KINDS), show_default=True, help="Jobs at a time.")
@click.option("--every", default=6.0, show_default=True, help="Mean seconds between two faults, over all jobs.")
@click.option("--job-minutes", default=15.0, show_default=True, help="How long faults go on in one job.")
@click.option("--lease-ttl", default=3.0, show_default=True, help="Of the launchers, in seconds.")
@click.option("--pause", default=0.2, show_default=True, help="Seconds that each worker sleeps after a step.")
@click.option("--patience", default=180.0, show_default=True,
              help="Seconds within which a job must train with all its nodes again, and end.")  # fmt: skip
@click.option("--replay", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Repeat the faults of this file (faults.json of a violation) on one job of its kind.")  # fmt: skip
def main(
    hours: float | None, minutes: float | None, seed: int | None, kinds: str, faults: str, out: Path | None,
    at_once: int, every: float, job_minutes: float, lease_ttl: float, pause: float, patience: float,
    replay: Path | None,
) -> None:  # fmt: skip
    """Random real faults on jobs of all kinds at once."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if hours is not None and minutes is not None:
        raise click.UsageError("--hours and --minutes say the same: give one of them")
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    seconds = hours * 3600 if hours is not None else 60 * (minutes or 0.0)
    strikes: tuple[Strike, ...] = ()
    if replay is not None:
        kinds, strikes = replayed(replay)
        faults = ",".join(one.fault for one in strikes)
        seconds = seconds or max((one.end_s for one in strikes), default=0.0) + REPLAY_AFTER_S
        job_minutes = seconds / 60
    elif seconds <= 0:
        raise click.UsageError("--hours H or --minutes M says how long faults go on")
    names, wanted = chosen(kinds, dict(KINDS), "--kinds"), chosen(faults, dict(FAULTS), "--faults")
    present, reasons = allowed()
    skipped = left_out(names, wanted, reasons)
    out = (out or Path(f"soak-{seed}")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise click.UsageError(f"--out: {out} is not empty; give a new folder")
    library, why = build(out) if "clock" in wanted else (None, "")
    if why:
        skipped["clock"] = why
    options = Options(
        seconds=seconds, seed=seed, kinds=tuple(name for name in names if not missing(KINDS[name])),
        faults=tuple(name for name in wanted if name not in skipped), out=out, every_s=every, job_s=job_minutes * 60,
        lease_s=lease_ttl, pause_s=pause, patience_s=patience, at_once=at_once, replay=strikes,
        allowed=present, clock_library=library,
        command=shlex.join(["scripts/soak", *sys.argv[1:], *([] if "--seed" in sys.argv else ["--seed", str(seed)])]),
    )  # fmt: skip
    what = f"{len(strikes)} faults of {replay}" if replay is not None else ", ".join(options.faults)
    print(f"seed {seed}: {seconds / 60:g} minutes, {', '.join(options.kinds)}; {what}", flush=True)
    for what, why in sorted(skipped.items()):
        print(f"left out: {what}: {why}", flush=True)
    soak = Soak(options, lambda text: print(text, flush=True))
    soak.results.skipped.update(skipped)
    try:
        soak.run()
    finally:
        write(out, soak.results)
    sys.exit(0 if soak.results.good else 1)


if __name__ == "__main__":
    main()
