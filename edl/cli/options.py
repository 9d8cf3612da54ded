"""Options that all commands share: which job, and the output format."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edl.config import environment

if TYPE_CHECKING:
    from edl.cli.find import Where

F = TypeVar("F", bound=Callable[..., Any])

LAUNCHERS = (
    *("data_dir", "request_timeout", "connect_timeout"),
    # torchrun's
    *("join_timeout", "timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt", "read_timeout"),
    *("protocol", "store_type", "is_host", "close_timeout", "heartbeat_timeout", "rank", "etcd_prefix"),
)
"""Keys of ``--rdzv-conf`` that a command ignores."""
TORCHRUN = {"ssl_cert": "cert", "ssl_cert_key": "key", "ca_cert": "ca", "cacert": "ca"}
"""torchrun's names of others."""


def _where_option(name: str, metavar: str, help_text: str) -> Callable[[F], F]:
    """A ``--rdzv-*`` option like the launcher's, with the same environment variable. In a subcommand click would derive
    another name for the variable."""
    return click.option(
        f"--rdzv-{name}", default="", envvar=f"EDL_RDZV_{name.upper()}", metavar=metavar, help=help_text
    )


def store_options(function: F) -> F:
    """Add the options that select the store, and ``--json``."""
    for option in (
        _where_option("endpoint", "HOST:PORT[,…]", "Members of the store. Default: the store of the job on this host."),
        _where_option("conf", "K=V[,…]", "Credentials for the store: ca, cert, key, user, password."),
        click.option(
            "--secret-file",
            default="",
            envvar="EDL_SECRET_FILE",
            metavar="FILE|shared",
            help="The job's secret. Default: EDL_SECRET, or the file of a launcher on this host.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text; one line per event."),
    ):
        function = option(function)
    return function


def job_options(function: F) -> F:
    """Add the options that select the job, and ``--json``."""
    return _where_option("id", "JOB", "Name of the job. Default: the only job in the store.")(store_options(function))


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration_s(text: str) -> float | None:
    """Parse ``90s``, ``15m``, ``2h`` or ``3d``, in seconds; None: it is something else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    return float(match[1]) * _UNITS[match[2]] if match is not None else None


wait_option = click.option("--wait/--no-wait", default=True, help="Whether to wait for the outcome. Default: wait.")
reason_option = click.option("--reason", default="", metavar="TEXT", help="The reason, recorded in the history.")


def where_of(options: dict[str, str]) -> Where:
    """Parse the options that ``job_options`` or ``store_options`` adds; reports unknown keys of ``--rdzv-conf``. Raises
    ``UsageError``."""
    from edl.adapters.etcd_plan import encrypted, parse_endpoints, tls_files
    from edl.adapters.etcd_rpc import EtcdTls
    from edl.cli.find import Where

    items = (item.partition("=") for item in options["rdzv_conf"].split(",") if item.strip())
    conf = {TORCHRUN.get(name.strip(), name.strip()): value.strip() for name, _, value in items}
    # Keys that only launchers use are ignored: EDL_RDZV_CONF may be the same for both.
    for name in sorted(set(conf) - {*("ca", "cert", "key", "user", "password"), *LAUNCHERS}):
        known = "known keys are ca, cert, key, user, password"
        click.echo(f"edl: --rdzv-conf: unknown key {name!r} is ignored; {known}", err=True)
    endpoint = encrypted(options["rdzv_endpoint"], conf.get("protocol", ""))
    files = tls_files(endpoint, conf)
    tls = EtcdTls(files["ca"], files["cert"] or None, files["key"] or None) if files["ca"] else None
    endpoints = parse_endpoints(endpoint)
    login = conf.get("user"), conf.get("password")
    return Where(
        options.get("rdzv_id", ""), endpoints, tls, *login, options["secret_file"], environment().get("EDL_SECRET", "")
    )
