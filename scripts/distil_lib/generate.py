"""Draws answers from the target in batch, with vLLM in this process, and writes them as shards.

A user's turn comes from the grammar, from a file, or from the target itself, which completes an opening. Requests of all
kinds are in the engine together and a new one starts when one ends, so that batches stay full.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hw.onnx.checkpoint import ModelShape
from scripts.bench_lib.prompts import load_prompts
from scripts.distil_lib.grammar import Grammar, Prompt
from scripts.distil_lib.held_out import measured_prompts, prompt_hash
from scripts.distil_lib.shards import TEXT, Written, known_hashes, shard_names, write_shard

SAMPLED = (
    4  # every so manieth shard is drawn at one of these temperatures, the others greedily: a batch in which nothing is
)
TEMPERATURES = (0.7, 1.0)  # sampled costs a quarter less
BARE_SHARE = 0.1  # of prompts that come without the system message the chat template adds
TURN_TOKENS, TURN_LETTERS = 56, (8, 400)
SENTENCE = re.compile(r"[.?!](?=\s|$)")
TEXT_TOKENS = 320  # of one piece of a text that was given
MARK = "\u2063own turn\u2063"  # where a turn stands in the chat template


@dataclass(frozen=True)
class Plan:
    """How much to draw and how. ``tokens``: answer tokens in this run; ``seconds``: or until then, whichever comes first."""

    tokens: int
    seconds: float = float("inf")
    answer_tokens: int = 256
    batch: int = 96
    shard: int = 256  # sequences
    own: float = 0.4  # share of turns that the target completes by itself
    seed: int = 0
    threads: int = 1
    kv_gib: int = 2
    prompts: Path | None = None
    text: Path | None = None
    measured: str = ""  # a prompt set of the benchmark: greedy answers to measure with, in a folder of their own


@dataclass
class Drawn:
    """What a run has drawn so far."""

    sequences: int = 0
    tokens: int = 0  # of answers
    refused: dict[str, int] = field(default_factory=dict)  # turns that were no use, by reason

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1


Report = Callable[[Drawn], None]


def read_prompts(path: Path) -> list[str]:
    """Users' turns of a file: one a line; of a ``.jsonl`` file ``messages`` (the last one's content) or ``prompt``.

    Raises ValueError naming the line that is not one.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            found.append(line.strip())
            continue
        try:
            record = json.loads(line)
            found.append(str(record["messages"][-1]["content"] if "messages" in record else record["prompt"]))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{path}:{number}: neither messages nor a prompt: {error!r}") from error
    if not found:
        raise ValueError(f"{path} has no prompts")
    return found


def text_pieces(path: Path, encode: Callable[[str], list[int]], tokens: int = TEXT_TOKENS) -> Iterator[Written]:
    """A text as sequences of at most ``tokens`` tokens, cut between paragraphs where it can be: learned from as they stand."""

    def piece(ids: list[int]) -> Written:
        return Written(np.array(ids, np.int64), 1, TEXT, prompt_hash(" ".join(map(str, ids))), "text")

    ids: list[int] = []
    for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
        more = encode(paragraph.strip() + "\n\n") if paragraph.strip() else []
        if len(ids) + len(more) > tokens:
            if len(ids) > 1:
                yield piece(ids)
            while len(more) > tokens:
                yield piece(more[:tokens])
                more = more[tokens:]
            ids = []
        ids += more
    if len(ids) > 1:
        yield piece(ids)


