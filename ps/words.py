"""What the Master's placement machine, the pservers and the trainers say to each other about who holds what.

JSON texts of frozen dataclasses. ``Orders`` is the whole of what a pserver has to know, each time: the newest version
wins, and one that has been lost does no harm. What pservers and trainers say is said again after a change of the
Master. Numbers of pservers and trainers are never used twice in a job: a process that takes another's place gets a new
one, so a number is an incarnation.
"""

from __future__ import annotations

import base64
import json
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from edl.errors import ProtocolError
from edl.wire.plain import from_plain, to_plain
from ps.spec import BUCKETS, TableSpec, Training

NOBODY = 0
"""In place of a pserver's number. Real numbers begin at 1."""


def pack(numbers: Sequence[int]) -> str:
    """One number a bucket (-1 .. 32767), as text."""
    packed = array("h", numbers)
    return base64.b64encode(zlib.compress(packed.tobytes(), 1)).decode("ascii")


def unpack(text: str) -> array[int]:
    """The inverse of ``pack``. Raises ``ProtocolError``."""
    found = array("h")
    try:
        found.frombytes(zlib.decompress(base64.b64decode(text, validate=True), bufsize=2 * BUCKETS))
    except (ValueError, zlib.error) as error:
        raise ProtocolError(f"not a list of pservers by bucket: {error}") from None
    if len(found) != BUCKETS:
        raise ProtocolError(f"a list of pservers by bucket has {len(found)} entries instead of {BUCKETS}")
    return found


@dataclass(frozen=True, slots=True)
class Server:
    """A pserver and where it is reached."""

    number: int
    name: str
    host: str
    port: int
    path: str = ""
    """Unix socket (abstract name) for those on the same host."""
    machine: str = ""
    """Which host it is on, to know whether ``path`` is of use (boot id and network namespace)."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Who holds each bucket. One owner a bucket a version."""

    version: int = 0
    history: int = 1
    """Raised when the parameters were rolled back to a checkpoint: a trainer of an earlier history has to begin anew."""
    servers: tuple[Server, ...] = ()
    """Those that live. Who is not in this list is dead, for everybody."""
    owner: str = ""
    """``pack``ed. ``NOBODY``: the bucket waits to be restored, or the job for its first pservers."""
    backup: str = ""
    """Its copy in step (or to be again, see ``unsynced``); ``NOBODY``: there is none."""
    joining: str = ""
    """Who is being given a copy: the next owner or the next backup."""
    unsynced: str = ""
    """1 where the backup has lost step with the owner: it counts for nothing until the owner has copied it anew."""


@dataclass(frozen=True, slots=True)
class Member:
    """A trainer of the membership epoch."""

    number: int
    name: str
    """``node/slot``."""
    step: int = 0
    """The step it began with."""


@dataclass(frozen=True, slots=True)
class LrHold:
    """From this step on, the LR of every table (or of one) is the optimizer's times ``factor``."""

    step: int
    factor: float
    table: str = ""


@dataclass(frozen=True, slots=True)
class Cut:
    """A checkpoint under way, or one to begin from."""

    number: int
    phase: str
    """``mark``: note all rows as they are now, without delay. ``write``: write them. ``restore``: load them."""
    run: str = ""
    """Folder, below the checkpoint directory, of the cut to restore."""
    extra: str = ""
    """``write``: what the manifest has to say about trainers: positions and values, as JSON."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Master to pserver: everything that holds now."""

    token: int
    """The Master's fencing token: orders with a smaller one are refused."""
    you: int
    """The number of the pserver that this is said to."""
    chart: Chart
    epoch: int
    """Of the membership."""
    members: tuple[Member, ...]
    training: Training
    tables: tuple[TableSpec, ...]
    lr: tuple[LrHold, ...] = ()
    """By rising step; of the holds that apply to a table the last one with ``step`` at or below a push's counts."""
    cut: Cut | None = None
    revoked: tuple[int, ...] = ()
    """Trainers that are gone but may still have a push under way: refuse them."""
    drain: bool = False
    """The pserver leaves: others take its buckets; it ends when it has none (``Orders`` then has it not in servers)."""


# --- pserver to Master -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First word on a line, and again on each new one."""

    name: str
    history: int
    version: int
    """Of the newest orders that it has followed; 0: none, it is empty."""
    holds: str
    """``pack``ed: per bucket 0 nothing, 1 as owner, 2 as copy in step, 3 as copy not in step."""
    most_bytes: int
    """Memory that its rows may take."""


@dataclass(frozen=True, slots=True)
class Followed:
    """Orders of this version are carried out as far as it is up to this pserver alone."""

    version: int


@dataclass(frozen=True, slots=True)
class Synced:
    """The owner says: ``follower`` has all of these buckets, and every push waits for it from now on."""

    version: int
    follower: int
    buckets: tuple[tuple[int, int], ...]
    """Half-open ranges."""


