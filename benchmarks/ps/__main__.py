"""Benchmarks of the parameter servers: ``python -m benchmarks.ps kernels`` (growth, memory, transport, e2e …)."""

from __future__ import annotations

import importlib

import click

PROGRAMS = {
    "kernels": "kernels",
    "growth": "growth",
    "memory": "growth",
    "transport": "transport",
    "e2e": "e2e",
    "chaos": "chaos",
    "records": "records",
    "auc": "auc",
    "crowd": "crowd",
    "steps": "steps",
    "bags": "bags",
}
"""The module of each program; its command is ``main`` or has the program's name."""


class Programs(click.Group):
    """Imports only the requested program, since each needs different packages."""

    def list_commands(self, context: click.Context) -> list[str]:
        """The names of all programs."""
        return list(PROGRAMS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """The command of a program."""
        if name not in PROGRAMS:
            return None
        try:
            module = importlib.import_module(f"benchmarks.ps.{PROGRAMS[name]}")
        except ModuleNotFoundError as error:
            if error.name != f"benchmarks.ps.{PROGRAMS[name]}":
                raise
            return None
        found = getattr(module, name, None) or module.main
        if not isinstance(found, click.Command):
            raise TypeError(f"benchmarks.ps.{PROGRAMS[name]}.main is no command")
        return found


main = Programs(help=__doc__)

if __name__ == "__main__":
    main()
