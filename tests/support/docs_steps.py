"""The commands of the documentation that ``tests/process/test_docs_run.py`` runs, in the order of running."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One command. Its exit status has to be 0."""

    line: str
    """As the documentation has it; empty for one that only prepares the next."""
    says: str = ""
    """A pattern for what it prints."""
    run: str = ""
    """What is run in its place; empty: the line. ``SUBSTITUTES`` apply to both."""
    follows: bool = False
    """It runs until it is interrupted, which is done once it has printed what it should."""
    start: str = ""
    """A node that is started before, and waited for."""
    stdin: str = ""
    """With ``{folder}`` for the folder that the steps run in."""


SUBSTITUTES: tuple[tuple[str, str], ...] = (
    # The parts of usage lines.
    (r"\[(-f|--no-wait|--follow)\] ?", ""),
    (r"(?<= )\[(?=-)|\](?=[ …]|$)|,?…", ""),
    (r"HOST:PORT,?", "{endpoint}"),
    (r"\bJOB\b", "{job}"),
    (r"--node NODE\b", "--node node-a"),
    (r"--rank R\b", "--rank 0"),
    (r"-n SECONDS\b", "-n 1"),
    (r"(--after|--lines) N\b", r"\1 1"),
    (r"NAME=VALUE", "lr-scale=1"),
    # Names and places of the reader's job.
    (r"--rdzv-id=[\w-]+", "--rdzv-id={job}"),
    (r"--rdzv-endpoint=[\w:-]+", "--rdzv-endpoint={endpoint}"),
    (r"http://10\.0\.0\.1:8080/v1/jobs/digits", "{http}/v1/jobs/{job}"),
    (r"/ckpt/digits|/shared/history", "history"),
    (r"/shared/denylist", "denylist"),
    (r"--device=3\b", "--device=1"),  # the nodes of the test have two slots
    (r"\bdrain NODE\b", "drain node-b"),
)
"""Applied in this order to a line before it is run; ``{…}`` are filled in by the test."""

HTTP = 'URL=http://10.0.0.1:8080/v1/jobs/digits TOKEN="$(edl token --rdzv-id=digits)"'
"""The line that the commands with curl need before them."""

ALONE: tuple[Step, ...] = (
    Step("edl simulate --nodes 128 --spares 2 --min-nodes 120 --price 2 --checkpoint-size 500G", r"Goodput: \d"),
    Step('edl denylist add gamma --for=7d --reason="fan 3 is dead" --at=/shared/denylist', "gamma"),
    Step('edl denylist add --device=GPU-5b1c… --reason="RMA 4711" --at=/shared/denylist', "GPU-5b1c",
         run='edl denylist add --device=GPU-5b1c --reason="RMA 4711" --at=denylist'),
    Step("edl denylist list --at=/shared/denylist", "device GPU-5b1c: until(.|\n)*fan 3 is dead"),
    Step("edl denylist remove GPU-5b1c… --at=/shared/denylist", run="edl denylist remove GPU-5b1c --at=denylist"),
    Step("edl denylist remove --expired --at=/shared/denylist"),
    Step("python examples/05-data-service/make_data.py", "records in 4 files"),
    Step("dd if=/dev/zero of=runs/data-service/digits/part-1.parquet bs=1 seek=4 count=2000 conv=notrunc"),
    Step("python -m data_service scan 'train/day-*'", r"\d"),
    Step("python -m data_service convert 'train/day-*' fast --pack 'dense:float32=I1,I2,I3' --pack 'cat=C*' "
         "--fill 'I*=0'"),
    Step("python -m edl.testing --seed=3"),
    Step("(umask 077; head -c 32 /dev/urandom | base64 > job.secret)"),
    Step("export EDL_RDZV_ENDPOINT=$(head -n 1 train.store) EDL_RDZV_ID=train EDL_SECRET_FILE=shared"),
)  # fmt: skip
"""Commands that need no job. They run in a folder with the files that ``test_docs_run`` makes."""

