"""What a table is: its shape, its optimizer, how rows begin, which keys get one, which lose it.

Frozen and checked when made; a bad value raises ``SettingError`` with its name, its value and what is allowed. Trainers
define tables; the first definition counts, and another one of the same name is refused with the difference.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from edl.errors import SettingError

BUCKETS = 4096
"""Virtual buckets that all keys of all tables fall into: the units of placement. Never changes."""
MOST_DIM = 4096
MOST_TABLES = 256


class Rule(enum.Enum):
    """How a row follows its gradients. ``slots`` of float32 per weight, or per row, lie beside the weights."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAGRAD = "adagrad"
    ROW_ADAGRAD = "row-adagrad"
    """One accumulator a row: the mean of the squared gradients."""
    ADAM = "adam"
    """Lazy: a row's moments move only when it gets a gradient; bias correction by the row's own count of updates."""
    FTRL = "ftrl"
    ADD = "add"
    """Adds what is pushed, whatever the learning rate. For counters and differences."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A rule and its numbers. Those that the rule does not use are ignored."""

    rule: Rule = Rule.SGD
    lr: float = 0.01
    momentum: float = 0.9
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    initial_accumulator: float = 0.0
    """Adagrad, row-wise Adagrad, FTRL: where the sum of squares begins."""
    l1: float = 0.0
    """FTRL only."""
    l2: float = 0.0
    """FTRL only."""
    lr_power: float = -0.5
    """FTRL only: at most 0."""
    weight_decay: float = 0.0
    """Added to the gradient as ``weight_decay * weight`` (coupled), with each update of a row."""
    clip_value: float = 0.0
    """Each element of a row's summed gradient is cut to ``-clip_value .. clip_value``; 0: no."""
    clip_norm: float = 0.0
    """A row's summed gradient longer than this is shortened to it; 0: no."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "initial_accumulator", "l1", "l2", "weight_decay", "clip_value", "clip_norm"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise SettingError(name, f"{value:g}", "must be 0 or more, and finite")
        for name in ("momentum", "beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise SettingError(name, f"{value:g}", "must be at least 0 and below 1")
        if not -10 <= self.lr_power <= 0:
            raise SettingError("lr_power", f"{self.lr_power:g}", "must be from -10 to 0")


class Start(enum.Enum):
    """How a row that nobody has written begins."""

    ZEROS = "zeros"
    CONSTANT = "constant"
    UNIFORM = "uniform"
    """``-scale .. scale``."""
    NORMAL = "normal"
    """Mean 0, standard deviation ``scale``."""


@dataclass(frozen=True, slots=True)
class Initial:
    """A row's first weights, a function of (seed, key, column) only: the same on any pserver, at any time."""

    start: Start = Start.UNIFORM
    scale: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise SettingError("scale", f"{self.scale:g}", "must be finite")
        if not 0 <= self.seed < 1 << 62:
            raise SettingError("seed", self.seed, "must be at least 0 and below 2**62")


@dataclass(frozen=True, slots=True)
class Admission:
    """Which keys get a row. Others are answered with their first weights, and gradients for them are dropped."""

    count: int = 1
    """Occurrences (duplicates in one pull count each) after which a key gets a row; see ``ps/store/admission.py``."""
    probability: float = 1.0
    """Chance that an occurrence of an unknown key gives it a row; by a hash of (key, occurrence), not drawn."""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 1 << 20:
            raise SettingError("count", self.count, f"must be from 1 to {1 << 20}")
        if not 0 < self.probability <= 1:
            raise SettingError("probability", f"{self.probability:g}", "must be more than 0 and at most 1")
        if self.count > 1 and self.probability < 1:
            raise SettingError("probability", f"{self.probability:g}", f"goes not together with count={self.count}")


