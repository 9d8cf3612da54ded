"""Finds the statements of a script that change environment variables, without running it.

What a module reads when it is imported depends on them, and on whether they come before the import.
"""

from __future__ import annotations

import ast

_METHODS = ("__setitem__", "clear", "pop", "popitem", "setdefault", "update")
"""Those of ``os.environ`` that change it."""
_FUNCTIONS = ("putenv", "unsetenv")


def environment_changes(text: str) -> tuple[str, ...]:
    """The statements of a source that change variables, and its imports, in their order; empty without such a
    statement."""
    if not any(word in text for word in ("environ", *_FUNCTIONS)):
        return ()
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    changes = [node for node in nodes if _changes(node)]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)] if changes else []
    places = {(node.lineno, node.col_offset): ast.unparse(node) for node in (*changes, *imports)}  # type: ignore[attr-defined]
    return tuple(words for _, words in sorted(places.items()))


def _changes(node: ast.AST) -> bool:
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return any(map(_is_environment, targets))
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return _is_environment(target)
        case ast.Call(func=ast.Attribute(attr=name, value=owner)) if name in _METHODS:
            return _is_environment(owner)
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name in _FUNCTIONS
        case _:
            return False


def _is_environment(value: ast.expr) -> bool:
    """Whether it is ``os.environ`` or one of its variables."""
    match value:
        case ast.Subscript(value=owner):
            return _is_environment(owner)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name == "environ"
        case _:
            return False
