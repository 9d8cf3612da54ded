"""The rules of the house that no other tool checks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
CODE_FOLDERS = ("edl", "ps", "data_service", "tests", "examples", "benchmarks", "scripts")
FOREIGN_FOLDERS = {"build", "dist", "logs", "__pycache__"}
MACHINE_PATH = re.compile(r"(?<![\w.\-])/(?:work)/")


def code_files(*folders: str) -> list[Path]:
    """Python files, without generated ones."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in paths if not re.search(r"_pb2(_grpc)?\.py$", path.name))


def text_files() -> Iterator[tuple[Path, str]]:
    """Every text file of the repository and what it holds; folders of tools are left out."""
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        foreign = any(part in FOREIGN_FOLDERS or part.endswith(".egg-info") for part in parts)
        hidden = parts[0].startswith(".") and parts[0] != ".ci"
        if foreign or hidden or not path.is_file():
            continue
        try:
            yield path, path.read_text()
        except UnicodeDecodeError:
            continue


def long_functions(source: str) -> list[str]:
    """``line name length`` of each function, docstring included and decorators not, that is over the limit."""
    return [
        f"{node.lineno} {node.name} {length}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def modules(package: str) -> list[str]:
    """Dotted names of a package's modules; ``__main__`` is a program, not a module to import."""
    names = []
    for path in code_files(package):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__main__":
            continue
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def modules_loaded_by(imported: list[str]) -> set[str]:
    """Modules that a fresh interpreter has loaded after importing these."""
    program = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; print(*sys.modules)"
    finished = subprocess.run([sys.executable, "-c", program, *imported], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.split())


def loaded_by(imported: list[str]) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after importing these modules."""
    return {name.partition(".")[0] for name in modules_loaded_by(imported)}


def test_a_launcher_imports_what_every_job_uses() -> None:
    """The others would make each start slower: the import is most of it."""
    loaded = modules_loaded_by(["edl.launch.compose"])
    assert "edl.master.machine" in loaded
    placement = {"ps.coordinator.machine", "ps.coordinator.placement"}
    assert not ({"aiohttp", "edl.web.front", "edl.schedulers.reconcile"} | placement) & loaded


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in code_files(*CODE_FOLDERS)}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    found = {str(path.relative_to(ROOT)): long_functions(path.read_text()) for path in code_files(*CODE_FOLDERS)}
    assert {path: functions for path, functions in found.items() if functions} == {}


def test_unit_tests_mirror_the_packages() -> None:
    tests = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    unknown = sorted(str(folder) for folder in folders if not (ROOT / folder).is_dir())
    assert not unknown, f"folders of tests/unit without a folder of the product: {unknown}"


def test_the_limit_of_a_function_counts_its_lines() -> None:
    body = "    pass\n" * MAX_FUNCTION_LINES
    assert long_functions(f"def f():\n{body}") == [f"1 f {MAX_FUNCTION_LINES + 1}"]
    assert long_functions(f"def f():\n{body[: -len('    pass') - 1]}") == []


def test_no_path_of_one_machine() -> None:
    assert [str(path.relative_to(ROOT)) for path, text in text_files() if MACHINE_PATH.search(text)] == []


@pytest.mark.parametrize("folder", ["tests/unit", "tests/sim"])
def test_time_is_fake_where_nothing_real_runs(folder: str) -> None:
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in code_files(folder)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"time.sleep", "sleep"}
    ]
    assert calls == []


def test_importing_edl_is_cheap() -> None:
    assert loaded_by(["edl"]) & {"torch", "paddle", "grpc", "google", "numpy", "click"} == set()


def test_only_its_own_room_loads_a_framework() -> None:
    # Simulated readers and pservers run the loader and the connections that ship, which make arrays.
    own = ("edl.integrations", "edl.torch", "edl.paddle", "edl.testing.sim.data", "edl.testing.sim.sockets")
    rooms = [name for name in modules("edl") if not name.startswith(own)]
    assert loaded_by(rooms) & {"torch", "paddle", "numpy"} == set()


def test_a_worker_starts_without_a_network_library() -> None:
    assert loaded_by(modules("edl/worker")) & {"grpc", "google", "pyetcd", "click", "rich"} == set()


def test_every_exit_code_is_documented() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (ROOT / "docs/exit-codes.md").read_text(), re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [(code.value, code.name) for code in ExitCode]