@dataclass(frozen=True, slots=True)
class Unsynced:
    """The owner says: the line to ``follower`` broke. Until orders take it out of step or away, no push is
    acknowledged that it should have."""

    version: int
    follower: int


@dataclass(frozen=True, slots=True)
class TrainerLost:
    """A trainer's connection broke without a farewell."""

    trainer: int


@dataclass(frozen=True, slots=True)
class CutDone:
    """A phase of a cut is done here, or cannot be (``failed``)."""

    number: int
    phase: str
    failed: str = ""
    told: str = ""
    """JSON: what was written or restored (files, rows, bytes, seconds)."""


@dataclass(frozen=True, slots=True)
class Load:
    """Now and then: what this pserver does. All counts since its start, except ``rows`` and ``bytes``."""

    rows: int
    bytes: int
    most_bytes: int
    pulls: int
    pushes: int
    keys: int
    top_step: int
    """The highest step that a push has had."""
    lag_s: float
    """How far copies are behind, at most."""
    hot: tuple[tuple[int, int], ...] = ()
    """(bucket, keys served since the last word) of those with the most, at most 16."""
    damaged: int = 0
    """Gradients skipped or clipped because of NaN or an infinity."""
    text: str = ""
    """What a person should know: memory nearly full, for example."""


# --- trainer to Master, over the desk --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """A trainer begins, or asks again. ``nonce``: drawn once by each process; the same nonce gets the same number."""

    nonce: str
    tables: tuple[TableSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Begin:
    """The trainer counts in the membership from now on (sync: others wait for its pushes)."""

    number: int


@dataclass(frozen=True, slots=True)
class Leave:
    """It has no more to do: nobody waits for it."""

    number: int


@dataclass(frozen=True, slots=True)
class ChartPlease:
    """Whatever is newer than ``version``."""

    version: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """A pserver cannot be reached: have a look."""

    server: int
    why: str


@dataclass(frozen=True, slots=True)
class SetLr:
    """From ``step`` on (0: as soon as everybody can)."""

    number: int
    hold: LrHold


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint, please. Answered with ``Saved`` or ``Refused`` of the same ``ask``."""

    ask: int


@dataclass(frozen=True, slots=True)
class AtCut:
    """The trainer has come to a boundary: all it has pushed is acknowledged, its data positions are told."""

    cut: int
    step: int
    value: str = ""
    """What the script wants back after a restore, as JSON."""


@dataclass(frozen=True, slots=True)
class DataNamed:
    """The trainer that was asked to has named the data positions after the cut. ``ledgers``: by data set, the position
    itself, for the manifest."""

    cut: int
    ledgers: tuple[tuple[str, str], ...]


# --- Master to trainer -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """The answer to ``Join``, as soon as every bucket has an owner."""

    number: int
    token: int
    chart: Chart
    epoch: int
    members: tuple[Member, ...]
    training: Training
    tables: tuple[TableSpec, ...]
    step: int
    """Where to begin: the step of those that train, or of the restored checkpoint."""
    restored: str = ""
    """The checkpoint that the parameters come from, and what it says of trainers, as JSON; empty: none."""


@dataclass(frozen=True, slots=True)
class Charted:
    """The chart or the membership has changed."""

    token: int
    chart: Chart
    epoch: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Halt:
    """Stop at the next boundary for this cut, and say ``AtCut``."""

    cut: int


@dataclass(frozen=True, slots=True)
class NameData:
    """To one trainer: all have stopped; name the data positions ``cut-<number>`` and say ``DataNamed``."""

    cut: int


@dataclass(frozen=True, slots=True)
class GoOn:
    """The cut is marked, or given up: train on."""

    cut: int


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint that was asked for is complete. ``run``: its folder."""

    ask: int
    cut: int
    run: str


@dataclass(frozen=True, slots=True)
class Refused:
    """``kind``: ``table`` (differs), ``stale`` (number or history is gone: begin anew), ``save``, ``word``."""

    kind: str
    text: str
    ask: int = 0


Word = TypeVar("Word")
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Orders, Hello, Followed, Synced, Unsynced, TrainerLost, CutDone, Load),
        *(Join, Begin, Leave, ChartPlease, Suspect, SetLr, Save, AtCut, DataNamed),
        *(Joined, Charted, Halt, NameData, GoOn, Saved, Refused),
    )
}


def encode(word: Any) -> str:
    """A word as JSON text."""
    return json.dumps({"word": type(word).__name__, **to_plain(word)}, separators=(",", ":"))


def decode(text: str) -> Any:
    """The inverse of ``encode``. Raises ``ProtocolError`` naming what does not fit."""
    try:
        plain = json.loads(text)
        kind = _KINDS[plain.pop("word")]
        return from_plain(kind, plain)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ProtocolError(f"not a word of the parameter servers ({error!r}): {text[:80]!r}") from None
