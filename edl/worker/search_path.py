"""Finds the folders that a script adds to ``sys.path`` before it imports from them, without running it.

Understood are the usual ways to find a package beside or above a script: names, string literals, ``os.path``,
``pathlib`` and ``__file__``. Anything else is ignored.
"""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Added:
    """A folder added to ``sys.path``."""

    folder: str
    """Absolute path; it need not exist."""
    first: bool
    """Inserted before the libraries, not appended after them."""


def added_folders(text: str, file: str, directory: str) -> tuple[Added, ...]:
    """The added folders in the order of the source. ``file``: path of the script; ``directory``: its working
    directory."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    texts = _Texts(directory, {"__file__": os.path.join(directory, file)})
    found: dict[Added, None] = {}
    for statement in _statements(tree.body):
        for value, first in _additions(statement):
            folder = texts.of(value)
            if folder is not None:
                found[Added(os.path.normpath(os.path.join(directory, folder)), first)] = None
        texts.remember(statement)
    return tuple(found)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the module does, in order, with both branches of conditions."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, part, []))


def _additions(statement: ast.stmt) -> Iterator[tuple[ast.expr, bool]]:
    """Values that a statement adds to ``sys.path``, and whether at the front."""
    match statement:
        case ast.AugAssign(target=target, value=ast.List(elts=items)) if ast.unparse(target) == "sys.path":
            yield from ((item, False) for item in items)
        case ast.Expr(value=ast.Call(func=called, args=[*_, item])):
            how = ast.unparse(called)
            if how in ("sys.path.append", "sys.path.insert"):
                yield item, how.endswith("insert")


class _Texts:
    """Values of a script's expressions, as far as they can be determined without running it."""

    def __init__(self, directory: str, known: dict[str, str]) -> None:
        self._directory = directory
        self._known = known

    def remember(self, statement: ast.stmt) -> None:
        """Track an assignment to a name."""
        if isinstance(statement, ast.Assign):
            value = self.of(statement.value)
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    self._known.pop(target.id, None)
                    if value is not None:
                        self._known[target.id] = value

    def of(self, value: ast.expr) -> str | None:
        """The string, or the path as a string; None if unknown."""
        match value:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id=name):
                return self._known.get(name)
            case ast.Attribute(attr="parent", value=path):
                return self._applied(os.path.dirname, path)
            case ast.Subscript(value=ast.Attribute(attr="parents", value=path), slice=ast.Constant(value=int(above))):
                return self._applied(lambda text: os.path.join(text, *[os.pardir] * (above + 1)), path)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return self._applied(os.path.join, left, right)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._applied(operator.add, left, right)
            case ast.Call(func=ast.Attribute(attr="getcwd" | "cwd"), args=[]):
                return self._directory
            case ast.Call(func=ast.Attribute(attr="resolve" | "absolute", value=path), args=[]):
                return self._applied(os.path.realpath, path)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments) if name in _FUNCTIONS:
                return self._applied(_FUNCTIONS[name], *arguments)
            case _:
                return None

    def _applied(self, function: Callable[..., str], *arguments: ast.expr) -> str | None:
        values = [self.of(one) for one in arguments]
        if not values or None in values:
            return None
        try:
            return function(*values)
        except (TypeError, ValueError):
            return None  # another function with that name


_FUNCTIONS: dict[str, Callable[..., str]] = {
    "abspath": os.path.normpath,
    "dirname": os.path.dirname,
    "join": os.path.join,
    "normpath": os.path.normpath,
    "realpath": os.path.realpath,
    "str": str,
    "Path": os.path.join,
}
"""By the last part of their names, since scripts import ``os.path`` in many ways. Paths begin at ``__file__``, which is
absolute."""
