"""Click data in Criteo's format: how it is read, what the models get of it, and how good a model is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMBERS = tuple(f"I{n}" for n in range(1, 14))
CATEGORIES = tuple(f"C{n}" for n in range(1, 27))
NAMES = ("label", *NUMBERS, *CATEGORIES)
FIELDS = len(NUMBERS) + len(CATEGORIES)
CROSSED = ((4, 5), (4, 13), (5, 13), (5, 22), (13, 16), (13, 24), (16, 22))
"""Pairs of categories that the wide part of Wide&Deep sees together."""
READING: dict[str, Any] = {
    "delimiter": "\t",
    "quote": "",
    "header": False,
    "names": NAMES,
    "types": {"label": "float32", **dict.fromkeys(NUMBERS, "float32"), **dict.fromkeys(CATEGORIES, "string")},
}
"""Options of the data service for files as Criteo publishes them (train.txt) and as generate.py writes them."""

Array = NDArray[Any]


def features(columns: Mapping[str, Any]) -> dict[str, Array]:
    """Of columns as they are in the files: ``label`` float32[n]; ``numbers`` float32[n, 13], about -1 .. 1, 0 where
    missing; ``keys`` int64[n, 39], one key for each (field, value); ``crossed`` int64[n, 7]. Data that have been
    prepared stay as they are."""
    if "keys" in columns:
        return dict(columns)
    raw = np.stack([np.asarray(columns[name], np.float64) for name in NUMBERS], axis=1)
    known = np.nan_to_num(raw)
    logs = np.log1p(np.maximum(known, 0))
    steps = np.where(known > 2, np.floor(logs**2), known).astype(np.int64)
    texts = np.where(np.isnan(raw), np.int64(1 << 40), steps).view(np.uint64)
    categories = np.stack([_hashed(columns[name]) for name in CATEGORIES], axis=1)
    keys = mixed(np.concatenate([texts, categories], axis=1) + FIELD_SEEDS)
    crossed = [mixed(keys[:, 13 + one] + mixed(keys[:, 13 + other])) for one, other in CROSSED]
    return {
        "label": np.asarray(columns["label"], np.float32),
        "numbers": (0.25 * logs).astype(np.float32),
        "keys": keys.view(np.int64),
        "crossed": np.stack(crossed, axis=1).view(np.int64),
    }


def mixed(words: Array) -> Array:
    """splitmix64: each bit of the result depends on all bits of a word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


FIELD_SEEDS = mixed(np.arange(1, FIELDS + 1, dtype=np.uint64) << np.uint64(32))
"""So that the same text in two fields is not the same key."""


def _hashed(texts: Any) -> Array:
    """64 bits of each text (FNV-1a, all texts at once, byte by byte). A missing one is like an empty one."""
    plain = np.asarray(["" if text is None else text for text in texts], dtype=np.bytes_)
    letters = np.ascontiguousarray(plain).view(np.uint8).reshape(len(plain), -1)
    found = np.full(len(plain), 0xCBF29CE484222325, np.uint64)
    for letter in letters.T:
        found = np.where(letter > 0, (found ^ letter) * np.uint64(0x100000001B3), found)
    return found


def read(path: str, batch_size: int) -> Iterator[dict[str, Array]]:
    """Batches of one file, in its order, raw or prepared. For the held-out set."""
    from data_service.formats import open_reader
    from data_service.formats.arrays import to_numpy
    from data_service.formats.options import FormatOptions
    from data_service.scan import scan

    raw = is_raw(path)
    options = FormatOptions.of(READING) if raw else FormatOptions()
    manifest = scan([path], "csv" if raw else None, options=options)
    reader = open_reader(manifest.format, options=options)
    try:
        for index in range(len(manifest)):
            columns = to_numpy(reader.read(manifest.ref(index)))
            count = len(columns["label"])
            for begin in range(0, count, batch_size):
                yield features({name: array[begin : begin + batch_size] for name, array in columns.items()})
    finally:
        reader.close()


def is_raw(path: str) -> bool:
    """Whether these files are as Criteo publishes them, and not prepared (see prepare.py)."""
    return not path.endswith(".arrow")


def auc(scores: Array, labels: Array) -> float:
    """The probability that a random click has a higher score than a random non-click; ties count half.

    From the sum of the clicks' ranks (Mann-Whitney).
    """
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]]
    group = np.cumsum(first) - 1
    begins = np.flatnonzero(first)
    ends = np.r_[begins[1:], len(scores)]
    ranks = ((begins + ends + 1) / 2)[group]  # of equal scores: their mean, from 1
    clicks = labels[order] > 0.5
    count = int(clicks.sum())
    others = len(labels) - count
    if not count or not others:
        raise ValueError("an AUC needs clicks and non-clicks")
    return float((ranks[clicks].sum() - count * (count + 1) / 2) / (count * others))
