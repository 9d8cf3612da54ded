"""Selects the modules to import before workers are started: pure, by reading the source without running it.

The script and its neighbouring modules are searched for imports, at the top or deeper. Frameworks are imported with the
parts that a distributed start needs anyway; other libraries only if they are in ``SAFE``. The user's own modules are
read, never imported.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from edl.worker.environment_changes import environment_changes

CONNECTING = "encodings.idna"
"""Python imports it when a process first connects to a host by its name, which takes 5 to 15 ms."""
FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "torch": (
        "torch",
        # DistributedDataParallel imports it, and it costs as much as torch itself.
        "torch._dynamo",
        "torch.distributed",
        "torch.distributed.elastic.multiprocessing.errors",
        "torch.nn.parallel",
        "torch.optim",
        "torch.utils.data",
        "torch.utils.data.distributed",
        CONNECTING,
    ),
    "paddle": (
        "paddle",
        "paddle.distributed",
        "paddle.distributed.fleet",
        "paddle.io",
        "paddle.nn",
        "paddle.optimizer",
        CONNECTING,
    ),
}
"""The modules that warm up each framework; the first is the framework itself."""

IMPLIED: dict[str, str] = {
    "edl.torch": "torch",
    "edl.paddle": "paddle",
    "edl.integrations.accelerate": "torch",
    "edl.integrations.fleet": "paddle",
    "edl.integrations.lightning": "torch",
    "edl.integrations.paddle_model": "paddle",
    "edl.integrations.pytorch_lightning": "torch",
    "edl.integrations.torchtitan": "torch",
    "edl.integrations.transformers": "torch",
    "accelerate": "torch",
    "lightning": "torch",
    "pytorch_lightning": "torch",
    "timm": "torch",
    "torchvision": "torch",
    "transformers": "torch",
    "paddlenlp": "paddle",
    "paddleseg": "paddle",
}
"""Modules whose import implies a framework."""

BEHIND: dict[str, tuple[str, ...]] = {
    "edl.torch": ("edl.torch.state", "edl.torch.ddp", "edl.torch.random_state", "edl.worker.context"),
    "edl.paddle": ("edl.paddle.state", "edl.paddle.ddp", "edl.paddle.random_state", "edl.worker.context"),
}
"""Packages that import their parts lazily, and these parts."""

SAFE: frozenset[str] = frozenset(
    {
        "PIL",
        "edl.paddle",
        "edl.torch",
        "einops",
        "numpy",
        "paddle.amp",
        "paddle.distributed",
        "paddle.io",
        "paddle.metric",
        "paddle.nn",
        "paddle.optimizer",
        "paddle.vision",
        "pandas",
        "safetensors",
        "scipy",
        "sklearn",
        "torch.amp",
        "torch.cuda",
        "torch.distributed",
        "torch.multiprocessing",
        "torch.nn",
        "torch.optim",
        "torch.utils.data",
        "torchvision",
        "tqdm",
        "yaml",
    }
)
"""Modules, including their submodules, whose import is known to start no thread and to touch no device."""

MOST_FILES = 64
MOST_CHARACTERS = 512_000
"""Limits of reading: parsing more would cost more than it saves."""


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """Text of a module, and the package for its relative imports (empty for a script)."""

    text: str
    package: str


SourceOf = Callable[[str], ModuleSource | None]
"""The source of one of the user's own modules by dotted name; None for other modules."""


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """Names to import, in order. A missing ``required`` one makes every worker fail; the others may be absent."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    found: frozenset[str] = field(default=frozenset(), compare=False)
    """All external names that the source imports."""
    changes: tuple[str, ...] = field(default=(), compare=False)
    """Statements of the source that change environment variables, among its imports."""


@dataclass(frozen=True, slots=True)
class _Import:
    name: str
    firm: bool
    """It runs whenever the module does: not inside a function, ``if`` or ``try``."""


def plan(entry: ModuleSource, source_of: SourceOf, extra: tuple[str, ...] = ()) -> ImportPlan:
    """The modules to import for a script with source ``entry``. ``extra``: modules that the user named."""
    imports, changes = _all_imports(entry, source_of)
    required: dict[str, None] = {}
    optional: dict[str, None] = {}
    for framework, modules in FRAMEWORKS.items():
        firmness = [firm for name, firm in imports.items() if _framework(name) == framework]
        if not firmness:
            continue
        # A library that implies a framework may be absent itself; only a direct import makes the framework required.
        named = any(firm for name, firm in imports.items() if firm and name.partition(".")[0] == framework)
        (required if named else optional)[modules[0]] = None
        optional.update(dict.fromkeys(modules[1:]))
    optional.update(dict.fromkeys(name for name in imports if is_safe(name)))
    optional.update(dict.fromkeys(part for name in imports for part in BEHIND.get(name, ())))
    required.update(dict.fromkeys(extra))
    rest = tuple(name for name in optional if name not in required)
    return ImportPlan(tuple(required), rest, frozenset(imports), changes)


def imported(entry: ModuleSource, source_of: SourceOf) -> frozenset[str]:
    """External names imported by the script and by the user's modules that it uses."""
    return frozenset(_all_imports(entry, source_of)[0])


