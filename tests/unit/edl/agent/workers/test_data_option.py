"""``--data``: from the command line to the workers' environment."""

from __future__ import annotations

import json
import os

import pytest

from edl.agent.workers.environment import LocalPaths, WorkerGroupDeps, ahead_environment
from edl.config import JobSpec, NodeRange
from edl.errors import SettingError
from edl.job_records import environment_text
from edl.launch.data_option import data_sets, functions_from
from edl.launch.options.agreement import differences
from edl.types import JobId, NodeId
from edl.wire import plain


def test_none_says_nothing() -> None:
    assert (data_sets(()), environment_text(())) == ((), "")


def test_patterns_and_options() -> None:
    sets = data_sets(("train=/d/a-*.parquet, b.parquet;shuffle=no;seed=3", "valid=s3://bucket/v/*.arrow"))
    assert json.loads(environment_text(sets)) == {
        "train": {"files": ["/d/a-*.parquet", os.path.abspath("b.parquet")], "shuffle": "no", "seed": "3"},
        "valid": {"files": ["s3://bucket/v/*.arrow"]},
    }


@pytest.mark.parametrize(
    "text", ["train", "train=", "=x", "tr ain=x", "train=,", "train=x;oops", "train=x;files=y", "train=x;a b=c"]
)
def test_bad_input_is_named(text: str) -> None:
    with pytest.raises(SettingError, match="--data") as caught:
        data_sets((text,))
    assert repr(text) in str(caught.value)
    assert "NAME=PATTERN" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("shuffle=maybe", "maybe"),
        ("seed=x", "x"),
        ("nonsense=3", "nonsense=3"),
        ("tail=foo", "tail=foo"),
        ("rescan=x", "rescan=x"),
        ("when=x", "when=x"),
        ("format=x", "format=x"),
        ("remote=x", "remote=x"),
        ("shard_records=0", "shard_records=0"),
        ("types=price", "types=price"),
        ("names=a,b", "header=False"),
        ("decode=mine", "decode='mine'"),
        ("format=user;read=mine.read", "read='mine.read'"),
        ("columns=a,,b", "columns=a,,b"),
        ("columns=", "at least one column"),
        ("delimiter=;", "delimiter=semicolon"),
    ],
)
def test_what_the_workers_would_refuse_is_refused_at_once(text: str, named: str) -> None:
    with pytest.raises(SettingError) as caught:
        data_sets((f"train=x;{text}",))
    assert named in str(caught.value)


def test_the_same_name_twice() -> None:
    with pytest.raises(SettingError, match="data set train is given twice"):
        data_sets(("train=a", "train=b"))


def test_all_launchers_agree_on_it_and_workers_are_told() -> None:
    data = data_sets(("train=/d/x;shuffle=no",))
    spec = JobSpec(JobId("job"), NodeRange(1, 1), data=data)
    other = JobSpec(JobId("job"), NodeRange(1, 1))
    assert differences(spec, other) == ["--data=train=/d/x;shuffle=no (the running job has '')"]
    environment = ahead_environment({}, spec, NodeId("a"), (0,), 0, LocalPaths("", ""), WorkerGroupDeps())
    assert environment["EDL_DATA_SETS"] == environment_text(data)
    assert plain.loads(JobSpec, plain.dumps(spec)) == spec
    assert "EDL_DATA_SETS" not in ahead_environment(
        {}, other, NodeId("a"), (0,), 0, LocalPaths("", ""), WorkerGroupDeps()
    )


def test_what_readers_may_be_asked_to_call() -> None:
    sets = ("train=x;format=user;read=mine.own:read;shards=mine.own:split", "valid=y;decode=mine.own:decode")
    expected = ("a.b:c", "mine.own:read", "mine.own:split", "mine.own:decode")
    assert sorted(functions_from("a.b:c, mine.own:read", data_sets(sets))) == sorted(expected)
    assert functions_from("", ()) == ()


@pytest.mark.parametrize("name", ["open", "a.b", ":f", "a:", "a b:c", "os:system('x')"])
def test_what_names_no_function(name: str) -> None:
    with pytest.raises(SettingError, match=r"--reader-functions.*Write package\.module:function"):
        functions_from(name, ())
