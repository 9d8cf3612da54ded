"""Translates torchrun's rendezvous options to settings of edl's store: ``--standalone``, ``--master-addr``,
``--master-port`` and ``--rdzv-conf``."""

from __future__ import annotations

import difflib
import re

from edl.adapters.etcd_plan import encrypted
from edl.config import parse_nnodes
from edl.errors import SettingError
from edl.launch.dropin_table import Fate
from edl.launch.options import value
from edl.launch.resolved_options import ResolvedOptions
from edl.launch.settings import CONF_KEYS
from edl.launch.torchrun_table import KEYS, Key
from edl.wire.address import address

DEFAULT_PORT = 29500
"""torchrun's default port of a static rendezvous."""
_KEEP_ALIVE_S, _KEEP_ALIVES = 5.0, 3.0
"""torchrun's defaults of ``keep_alive_interval`` and ``keep_alive_max_attempt``."""


def apply(resolved: ResolvedOptions) -> None:
    """Translate the options. Raises ``SettingError``."""
    _standalone(resolved)
    _configuration(resolved)
    _static(resolved)


def _standalone(resolved: ResolvedOptions) -> None:
    """With ``--standalone``, ignore the other options about the store, as torchrun does. Raises ``SettingError`` for
    more than one node."""
    if not resolved.values["standalone"]:
        return
    if parse_nnodes(resolved.values["nnodes"]).minimum > 1:
        raise SettingError(
            _said(resolved, "nnodes"),
            resolved.values["nnodes"],
            "--standalone means one node",
            "Drop one of the two options",
        )
    for name in ("rdzv_endpoint", "rdzv_backend", "master_addr", "master_port"):
        if resolved.values[name] and resolved.given(name):
            what = f"{_said(resolved, name)}={resolved.values[name]}"
            resolved.remark(f"--standalone: {what} is not used, because the job has a private store")
        resolved.values[name] = 0 if name == "master_port" else ""


def _static(resolved: ResolvedOptions) -> None:
    """Use ``--master-addr`` and ``--master-port`` as the address of the store in a job of several nodes. Raises
    ``SettingError``."""
    value("master_port", resolved.values)
    given = [name for name in ("master_addr", "master_port") if resolved.given(name) and resolved.values[name]]
    if not given:
        return
    said = " ".join(f"{_said(resolved, name)}={resolved.values[name]}" for name in given)
    if resolved.values["rdzv_endpoint"]:
        other = f"{_said(resolved, 'rdzv_endpoint')}={resolved.values['rdzv_endpoint']}"
        resolved.remark(f"{said} is not used: {other} takes precedence, as in torchrun")
        return
    if parse_nnodes(resolved.values["nnodes"]).maximum == 1:
        resolved.remark(f"{said} is not used: a job of one node has a private store")
        return
    host = (resolved.values["master_addr"] or "127.0.0.1").strip().removeprefix("[").removesuffix("]")
    if not re.fullmatch(r"[\w.:-]+", host):
        raise SettingError(
            _said(resolved, "master_addr"), host, "not a host name or address", "Write node1 or 10.0.0.1, for example"
        )
    endpoint = address(host, resolved.values["master_port"] or DEFAULT_PORT)
    resolved.offer("rdzv_endpoint", endpoint, max(resolved.source(name) for name in given), _said(resolved, given[0]))
    resolved.remark(
        f"{said}: the job's store is at {endpoint}; the workers' MASTER_PORT is a free port, a new one in each round"
    )


# --- --rdzv-conf -----------------------------------------------------------------------------------------------------


def _configuration(resolved: ResolvedOptions) -> None:
    """Translate torchrun's keys of ``--rdzv-conf`` to options or to edl's own keys, which stay in ``rdzv_conf``. Raises
    ``SettingError``."""
    kept: list[str] = []
    found: dict[str, str] = {}
    text = resolved.values["rdzv_conf"].strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]  # quotes that no shell has removed
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in item.partition("="))
        key = KEYS.get(name)
        if key is None and name not in CONF_KEYS:
            _unknown(resolved, name)
            continue
        if key is None:
            kept.append(item)
            continue
        if not value:
            raise _wrong(resolved, item, "needs a value", f"Write {name}=VALUE")
        if key.allowed and value.lower() not in key.allowed:
            raise _wrong(resolved, item, f"must be {' or '.join(key.allowed)}")
        if key.fate is Fate.EXPLAINED:
            _explain(resolved, key, value)
        found[name] = value
    for name in ("ssl_cert", "ssl_cert_key", "ca_cert", "cacert"):
        if name in found:
            kept.append(f"{KEYS[name].becomes}={found[name]}")
    if "read_timeout" in found:
        kept.append(f"connect_timeout={_seconds(resolved, 'read_timeout', found):g}")
    resolved.values["rdzv_conf"] = ",".join(kept)
    _encryption(resolved, found)
    _times(resolved, found)
    if "rank" in found:
        _take_rank(resolved, found["rank"])


