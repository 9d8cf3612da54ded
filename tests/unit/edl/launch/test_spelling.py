"""Options in every spelling that torchrun and Paddle's launcher take, and in their abbreviations."""

from __future__ import annotations

import pytest

from edl.errors import UsageError
from edl.launch.cli import with_both_spellings
from edl.launch.spelling import Spelling, one_spelling

OPTIONS = [
    Spelling(("--nnodes",), takes_value=True),
    Spelling(("--nproc-per-node",), takes_value=True),
    Spelling(("-t", "--tee"), takes_value=True),
    Spelling(("-m", "--module"), takes_value=False),
    Spelling(("--master",), takes_value=True),
    Spelling(("--master-addr",), takes_value=True),
    Spelling(("--master-port",), takes_value=True),
    Spelling(("--max-restarts",), takes_value=True),
    Spelling(("--max-restart",), takes_value=True),
    Spelling(("--gpus", "--gpu-list"), takes_value=True),
    Spelling(("--rank",), takes_value=True),
    Spelling(("--rack",), takes_value=True),
]
FIRST = {"--nnodes", "--nproc-per-node", "--module", "--max-restarts", "--master-addr", "--master-port"}


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("--nproc_per_node=2 a.py", "--nproc-per-node=2 a.py"),
        ("--nproc 2 a.py --nproc 3", "--nproc-per-node 2 a.py --nproc 3"),
        ("--nn=1:2 --nproc_per=2 a.py", "--nnodes=1:2 --nproc-per-node=2 a.py"),
        ("--max=3 a.py", "--max-restarts=3 a.py"),
        ("--max-restart=3 a.py", "--max-restart=3 a.py"),
        ("--master=h a.py", "--master=h a.py"),
        ("--master-a=h a.py", "--master-addr=h a.py"),
        ("--modul a_b.py", "--module a_b.py"),
        ("--te 3 a.py", "--tee 3 a.py"),
        ("--gpu 0 a.py", "--gpus 0 a.py"),
        ("-t3 a.py", "-t 3 a.py"),
        ("-t=0:3 a.py", "-t 0:3 a.py"),
        ("-t 3 a.py -t=1", "-t 3 a.py -t=1"),
        ("-m pkg.mod --nn=2", "-m pkg.mod --nn=2"),
        ("--unknown_thing a.py", "--unknown-thing a.py"),
        ("-x a.py", "-x a.py"),
        ("-- --nn.py --nn", "-- --nn.py --nn"),
        ("- --nn", "- --nn"),
        ("--nn=2 a.py -- --depth=24", "--nnodes=2 a.py --depth=24"),
        ("a.py --", "a.py"),
        ("a.py -- -- b", "a.py -- b"),
        ("a.py b -- c", "a.py b -- c"),
        ("-- a.py -- b", "-- a.py -- b"),
        ("-m pkg.mod -- --nn", "-m pkg.mod --nn"),
        ("--nnodes", "--nnodes"),
        ("--max-restarts -1 a.py", "--max-restarts -1 a.py"),
        ("--tee --what a.py", "--tee --what a.py"),
        ("", ""),
    ],
)
def test_each_becomes_the_name_in_full(given: str, made: str) -> None:
    assert one_spelling(given.split(), OPTIONS, FIRST) == made.split()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--m=1", "--m is ambiguous: it could be any of --master-addr, --master-port, --max-restarts, --module."),
        ("--master_=1", "--master- is ambiguous: it could be any of --master-addr, --master-port."),
        ("--ra=1", "--ra is ambiguous: it could be any of --rack, --rank."),
        ("--n=1", "--n is ambiguous: it could be any of --nnodes, --nproc-per-node."),
        ("--nnodes --tee 3", "--nnodes needs a value, but --tee follows it. Write --nnodes=VALUE"),
        ("-t --nnodes=2", "-t needs a value, but --nnodes=2 follows it."),
    ],
)
def test_what_could_mean_several_things_is_refused(given: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        one_spelling(given.split(), OPTIONS, FIRST)
    assert words in str(refused.value)


ABBREVIATED = {
    "nnode": "--nnodes",
    "nproc-per": "--nproc-per-node",
    "nproc_per": "--nproc-per-node",
    "rdzv_b": "--rdzv-backend",
    "standal": "--standalone",
    "max_res": "--max-restarts",
    "mod": "--module",
    "te": "--tee",
    "redir": "--redirects",
    "no-py": "--no-python",
    "virt": "--virtual-local-rank",
}


def test_torchruns_abbreviations_mean_here_what_they_mean_there(capsys: pytest.CaptureFixture[str]) -> None:
    """By torch's own parser. Where an option has two spellings, argparse finds their beginning ambiguous up to Python
    3.11 or so; here it is one option."""
    run = pytest.importorskip("torch.distributed.run")
    understood = 0
    parser = run.get_args_parser()
    for name, full in ABBREVIATED.items():
        if full not in parser._option_string_actions:
            continue  # of a later torch
        value = [] if full in ("--standalone", "--no-python", "--virtual-local-rank", "--module") else ["7"]
        assert with_both_spellings([f"--{name}", *value, "train.py"]) == [full, *value, "train.py"]
        try:
            theirs = parser.parse_args([f"--{name}", *value, "train.py"])
        except SystemExit:
            assert "ambiguous" in capsys.readouterr().err
            continue
        understood += 1
        assert {key for key, held in vars(theirs).items() if held in ("7", 7, True)} == {full[2:].replace("-", "_")}
    assert understood >= 5


def test_help_and_version_are_known() -> None:
    assert with_both_spellings(["--hel"]) == ["--help"]
    assert with_both_spellings(["--vers"]) == ["--version"]
