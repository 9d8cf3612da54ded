"""``python -m ps``: the processes and tools of the parameter servers."""

from __future__ import annotations

import sys

import click

from edl.errors import EdlError, PsError


@click.group(name="ps")
def commands() -> None:
    """Serve parameters, and work with their checkpoints."""


@commands.command("server", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def server(arguments: tuple[str, ...]) -> None:
    """Hold rows for trainers elsewhere; started by a launcher (--run-mode=ps)."""
    from ps.server.process import server_command  # numpy and the kernels take a moment to load

    server_command.main(args=list(arguments), prog_name="ps server", standalone_mode=False)


@commands.command("export")
@click.argument("checkpoint")
@click.argument("out")
@click.option("--format", type=click.Choice(["arrow", "safetensors"]), default="arrow", show_default=True)
@click.option(
    "--dtype", type=click.Choice(["f4", "f2"]), default="f4", show_default=True, help="Number format of the weights."
)
@click.option("--table", "tables", multiple=True, help="Export only this table; may be given several times.")
@click.option("--since", default="", help="Export only what differs from this older checkpoint.")
def export(checkpoint: str, out: str, format: str, dtype: str, tables: tuple[str, ...], since: str) -> None:
    """Write the weights of a checkpoint for inference, into the folder OUT.

    CHECKPOINT: path or URL that ends in ps/<job>/checkpoint-<number>, or in ps/<job> for the newest one."""
    from ps.export import export_changes, export_checkpoint

    if since:
        done = export_changes(since, checkpoint, out, format=format, dtype=dtype, tables=tables)
    else:
        done = export_checkpoint(checkpoint, out, format=format, dtype=dtype, tables=tables)
    for table, rows in done.rows.items():
        click.echo(f"{table}: {rows:,} rows")
    click.echo(f"{done.bytes:,} bytes in {done.folder}")


@commands.command("warm")
@click.option("--child", is_flag=True, hidden=True, help="Exit when stdin is closed.")
def warm(child: bool) -> None:
    """Compile the kernels ahead of time, for example while an image is built. This takes about half a minute, once for
    each type of processor. A pserver that finds no compiled kernels starts with slower ones."""
    from ps.store.kernels import chosen
    from ps.store.kernels.compiling import compile_all
    from ps.store.kernels.ready import end_with_parent

    if child:
        end_with_parent()
    if chosen() != "numba":
        click.echo("The numpy kernels are in use; there is nothing to compile")
        return
    place = compile_all()
    if place is None:
        raise PsError("no writable directory for the compiled kernels. Set NUMBA_CACHE_DIR to a writable one")
    click.echo(f"Compiled the kernels into {place}")


def main() -> None:
    """Entry point of ``python -m ps``: run a command and exit with its status."""
    try:
        commands.main(standalone_mode=False)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except EdlError as error:
        click.echo(f"ps: error: {error}", err=True)
        sys.exit(int(error.exit_code))


if __name__ == "__main__":
    main()
