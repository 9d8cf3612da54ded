"""The documentation says what the code does, as far as a program can tell."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import get_args

import click
import pytest

import edl.launch
import edl.master
import edl.paddle
import edl.torch
from edl.agent.switches import NAMES
from edl.agent.workers.environment import LocalPaths, WorkerGroupDeps, worker_environment
from edl.agent.workers.paddle_environment import KINDS, ScriptPlaces, shortened
from edl.checkpoint.directory.manifest import MANIFEST_FILE, OWNER_FILE
from edl.config import JobSpec, LrRule, NodeRange, Replicas, ScriptServers, VerifyRules
from edl.job_records import Training
from edl.launch.data_option import data_sets
from edl.launch.options import launcher_options
from edl.launch.pservers import environment_of
from edl.launch.settings import CONF_KEYS, ServerSettings
from edl.master.events import Event
from edl.master.hyper import NAMES as SETTINGS
from edl.master.machine import EVENT_HANDLERS, MESSAGE_HANDLERS
from edl.master.state import NodeStatus, Phase
from edl.types import Incarnation, JobId, NodeId, Rank, Round
from edl.wire.messages import AgentMessage, Attach, ServiceFromWorker
from edl.wire.records import Failure, Member, Settings, World
from edl.wire.scale_requests import ScaleView
from edl.wire.snapshot import FILE_NAME
from edl.wire.status import HistoryEntry, JobStatus, Kind, NodeView
from edl.worker.context import Context
from edl.worker.hyper import SettingsView

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *(
            ROOT / name
            for name in (
                *("README.md", "README.zh.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"),
                "benchmarks/README.md",
            )
        ),
        *DOCS.rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)


def page(name: str) -> str:
    return (DOCS / name).read_text()


def first_columns(text: str) -> list[list[str]]:
    """For each row of each table: the names in backticks in its first column."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return [re.findall(r"`([^`]+)`", row) for row in rows]


def section(text: str, heading: str) -> str:
    """Text below a heading, up to the next one of its level or above."""
    level = heading.partition(" ")[0]
    _, found, rest = f"\n{text}".partition(f"\n{heading}\n")
    assert found, f"no heading {heading!r}"
    return re.split(rf"\n#{{1,{len(level)}}} ", rest)[0]


def names_of(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def in_backticks(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


# --- where things are ------------------------------------------------------------------------------------------------


def handler_rows(table: Mapping[type, Callable[..., None]]) -> set[tuple[str, str]]:
    return {
        (kind.__name__, f"{handler.__module__.removeprefix('edl.master.')}.{handler.__name__}")
        for kind, handler in table.items()
    }


def test_every_event_and_message_of_the_master_is_listed_with_its_handler() -> None:
    text = section((ROOT / "CONTRIBUTING.md").read_text(), "## Change a decision of the Master")
    listed = re.findall(r"^\| [^|]+ \| `([^`|]+)` \| `([^`|]+)` \|$", text, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == handler_rows(EVENT_HANDLERS) | handler_rows(MESSAGE_HANDLERS)


def test_every_event_and_message_has_a_handler() -> None:
    assert set(EVENT_HANDLERS) == set(get_args(Event))
    by_streams = {Attach, ServiceFromWorker}
    """``edl.master.streams`` turns them into events, or passes them to a service."""
    assert set(MESSAGE_HANDLERS) == set(get_args(AgentMessage)) - by_streams


@pytest.mark.parametrize("package", [edl.launch, edl.master], ids=lambda package: str(package.__name__))
def test_a_package_lists_its_modules(package: ModuleType) -> None:
    there = {
        path.stem for path in Path(str(package.__file__)).parent.iterdir() if path.suffix == ".py" or path.is_dir()
    }
    named = set(re.findall(r"``(\w+)``", package.__doc__ or ""))
    assert named == there - {"__init__", "__pycache__"}


# --- the launcher's options ------------------------------------------------------------------------------------------


def options() -> list[click.Option]:
    @click.command()
    @launcher_options
    def probe(**_: object) -> None: ...

    # Those that only another launcher has, with variables of their own, have a page of their own and a test for it.
    return [option for option in probe.params if isinstance(option, click.Option) and option.allow_from_autoenv]


def shown_default(option: click.Option) -> str:
    """A default as the table of options writes it."""
    if option.is_flag:
        return "off"
    if option.multiple:
        return "none"
    value = option.default
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value}`" if value != "" else "none"


@pytest.mark.parametrize("option", options(), ids=lambda option: str(option.name))
def test_every_option_is_documented_with_its_default(option: click.Option) -> None:
    long = next(name for name in option.opts if name.startswith("--"))
    variable = "EDL_" + long[2:].replace("-", "_").upper()
    table = section(page("launcher.md"), "## Options")
    rows = [row for row in table.splitlines() if row.startswith(f"| `{long}`")]
    assert len(rows) == 1, f"{long} has {len(rows)} rows in docs/launcher.md"
    names, environment, default = (cell.strip() for cell in rows[0].split("|")[1:4])
    assert re.findall(r"`([^`]+)`", names) == sorted(option.opts, key=len, reverse=True)
    assert environment == f"`{variable}`"
    assert default == shown_default(option)


def test_no_option_is_documented_that_does_not_exist() -> None:
    known = {name for option in options() for name in option.opts}
    rows = first_columns(section(page("launcher.md"), "## Options"))
    documented = {name for row in rows for name in row if name.startswith("-")}
    assert documented == known


def test_every_setting_of_the_store_is_documented() -> None:
    rows = first_columns(section(page("launcher.md"), "### Settings of the store"))
    assert {name for row in rows for name in row} - {"--rdzv-conf"} == set(CONF_KEYS)


# --- what workers are told -------------------------------------------------------------------------------------------


