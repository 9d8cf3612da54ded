"""Converts a configuration of ``edl.launch.api``, or torch's, to command-line arguments of the launcher."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from edl.config import environment
from edl.errors import UsageError

_TORCH_TIMEOUT_S = 900
"""torch's default of ``timeout`` in ``rdzv_configs``."""
TORCH_ROLE = "default_role"
"""torch's default role of workers that are started from Python; torchrun's is ``default``."""

_PLAIN: dict[str, str] = {
    "run_id": "rdzv_id",
    "rdzv_backend": "rdzv_backend",
    "rdzv_endpoint": "rdzv_endpoint",
    "max_restarts": "max_restarts",
    "monitor_interval": "monitor_interval",
    "start_method": "start_method",
    "log_dir": "log_dir",
    "local_addr": "local_addr",
    "shutdown_timeout": "shutdown_timeout",
    "virtual_local_rank": "virtual_local_rank",
    "signals_to_handle": "signals_to_handle",
    "event_log_handler": "event_log_handler",
}
"""Fields of the configuration, and the options that they become."""

_DEFAULTS: dict[str, Any] = {
    "max_restarts": 3,
    "monitor_interval": 0.1,
    "start_method": "spawn",
    "event_log_handler": "null",
    "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
}
"""torch's default values that stand for the launcher's own defaults, also those that the environment replaces."""


def words_of(config: Any) -> list[str]:
    """The command-line arguments for a configuration: edl's or torch's ``LaunchConfig``, recognised by its fields.

    Raises ``UsageError`` for any other object, and for a value that no option can express.
    """
    missing = [name for name in ("min_nodes", "max_nodes", "nproc_per_node") if not hasattr(config, name)]
    if missing:
        raise UsageError(f"config={config!r}: not a LaunchConfig, it has no {missing[0]}")
    words = [f"--nnodes={config.min_nodes}:{config.max_nodes}", f"--nproc-per-node={config.nproc_per_node}"]
    for name, option in _PLAIN.items():
        value = getattr(config, name, None)
        if value != "" and value != _DEFAULTS.get(name):
            words += option_words(option, value)
    words += _role_words(config)
    words += _name_words(config)
    words += _store_words(config)
    words += _log_words(config)
    words += _torchs_words(config)
    for name, value in (getattr(config, "options", None) or {}).items():
        words += option_words(name, value)
    return words


def option_words(name: str, value: Any) -> list[str]:
    """The arguments for one option: True gives a flag, False and None give nothing, a list repeats the option."""
    option = "--" + name.lstrip("-").replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    if isinstance(value, list | tuple):
        return [word for one in value for word in option_words(name, one)]
    return [f"{option}={value}"]


def _role_words(config: Any) -> list[str]:
    """The role, which workers see as ``ROLE_NAME``. The launcher has another default than torch's API."""
    role = getattr(config, "role", "")
    if role == TORCH_ROLE and {"EDL_ROLE", "PET_ROLE"} & environment().keys():
        return []
    return option_words("role", role or None)


def _name_words(config: Any) -> list[str]:
    """A new job name for a call that has none and uses a store that others may use as well. On the command line such
    jobs are all called ``default``, so successive calls would join the same job. Raises ``UsageError``."""
    named = getattr(config, "run_id", "") or "rdzv_id" in (getattr(config, "options", None) or {})
    if named or not getattr(config, "rdzv_endpoint", "") or {"EDL_RDZV_ID", "PET_RDZV_ID"} & environment().keys():
        return []
    if config.max_nodes != 1:
        raise UsageError("run_id='': a job of several nodes needs a name. Give the same run_id on every node")
    return [f"--rdzv-id=call-{secrets.token_hex(4)}"]


def _store_words(config: Any) -> list[str]:
    configs = dict(getattr(config, "rdzv_configs", None) or {})
    if configs.get("timeout") == _TORCH_TIMEOUT_S:
        del configs["timeout"]
    timeout_s = getattr(config, "rdzv_timeout", -1)
    if timeout_s != -1:
        configs["timeout"] = timeout_s
    return [f"--rdzv-conf={_joined(configs, '=')}"] if configs else []


def _log_words(config: Any) -> list[str]:
    """The options about output, from edl's fields or from torch's ``logs_specs``. Raises ``UsageError``."""
    specs = getattr(config, "logs_specs", None)
    both = [name for name in ("log_dir", "redirects", "tee") if specs is not None and getattr(config, name, None)]
    if both:
        raise UsageError(
            f"{both[0]}={getattr(config, both[0])!r}: logs_specs is given as well, and says the same. Drop one of them"
        )
    if specs is None:
        found = {"redirects": getattr(config, "redirects", 0), "tee": getattr(config, "tee", 0)}
    else:
        if type(specs).__name__ != "DefaultLogsSpecs":
            raise UsageError(
                f"logs_specs={specs!r}: only DefaultLogsSpecs is supported. Use log_dir, redirects and tee"
            )
        found = {"redirects": specs._redirects, "tee": specs._tee}
        found["log_dir"] = specs._root_log_dir
        shown = specs._local_ranks_filter
        found["local_ranks_filter"] = ",".join(str(rank) for rank in shown) if shown else None
    words = []
    for option, value in found.items():
        text = _joined({int(key): int(one) for key, one in value.items()}, ":") if isinstance(value, Mapping) else value
        if text not in (None, 0, "0", ""):
            words += option_words(option, int(text) if isinstance(text, int) else text)
    return words


def _torchs_words(config: Any) -> list[str]:
    """The options for fields whose values have another form in torch's configuration. Raises ``UsageError``."""
    if getattr(config, "metrics_cfg", None):
        raise UsageError(
            f"metrics_cfg={config.metrics_cfg!r}: edl has no such metrics. Drop it; see edl status and --http-port"
        )
    words = []
    for name in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
        filters: Iterable[str] = getattr(config, name, None) or ()
        escaped = [text.replace(",", ",,") for text in filters]
        words += option_words(name, ",".join(escaped) or None)
    numa = getattr(config, "numa_options", None)
    if numa is not None:
        words += option_words("numa_binding", getattr(numa.affinity_mode, "value", numa.affinity_mode))
    return words + option_words("log_prefix", getattr(config, "log_line_prefix_template", None))


def _joined(values: Mapping[Any, Any], between: str) -> str:
    return ",".join(f"{key}{between}{value}" for key, value in values.items())