IN_THE_JOB: tuple[Step, ...] = (
    # Looking.
    Step("edl status", r"digits +running(.|\n)*node-d +running"),
    Step("edl status | grep Dashboard", "http://"),
    Step("edl status --rdzv-id=demo --rdzv-endpoint=alpha:2379", "running"),
    Step("edl status --rdzv-id=digits --rdzv-endpoint=alpha:2379", "running"),
    Step("edl status [--all] [--rdzv-id JOB] [--rdzv-endpoint HOST:PORT,…] [--json]", '"phase": *"running"'),
    Step("edl top", "digits", run="edl top --once"),
    Step("edl top [-n SECONDS] [--once] [--rdzv-id JOB] [--rdzv-endpoint HOST:PORT,…] [--json]", "node-a"),
    Step("edl events -f", "world-formed", follows=True),
    Step("edl events [-f] [--after N] [--rdzv-id JOB] [--rdzv-endpoint HOST:PORT,…] [--json]", "world-formed"),
    Step("edl health [--node NODE] [--rdzv-id JOB] [--rdzv-endpoint HOST:PORT,…] [--json]"),
    Step("edl config [--node NODE] [--all] [--rdzv-id JOB] [--rdzv-endpoint HOST:PORT,…] [--json]", "nnodes"),
    Step("edl config --all", "nnodes"),
    Step("edl errors"),
    Step("edl errors [--all] [--rdzv-id JOB] [--rdzv-endpoint HOST:PORT,…] [--json]"),
    Step("edl logs --rank 3 --lines 2"),
    Step("edl logs [-f] [--rank R]… [--node NODE]… [--lines N] [--raw] [--rdzv-id JOB] [--rdzv-endpoint HOST:PORT,…] "
         "[--json]"),
    Step("edl stacks --rank 3", "train"),
    # Without a rank: which one is on that node depends on who was there first.
    Step("edl stacks [--rank R]… [--node NODE]… [--raw] [--rdzv-id JOB] [--rdzv-endpoint HOST:PORT,…] [--json]",
         "train", run="edl stacks --node node-a --raw --rdzv-id={job} --rdzv-endpoint={endpoint} --json"),
    Step("edl history /ckpt/digits", "began"),
    Step("edl history /shared/history", "began"),
    # Notifications.
    Step("cat > channels && chmod 600 channels", stdin="exec:{folder}/page-me\n"),
    Step("edl notify test", "page-me: delivered"),
    Step("edl watch --rdzv-endpoint=alpha --rdzv-id=run7 --notify-file=channels --limit=1800 "
         "--heartbeat=https://hc.example.com/ping/1f",
         run="edl watch --rdzv-endpoint=alpha --rdzv-id=run7 --notify-file=channels --limit=1800 --once"),
    # Settings and checkpoints.
    Step("edl set global-batch=2048 lr-rule=linear", "global batch 2048"),
    Step("edl set global-batch=512 lr-scale=0.5", "global batch 512"),
    Step("edl set NAME=VALUE… [--no-wait] [--rdzv-id JOB] [--rdzv-endpoint HOST:PORT,…] [--json]"),
    Step("edl checkpoint", "commit-"),
    Step("edl checkpoint [--no-wait] [--rdzv-id JOB] [--rdzv-endpoint HOST:PORT,…] [--json]", "commit-"),
    # Another size, other nodes.
    Step("edl scale", "4 nodes train"),
    Step("edl scale 3", "3 nodes in training"),
    Step("edl scale 4", "4 nodes in training"),
    Step("edl scale --min=2 --max=16"),
    Step("edl cordon node-b"),
    Step("", run="edl uncordon node-b"),
    Step("edl cordon node-b --device=3"),
    Step("", run="edl uncordon node-b --device=1"),
    Step("edl suspend"),
    Step("edl resume"),
    Step("edl token", r"\S{16}"),
    Step(HTTP),
    Step('curl -H "Authorization: Bearer $TOKEN" $URL/scale', '"replicas": *4'),
    Step('curl -L --location-trusted -X PATCH -H "Authorization: Bearer $TOKEN" '
         "-H 'Content-Type: application/merge-patch+json' "
         """-d '{"spec": {"replicas": 4}, "reason": "more data"}' $URL/scale""", '"replicas": *4'),
    Step('curl -N -L --location-trusted -H "Authorization: Bearer $TOKEN" "$URL/events?follow=true"', "world-formed",
         follows=True),
    Step('curl -L --location-trusted -X POST -H "Authorization: Bearer $TOKEN" -H \'Content-Type: application/json\' '
         """-d '{"nodes": ["node-c"], "deadlineSeconds": 60}' $URL/drain""", "node-c"),
    Step("edl drain node-c node-d", "left", start="node-c"),
    Step("edl drain slurm-1234", "slurm-1234 has left", start="slurm-1234"),
    Step("", run="edl scale --min=1 --max=16 --no-wait"),
    Step("edl scale 1", "1 node in training"),
    Step("edl drain NODE", "node-b has left"),
    Step("edl scale auto"),
)  # fmt: skip
"""Commands in one job of four nodes, node-a to node-d, of two workers each. The order matters."""

BEFORE_THE_END: tuple[Step, ...] = (Step("edl stop"),)


def substituted(step: Step, **values: str) -> str:
    """What is run for a step. ``values``: of the job, such as its ``endpoint``."""
    line = step.run or step.line
    for pattern, other in SUBSTITUTES:
        line = re.sub(pattern, other, line)
    for name, value in values.items():
        line = line.replace(f"{{{name}}}", value)
    return line
