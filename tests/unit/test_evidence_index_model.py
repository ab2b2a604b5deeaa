"""The index equals a dict, through restarts and crashes."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deployments.evidence import index as index_module
from tests.unit.evidence_index_cases import Known, open_index, vectors

KEYS = st.sampled_from(["a", "b", "c", "Ö/x.md"])
GROUPS = st.sampled_from(["", "one", "two"])


class EqualsDict(RuleBasedStateMachine):
    """Puts, deletes, restarts, and crashes in the middle of the last change."""

    @initialize()
    def begin(self) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.compact_bytes, index_module.COMPACT_BYTES = index_module.COMPACT_BYTES, 600
        self.index = open_index(self.path)
        self.model: dict[str, Known] = {}
        self.before: tuple[Path, int, dict[str, Known]] | None = None

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.index.close()
            index_module.COMPACT_BYTES = self.compact_bytes
            shutil.rmtree(self.path)

    def log(self) -> Path:
        (log,) = self.path.glob("records-*.log")
        return log

    def changing(self) -> None:
        self.before = (self.log(), self.log().stat().st_size, dict(self.model))

    @rule(key=KEYS, group=GROUPS, value=st.binary(max_size=90), seed=st.integers(0, 999), rows=st.integers(0, 3))
    def put(self, key: str, group: str, value: bytes, seed: int, rows: int) -> None:
        self.changing()
        self.index.put(key, value, vectors(seed, rows), group)
        self.model.pop(key, None)
        self.model[key] = (group, value, vectors(seed, rows))

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.changing()
        assert self.index.delete(key) == (key in self.model)
        self.model.pop(key, None)

    @rule()
    def restart(self) -> None:
        self.index.close()
        self.index = open_index(self.path)
        self.before = None

    @precondition(lambda self: self.before is not None)
    @rule(part=st.floats(0, 1, exclude_max=True), rubbish=st.binary(max_size=40))
    def crash(self, part: float, rubbish: bytes) -> None:
        """The last record is cut somewhere, and the disk may hold anything behind the cut."""
        log, size, model = self.before or (Path(), 0, {})
        self.index.close()
        if log == self.log() and log.stat().st_size > size:
            cut = size + int(part * (log.stat().st_size - size))
            os.truncate(log, cut)
            with log.open("ab") as file:
                file.write(rubbish)
            self.model = model
        self.index = open_index(self.path)
        self.before = None

    @rule(seed=st.integers(0, 999), group=GROUPS, most=st.integers(1, 5))
    def search(self, seed: int, group: str, most: int) -> None:
        query = vectors(seed, 1)[0]
        expected = [
            (float(row @ query), key, place)
            for key, (its, _, rows) in self.model.items()
            if its == group
            for place, row in enumerate(rows)
        ]
        hits = self.index.search(query, group, most)
        assert len(hits) == min(most, len(expected))
        best = sorted((similarity for similarity, _, _ in expected), reverse=True)[:most]
        np.testing.assert_allclose([hit.similarity for hit in hits], best, rtol=1e-5, atol=1e-5)
        for hit in hits:
            its, value, rows = self.model[hit.key]
            assert (its, value) == (group, hit.value)
            assert hit.similarity == pytest.approx(float(rows[hit.row] @ query), rel=1e-5, abs=1e-5)

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "index"):
            return
        assert self.index.items() == [(group, key) for key, (group, _, _) in self.model.items()]
        assert self.index.rows == sum(len(rows) for _, _, rows in self.model.values())
        for key, (_, value, rows) in self.model.items():
            held = self.index.get(key)
            assert held is not None
            assert held[0] == value
            np.testing.assert_array_equal(held[1], rows)


TestEqualsDict = EqualsDict.TestCase
TestEqualsDict.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
