"""Indexes to test with, a fixed series of changes, and what an index must hold after so many of them."""

from pathlib import Path

import numpy as np

from deployments.evidence.index import Index

DIMENSIONS = 4
Known = tuple[str, bytes, np.ndarray]  # group, value, rows


def vectors(seed: int, rows: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, DIMENSIONS)).astype(np.float32)


def open_index(path: Path, model: str = "m") -> Index:
    return Index(path, DIMENSIONS, model)


def change(index: Index, number: int) -> None:
    """The changes that the process which is killed makes, one after another."""
    if number % 5 == 4:
        index.delete(f"k{number % 7}")
    else:
        index.put(f"k{number % 7}", b"%d" % number * (1 + number % 50), vectors(number, number % 4), str(number % 2))


def expected(changes: int) -> dict[str, Known]:
    """What is in the index after so many."""
    model: dict[str, Known] = {}
    for number in range(changes):
        key = f"k{number % 7}"
        model.pop(key, None)
        if number % 5 != 4:
            model[key] = (str(number % 2), b"%d" % number * (1 + number % 50), vectors(number, number % 4))
    return model


def holds(index: Index, model: dict[str, Known]) -> bool:
    if index.items() != [(group, key) for key, (group, _, _) in model.items()]:
        return False
    for key, (_, value, rows) in model.items():
        held = index.get(key)
        if held is None or held[0] != value or not np.array_equal(held[1], rows):
            return False
    return True
