"""Turn click data into what the models get, once: Arrow files that are mapped into memory, for many epochs or trainers.

Training reads the raw files as well; this saves it the parsing and hashing.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
from clicks import read

from data_service.formats.arrays import from_numpy

BATCH = 16384


def prepare(source: Path, target: Path) -> int:
    """Write ``target`` from one raw file. Returns the number of records."""
    writing, writer, count = target.with_suffix(".tmp"), None, 0
    with pa.OSFile(str(writing), "wb") as sink:
        for batch in read(str(source), BATCH):
            arrays = {name: from_numpy(np.ascontiguousarray(array)) for name, array in batch.items()}
            records = pa.record_batch(list(arrays.values()), names=list(arrays))
            if writer is None:
                writer = pa.ipc.new_file(sink, records.schema)
            writer.write_batch(records)
            count += len(records)
        if writer is not None:
            writer.close()
    writing.rename(target)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="as Criteo publishes them, or as generate.py writes them")
    parser.add_argument("--folder", type=Path, help="where to write (default: beside each file)")
    options = parser.parse_args()
    for source in options.files:
        folder = options.folder or source.parent
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / (source.stem + ".arrow")
        print(f"{target}: {prepare(source, target)} records", flush=True)


if __name__ == "__main__":
    main()