@dataclass(frozen=True, slots=True)
class Eviction:
    """Which rows go. All zero: none."""

    unseen_steps: int = 0
    """Rows that no trainer has pulled or pushed for so many steps go; 0: none."""
    most_rows: int = 0
    """Hard cap over all pservers; the least recently seen go first, of those the least frequent; 0: no cap."""
    least_rows: int = 0
    """So many rows stay, whatever ``unseen_steps`` says (over all pservers)."""
    export: bool = False
    """Evicted rows are written to the checkpoint directory, below ``evicted/``."""

    def __post_init__(self) -> None:
        for name in ("unseen_steps", "most_rows", "least_rows"):
            if not 0 <= getattr(self, name) < 1 << 60:
                raise SettingError(name, getattr(self, name), "must be 0 or more")
        if self.most_rows and self.least_rows > self.most_rows:
            raise SettingError("least_rows", self.least_rows, f"is above most_rows={self.most_rows}")

    @property
    def any(self) -> bool:
        """Whether rows can be evicted at all."""
        return bool(self.unseen_steps or self.most_rows)


class Damaged(enum.Enum):
    """What becomes of a gradient that holds NaN or an infinity, or that its rule cannot square
    (``ps/store/damage.py``)."""

    REFUSE = "refuse"
    """The push is refused, naming table and key; nothing of it is applied on any pserver."""
    SKIP = "skip"
    """Rows with such a gradient are left as they are, and counted."""
    CLIP = "clip"
    """NaN counts as 0, what is too large as the largest sound number (then ``clip_value`` and ``clip_norm`` hold)."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table. Its rows are float32; keys are int64, any value."""

    name: str
    dim: int
    """Weights in a row, 1 .. 4096."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    initial: Initial = field(default_factory=Initial)
    admission: Admission = field(default_factory=Admission)
    eviction: Eviction = field(default_factory=Eviction)
    damaged: Damaged = Damaged.REFUSE
    dense: bool = False
    """Rows are blocks of dense parameters: keys ``0 .. rows-1``, never evicted, first values given by a trainer."""
    rows: int = 0
    """Of a dense table; 0 for a sparse one."""

    def __post_init__(self) -> None:
        good = 0 < len(self.name) <= 100 and self.name.isascii()
        if not good or not all(one.isalnum() or one in "._-" for one in self.name):
            raise SettingError("table", repr(self.name), "needs 1 to 100 letters, digits, dots, dashes, underscores")
        if type(self.dim) is not int or not 1 <= self.dim <= MOST_DIM:
            raise SettingError(f"dim of table {self.name}", self.dim, f"must be from 1 to {MOST_DIM}")
        if self.dense != bool(self.rows) or self.rows < 0:
            raise SettingError(f"rows of table {self.name}", self.rows, "a dense table has rows, a sparse one has 0")
        if self.dense and (self.eviction.any or self.admission != Admission()):
            raise SettingError(f"table {self.name}", "dense", "has neither admission nor eviction")
        if self.dense and self.optimizer.rule is Rule.ROW_ADAGRAD:
            raise SettingError(f"optimizer of table {self.name}", "row-adagrad", "is for sparse tables")

    def difference(self, other: TableSpec) -> str:
        """``dim 16 here, 8 there``; empty when both are the same table. The learning rate may differ."""
        from edl.wire.json_messages import to_plain

        def flat(value: object, prefix: str = "") -> dict[str, object]:
            if not isinstance(value, dict):
                return {prefix: value}
            return {k: v for name, item in value.items() for k, v in flat(item, f"{prefix}.{name}".strip(".")).items()}

        mine, theirs = flat(to_plain(self)), flat(to_plain(other))
        names = [name for name in mine if mine[name] != theirs[name] and name != "optimizer.lr"]
        return "; ".join(f"{name} {mine[name]} here, {theirs[name]} there" for name in names)


def differences(saved: Iterable[TableSpec], wanted: Iterable[TableSpec]) -> str:
    """Why a checkpoint is another model's, table by table; empty when it is not.

    Tables that were added are no difference, and neither are tables that are gone. One that is gone while another one
    is new has probably got another name, and its rows would be lost.
    """
    mine, theirs = {one.name: one for one in wanted}, {one.name: one for one in saved}
    lines = []
    for name in sorted(mine.keys() & theirs.keys()):
        difference = mine[name].difference(theirs[name])
        if difference:
            lines.append(f"table {name}: {difference} (here: the script, there: the checkpoint)")
    new, gone = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    if new and gone:
        lines += [f"table {name}: in the script, not in the checkpoint" for name in new]
        lines += [f"table {name}: in the checkpoint, not in the script" for name in gone]
    return "\n".join(lines)
