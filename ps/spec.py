"""The definition of a table: its shape, optimizer, initial values, admission and eviction of rows.

The classes are frozen and validated; an invalid value raises ``SettingError`` with its name, its value and what is
allowed. Trainers define tables; the first definition counts, and a different one of the same name is refused with the
difference.
"""

from __future__ import annotations

import enum
import itertools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

from edl.errors import SettingError

BUCKETS = 4096
"""Number of hash partitions of all keys, the units of placement. Never changes."""
MOST_DIM = 4096
MOST_TABLES = 256


def _number(owner: object, *names: str) -> None:
    """Make these fields of a frozen instance floats, also where they are integers or numpy's. Raises
    ``SettingError``."""
    for name in names:
        value = getattr(owner, name)
        try:
            object.__setattr__(owner, name, float(value))
        except (TypeError, ValueError):
            raise SettingError(name, repr(value), "must be a number") from None


def _whole(owner: object, *names: str, of: str = "") -> None:
    """Make these fields of a frozen instance integers, also where they are numpy's. Raises ``SettingError``. ``of``:
    whose fields they are, for the error."""
    for name in names:
        value = getattr(owner, name)
        try:
            object.__setattr__(owner, name, operator.index(value))
        except TypeError:
            raise SettingError(f"{name}{of}", repr(value), "must be an integer") from None


