"""The benchmarks of the data service: ``python -m benchmarks.data leases|readers|remote|loader|shuffle``."""

from __future__ import annotations

import importlib

import click

PROGRAMS = ("leases", "readers", "remote", "loader", "shuffle")


class Programs(click.Group):
    """Imports only the requested program, since each needs different packages."""

    def list_commands(self, context: click.Context) -> list[str]:
        """The names of all programs."""
        return list(PROGRAMS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """The ``main`` of a program."""
        if name not in PROGRAMS:
            return None
        try:
            module = importlib.import_module(f"benchmarks.data.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"benchmarks.data.{name}":
                raise
            return None
        found = module.main
        if not isinstance(found, click.Command):
            raise TypeError(f"benchmarks.data.{name}.main is no command")
        return found


main = Programs(help=__doc__)

if __name__ == "__main__":
    main()
