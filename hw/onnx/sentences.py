"""Texts as vectors: a small sentence encoder in ONNX Runtime, with a cache and a time budget.

A text's vector is the mean over its tokens. That of a *phrase* is the mean over its words' tokens alone, which have read the text
around them: two phrases in the same text can be compared without the text making them similar.

Every text is a run of its own. Activations are quantised by the largest value of a run, so in a batch a text's vector would
depend on its neighbours; and on one core eight texts in a batch take 0.8 of the time of eight runs.
"""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from tokenizers import Tokenizer

from hw.onnx.checkpoint import CheckpointError, Manifest

Vectors = npt.NDArray[np.float32]
Phrase = tuple[str, str, str]  # what comes before, the words that are meant, what comes after
Text = str | Phrase

MAX_TOKENS = 256  # what the model was trained on; longer texts are cut at their end
MAX_CHARACTERS = 16 * MAX_TOKENS  # and before that, so that cutting costs nothing
_PROBES = (8, 32, 96)  # lengths that are timed at the start
_DRIFT = 0.1  # weight of the newest run in how much slower or faster than at the start runs are


class SentenceModel:
    """One ONNX Runtime session over ``folder`` (``scripts/prepare_models`` makes it). Safe to use from several threads.

    ``threads`` are ONNX Runtime's; ``cache`` is how many texts' vectors are kept (1.5 KB each, beside the text).
    """

    def __init__(self, folder: Path, *, threads: int = 1, cache: int = 4096) -> None:
        """Load the model and time it, which takes half a second.

        Raises FileNotFoundError, or :class:`hw.onnx.checkpoint.CheckpointError` where the folder holds something else.
        """
        path = Path(folder) / "model.onnx"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: run scripts/prepare_models")
        self.manifest = Manifest.read(folder)
        if self.manifest.kind != "sentences":
            raise CheckpointError(f"{folder} holds a {self.manifest.kind}, not a sentence model")
        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(min(MAX_TOKENS, self.manifest.max_context))
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = threads
        settings.inter_op_num_threads = 1
        settings.log_severity_level = 3
        settings.add_session_config_entry(
            "session.intra_op.allow_spinning", "0"
        )  # the cores are somebody else's between runs
        self._session = ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        self.dimension = int(self._session.get_outputs()[0].shape[1])
        self._cache: OrderedDict[Text, Vectors] = OrderedDict()
        self._room = cache
        self._lock = threading.Lock()  # of the cache and the timing
        self._per_run, self._per_token, self._drift = 0.0, 0.0, 1.0
        self._time()

    def embed(self, texts: Sequence[Text], budget_s: float = math.inf) -> Vectors:
        """Vectors of length 1 of texts or phrases, ``[n, dimension]`` float32. Rows that are not known within ``budget_s`` are
        NaN, and those of phrases whose words hold no token, or are too far into a text.

        Texts are taken in their order, those in the cache first. A run that would end after the budget, as runs go at the
        moment, is not started.
        """
        began = time.perf_counter()
        rows = np.full((len(texts), self.dimension), np.nan, np.float32)
        missing: dict[Text, list[int]] = {}
        with self._lock:
            for index, text in enumerate(texts):
                known = self._cache.get(text)
                if known is None:
                    missing.setdefault(text, []).append(index)
                else:
                    self._cache.move_to_end(text)
                    rows[index] = known
        for text, places in missing.items():
            left = budget_s - (time.perf_counter() - began)
            if left <= 0:
                break
            ids, pooled = self._encode(text)
            if not pooled.any() or self.cost_s(ids.size) > left:
                continue  # a shorter one may fit
            vector = self._run(ids, pooled)
            rows[places] = vector
            with self._lock:
                self._cache[text] = vector
                while len(self._cache) > self._room:
                    self._cache.popitem(last=False)
        return rows

    def compare(self, pairs: Sequence[tuple[Text, Text]], budget_s: float) -> list[float]:
        """Cosine in [-1, 1] of each pair, in their order; NaN for those not known within ``budget_s``."""
        rows = self.embed([text for pair in pairs for text in pair], budget_s).reshape(len(pairs), 2, self.dimension)
        cosines: list[float] = np.clip(np.einsum("nd,nd->n", rows[:, 0], rows[:, 1]), -1.0, 1.0).tolist()
        return cosines

    def cost_s(self, tokens: int) -> float:
        """Seconds a run over so many tokens takes at present."""
        return self._drift * (self._per_run + self._per_token * tokens)

    def _encode(self, text: Text) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Token ids ``[1, L]`` and which of them count ``[1, L]``."""
        whole = text if isinstance(text, str) else "".join(text)
        encoding = self._tokenizer.encode(whole[:MAX_CHARACTERS])
        ids = np.asarray([encoding.ids], np.int64)
        if isinstance(text, str):
            return ids, np.ones(ids.shape, np.int32)
        start, end = len(text[0]), len(text[0]) + len(text[1])
        inside = [begin < stop and begin < end and stop > start for begin, stop in encoding.offsets]
        return ids, np.asarray([inside], np.int32)

    def _run(self, ids: npt.NDArray[np.int64], pooled: npt.NDArray[np.int32]) -> Vectors:
        began = time.perf_counter()
        vector: Vectors = self._session.run(None, _feeds(ids, pooled))[0][0]
        with self._lock:
            ratio = (time.perf_counter() - began) / max(self._per_run + self._per_token * ids.size, 1e-9)
            self._drift += _DRIFT * (min(ratio, 10.0) - self._drift)
        return vector

    def _time(self) -> None:
        """Fit what a run takes to a line over its tokens."""
        seconds = []
        probes = [min(tokens, self.manifest.max_context) for tokens in _PROBES]
        for tokens in probes:
            batch = np.full((1, tokens), self.manifest.vocab_size // 2, np.int64)
            feeds = _feeds(batch, np.ones(batch.shape, np.int32))
            took = []
            for _ in range(4):
                began = time.perf_counter()
                self._session.run(None, feeds)
                took.append(time.perf_counter() - began)
            seconds.append(min(took))  # the least disturbed one; drift follows what is normal here
        slope, base = np.polyfit(probes, seconds, 1).tolist()
        self._per_token, self._per_run = max(slope, 0.0), max(base, 0.0)


def _feeds(ids: npt.NDArray[np.int64], pooled: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[np.integer]]:
    return {"input_ids": ids, "attention_mask": np.ones(ids.shape, np.int32), "pooled": pooled}
