"""The progress bar of a conversion."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from data_service.manifest import counted

if TYPE_CHECKING:
    from data_service.convert.conversion import ConversionProgress


@contextlib.contextmanager
def conversion_bar() -> Iterator[Callable[[ConversionProgress], None]]:
    """Context with a progress bar on stderr; yields the function that updates it.

    The bar shows bytes of input, speed and remaining time. Without a terminal the final state is printed once.
    """
    columns = (
        TextColumn("converting"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[files]} written, {task.fields[records]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None, files=counted(0, "file"), records=counted(0, "record"))

        def reached(now: ConversionProgress) -> None:
            files, records = counted(now.files, "file"), counted(now.records, "record")
            bar.update(task, completed=now.done_bytes, total=max(1, now.total_bytes), files=files, records=records)

        yield reached
