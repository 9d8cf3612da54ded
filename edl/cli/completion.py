"""Completion of node names in the shell, from the status of the running job."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import click

from edl.cli.options import where_of

if TYPE_CHECKING:
    from edl.cli.find import Where

LIMIT_S = 2.0
"""Seconds after which nothing is completed: a shell waits for the answer."""


def node_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of the job's nodes that begin with ``incomplete``; none if there is no answer within ``LIMIT_S``."""
    options = {name: value or "" for name, value in context.params.items()}
    given = context.params.get(parameter.name or "") or ()
    try:
        names = asyncio.run(asyncio.wait_for(_names(where_of(options)), LIMIT_S))
    except Exception:  # noqa: BLE001 - top of a process: its errors would appear in the line that is being typed
        return []
    return [name for name in names if name.startswith(incomplete) and name not in given]


def data_set_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of the job's data sets that begin with ``incomplete``; none if there is no answer within ``LIMIT_S``."""
    options = {name: value or "" for name, value in context.params.items()}
    try:
        names = asyncio.run(asyncio.wait_for(_data_sets(where_of(options)), LIMIT_S))
    except Exception:  # noqa: BLE001 - as above
        return []
    return [name for name in names if name.startswith(incomplete)]


async def _data_sets(where: Where) -> list[str]:
    from edl.cli.data_text import data_sets
    from edl.cli.find import master_of

    async with master_of(dataclasses.replace(where, quiet=True)) as client:
        return [one.name for one in data_sets(await client.status()) if one.name.isprintable()]


async def _names(where: Where) -> list[str]:
    from edl.cli.find import master_of

    async with master_of(dataclasses.replace(where, quiet=True)) as client:
        return [node.node for node in (await client.status()).nodes if node.node.isprintable()]