class UpdateRule(enum.Enum):
    """Update rules. Each keeps a number of float32 state values per weight or per row."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAGRAD = "adagrad"
    ROW_ADAGRAD = "row-adagrad"
    """One accumulator per row: the mean of the squared gradients."""
    ADAM = "adam"
    """Lazy: a row's moments are only updated when it gets a gradient; bias correction uses the row's own update
    count."""
    FTRL = "ftrl"
    ADD = "add"
    """Adds the pushed values, ignoring the learning rate. For counters and differences."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An update rule with its hyperparameters. Those that the rule does not use are ignored. Raises
    ``SettingError``."""

    rule: UpdateRule = UpdateRule.SGD
    lr: float = 0.01
    momentum: float = 0.9
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    initial_accumulator: float = 0.0
    """Adagrad, row-wise Adagrad and FTRL: initial value of the sum of squares."""
    l1: float = 0.0
    """L1 regularisation; FTRL only."""
    l2: float = 0.0
    """L2 regularisation; FTRL only."""
    lr_power: float = -0.5
    """FTRL only: -10 to 0."""
    weight_decay: float = 0.0
    """Coupled weight decay: ``weight_decay * weight`` is added to the gradient at each update of a row."""
    clip_value: float = 0.0
    """Each element of a row's summed gradient is clipped to ``-clip_value .. clip_value``; 0: no clipping."""
    clip_norm: float = 0.0
    """A row's summed gradient is scaled down to this norm if it is longer; 0: no clipping."""

    def __post_init__(self) -> None:
        least_0 = ("lr", "eps", "initial_accumulator", "l1", "l2", "weight_decay", "clip_value", "clip_norm")
        _number(self, *least_0, "momentum", "beta1", "beta2", "lr_power")
        for name in least_0:
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise SettingError(name, f"{value:g}", "must be 0 or more, and finite")
        for name in ("momentum", "beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise SettingError(name, f"{value:g}", "must be at least 0 and below 1")
        if not -10 <= self.lr_power <= 0:
            raise SettingError("lr_power", f"{self.lr_power:g}", "must be from -10 to 0")
        if self.rule is UpdateRule.FTRL and not self.lr:
            raise SettingError("lr", "0", "must be more than 0 for FTRL", "set_lr may set it to 0 for a while")


class InitMethod(enum.Enum):
    """How a new row's initial weights are chosen; ``scale`` is that of ``Initial``."""

    ZEROS = "zeros"
    CONSTANT = "constant"
    UNIFORM = "uniform"
    """Uniform in ``-scale .. scale``."""
    NORMAL = "normal"
    """Normal with mean 0 and standard deviation ``scale``."""


@dataclass(frozen=True, slots=True)
class Initial:
    """A row's initial weights: a function of (seed, key, column) only, so the same on any pserver at any time.
    ``seed``: 0 .. 2**62 - 1."""

    start: InitMethod = InitMethod.UNIFORM
    scale: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        _number(self, "scale")
        _whole(self, "seed")
        if not math.isfinite(self.scale):
            raise SettingError("scale", f"{self.scale:g}", "must be finite")
        if not 0 <= self.seed < 1 << 62:
            raise SettingError("seed", self.seed, "must be at least 0 and below 2**62")


@dataclass(frozen=True, slots=True)
class Admission:
    """Rule by which a key gets a row. Other keys are answered with their initial weights; gradients for them are
    dropped."""

    count: int = 1
    """Occurrences after which a key gets a row, 1 .. 2**20; duplicates in one pull each count. See
    ``ps/store/admission.py``."""
    probability: float = 1.0
    """Probability that an occurrence of an unknown key creates its row, above 0 and at most 1; derived from a hash of
    (key, occurrence)."""

    def __post_init__(self) -> None:
        _number(self, "probability")
        _whole(self, "count")
        if not 1 <= self.count <= 1 << 20:
            raise SettingError("count", self.count, f"must be from 1 to {1 << 20}")
        if not 0 < self.probability <= 1:
            raise SettingError("probability", f"{self.probability:g}", "must be more than 0 and at most 1")
        if self.count > 1 and self.probability < 1:
            raise SettingError("probability", f"{self.probability:g}", f"cannot be combined with count={self.count}")


@dataclass(frozen=True, slots=True)
class Eviction:
    """Rule by which rows are evicted. All zero: never."""

    unseen_steps: int = 0
    """Evict rows not pulled or pushed for this many steps; 0: never."""
    most_rows: int = 0
    """Hard cap over all pservers; the least recently seen rows go first, among those the least frequent. 0: no cap."""
    least_rows: int = 0
    """This many rows (over all pservers) are kept regardless of ``unseen_steps`` and ``unseen_s``."""
    unseen_s: int = 0
    """Evict rows not pulled or pushed for this many seconds of the job's clock (``ps/store/job_clock.py``), up to
    2**31; 0: never. Instead of ``unseen_steps``."""
    export: bool = False
    """Write evicted rows to the checkpoint directory, below ``evicted/``. Every launcher needs ``--checkpoint-dir``."""

    def __post_init__(self) -> None:
        _whole(self, "unseen_steps", "most_rows", "least_rows", "unseen_s")
        for name in ("unseen_steps", "most_rows", "least_rows"):
            if not 0 <= getattr(self, name) < 1 << 60:
                raise SettingError(name, getattr(self, name), "must be 0 or more")
        if not 0 <= self.unseen_s <= 1 << 31:
            raise SettingError("unseen_s", self.unseen_s, "must be a whole number of seconds from 0 to 2**31")
        if self.unseen_s and self.unseen_steps:
            raise SettingError("unseen_s", self.unseen_s, f"cannot be combined with unseen_steps={self.unseen_steps}")
        if self.most_rows and self.least_rows > self.most_rows:
            raise SettingError("least_rows", self.least_rows, f"is above most_rows={self.most_rows}")

    @property
    def any(self) -> bool:
        """True if rows can be evicted."""
        return bool(self.unseen_steps or self.unseen_s or self.most_rows)


class WeightFormat(enum.Enum):
    """Number format of the weights on the pservers. Optimizer state is always float32."""

    F4 = "f4"
    F2 = "f2"
    """Half precision: 11 significant bits, up to 65504."""
    BF16 = "bf16"
    """bfloat16: 8 significant bits, the range of float32."""


class Damaged(enum.Enum):
    """Treatment of gradients with NaN, infinities, or values that the rule cannot square (``ps/store/damage.py``)."""

    REFUSE = "refuse"
    """Refuse the push, naming table and key; nothing of it is applied on any pserver."""
    SKIP = "skip"
    """Leave the rows of such gradients unchanged, and count them."""
    CLIP = "clip"
    """Replace NaN by 0 and too large values by the largest valid one; then ``clip_value`` and ``clip_norm`` apply."""


@dataclass(frozen=True, slots=True)
class DenseParameter:
    """Name and shape of one of the arrays in a dense table."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Definition of a table. Rows are float32 for trainers; keys are any int64."""

    name: str
    dim: int
    """Weights per row, 1 .. 4096."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    initial: Initial = field(default_factory=Initial)
    admission: Admission = field(default_factory=Admission)
    eviction: Eviction = field(default_factory=Eviction)
    damaged: Damaged = Damaged.REFUSE
    dense: bool = False
    """True for a table of dense parameters: keys ``0 .. rows-1``, never evicted, initialised by a trainer."""
    rows: int = 0
    """Number of rows of a dense table; 0 for a sparse one."""
    parameters: tuple[DenseParameter, ...] = ()
    """The arrays in a dense table, one after another; empty if they have no names."""
    weights: WeightFormat = WeightFormat.F4
    """In 16 bits, updates are rounded at random (``ps/store/halves.py``), and assigned values to the nearest. Only
    sparse tables, and not with the rule ``ADD``."""

    def __post_init__(self) -> None:
        good = 0 < len(self.name) <= 100 and self.name.isascii()
        if not good or not all(one.isalnum() or one in "._-" for one in self.name):
            raise SettingError("table", repr(self.name), "needs 1 to 100 letters, digits, dots, dashes, underscores")
        _whole(self, "dim", "rows", of=f" of table {self.name}")
        if not 1 <= self.dim <= MOST_DIM:
            raise SettingError(f"dim of table {self.name}", self.dim, f"must be from 1 to {MOST_DIM}")
        if self.dense != bool(self.rows) or self.rows < 0:
            raise SettingError(
                f"rows of table {self.name}", self.rows, "must be positive for a dense table, 0 for a sparse one"
            )
        if self.dense and (self.eviction.any or self.admission != Admission()):
            raise SettingError(f"table {self.name}", "dense", "cannot have admission or eviction")
        if self.weights is not WeightFormat.F4 and (self.dense or self.optimizer.rule is UpdateRule.ADD):
            kind = "a dense table" if self.dense else "the rule add"
            raise SettingError(f"weights of table {self.name}", self.weights.value, f"must be f4 with {kind}")
        if self.dense and self.optimizer.rule is UpdateRule.ROW_ADAGRAD:
            raise SettingError(f"optimizer of table {self.name}", "row-adagrad", "is only for sparse tables")

    def difference(self, other: TableSpec) -> str:
        """``dim 16 here, 8 there``; empty when both are the same table. The learning rate may differ, except with FTRL,
        whose state depends on it."""
        from edl.wire.json_messages import to_plain

        def flat(value: object, prefix: str = "") -> dict[str, object]:
            if not isinstance(value, dict):
                return {prefix: value}
            return {k: v for name, item in value.items() for k, v in flat(item, f"{prefix}.{name}".strip(".")).items()}

        mine, theirs = flat(to_plain(self)), flat(to_plain(other))
        may_differ = {"parameters"} if self.optimizer.rule is UpdateRule.FTRL else {"parameters", "optimizer.lr"}
        names = [name for name in mine if mine[name] != theirs[name] and name not in may_differ]
        found = [f"{name} {mine[name]} here, {theirs[name]} there" for name in names]
        if self.parameters and other.parameters:  # earlier versions of edl wrote no names
            for one, two in itertools.zip_longest(self.parameters, other.parameters):
                if one != two:
                    shown = (f"{it.name} {it.shape}" if it is not None else "none" for it in (one, two))
                    found.append("parameter {} here, {} there".format(*shown))
                    break
        return "; ".join(found)


def differences(saved: Iterable[TableSpec], wanted: Iterable[TableSpec]) -> str:
    """Reasons why a checkpoint belongs to another model, one line each; empty if it fits.

    Added tables are fine, and so are removed ones. But if one is missing while another is new, it has probably been
    renamed, and its rows would be lost.
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
