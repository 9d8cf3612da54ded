"""``edl simulate``: what a job would lose on a cluster. Needs no running job."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edl.cli.options import duration_s
from edl.errors import SettingError

if TYPE_CHECKING:
    from edl.simulate.advice import SettingAdvice
    from edl.simulate.faults import FaultProcess
    from edl.simulate.scenario import SimulatedScenario

DEFAULT_FAULTS = ("worker:every=84d", "node:every=84d,lasts=2h")
"""About the rate that arXiv 2410.21680 gives for nodes of eight GPUs, half of it in workers."""
PRESETS = ("dlrover", "byterobust", "meta")
_SIZE = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class _Duration(click.ParamType[float]):
    """``20ms``, ``90s``, ``15m``, ``2h`` or ``3d``."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = _seconds(str(value))
        if found is None:
            self.fail(f"{value!r} is no duration. Write a number and a unit: 20ms, 90s, 15m, 2h, 3d", param, ctx)
        return found


DURATION = _Duration()


@click.command()
@click.option("--nodes", default=128, show_default=True, help="Nodes of the largest world.")
@click.option("--min-nodes", default=0, help="Nodes of the smallest world. Default: the same as --nodes.")
@click.option("--spares", type=click.IntRange(min=0), default=0, show_default=True, help="Nodes beyond --nodes.")
@click.option("--slots", default=8, show_default=True, help="Slots of each node.")
@click.option("--node-unit", default=1, show_default=True, help="Worlds have a multiple of this many nodes.")
@click.option("--replica-nodes", default=1, show_default=True, help="Nodes that hold one replica of the model.")
@click.option(
    "--state-nodes",
    default=1,
    show_default=True,
    help="Nodes that hold one state together: 1 with DDP, 0 for all nodes (FSDP).",
)
@click.option("--rack-nodes", default=0, help="Nodes in each rack. Default: no racks.")
@click.option("--switch-nodes", default=0, help="Nodes behind each switch. Default: no switches.")
@click.option("--no-memory", is_flag=True, help="Commits are not kept in memory: each fault needs a checkpoint.")
@click.option("--restart", is_flag=True, help="All workers restart after each fault.")
@click.option("--for", "horizon", default="30d", type=DURATION, show_default=True, help="Time to simulate.")
@click.option("--seed", default=0, show_default=True, help="Seed of the faults.")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="KIND:every=T[,…]",
    help="Random faults: worker, node, rack, switch, drain, master, store, straggler, slow-storage. every: mean time "
    "of one unit from a fault to the next; shape: of the Weibull distribution, 1 is exponential; lasts: T, or ~T for a "
    f"mean; factor: slowdown. May be given several times. Default: {' '.join(DEFAULT_FAULTS)}",
)
@click.option("--trace", type=click.Path(path_type=Path), help="Recorded faults: CSV, or JSON lines.")
@click.option("--time", "times", multiple=True, metavar="PHASE=T", help="Duration of a recovery phase. Repeatable.")
@click.option("--step", default="1s", type=DURATION, show_default=True, help="Duration of a step.")
@click.option("--commit-every", default=1, show_default=True, help="Steps between commits in memory; 0: none.")
@click.option("--commit-blocks", default="0s", type=DURATION, show_default=True, help="Time that a commit blocks.")
@click.option(
    "--checkpoint-every", default="30m", type=DURATION, show_default=True, help="Time between checkpoints; 0s: none."
)
@click.option("--checkpoint-blocks", default="0s", type=DURATION, show_default=True, help="Time that a save blocks.")
@click.option("--checkpoint-write", default="60s", type=DURATION, show_default=True, help="Time to write a checkpoint.")
@click.option("--checkpoint-size", default="0", metavar="SIZE", help="Size of a checkpoint, such as 500G.")
@click.option("--price", default=0.0, help="Price of a slot per hour.")
@click.option("--recommend", is_flag=True, help="Simulate other settings, and name the best ones.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw loss against checkpoint interval as SVG.")
@click.option("--preset", type=click.Choice(PRESETS), help="Simulate published figures instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def simulate(preset: str | None, recommend: bool, plot: Path | None, as_json: bool, **given: Any) -> None:
    """Estimate what a job would lose on a cluster: run the Master's own decisions in virtual time, under random faults
    or faults from a file."""
    if preset:
        _published(preset, as_json)
        return
    from edl.cli.show import screen
    from edl.cli.tables import show_lines, show_table
    from edl.simulate import advice, report
    from edl.simulate.accounts import account

    if plot is not None and not plot.parent.is_dir():  # before the simulation, which may take long
        raise _not_written(plot, os.strerror(errno.ENOENT))
    scenario = _scenario(**given)
    history = scenario.run()
    result = report.document(scenario, history, account(history, scenario.saving))
    found = advice.recommend(scenario, history) if recommend else []
    if plot is not None:
        _draw(plot, found[0] if found else advice.interval(history, scenario.saving))
    if as_json:
        click.echo(json.dumps({**result, "advice": [_plain(one) for one in found]}, indent=2))
        return
    console = screen()
    show_lines(console, [*report.summary_lines(result), ""])
    show_table(console, ("use", "slot-hours", "share"), report.use_rows(result))
    for one in found:
        show_lines(console, ["", f"Recommended: {one.setting} {_typed(one.setting, one.best)} ({one.why})"])
        if one.tried:
            rows = [(_typed(one.setting, each.value), f"{each.of_cluster:.3%}") for each in one.tried]
            show_table(console, (one.setting, "useful, of the cluster"), rows)


def _typed(setting: str, value: float) -> str:
    """A value as the option takes it: a number, or a duration with its unit."""
    from edl.simulate.advice import CHECKPOINT_EVERY

    if setting != CHECKPOINT_EVERY:
        return f"{value:.0f}"
    if value >= 100:
        return f"{value:.0f}s"
    return f"{value:.{2 if value >= 1 else 6}f}".rstrip("0").rstrip(".") + "s"


def _scenario(**given: Any) -> SimulatedScenario:
    from edl.simulate.accounts import SavingRules
    from edl.simulate.recorded import read
    from edl.simulate.scenario import SimulatedScenario
    from edl.simulate.shape import ClusterShape, JobShape

    nodes = given["nodes"]
    cluster = ClusterShape(nodes + given["spares"], given["slots"], given["rack_nodes"], given["switch_nodes"])
    job = JobShape(
        given["min_nodes"] or nodes,
        nodes,
        given["node_unit"],
        given["replica_nodes"],
        given["state_nodes"],
        memory=not given["no_memory"],
        in_process=not given["restart"],
    )
    saving = SavingRules(
        given["step"],
        given["commit_every"],
        given["commit_blocks"],
        given["checkpoint_every"],
        given["checkpoint_blocks"],
        given["checkpoint_write"],
        _bytes(given["checkpoint_size"]),
    )
    recorded = tuple(read(given["trace"], cluster)) if given["trace"] else ()
    chosen: Sequence[str] = given["faults"] or (() if given["trace"] else DEFAULT_FAULTS)
    return SimulatedScenario(
        cluster,
        job,
        tuple(parse_fault(text) for text in chosen),
        recorded,
        _times(given["times"]),
        saving,
        given["horizon"],
        given["seed"],
        given["price"],
    )


def parse_fault(text: str) -> FaultProcess:
    """Parse ``node:every=30d,shape=0.7,lasts=~2h``. Raises ``SettingError``."""
    from edl.simulate.faults import KINDS, FaultProcess

    name, _, rest = text.partition(":")
    values = dict(item.partition("=")[::2] for item in rest.split(",") if item)
    if name not in KINDS:
        raise SettingError("--fault", text, f"{name!r} is no kind of fault", f"Use one of {', '.join(KINDS)}")
    unknown = sorted(set(values) - {"every", "shape", "lasts", "factor"})
    if unknown or "every" not in values:
        what = f"unknown {unknown[0]!r}" if unknown else "every= is missing"
        raise SettingError("--fault", text, what, "Write KIND:every=30d,shape=1,lasts=2h,factor=2")
    lasts = values.get("lasts", "0s")
    return FaultProcess(
        KINDS[name],
        _parsed(text, "every", values["every"]),
        _number(text, "shape", values.get("shape", "1")),
        _parsed(text, "lasts", lasts.removeprefix("~")),
        _number(text, "factor", values["factor"]) if "factor" in values else None,
        varies=lasts.startswith("~"),
    )


def _times(given: Sequence[str]) -> Any:
    from edl.simulate.shape import PhaseTimes, phases

    known = phases()
    chosen = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in known:
            raise SettingError("--time", text, f"{name!r} is no phase", f"Use one of {', '.join(known)}")
        chosen[known[name]] = _parsed(text, name, value)
    return PhaseTimes(**chosen)


def _seconds(text: str) -> float | None:
    milliseconds = re.fullmatch(r"(\d+(?:\.\d+)?)ms", text)
    return float(milliseconds[1]) / 1000 if milliseconds else duration_s(text)


def _parsed(text: str, name: str, value: str) -> float:
    found = _seconds(value)
    if found is None:
        raise SettingError(text, None, f"{name}={value!r} is no duration", "Write 20ms, 90s, 15m, 2h or 3d")
    return found


def _number(text: str, name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise SettingError(text, None, f"{name}={value!r} is no number") from None


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]?)", text)
    if match is None:
        raise SettingError("--checkpoint-size", text, "must be a number of bytes, or one with K, M, G or T")
    return int(match[1]) * _SIZE[match[2]]


