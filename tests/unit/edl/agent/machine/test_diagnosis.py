"""A worker's last words are read for what they say about its end."""

from __future__ import annotations

import json
import signal

import pytest

from edl.agent.machine.diagnosis import LONGEST_EXCEPTION, LONGEST_TRACEBACK, LastWords, is_usage_error, last_words
from edl.types import NodeId, Rank, Round
from edl.wire import codec
from edl.wire.messages import WorkerFailed
from edl.wire.records import Failure

ABORTED = -int(signal.SIGABRT)
KILLED = -int(signal.SIGKILL)
TERMINATED = -int(signal.SIGTERM)

GLOO_LOSS = """\
step 41 loss 0.32
Traceback (most recent call last):
  File "/app/train.py", line 58, in <module>
    main()
    ~~~~^^
  File "/app/train.py", line 44, in main
    loss.backward()
  File "/venv/lib/torch/_tensor.py", line 625, in backward
    torch.autograd.backward(
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234
"""
NCCL_LOSS = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/app/train.py", line 31, in <module>
[rank1]:     dist.all_reduce(grad)
[rank1]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or \
there was a network error, NCCL version 2.21.5
[rank1]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
"""
NCCL_WATCHDOG = """\
[rank2]:[E1018 12:44:10 ProcessGroupNCCL.cpp:684] [Rank 2] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=12, OpType=ALLREDUCE) ran for 600029 milliseconds before timing out.
terminate called after throwing an instance of 'c10::DistBackendError'
"""
PADDLE_ABORT = """\
terminate called after throwing an instance of 'gloo::TimeoutException'
  what():  [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 300000ms for recv operation

--------------------------------------
C++ Traceback (most recent call last):
--------------------------------------
0   paddle::distributed::ProcessGroupGloo::AllReduce(...)
FatalError: `Process abort signal` is detected by the operating system.
  [TimeInfo: *** Aborted at 1760000000 (unix time) ***]
"""
STORE_LOSS = """\
Traceback (most recent call last):
  File "/app/train.py", line 9, in <module>
    dist.init_process_group("gloo")
torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (h, 29).
"""
ORDINARY = """\
epoch 3
Traceback (most recent call last):
  File "/app/train.py", line 12, in <module>
    check(7)
  File "/app/train.py", line 8, in check
    raise ValueError("7 is odd")
ValueError: 7 is odd
"""
HANDLING = """\
Traceback (most recent call last):
  File "/app/train.py", line 4, in load
    return table[key]
           ~~~~~^^^^^
KeyError: 'weights'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/app/train.py", line 9, in <module>
    load("weights")
  File "/app/train.py", line 6, in load
    raise RuntimeError("no checkpoint") from None or error
RuntimeError: no checkpoint
"""
CAUSED = HANDLING.replace(
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
SYNTAX = """\
Traceback (most recent call last):
  File "/app/train.py", line 1, in <module>
    import model
  File "/app/model.py", line 3
    def forward(self:
               ^
SyntaxError: '(' was never closed
"""


class TestOrdinaryEnd:
    def test_the_last_line_of_the_traceback_is_the_exception(self) -> None:
        words = last_words(1, ORDINARY, "")
        assert words.exception == "ValueError: 7 is odd"
        assert words.traceback == ORDINARY.removeprefix("epoch 3\n").rstrip()
        assert not words.peer_loss

    def test_what_is_written_after_it_does_not_belong_to_it(self) -> None:
        words = last_words(1, ORDINARY + "wandb: run finished\n", "")
        assert words.exception == "ValueError: 7 is odd"
        assert "wandb" not in words.traceback

    def test_the_last_of_several_counts(self) -> None:
        logged = ORDINARY.replace("7", "5") + "retrying\n" + ORDINARY
        assert last_words(1, logged, "").exception == "ValueError: 7 is odd"
        assert "5 is odd" not in last_words(1, logged, "").traceback

    @pytest.mark.parametrize("tail", [HANDLING, CAUSED], ids=["handling", "caused"])
    def test_a_chain_is_kept_whole(self, tail: str) -> None:
        words = last_words(1, "before\n" + tail, "")
        assert words.exception == "RuntimeError: no checkpoint"
        assert words.traceback == tail.rstrip()

    def test_a_chain_whose_beginning_scrolled_away_is_kept_as_far_as_it_goes(self) -> None:
        cut = HANDLING[HANDLING.index("KeyError") :]
        words = last_words(1, cut, "")
        assert words.exception == "RuntimeError: no checkpoint"
        assert words.traceback == cut.rstrip()

    def test_a_syntax_error_is_named(self) -> None:
        assert last_words(1, SYNTAX, "").exception == "SyntaxError: '(' was never closed"

    def test_a_syntax_error_of_the_script_itself_has_no_header(self) -> None:
        bare = SYNTAX[SYNTAX.index('  File "/app/model.py"') :]
        assert last_words(1, bare, "").exception == "SyntaxError: '(' was never closed"

    def test_a_traceback_longer_than_the_tail_still_names_its_exception(self) -> None:
        words = last_words(1, ORDINARY[ORDINARY.index("    check") :], "")
        assert words.exception == "ValueError: 7 is odd"
        assert words.traceback.startswith("    check(7)")

    def test_an_exception_group_is_kept_though_its_last_line_is_no_name(self) -> None:
        group = (
            "  + Exception Group Traceback (most recent call last):\n"
            '  |   File "a.py", line 1, in <module>\n'
            "  | ExceptionGroup: two things (2 sub-exceptions)\n"
            "  +-+---------------- 1 ----------------\n"
            "    | ValueError: 7 is odd\n"
        )
        assert last_words(1, "before\n" + group, "") == LastWords("", group)

    def test_torchs_rank_before_each_line_is_taken_off(self) -> None:
        prefixed = "".join(f"[rank12]: {line}\n" for line in ORDINARY.splitlines())
        assert last_words(1, prefixed, "") == last_words(1, ORDINARY, "")

    def test_an_exception_of_a_package_is_named_in_full(self) -> None:
        tail = '  File "a.py", line 1, in f\n    g()\nmy_pkg.errors.BadConfigError: no such layer\n'
        assert last_words(1, tail, "").exception == "my_pkg.errors.BadConfigError: no such layer"

    @pytest.mark.parametrize(
        "tail",
        [
            "",
            "step 1\nstep 2\n",
            "  indented log line\nINFO: all is well\n",
            "ValueError: mentioned in a log, under no frame\n",
            "\n\n",
        ],
    )
    def test_nothing_is_made_up(self, tail: str) -> None:
        assert last_words(1, tail, "") == LastWords()

    def test_a_traceback_without_end_has_no_exception(self) -> None:
        cut = ORDINARY[: ORDINARY.index("ValueError: 7")]
        words = last_words(KILLED, cut, "")
        assert words.exception == ""
        assert words.traceback.startswith("Traceback")


class TestPeerLoss:
    @pytest.mark.parametrize(
        ("code", "tail", "exception"),
        [
            (1, GLOO_LOSS, "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by"),
            (
                1,
                NCCL_LOSS,
                "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process",
            ),
            (ABORTED, NCCL_WATCHDOG, ""),
            (ABORTED, PADDLE_ABORT, ""),
            (1, STORE_LOSS, "torch.distributed.DistNetworkError: The client socket has timed out"),
            (1, ORDINARY.replace("7 is odd", "[Errno 104] Connection reset by peer"), "ValueError: [Errno 104]"),
            (TERMINATED, STORE_LOSS, "torch.distributed.DistNetworkError: The client socket has timed out"),
        ],
        ids=["gloo", "nccl", "nccl watchdog", "paddle", "store", "socket", "stopped meanwhile"],
    )
    def test_complaints_about_a_peer_are_recognised(self, code: int, tail: str, exception: str) -> None:
        words = last_words(code, tail, "")
        assert words.peer_loss
        assert words.exception.startswith(exception)
        assert bool(words.exception) is bool(exception)

    @pytest.mark.parametrize("tail", [ORDINARY, HANDLING, SYNTAX, "", "Segmentation fault"])
    def test_other_ends_are_causes(self, tail: str) -> None:
        assert not last_words(1, tail, "").peer_loss
        assert not last_words(ABORTED, tail, "").peer_loss

    @pytest.mark.parametrize("code", [KILLED, -int(signal.SIGSEGV), 3, 137])
    def test_a_worker_that_ended_otherwise_is_a_cause_whatever_it_said(self, code: int) -> None:
        assert not last_words(code, GLOO_LOSS, "").peer_loss

    def test_an_old_complaint_does_not_count(self) -> None:
        assert not last_words(1, "Connection refused, retrying\n" + "step\n" * 1000 + ORDINARY, "").peer_loss

    def test_the_error_file_is_searched_too(self) -> None:
        assert last_words(1, "", json.dumps({"message": "RuntimeError: Connection closed by peer"})).peer_loss


class TestErrorFile:
    def test_torchs_form_with_a_call_stack(self) -> None:
        text = json.dumps(
            {
                "message": {
                    "message": "ZeroDivisionError: division by zero",
                    "extraInfo": {
                        "py_callstack": "Traceback (most recent call last):\n  ...",
                        "timestamp": "1760000000",
                    },
                }
            }
        )
        words = last_words(1, ORDINARY, text)
        assert words == LastWords("ZeroDivisionError: division by zero", "Traceback (most recent call last):\n  ...")

    def test_torchs_form_of_one_string(self) -> None:
        text = json.dumps({"message": "Traceback:\n  File x\nSignalException: got 15\n", "errorCode": 5})
        assert last_words(1, ORDINARY, text) == LastWords("SignalException: got 15", "")

    @pytest.mark.parametrize(
        "text",
        [
            '{"message": {"message": "ZeroDivisionEr',
            "",
            "null",
            "[]",
            "{}",
            '{"message": ""}',
            '{"message": null}',
            '{"message": {"message": "no call stack"}}',
            "\x00",
        ],
    )
    def test_one_that_says_nothing_gives_way_to_the_tail(self, text: str) -> None:
        assert last_words(1, ORDINARY, text).exception == "ValueError: 7 is odd"


class TestSending:
    def test_what_is_no_text_can_be_sent_all_the_same(self) -> None:
        """A file name that is not UTF-8 gets into messages as lone surrogates, which protobuf refuses."""
        text = json.dumps(
            {"message": {"message": "OSError: caf\udce9.bin", "extraInfo": {"py_callstack": "open('caf\udce9.bin')"}}}
        )
        words = last_words(1, "", text)
        assert words.exception == "OSError: caf?.bin"
        failure = Failure(NodeId("a"), Round(1), Rank(0), 0, 1, "w", words.exception, words.traceback)
        assert codec.decode_agent(codec.encode_agent(WorkerFailed(failure))) == WorkerFailed(failure)

    def test_long_texts_are_cut_where_they_say_least(self) -> None:
        stack = "Traceback\n" + "x" * 100_000 + "\nthe end"
        text = json.dumps({"message": {"message": "ValueError: " + "y" * 5000, "extraInfo": {"py_callstack": stack}}})
        words = last_words(1, "", text)
        assert len(words.exception) == LONGEST_EXCEPTION
        assert words.exception.startswith("ValueError: yyy")
        assert len(words.traceback) == LONGEST_TRACEBACK
        assert words.traceback.endswith("\nthe end")


ARGPARSE = "usage: train.py [-h] --data DATA\ntrain.py: error: the following arguments are required: --data\n"
CLICK = "Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\nError: No such option: --deptj\n"


@pytest.mark.parametrize(
    ("code", "tail", "refused"),
    [
        (2, ARGPARSE, True),
        (2, CLICK, True),
        (2, f"importing\n{ARGPARSE}\n", True),
        (1, ARGPARSE, False),
        (2, "ls: cannot access 'x'\n", False),
        (2, "train.py: error: the disk is full\n", False),
        (2, f"{ARGPARSE}caught that, and ended for another reason\n", False),
        (2, "", False),
    ],
)
def test_a_script_that_refuses_its_own_command_line_would_do_so_again(code: int, tail: str, refused: bool) -> None:
    assert is_usage_error(code, tail) == refused
