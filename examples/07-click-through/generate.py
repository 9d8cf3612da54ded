"""Write made-up clicks in the format of Criteo's display advertising data: tab separated, no header; a label, 13 whole
numbers, 26 categories in hexadecimal, any of them may be missing.

Few values of a category are frequent and most are rare, as in real ones. Whether an advertisement is clicked follows
from single values and from pairs of them, so that a model of pairs is better than one without.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

SIZES = (1460, 583, 90000, 40000, 305, 24, 12517, 633, 3, 30000, 5683, 80000, 3194, 27, 14992, 60000, 10, 5652, 2173, 4,
         70000, 18, 15, 50000, 105, 20000)  # fmt: skip
"""Values that a category has: those of Criteo's, the longest ones cut."""
MISSING = {2: 0.03, 3: 0.03, 5: 0.12, 18: 0.44, 19: 0.44, 21: 0.76, 24: 0.44, 25: 0.44}
"""Share of records without a value, by category."""
NUMBERS_MISSING = (0.45, 0.0, 0.21, 0.22, 0.03, 0.22, 0.04, 0.0, 0.04, 0.45, 0.04, 0.76, 0.22)
PAIRED = (4, 5, 8, 13, 16, 22, 24)
"""Categories whose values matter in pairs."""
SKEW = 1.1
FACTORS = 2
ALONE = (0.8, 0.4)
"""What each factor of a value does without a partner."""

Array = NDArray[Any]


class World:
    """What is behind the clicks. The same for the same seed."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng([seed, 0])
        self.cumulated = []
        """By category: how probable the first values are together, the most frequent first."""
        self.names = []
        """By category: how each value is written."""
        for size in SIZES:
            weight = 1.0 / np.arange(1, size + 1) ** SKEW
            self.cumulated.append(np.cumsum(weight) / weight.sum())
            codes = draw.integers(0, 1 << 32, size, dtype=np.uint64)
            self.names.append(np.array([f"{code:08x}" for code in codes], dtype=object))
        self.single = [draw.normal(0, 0.25, size) for size in SIZES]
        self.factors = {field: draw.normal(0, 0.5, (SIZES[field], FACTORS)) for field in PAIRED}
        for field, factors in self.factors.items():
            self.single[field] = factors @ np.array(ALONE)
        self.slopes = draw.normal(0, 0.1, 13)
        self.scales = draw.uniform(0.5, 4.0, 13)

    def records(self, count: int, seed: int, part: int) -> pa.Table:
        """Records of one file."""
        draw = np.random.default_rng([seed, 1 + part])
        values = [np.searchsorted(each, draw.random(count)) for each in self.cumulated]
        numbers = [np.floor(np.exp(draw.normal(scale, 1.2, count))) - (index == 1)
                   for index, scale in enumerate(self.scales)]  # fmt: skip
        logit = np.full(count, -1.5)
        columns: list[pa.Array] = []
        for index, number in enumerate(numbers):
            missing = draw.random(count) < NUMBERS_MISSING[index]
            effect = self.slopes[index] * (np.log1p(np.maximum(number, 0)) - self.scales[index])
            logit += np.where(missing, 0.0, effect)
            columns.append(pa.array(number.astype(np.int64), mask=missing))
        together = np.zeros((count, FACTORS))
        apart = np.zeros(count)
        for field, value in enumerate(values):
            missing = draw.random(count) < MISSING.get(field, 0.0)
            logit += np.where(missing, 0.0, self.single[field][value])
            if field in PAIRED:
                factors = np.where(missing[:, None], 0.0, self.factors[field][value])
                together += factors
                apart += (factors**2).sum(axis=1)
            columns.append(pa.array(self.names[field][value], pa.string(), mask=missing))
        logit += 0.5 * ((together**2).sum(axis=1) - apart)  # the sum over all pairs of their products
        label = (draw.random(count) < 1 / (1 + np.exp(-logit))).astype(np.int64)
        names = ["label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]
        return pa.table([pa.array(label), *columns], names=names)


def write(folder: Path, rows: int, held_out: int, files: int, seed: int) -> None:
    """``files`` files ``train-<n>.tsv`` with ``rows`` records together, and ``test.tsv``."""
    folder.mkdir(parents=True, exist_ok=True)
    world = World(seed)
    plain = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    for part in range(files):
        count = rows // files + (part < rows % files)
        pyarrow.csv.write_csv(world.records(count, seed, part), folder / f"train-{part}.tsv", plain)
    pyarrow.csv.write_csv(world.records(held_out, seed, 1_000_000), folder / "test.tsv", plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/clicks"))
    parser.add_argument("--rows", type=int, default=400_000, help="to train on")
    parser.add_argument("--held-out", type=int, default=100_000, help="to measure on")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.folder, options.rows, options.held_out, options.files, options.seed)
    print(f"{options.rows} records in {options.files} files and {options.held_out} in test.tsv, in {options.folder}")


if __name__ == "__main__":
    main()
