"""Options about the health check of nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from edl.errors import SettingError
from edl.job_records import HealthRules
from edl.launch.options.option import Option, Section, Setting

_PROBE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def probes_from(option: str, names: Sequence[str]) -> tuple[str, ...]:
    """Check the names of probes, each ``module:function``. Raises ``SettingError``."""
    for name in names:
        if not _PROBE.fullmatch(name):
            raise SettingError(option, name or "''", "is not MODULE:FUNCTION", "Such as my_probes:check_disk")
    return tuple(names)


HEALTH = (
    Option(
        "--health-check",
        setting=Setting(HealthRules, "mode"),
        help=(
            "When a node is [checked](health-check.md) by a matrix product and an exchange of data with other nodes: "
            "`join` (before it takes part for the first time), `failure` (after a failure that looks like defective "
            "hardware), `both`, or `off`."
        ),
    ),
    Option(
        "--health-check-timeout",
        setting=Setting(HealthRules, "timeout_s"),
        metavar="SECONDS",
        help="Seconds that a probe of a node may take. A check consists of one probe, or two if there are suspects.",
    ),
    Option(
        "--health-check-size",
        setting=Setting(HealthRules, "size"),
        metavar="ROWS",
        help="Rows of the matrices that are multiplied; on a GPU four times as many.",
    ),
    Option(
        "--health-check-slow",
        setting=Setting(HealthRules, "slow"),
        help=(
            "What happens to a slow node: `report` (a warning), or `exclude` (it is kept out, if the job can do "
            "without it)."
        ),
    ),
    Option(
        "--health-check-factor",
        setting=Setting(HealthRules, "factor"),
        metavar="FACTOR",
        help="A node is slow if its product takes more than this many times as long as on others of its kind.",
    ),
    Option(
        "--health-check-expiry",
        setting=Setting(HealthRules, "expiry_s"),
        metavar="SECONDS",
        help=(
            "Seconds after which a result no longer holds: a node that was kept out is checked again, and so is a "
            "spare. 0: it holds as long as the launcher lives."
        ),
    ),
    Option(
        "--health-probe",
        written_default="",
        repeated=True,
        parse=probes_from,
        metavar="MODULE:FUNCTION",
        help=(
            "A [probe of your own](health-check.md#your-own-probes) that is part of the check of this node. May be "
            "given several times; in the variable, separate them with spaces."
        ),
    ),
)
SECTIONS = (Section("Health check", HEALTH),)
