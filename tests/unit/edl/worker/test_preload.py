"""Choice of the modules that the fork server imports, from source text alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import edl.integrations
from edl.worker import preload
from edl.worker.preload import FRAMEWORKS, ImportPlan, ModuleSource, plan


def plan_of(
    text: str, extra: tuple[str, ...] = (), package: str = "", modules: Mapping[str, str] | None = None
) -> ImportPlan:
    own = dict(modules or {})
    parents = {name.rpartition(".")[0] for name in own}

    def source_of(name: str) -> ModuleSource | None:
        if name not in own:
            return None
        return ModuleSource(own[name], name if name in parents else name.rpartition(".")[0])

    return plan(ModuleSource(text, package), source_of, extra)


def test_nothing_is_imported_for_a_script_without_frameworks() -> None:
    assert plan_of("import os, json, asyncio, mylib\nfrom . import sibling\n") == ImportPlan((), ())


def test_changes_of_environment_variables_are_found_in_the_users_modules_too() -> None:
    found = plan_of("import settings\nimport torch\n", modules={"settings": "import os\nos.environ['A'] = '1'\n"})
    assert found.changes == ("import os", "os.environ['A'] = '1'")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "statement", ["import {}", "import {}.nn as nn", "from {}.nn import Linear", "from {} import *"]
)
def test_a_plain_import_makes_the_framework_a_must(framework: str, statement: str) -> None:
    found = plan_of(statement.format(framework))
    assert found.required == (framework,)
    assert set(FRAMEWORKS[framework][1:]) <= set(found.optional)


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import torch\nexcept ImportError:\n    torch = None",
        "def main():\n    import torch",
        "if condition:\n    from torch import nn",
        "match x:\n    case 1:\n        import torch",
        "async def f():\n    with a:\n        import torch",
        "import torchvision.transforms as t",
        "import edl.torch as edl",
        "from edl import torch",
    ],
)
def test_an_import_that_may_not_happen_is_tried_but_may_fail(text: str) -> None:
    found = plan_of(text)
    assert found.required == ()
    assert found.optional[0] == "torch"


def test_a_class_body_and_a_with_block_always_run() -> None:
    assert plan_of("class A:\n    with b:\n        import torch").required == ("torch",)


def test_both_frameworks_only_for_a_script_that_imports_both() -> None:
    assert "paddle" not in plan_of("import torch").optional
    assert plan_of("import paddle, torch").required == ("torch", "paddle")


INTEGRATIONS = sorted(
    path.stem for path in Path(edl.integrations.__file__).parent.glob("*.py") if "\nTESTED = " in path.read_text()
)


@pytest.mark.parametrize("statement", ["from edl.integrations import {}", "from edl.integrations.{} import Something"])
@pytest.mark.parametrize("name", [*INTEGRATIONS, "lightning", "pytorch_lightning"])
def test_an_integration_implies_its_framework_alone(name: str, statement: str) -> None:
    found = plan_of(statement.format(name)).optional
    assert [one for one in found if one in FRAMEWORKS] == ["paddle" if name in ("fleet", "paddle_model") else "torch"]


def test_other_libraries_only_from_the_list() -> None:
    text = (
        "import torch, numpy, pandas, wandb, tensorflow\nfrom sklearn import datasets\nimport torch.utils.tensorboard"
    )
    found = plan_of(text)
    assert {"numpy", "pandas", "sklearn", "sklearn.datasets"} <= set(found.optional)
    assert not {"wandb", "tensorflow", "torch.utils.tensorboard"} & {*found.optional, *found.required}


def test_what_is_asked_for_is_a_must() -> None:
    found = plan_of("import numpy", extra=("mymodel", "numpy"))
    assert found == ImportPlan(("mymodel", "numpy"), ())


def test_own_modules_are_followed_but_not_imported() -> None:
    found = plan_of(
        "from project.train import main",
        modules={
            "project": "",
            "project.train": "from .model import Net\nfrom ..outside import x\nfrom . import data",
            "project.model": "import torch",
            "project.data": "def load():\n    import numpy\n    import project.train",
        },
    )
    assert found.required == ("torch",)
    assert "numpy" in found.optional
    assert not [name for name in (*found.required, *found.optional) if name.startswith("project")]


def test_an_own_module_that_may_not_be_imported_asks_for_nothing_firmly() -> None:
    assert plan_of("def f():\n    import helper", modules={"helper": "import torch"}).required == ()


def test_relative_imports_of_a_module_start_in_its_package() -> None:
    kit = {"kit": "", "kit.net": "import paddle"}
    assert plan_of("from .net import Net", package="kit", modules=kit).required == ("paddle",)


def test_an_own_module_hides_a_library_of_the_same_name() -> None:
    assert plan_of("import numpy", modules={"numpy": "import torch"}) == plan_of("import torch")


@pytest.mark.parametrize("text", ["x = (", "\0", "import torch\nx = ("])
def test_text_that_does_not_compile_is_left_to_the_worker(text: str) -> None:
    assert plan_of(text) == ImportPlan((), ())


def test_reading_stops_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "MOST_FILES", 3)
    chain = {f"m{number}": f"import m{number + 1}" for number in range(9)} | {"m9": "import torch"}
    assert plan_of("import m0", modules=chain) == ImportPlan((), ())
    monkeypatch.undo()
    assert plan_of("import m0", modules=chain).required == ("torch",)
