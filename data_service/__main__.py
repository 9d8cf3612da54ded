"""``python -m data_service``: commands for data sets."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from edl.errors import EdlError, SettingError

F = TypeVar("F", bound=Callable[..., Any])
AT_LEAST_1 = click.IntRange(min=1)


@click.group(name="data_service")
def commands() -> None:
    """Prepare and serve data sets."""


def _input_options(function: F) -> F:
    """The options that select the input files and say how to read them."""
    for option in (
        click.option(
            "-o",
            "--option",
            "given",
            multiple=True,
            metavar="NAME=VALUE",
            help="How to read them: types=price:float32,… delimiter=; quote= quoted_newlines=true header=false "
            "names=a,b read=module:function shards=module:function. See docs/data-formats.md.",
        ),
        click.option(
            "--storage", multiple=True, metavar="NAME=VALUE", help="Option for fsspec, if the files are URLs."
        ),
        click.option(
            "--shard-records", type=AT_LEAST_1, default=65536, show_default=True, help="Most records per shard."
        ),
        click.option(
            "--shard-mb",
            type=AT_LEAST_1,
            default=16,
            show_default=True,
            help="Approximate size of shards in line formats, in MiB.",
        ),
        click.option(
            "--format", "kind", help="ipc, parquet, csv, jsonl, text or user. Default: derived from the file names."
        ),
    ):
        function = option(function)
    return function


def _pairs(name: str, texts: tuple[str, ...]) -> dict[str, str]:
    for text in texts:
        if not text.partition("=")[0] or "=" not in text:
            raise SettingError(name, text, "must be NAME=VALUE")
    return {text.partition("=")[0]: text.partition("=")[2] for text in texts}


def _say(text: str) -> None:
    click.echo(text, err=True)


@commands.command("scan")
@click.argument("patterns", nargs=-1, required=True, metavar="PATTERN…")
@_input_options
@click.option("--list", "listed", is_flag=True, help="List each file with its number of shards.")
def scan_command(
    patterns: tuple[str, ...],
    given: tuple[str, ...],
    storage: tuple[str, ...],
    shard_records: int,
    shard_mb: int,
    kind: str | None,
    listed: bool,
) -> None:
    """Show the number of files, shards and records that the patterns match: files, folders, globs; local or URLs."""
    from data_service.formats.options import FormatOptions
    from data_service.manifest import counted
    from data_service.scan import scan

    manifest = scan(
        patterns,
        kind,
        shard_records=shard_records,
        shard_bytes=shard_mb << 20,
        storage_options=_pairs("--storage", storage),
        options=FormatOptions.of(_pairs("--option", given)),
        say=_say,
    )
    if listed:
        for file in manifest.files:
            click.echo(f"{file.path}  {file.size_bytes:,} bytes  {counted(file.shards, 'shard')}")
    click.echo(f"{manifest.format}: {manifest.describe()}, {manifest.size_bytes:,} bytes")


@commands.command("convert")
@click.argument("patterns", nargs=-1, required=True, metavar="PATTERN…")
@click.argument("output")
@_input_options
@click.option("--columns", default="", metavar="A,B,…", help="Columns to keep besides the packed ones. Default: all.")
@click.option(
    "--pack",
    "packs",
    multiple=True,
    metavar="NAME[:TYPE]=A,B,…",
    help="Pack columns side by side into one two-dimensional column. Globs are allowed: cat=C*.",
)
@click.option(
    "--fill", multiple=True, metavar="COLUMN=VALUE", help="Value that replaces nulls. Globs are allowed: I*=0."
)
@click.option("--compression", default="none", show_default=True, help="none (fastest, memory-mapped), lz4 or zstd.")
@click.option(
    "--file-mb",
    type=AT_LEAST_1,
    default=256,
    show_default=True,
    help="Approximate input per output file, in MiB.",
)
@click.option("--seed", type=int, help="Shuffle the records within each file.")
@click.option("--workers", type=AT_LEAST_1, default=1, show_default=True, help="Number of processes.")
def convert_command(
    patterns: tuple[str, ...],
    output: str,
    given: tuple[str, ...],
    storage: tuple[str, ...],
    shard_records: int,
    shard_mb: int,
    kind: str | None,
    columns: str,
    packs: tuple[str, ...],
    fill: tuple[str, ...],
    compression: str,
    file_mb: int,
    seed: int | None,
    workers: int,
) -> None:
    """Convert to Arrow IPC files in the folder OUTPUT. An interrupted conversion is continued by the same command."""
    from data_service.convert.conversion import convert
    from data_service.convert.progress_bar import conversion_bar
    from data_service.convert.recipe import Pack, Recipe, parsed_fill
    from data_service.formats.options import FormatOptions
    from data_service.manifest import counted

    recipe = Recipe(
        columns=tuple(columns.split(",")) if columns else None,
        packs=tuple(Pack.of(text) for text in packs),
        fill=parsed_fill(fill),
        compression=compression,
        shard_records=shard_records,
        file_bytes=file_mb << 20,
        seed=seed,
    )
    with conversion_bar() as progress:
        done = convert(
            patterns,
            output,
            recipe,
            format=kind,
            shard_bytes=shard_mb << 20,
            workers=workers,
            storage_options=_pairs("--storage", storage),
            options=FormatOptions.of(_pairs("--option", given)),
            say=_say,
            progress=progress,
        )
    before = f", {done.found:,} of them by an earlier run" if done.found else ""
    files, records = counted(done.files, "file"), counted(done.records, "record")
    click.echo(f"{output}: {files}{before}, {records}, {done.size_bytes:,} bytes")


@commands.command("reader", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def reader(arguments: tuple[str, ...]) -> None:
    """Read and decode for trainers on other hosts. Started by a launcher (--role=reader)."""
    from data_service.remote.serve import reader_command  # pyarrow.flight takes a moment to load

    reader_command.main(args=list(arguments), prog_name="data_service reader", standalone_mode=False)


def main() -> None:
    """Entry point of ``python -m data_service``: run a command and exit with its status."""
    try:
        commands.main(standalone_mode=False)
    except click.Abort:
        click.echo("data_service: interrupted. The same command continues a conversion where it stopped", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except EdlError as error:
        click.echo(f"data_service: error: {error}", err=True)
        sys.exit(int(error.exit_code))
    except BrokenPipeError:  # whoever reads the output has seen enough, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to be flushed at the exit
        sys.exit(1)
    except OSError as error:
        click.echo(f"data_service: error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