class Generator:
    """Draws answers of one target into a folder of shards."""

    def __init__(self, target: Path, weights: str, out: Path, plan: Plan, llm: Any = None) -> None:
        """``weights``: fingerprint of the target. ``llm``: of another generator with the same target; None loads one."""
        self._out, self._plan, self.weights = out, plan, weights
        self._measured = frozenset() if plan.measured else measured_prompts()
        self._seen = known_hashes(out) if out.is_dir() else set()
        self._number = max((int(name) + 1 for name in shard_names(out) if name.isdigit()), default=0)
        self._vocabulary = ModelShape.read(target).vocab_size
        self._grammar = Grammar(plan.seed * 1_000_003 + self._number)
        self._random = np.random.default_rng([plan.seed, self._number])
        self._given = self._prompts()
        self._longest = min(TURN_TOKENS * 4 + plan.answer_tokens + 512, ModelShape.read(target).max_context)
        self.llm = llm or _engine(target, plan, self._longest)
        self._engine = self.llm.llm_engine
        self._tokenizer = self.llm.get_tokenizer()
        self._templates = self._chat_templates()
        # What follows a user's turn begins with the token that ends one.
        end = self._tokenizer.encode(self._templates[0][1], add_special_tokens=False)[:1]
        self._end = sorted({int(self._tokenizer.eos_token_id), *end})
        self._waiting: dict[str, tuple[Prompt, str, float]] = {}  # by request: prompt, hash ("" of a turn), temperature
        self._pending: list[Written] = []
        self._turns: list[Prompt] = []  # complete ones, to be answered
        self.drawn = Drawn()
        self._names = 0
        self._begin_shard()

    def __call__(self, report: Report) -> Drawn:
        """Draw until the plan is met. What is unfinished on an interrupt is lost, whole shards are kept."""
        began = time.monotonic()
        if self._plan.text is not None:
            self._add_text(self._plan.text)
        while self._wants_more(began) or self._waiting:
            while self._wants_more(began) and len(self._waiting) < self._plan.batch and self._start():
                pass
            if not self._waiting:
                break
            for output in self._engine.step():
                if output.finished:
                    self._finished(output)
            if len(self._pending) >= self._plan.shard:
                self._write()
            report(self.drawn)
        self._write()
        report(self.drawn)
        return self.drawn

    def _prompts(self) -> Iterator[str] | None:
        """Turns that were given; None: they are drawn."""
        if self._plan.measured:
            return iter([prompt.messages[-1]["content"] for prompt in load_prompts(self._plan.measured)])
        return iter(read_prompts(self._plan.prompts)) if self._plan.prompts else None

    def _wants_more(self, began: float) -> bool:
        return self.drawn.tokens < self._plan.tokens and time.monotonic() - began < self._plan.seconds

    def _start(self) -> bool:
        """Put the next request into the engine; False where given prompts have come to their end."""
        if self._given is not None:
            text = next(self._given, None)
            if text is None:
                return False
            self._answer(Prompt(text, self._plan.measured or "given"))
            return True
        if self._burst:
            self._burst -= 1
            opening = self._grammar.opening()
            self._request(self._template()[0] + opening.text, opening, "", 1.0, TURN_TOKENS)
        elif self._turns and self._random.random() < self._plan.own:
            self._answer(self._turns.pop())
        else:
            self._answer(self._grammar.draw())
        return True

    def _begin_shard(self) -> None:
        """Turns are completed together, because sampling slows down everything in the batch."""
        self._burst = max(int(self._plan.own * self._plan.shard) - len(self._turns), 0) if self._given is None else 0
        sampled = not self._plan.measured and self._number % SAMPLED == SAMPLED - 1
        self._temperature = float(self._random.choice(TEMPERATURES)) if sampled else 0.0

    def _finished(self, output: Any) -> None:
        prompt, hashed, temperature = self._waiting.pop(output.request_id)
        ids = list(output.outputs[0].token_ids)
        if hashed:
            every = np.array([*output.prompt_token_ids, *ids], np.int64)
            self._pending.append(Written(every, len(output.prompt_token_ids), temperature, hashed, prompt.kind))
            self.drawn.sequences += 1
            self.drawn.tokens += len(ids)
            return
        turn = (prompt.text + self._tokenizer.decode(ids, skip_special_tokens=True)).strip()
        if output.outputs[0].finish_reason != "stop":  # as far as its last sentence
            turn = turn[: max((found.end() for found in SENTENCE.finditer(turn)), default=0)]
        if not TURN_LETTERS[0] <= len(turn) <= TURN_LETTERS[1]:
            self.drawn.refuse("length")
        else:
            self._turns.append(Prompt(turn, prompt.kind))

    def _answer(self, prompt: Prompt) -> None:
        """Have a user's turn answered, unless it was before or is one of those that measure."""
        hashed = prompt_hash(prompt.text)
        if hashed in self._measured:
            self.drawn.refuse("measured with")
        elif hashed in self._seen:
            self.drawn.refuse("seen before")
        else:
            self._seen.add(hashed)
            before, after = self._template()
            self._request(before + prompt.text + after, prompt, hashed, self._temperature, self._plan.answer_tokens)

    def _request(self, text: str, prompt: Prompt, hashed: str, temperature: float, tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._names += 1
        name = str(self._names)
        params = SamplingParams(
            temperature=temperature,
            max_tokens=tokens,
            stop_token_ids=self._end,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(ids) + tokens >= self._longest:
            self.drawn.refuse("too long")
            return
        self._engine.add_request(name, {"prompt_token_ids": ids}, params)
        self._waiting[name] = (prompt, hashed, temperature)

    def _add_text(self, path: Path) -> None:
        for piece in text_pieces(path, lambda text: list(self._tokenizer.encode(text, add_special_tokens=False))):
            if piece.hashed not in self._seen and piece.hashed not in self._measured:
                self._seen.add(piece.hashed)
                self._pending.append(piece)
                self.drawn.sequences += 1
                self.drawn.tokens += piece.answer
            if len(self._pending) >= self._plan.shard:
                self._write()

    def _write(self) -> None:
        if self._pending:
            name = f"{self._number:05d}"
            write_shard(self._out, name, self._pending, weights=self.weights, vocabulary=self._vocabulary)
            self._number += 1
            self._pending = []
            self._begin_shard()

    def _template(self) -> tuple[str, str]:
        return self._templates[int(not self._plan.measured and self._random.random() < BARE_SHARE)]

    def _chat_templates(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """What stands before and after a user's turn: as the chat template has it, and without its system message."""
        chat = [{"role": "user", "content": MARK}]
        before, after = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).split(
            MARK
        )
        chat = [{"role": "system", "content": "s"}, *chat]
        with_system = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).split(MARK)[
            0
        ]
        bare = before if not before.endswith(_last_line(with_system)) else _last_line(with_system)
        return (before, after), (bare, after)


def _last_line(text: str) -> str:
    """The line in which a user's turn begins, with the end of the one before it."""
    return "".join(text.splitlines(keepends=True)[-1:])


def _engine(target: Path, plan: Plan, longest: int) -> Any:
    """vLLM in this process. Threads are not bound to cores, so that others keep them when they need them."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(plan.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(plan.threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    from vllm import LLM

    return LLM(
        model=str(target),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=longest,
        max_num_seqs=plan.batch,
        enable_prefix_caching=True,
        seed=plan.seed * 1_000_003 + int(time.time()) % 1_000_003,
    )
