"""Which modules are imported ahead: order, exclusions, and what they cost."""

from __future__ import annotations

import pytest

from edl.agent.workers.environment import LocalPaths, WorkerGroupDeps, worker_environment
from edl.config import JobSpec, NodeRange
from edl.job_records import Training
from edl.types import Incarnation, JobId, NodeId, Rank, Round
from edl.wire.records import Member, World
from edl.worker.learnt import (
    ALSO_LEFT_OUT,
    EACH_ROUND,
    UNKNOWN,
    LearntModules,
    ModuleFile,
    SeenImport,
    cost_s,
    covers,
    is_library,
    merged,
    own_reasons,
    parse_record,
    same_values,
    search_folder,
    variables_set,
)

SITE = "/venv/lib/python3.12/site-packages"
STANDARD = frozenset({"/usr/lib/python3.12", "/usr/lib/python3.12/lib-dynload"})


def seen(*lines: tuple[int, bool]) -> list[SeenImport]:
    return [SeenImport(at_ms, nested, ModuleFile(f"m{at_ms}", "")) for at_ms, nested in lines]


def test_lines_are_read_in_order_and_others_are_skipped() -> None:
    whole = f"5\t0\theavy\t{SITE}/heavy/__init__.py\n7\t1\theavy.a\t{SITE}/heavy/a.py\n"
    assert parse_record(f"{whole}\nx\t0\tb\t/b.py\n9\t2\tc\t/c.py\n9\t0") == (
        SeenImport(5, False, ModuleFile("heavy", f"{SITE}/heavy/__init__.py")),
        SeenImport(7, True, ModuleFile("heavy.a", f"{SITE}/heavy/a.py")),
    )


@pytest.mark.parametrize(
    ("lines", "expected_s"),
    [
        ([], 0.0),
        ([(5, False)], 0.0),
        ([(0, False), (100, True), (900, True)], 0.9),
        # What lies between two outermost imports is the script's own time.
        ([(0, False), (100, True), (60_000, False), (60_500, True)], 0.6),
        ([(0, False), (10_000, False), (20_000, False)], 0.0),
    ],
)
def test_only_time_inside_of_imports_counts(lines: list[tuple[int, bool]], expected_s: float) -> None:
    assert cost_s(seen(*lines)) == expected_s


@pytest.mark.parametrize(
    ("name", "origin", "folder"),
    [
        ("a", f"{SITE}/a.py", SITE),
        ("a", f"{SITE}/a/__init__.py", SITE),
        ("a.b", f"{SITE}/a/b/__init__.py", SITE),
        ("a.b", f"{SITE}/a/b.cpython-312-x86_64-linux-gnu.so", SITE),
        ("a", f"{SITE}/other.py", ""),
        ("a.b", f"{SITE}/z/b.py", ""),
        ("a", "", ""),
        ("sys", "built-in", ""),
    ],
)
def test_the_search_folder_follows_from_name_and_file(name: str, origin: str, folder: str) -> None:
    assert search_folder(ModuleFile(name, origin)) == folder


@pytest.mark.parametrize(
    ("name", "origin", "expected"),
    [
        ("heavy", f"{SITE}/heavy/__init__.py", True),
        ("apt", "/usr/lib/python3/dist-packages/apt.py", True),
        ("json.decoder", "/usr/lib/python3.12/json/decoder.py", True),
        ("_json", "/usr/lib/python3.12/lib-dynload/_json.so", True),
        ("beside", "/job/beside.py", False),
        ("editable", "/home/me/editable/src/editable/__init__.py", False),
        ("own.train", f"{SITE}/own/train.py", False),
        ("edl.torch", f"{SITE}/edl/torch/__init__.py", False),
        ("moved", f"{SITE}/elsewhere.py", False),
    ],
)
def test_only_installed_modules_are_imported_ahead(name: str, origin: str, expected: bool) -> None:
    assert is_library(ModuleFile(name, origin), STANDARD, "/job", "own") is expected


def test_what_lies_beside_the_script_is_its_own_even_among_libraries() -> None:
    assert not is_library(ModuleFile("heavy", f"{SITE}/heavy.py"), STANDARD, SITE)


def test_libraries_below_the_script_are_libraries() -> None:
    assert is_library(ModuleFile("heavy", f"/job{SITE}/heavy.py"), STANDARD, "/job")


def test_new_modules_come_after_the_known_ones() -> None:
    a, b, c = (ModuleFile(name, f"/{name}.py") for name in "abc")
    moved = ModuleFile("a", "/other/a.py")
    assert merged((a, b), [c, b]) == (a, b, c)
    assert merged((a, b), [moved]) == (moved, b)


def test_a_variable_is_set_before_the_next_library() -> None:
    lines = ("0 a", "2 A", "0 own", "1 b", "2 A", "2 B", "0 c", "2 C")
    text = "".join(f"5\t{kind}\t{name}\t\n" for kind, name in map(str.split, lines))
    assert variables_set(text, {"a", "b", "c"}) == {"A": "b", "B": "c"}
    assert [one.module.name for one in parse_record(text)] == ["a", "own", "b", "c"]


def test_a_variable_is_barred_from_the_next_module_that_is_wanted() -> None:
    modules = tuple(ModuleFile(name, f"/{name}.py") for name in "abc")
    set_before = {"A": "a", "B": "b", "C": "c", "GONE": "z"}
    assert LearntModules(modules, {"b": ""}, set_before).barred_from == {"A": "a", "B": "c", "C": "c"}
    assert LearntModules(modules, {"c": ""}, set_before).barred_from == {"A": "a", "B": "b"}


def test_a_module_is_left_out_with_its_submodules() -> None:
    names = ("a", "a.b", "ab", "c")
    learnt = LearntModules(tuple(ModuleFile(name, f"/{name}.py") for name in names), {"a": "starts a thread"})
    assert [one.name for one in learnt.wanted] == ["ab", "c"]
    assert covers({"a"}, "a.b.c") and not covers({"a.b"}, "a")


def test_what_is_left_out_for_something_unknown_is_tried_again_when_more_is_known() -> None:
    left_out = {"a": "its import starts a thread", "b": f"it imports b.c from /b/c.py, {UNKNOWN}"}
    assert own_reasons({**left_out, "d": f"it imports b, {ALSO_LEFT_OUT}"}) == {"a": "its import starts a thread"}


def test_an_absent_variable_has_a_value_of_its_own() -> None:
    assert same_values(["A", "B"], {"A": "1"}, {"A": "1", "C": "2"})
    assert not same_values(["A"], {"A": ""}, {})


@pytest.mark.parametrize("servers", [False, True])
def test_all_variables_of_one_round_are_known(servers: bool) -> None:
    """A restart of the same nodes changes no others, so that a template made in one round fits the next."""
    spec = JobSpec(JobId("job"), NodeRange(1, 2), servers=Training() if servers else None)

    def environment(number: int) -> dict[str, str]:
        ports = tuple(range(1000 * number, 1000 * number + 3))
        member = Member(NodeId("a"), Incarnation(1), "10.0.0.1", 2, Rank(0), ports)
        world = World(Round(number), (member,), restarts=1)
        paths = LocalPaths(f"/logs/{number}/error.json", f"/logs/{number}")
        return worker_environment({}, spec, world, NodeId("a"), 1, paths, WorkerGroupDeps())

    first, second = environment(1), environment(2)
    changed = {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}
    assert changed and changed <= EACH_ROUND
    assert EACH_ROUND - changed <= {"PADDLE_GLOO_HTTP_ENDPOINT", "PADDLE_PORT", "PADDLE_PSERVERS_IP_PORT_LIST"}