def _unknown(resolved: ResolvedOptions, name: str) -> None:
    """Report an unknown key without refusing it, as in torchrun, whose plug-ins have keys of their own."""
    known = (*CONF_KEYS, *KEYS)
    near = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    resolved.remark(f"{_said(resolved, 'rdzv_conf')}: unknown key {name!r} is ignored; {meant}")


def _take_rank(resolved: ResolvedOptions, text: str) -> None:
    """Translate ``rank``, the node rank of torchrun's static rendezvous. Raises ``SettingError``."""
    if not text.isdecimal():
        raise _wrong(resolved, f"rank={text}", "must be a node rank, from 0")
    _offer(resolved, "node_rank", int(text), "rank")


def _explain(resolved: ResolvedOptions, key: Key, value: str) -> None:
    if (key.key, value.lower()) == ("store_type", "file"):
        raise _wrong(
            resolved, f"{key.key}={value}", key.why, "Drop it, and name the store with --rdzv-endpoint=HOST:PORT"
        )
    if (key.key, value.lower()) != ("store_type", "tcp"):
        resolved.remark(f"{_said(resolved, 'rdzv_conf')} {key.key}={value} has no effect: {key.why}")


def _encryption(resolved: ResolvedOptions, found: dict[str, str]) -> None:
    endpoint = resolved.values["rdzv_endpoint"]
    resolved.values["rdzv_endpoint"] = encrypted(endpoint, found.get("protocol", ""))


def _times(resolved: ResolvedOptions, found: dict[str, str]) -> None:
    for name in ("timeout", "join_timeout"):
        if name in found:
            _offer(resolved, "recover_timeout", _seconds(resolved, name, found), name)
    if "last_call_timeout" in found:
        _offer(resolved, "join_grace", _seconds(resolved, "last_call_timeout", found), "last_call_timeout")
    if "keep_alive_interval" in found or "keep_alive_max_attempt" in found:
        interval = _seconds(resolved, "keep_alive_interval", found, _KEEP_ALIVE_S)
        attempts = _seconds(resolved, "keep_alive_max_attempt", found, _KEEP_ALIVES)
        _offer(resolved, "lease_ttl", interval * attempts, "keep_alive_interval*keep_alive_max_attempt")


def _offer(resolved: ResolvedOptions, option: str, value: float, key: str) -> None:
    """Offer a key's value for an option. The option itself takes precedence over a key from the same source."""
    origin = f"{_said(resolved, 'rdzv_conf')} {key}"
    if resolved.source(option) < resolved.source("rdzv_conf") or resolved.origin(option).startswith(
        _said(resolved, "rdzv_conf")
    ):
        resolved.offer(option, value, resolved.source("rdzv_conf"), origin)
    elif resolved.values[option] != value:
        other = f"{_said(resolved, option)}={resolved.values[option]:g}"
        resolved.remark(f"{origin}={value:g} is not used: {other} takes precedence")


def _seconds(resolved: ResolvedOptions, name: str, found: dict[str, str], default: float = 0.0) -> float:
    text = found.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        what = "attempts" if name.endswith("attempt") else "seconds"
        raise _wrong(resolved, f"{name}={text}", f"must be a number of {what} above 0")
    return value


def _wrong(resolved: ResolvedOptions, item: str, allowed: str, advice: str = "") -> SettingError:
    return SettingError(_said(resolved, "rdzv_conf"), item, allowed, advice)


def _said(resolved: ResolvedOptions, name: str) -> str:
    """The name under which the option was given: a variable, or the option itself."""
    return resolved.said(name)
