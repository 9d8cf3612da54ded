"""--drain-signals, --drained-exit-code and --preemption-notice on the launcher's command line."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from edl.errors import SettingError
from edl.launch.leave_options import leave_from
from edl.launch.settings import LeaveSettings, NoticeSettings

TERM, USR1, USR2 = int(signal.SIGTERM), int(signal.SIGUSR1), int(signal.SIGUSR2)


def given(**options: Any) -> LeaveSettings:
    defaults = {
        "drain_signals": "TERM,USR2",
        "drained_exit_code": 0,
        "preemption_notice": "",
        "forward_signals": "",
        "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }
    return leave_from({**defaults, **options})


def test_defaults() -> None:
    assert given() == LeaveSettings()
    assert (given().signals, given().exit_code, given().notice) == ((TERM, USR2), 0, None)


@pytest.mark.parametrize(
    ("text", "signals"),
    [
        ("TERM", (TERM,)),
        ("", (TERM,)),
        (" sigusr1 , USR2,USR1 ", (TERM, USR1, USR2)),
        ("XCPU", (TERM, int(signal.SIGXCPU))),
    ],
)
def test_signals(text: str, signals: tuple[int, ...]) -> None:
    assert given(drain_signals=text).signals == signals


@pytest.mark.parametrize(
    ("text", "notice"),
    [
        ("aws", NoticeSettings("aws", "http://169.254.169.254")),
        ("gce", NoticeSettings("gce", "http://metadata.google.internal")),
        ("azure:http://127.0.0.1:8080/", NoticeSettings("azure", "http://127.0.0.1:8080")),
        ("aws:http://[fd00:ec2::254]", NoticeSettings("aws", "http://[fd00:ec2::254]")),
    ],
)
def test_notices(text: str, notice: NoticeSettings) -> None:
    assert given(preemption_notice=text).notice == notice


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drain_signals": "INT"}, "SIGINT is Ctrl-C"),
        ({"drain_signals": "TERM,KILL"}, "a node cannot drain on 'KILL'"),
        ({"drain_signals": "15"}, "a node cannot drain on '15'"),
        ({"drained_exit_code": 126}, "--drained-exit-code=126: must be from 0 to 125"),
        ({"drained_exit_code": -1}, "must be from 0"),
        ({"preemption_notice": "oracle"}, "unknown cloud 'oracle'"),
        ({"preemption_notice": "aws:"}, "is not a base URL"),
        ({"preemption_notice": "aws:localhost:1"}, "is not a base URL"),
        ({"preemption_notice": "gce:file:///etc/passwd"}, "is not a base URL"),
        ({"preemption_notice": "gce:http://h/?q"}, "is not a base URL"),
        ({"preemption_notice": "gce:http://[::1"}, "is not a base URL"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words.replace("(", r"\(")):
        given(**options)
