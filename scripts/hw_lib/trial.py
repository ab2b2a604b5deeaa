"""The real draft on one provider, beside the same draft on the CPU provider: cost, agreement, KV."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from hw.onnx.session import OnnxModel
from hw.providers.profile import CPU

TEXTS = (
    "The lighthouse keeper had counted ships for forty years and knew each of them by the sound of its engine.",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n",
    "To make a good soup for six people you need patience, an onion, two carrots, and",
    "In 1911 the expedition reached the edge of the ice, and its leader wrote in his diary that",
)
CONTEXT = 512
LONG = 128  # tokens of the prompt whose prefill is timed
AFTER_KV = 8  # tokens decoded on KV that was written

Tell = Callable[[float, str], None]
Floats = npt.NDArray[np.float32]


def run(folder: Path, provider: str, tokens: int, tell: Tell) -> dict[str, Any]:
    """Figures of ``provider`` for the draft in ``folder``: ``tokens`` greedy ones after each of :data:`TEXTS`.

    Times in milliseconds, differences in logits or in values of KV. Raises what :class:`~hw.onnx.session.OnnxModel` raises.
    """
    tell(0.0, "loading")
    began = time.perf_counter()
    model = OnnxModel(folder, slots=2, context=CONTEXT, provider=provider)
    load_s = time.perf_counter() - began
    tell(0.3, "loading on the CPU provider")
    cpu = OnnxModel(folder, slots=2, context=CONTEXT, provider="cpu")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    tell(0.4, "the same texts on both")
    same, differences, times, cpu_times = 0, [], [], []
    for prompt in prompts:
        wanted, expected, spent = _greedy(cpu, prompt, tokens)
        cpu_times += spent
        logits, spent = _forced(model, prompt, wanted)
        times += spent
        same += sum(int(row.argmax()) == token for row, token in zip(logits, wanted, strict=True))
        differences.append(max(float(np.abs(a - b).max()) for a, b in zip(logits, expected, strict=True)))
    tell(0.8, "KV out and in")
    prompt = max(prompts, key=len)
    return {
        "load_s": load_s,
        "decode_ms": statistics.median(times),
        "decode_cpu_ms": statistics.median(cpu_times),
        "prefill_ms": _prefill_ms(model, prompts),
        "prefill_cpu_ms": _prefill_ms(cpu, prompts),
        "prefill_tokens": LONG,
        "compared_tokens": tokens * len(prompts),
        "agreement": same / (tokens * len(prompts)),
        "largest_logit_difference": max(differences),
        "kv": kv_round_trip(model, cpu, prompt),
        "fallback": fallback(model),
    }


def fallback(model: OnnxModel) -> dict[str, Any]:
    """Nodes of the optimised graph that the CPU provider computes though another was asked for."""
    if model.placement is None:
        return {"share": 0.0, "operators": []}
    return {
        "share": model.placement.share(CPU),
        "operators": sorted(operator for name, operator in model.placement.nodes if name == CPU),
    }


def kv_round_trip(model: OnnxModel, cpu: OnnxModel, prompt: list[int]) -> dict[str, float]:
    """Read a prompt's KV, write it elsewhere, read it back, go on from it; and from KV that the CPU provider computed.

    ``read_back_error``: of values after writing and reading. ``continue_error``: of logits on written KV against the same KV
    where it was computed. ``own_and_cpu``: largest difference of the two providers' KV. ``cpu_kv_agreement``: share of greedy
    tokens on the CPU's KV that are the CPU's.
    """
    count = len(prompt)
    first = int(model.prefill(0, prompt, 0).argmax())
    kv = model.read_kv(0, 0, count).copy()
    model.write_kv(1, 0, kv)
    read_back = float(np.abs(model.read_kv(1, 0, count) - kv).max())
    token, length, error = first, count, 0.0
    for _ in range(AFTER_KV):
        own = model.decode([0], [token], [length])[0].copy()
        other = model.decode([1], [token], [length])[0]
        error = max(error, float(np.abs(own - other).max()))
        token, length = int(own.argmax()), length + 1
    wanted, _, _ = _greedy(cpu, prompt, AFTER_KV + 1)
    theirs = cpu.read_kv(0, 0, count)
    apart = float(np.abs(theirs - kv).max())
    model.write_kv(1, 0, theirs)
    same = 0
    for at in range(AFTER_KV):
        same += int(model.decode([1], [wanted[at]], [count + at])[0].argmax()) == wanted[at + 1]
    return {
        "read_back_error": read_back,
        "continue_error": error,
        "own_and_cpu": apart,
        "cpu_kv_agreement": same / AFTER_KV,
    }


def _greedy(model: OnnxModel, prompt: list[int], count: int) -> tuple[list[int], list[Floats], list[float]]:
    """``count`` greedy tokens, the logits each was chosen from, and the time of each step but the prompt's."""
    rows = [model.prefill(0, prompt, 0).copy()]
    tokens, spent = [int(rows[0].argmax())], list[float]()
    while len(tokens) < count:
        rows.append(_step(model, tokens[-1], len(prompt) + len(tokens) - 1, spent))
        tokens.append(int(rows[-1].argmax()))
    return tokens, rows, spent


def _forced(model: OnnxModel, prompt: list[int], tokens: list[int]) -> tuple[list[Floats], list[float]]:
    """Logits for each of ``tokens`` when the ones before it are given, and the time of each step but the prompt's."""
    rows, spent = [model.prefill(0, prompt, 0).copy()], list[float]()
    for at, token in enumerate(tokens[:-1]):
        rows.append(_step(model, token, len(prompt) + at, spent))
    return rows, spent


def _step(model: OnnxModel, token: int, length: int, spent: list[float]) -> Floats:
    began = time.perf_counter()
    row = model.decode([0], [token], [length])[0].copy()
    spent.append(1e3 * (time.perf_counter() - began))
    return row


def _prefill_ms(model: OnnxModel, prompts: list[list[int]]) -> float:
    joined = [token for prompt in prompts for token in prompt]
    long = (joined * (LONG // len(joined) + 1))[:LONG]
    spent = []
    for _ in range(3):
        began = time.perf_counter()
        model.prefill(0, long, 0)
        spent.append(1e3 * (time.perf_counter() - began))
    return statistics.median(spent)
