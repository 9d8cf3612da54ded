"""Write the digits that come with scikit-learn as Parquet files, for train_torch.py and train_paddle.py."""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from sklearn.datasets import load_digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/data-service/digits"))
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--copies", type=int, default=10, help="how many times each image is written, slightly changed")
    options = parser.parse_args()
    digits = load_digits()
    images = np.tile(digits.images.reshape(-1, 64) / 16, (options.copies, 1)).astype(np.float32)
    images += np.random.default_rng(0).normal(0, 0.02, images.shape).astype(np.float32)
    labels = np.tile(digits.target, options.copies).astype(np.int64)
    options.folder.mkdir(parents=True, exist_ok=True)
    for number in range(options.files):
        part = slice(number, None, options.files)
        pixels = pa.FixedSizeListArray.from_arrays(pa.array(images[part].reshape(-1)), 64)
        table = pa.table({"image": pixels, "label": labels[part], "number": np.arange(len(labels))[part]})
        pyarrow.parquet.write_table(table, options.folder / f"part-{number}.parquet", row_group_size=250)
    print(f"{len(labels)} records in {options.files} files below {options.folder}")


if __name__ == "__main__":
    main()