def _plain(one: SettingAdvice) -> dict[str, Any]:
    tried = [{"value": each.value, "goodput_of_cluster": each.of_cluster} for each in one.tried]
    return {"setting": one.setting, "best": one.best, "why": one.why, "tried": tried}


def _draw(path: Path, found: SettingAdvice) -> None:
    from edl.simulate.loglog import draw

    points = [(one.value, 1 - one.of_cluster) for one in found.tried if one.value and one.of_cluster < 1]
    if not points:
        raise SettingError("--plot", path, f"there is nothing to draw: {found.why}", found.to_vary)
    picture = draw({"lost": points}, "checkpoint interval, s", "share of the cluster's slot time lost")
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise _not_written(path, error.strerror or str(error)) from error


def _not_written(path: Path, why: str) -> SettingError:
    return SettingError("--plot", path, f"cannot be written: {why}", "Name a file in a folder that exists")


def _published(preset: str, as_json: bool) -> None:
    from edl.cli.show import screen
    from edl.cli.tables import show_table
    from edl.simulate.published import reproduce

    figures = reproduce(preset)
    if as_json:
        keys = ("scenario", "what", "published", "simulated")
        click.echo(json.dumps([{key: getattr(one, key) for key in keys} for one in figures], indent=2))
        return
    rows = [(one.scenario, one.what, f"{one.published:.1%}", f"{one.simulated:.1%}") for one in figures]
    show_table(screen(), ("scenario", "figure", "published", "simulated"), rows)