def _framework(name: str) -> str:
    """The framework that importing this module implies; empty for none."""
    root = name.partition(".")[0]
    if root in FRAMEWORKS:
        return root
    return next((framework for key, framework in IMPLIED.items() if name == key or name.startswith(key + ".")), "")


def is_library(name: str) -> bool:
    """Whether a module belongs to a package known here, so it is not the user's own."""
    root = name.partition(".")[0]
    return any(root == known.partition(".")[0] for known in (*FRAMEWORKS, *IMPLIED, *SAFE))


def is_safe(name: str) -> bool:
    """Whether a module belongs to ``SAFE``."""
    parts = name.split(".")
    return any(".".join(parts[:length]) in SAFE for length in range(1, len(parts) + 1))


def _all_imports(entry: ModuleSource, source_of: SourceOf) -> tuple[dict[str, bool], tuple[str, ...]]:
    """External names imported by the entry and by the user's modules that it uses, and whether unconditionally; and
    the statements there that change environment variables."""
    found: dict[str, bool] = {}
    changes: list[str] = []
    waiting: list[tuple[ModuleSource, bool]] = [(entry, True)]
    seen: set[str] = set()
    characters = files = 0
    while waiting:
        source, firm = waiting.pop(0)
        files, characters = files + 1, characters + len(source.text)
        if files > MOST_FILES or characters > MOST_CHARACTERS:
            break
        changes += environment_changes(source.text)
        for item in _imports(source):
            own = _own_modules(item.name, source_of, seen)
            waiting.extend((module, firm and item.firm) for module in own)
            if not own and not _belongs(item.name, seen):
                found[item.name] = found.get(item.name, False) or (firm and item.firm)
    return found, tuple(changes)


def _own_modules(name: str, source_of: SourceOf, seen: set[str]) -> list[ModuleSource]:
    """The user's modules that run when ``name`` is imported: its packages and itself, unless already read."""
    result = []
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        prefix = ".".join(parts[:length])
        if prefix in seen:
            continue
        source = source_of(prefix)
        if source is None:
            continue
        seen.add(prefix)
        result.append(source)
    return result


def _belongs(name: str, own: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in own for length in range(1, len(parts) + 1))


def _imports(source: ModuleSource) -> list[_Import]:
    """All import statements of a text; none when it does not compile (the worker reports that better)."""
    try:
        tree = ast.parse(source.text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    return list(_walk(tree, source.package, firm=True))


def _walk(node: ast.AST, package: str, *, firm: bool) -> Iterator[_Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield _Import(alias.name, firm)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, package)
            if base:
                yield _Import(base, firm)
                # Each name may be a submodule or just an attribute, so none of them is required.
                yield from (_Import(f"{base}.{alias.name}", False) for alias in child.names if alias.name != "*")
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            inner = firm and isinstance(child, ast.ClassDef | ast.With)
            yield from _walk(child, package, firm=inner)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """Absolute module name of ``from … import``; empty when it leads out of the package."""
    if node.level == 0:
        return node.module or ""
    parts = package.split(".") if package else []
    if node.level > len(parts):
        return ""
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)