def worker_variables() -> set[str]:
    """Every variable that edl sets, on CPUs and on GPUs, in a world of two workers on one node, with pservers."""
    member = Member(NodeId("a"), Incarnation(1), "host", 2, Rank(0), (1, 2, 3))
    world = World(Round(1), (member,), 0)
    spec = JobSpec(
        JobId("job"),
        NodeRange(1, 1),
        data=data_sets(("train=/data/*.parquet",)),
        servers=Training(),
        verify=VerifyRules(1),
        replicas=Replicas(2, 2),
    )
    found = set(environment_of(ServerSettings(listed=("h:1",))))
    for gpus in (0, 2):
        for kind in KINDS:
            around = WorkerGroupDeps(gpus, paddle=kind)
            found |= set(worker_environment({}, spec, world, NodeId("a"), 0, LocalPaths("error.json", "logs"), around))
    script = JobSpec(JobId("job"), NodeRange(1, 1), script_servers=ScriptServers(1))
    for local_rank in range(2):
        around = WorkerGroupDeps(scripts=ScriptPlaces(1))
        found |= set(worker_environment({}, script, world, NodeId("a"), local_rank, LocalPaths("e", "l"), around))
    return found | set(shortened({}, "backup_env.json"))


def test_the_page_on_the_environment_lists_exactly_what_is_set() -> None:
    told = page("environment.md").partition("\n## What the launcher reads\n")[0]
    assert {name for row in first_columns(told) for name in row} == worker_variables()


# --- what scripts use ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [edl.torch.__all__, edl.paddle.__all__], ids=["torch", "paddle"])
def test_everything_that_scripts_import_is_on_the_page_about_state(names: list[str]) -> None:
    assert [name for name in names if name not in page("state.md")] == []


def test_every_field_of_the_context_is_documented() -> None:
    rows = first_columns(section(page("state.md"), "### context()"))
    assert {name for row in rows for name in row} == names_of(Context)


def test_every_setting_is_documented() -> None:
    text = page("hyperparameters.md")
    by_hand = first_columns(section(text, "## Changing it while the job runs"))
    assert {name for row in by_hand for name in row} == set(SETTINGS)
    shown = first_columns(section(text, "## In the script"))
    assert {name for row in shown for name in row} == names_of(SettingsView)
    rules = first_columns(section(text, "## Keep the local batch"))
    assert [name for row in rules for name in row] == [rule.value for rule in LrRule]


def test_every_file_of_the_checkpoint_directory_is_documented() -> None:
    assert [name for name in (MANIFEST_FILE, OWNER_FILE, FILE_NAME) if name not in page("checkpoints.md")] == []
    rows = first_columns(section(page("checkpoints.md"), "## Checkpoints on request"))
    assert {name for row in rows for name in row} == set(NAMES.values())


# --- what status and events show -------------------------------------------------------------------------------------


def test_every_field_of_the_status_is_documented() -> None:
    text = section(page("status-and-events.md"), "### As JSON")
    assert names_of(JobStatus) | names_of(NodeView) | names_of(Settings) | names_of(ScaleView) <= in_backticks(text)


def test_every_field_of_a_failure_is_documented() -> None:
    assert in_backticks(section(page("status-and-events.md"), "### A failure")) == names_of(Failure)


def test_every_field_and_kind_of_event_is_documented() -> None:
    rows = first_columns(section(page("status-and-events.md"), "## edl events"))
    documented = {name for row in rows for name in row}
    assert documented == names_of(HistoryEntry) | {kind.value for kind in Kind}


def test_every_phase_and_state_is_documented() -> None:
    rows = first_columns(section(page("status-and-events.md"), "## edl status").partition("### As JSON")[0])
    documented = {name for row in rows for name in row}
    assert documented == {phase.value for phase in Phase} | {status.value for status in NodeStatus} | {
        "spare",
        "cordoned",
        "suspended",
        "checking",
        "faulty",
        "slow",
    }


# --- links -----------------------------------------------------------------------------------------------------------


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings get where repositories are shown."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name) if name else path
        if not linked.exists() or (anchor and anchor not in anchors(linked.read_text())):
            dead.append(target)
    assert dead == []


def test_the_list_of_decisions_is_complete() -> None:
    listed = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", page("decisions/README.md"))
    assert listed == sorted(path.name for path in (DOCS / "decisions").glob("[0-9]*.md"))


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        path = waiting.pop().resolve()
        if path in seen or path.suffix != ".md":
            continue
        seen.add(path)
        targets = re.findall(r"\]\(([^)#\s]+)", without_code(path.read_text()))
        waiting += [path.parent / target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [str(path.relative_to(ROOT)) for path in PAGES if path.resolve() not in seen and DOCS in path.parents] == []


def test_the_list_of_pages_has_them_all() -> None:
    linked = {DOCS / target for target in re.findall(r"\]\(([^)#\s]+)", without_code(page("README.md")))}
    pages = [path for path in (*DOCS.glob("*.md"), *(ROOT / "examples").rglob("*.md")) if path.is_file()]
    pages += [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", DOCS / "decisions/README.md"]
    found = {path.resolve() for path in linked}
    assert [str(path.relative_to(ROOT)) for path in pages if path.resolve() not in found | {DOCS / "README.md"}] == []
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(("name", "most"), [("README.md", 200), ("ARCHITECTURE.md", 80)])
def test_the_first_pages_stay_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most


# --- the glossary ----------------------------------------------------------------------------------------------------


def test_the_glossary_is_in_order_and_names_each_term_once() -> None:
    terms = [term.casefold() for term in re.findall(r"^\| \*\*([^*]+)\*\* \|", page("glossary.md"), re.MULTILINE)]
    assert terms == sorted(set(terms))
