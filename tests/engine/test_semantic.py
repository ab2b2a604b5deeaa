"""Semantic acceptance in a real engine, with the real draft and the real sentence model."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from deployments.channel.inprocess import InProcessChannel
from deployments.draft.build import build_engine
from deployments.draft.engine import DraftEngine
from deployments.target.meaning import Meaning, TargetText
from hw.onnx.sentences import SentenceModel
from tests.engine.conftest import Engine
from tests.fakes import FakeDrafter, half_right
from tests.models import model

pytestmark = pytest.mark.engine

_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    _CHAT.format(text)
    for text in (
        "How can I sleep better?",
        "Why is exercise good for you?",
        "Write a short story about a lost cat.",
        "What is a healthy breakfast?",
        "Describe the process of making bread.",
        "Give me tips for learning a language.",
    )
]
LOOSE = {"name": "semantic", "similarity": 0.4}
AMPLE_S = 5.0


def params(policy: dict[str, Any] | None, count: int, max_tokens: int = 40, **more: Any) -> list[SamplingParams]:
    chain = json.dumps({"id": "", **({"policy": policy} if policy else {})})
    return [SamplingParams(temperature=0, max_tokens=max_tokens, extra_args={"chain": chain}, **more)] * count


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def drafter() -> DraftEngine:
    return build_engine(model("draft-int4"), context=1024, slots=32, top_k=8)


@pytest.fixture(scope="module")
def sentences() -> SentenceModel:
    return SentenceModel(model("sentences"))


@pytest.fixture
def meaning(engine: Engine, sentences: SentenceModel) -> Iterator[Meaning]:
    """Semantic acceptance switched on in the shared engine, as its settings would; off again afterwards."""
    from tokenizers import Tokenizer

    worker = engine.llm.llm_engine.model_executor.driver_worker
    sampler = getattr(worker, "worker", worker).model_runner.rejection_sampler
    assert sampler.meaning is None
    text = TargetText.of(Tokenizer.from_file(str(model("target") / "tokenizer.json")))
    sampler.meaning = Meaning(sentences, text, AMPLE_S, engine.rounds().stats_of_rounds.counters)
    yield sampler.meaning
    sampler.meaning = None


@pytest.fixture
def real(drafter: DraftEngine, patient: None) -> Callable[[], InProcessChannel]:
    return lambda: InProcessChannel(drafter)


def plain(engine: Engine) -> list[list[int]]:
    engine.drafts()
    return tokens(engine.generate(PROMPTS, params(None, len(PROMPTS))))


def test_mismatches_pass_and_other_requests_do_not_change(
    engine: Engine, real: Callable[[], InProcessChannel], meaning: Meaning
) -> None:
    lossless = plain(engine)
    engine.drafts(a=real())
    half = len(PROMPTS) // 2
    mixed = [*params(LOOSE, half), *params(None, len(PROMPTS) - half)]
    got = tokens(engine.generate(PROMPTS, mixed))
    stats = engine.stats()
    assert got[half:] == lossless[half:]
    assert stats["relaxed_tokens"] > 0
    assert stats["semantic_passed"] >= stats["relaxed_tokens"]
    assert stats["semantic_compared"] > stats["semantic_passed"]
    assert not stats.get("semantic_failed")
    assert got[:half] != lossless[:half]


@pytest.mark.parametrize("off", ["no time", "no model", "certain"])
def test_where_nothing_can_pass_it_is_lossless(engine: Engine, meaning: Meaning, off: str) -> None:
    """Against a source whose every fourth word is another."""
    encode = engine.llm.get_tokenizer().encode
    lossless = plain(engine)
    known = [encode(prompt) + answer for prompt, answer in zip(PROMPTS, lossless, strict=True)]
    engine.drafts(a=InProcessChannel(FakeDrafter(half_right(known, engine.vocab()))))
    policy = {**LOOSE, "mask": 0.0} if off == "certain" else LOOSE
    if off == "no time":
        meaning.budget_s = 0.0
    elif off == "no model":
        meaning._model = None
    got = tokens(engine.generate(PROMPTS, params(policy, len(PROMPTS))))
    stats = engine.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    assert stats["relaxed_tokens"] == 0
    assert got == lossless


class Pushing(FakeDrafter):
    """Drafts what a lossless answer is, but for one word, which it always writes as another."""

    def __init__(self, known: list[int], instead: dict[int, int]) -> None:
        def guess(held: list[int], want: int) -> list[int]:
            following = known[len(held) : len(held) + want]
            return [instead.get(token, token) for token in following]

        super().__init__(guess, "pushing")


def pushed(engine: Engine, prompt: str, word: str, other: str, policy: dict[str, Any]) -> tuple[bool, dict[str, float]]:
    """Whether a source gets to write ``other`` where the target says ``word``; the counters.

    The word may not be one that comes behind a whole accepted draft: that is always the target's own.
    """
    encode = engine.llm.get_tokenizer().encode
    (ours,), (theirs,) = (encode(text, add_special_tokens=False) for text in (word, other))
    engine.drafts()
    answer = engine.generate([prompt], params(None, 1, 12))[0]
    known = [*answer.prompt_token_ids, *answer.outputs[0].token_ids]
    assert ours in answer.outputs[0].token_ids, answer.outputs[0].text
    engine.drafts(a=InProcessChannel(Pushing(known, {ours: theirs})))
    got = engine.generate([prompt], params(policy, 1, 12))[0].outputs[0].token_ids
    return theirs in got, engine.stats()


ECHO = (
    "The teacher wrote: {0} The pupils wrote the same: {0} Then the principal wrote the same: {0} Then everybody wrote "
    "the same:"
)
ALWAYS = {"name": "semantic", "similarity": 0.0, "mask": 1.0}


@pytest.mark.parametrize(
    ("sentence", "word", "other"),
    [
        ("You must encrypt the small file today.", " encrypt", " decrypt"),
        ("Prices will increase a little this year.", " increase", " decrease"),
        ("The bridge is not safe for heavy trucks.", " not", " very"),
        ("There are seven boats in the old harbour.", " seven", " nine"),
        ("The train to London leaves in the morning.", " London", " Paris"),
    ],
)
def test_a_guarded_pair_never_passes(engine: Engine, meaning: Meaning, sentence: str, word: str, other: str) -> None:
    """Not even with a threshold that everything reaches and no mask."""
    passed, stats = pushed(engine, ECHO.format(sentence), word, other, ALWAYS)
    assert not passed
    assert stats["semantic_guarded"] > 0


def test_another_word_for_the_same_does_and_one_for_something_else_does_not(engine: Engine, meaning: Meaning) -> None:
    prompt = ECHO.format("They live in a small flat near the sea.")
    policy = {"name": "semantic", "mask": 1.0}
    passed, stats = pushed(engine, prompt, " small", " tiny", policy)
    assert passed, stats
    assert stats["semantic_passed"] > 0
    passed, stats = pushed(engine, prompt, " small", " noisy", policy)
    assert not passed
    assert stats["semantic_compared"] > 0


def test_the_worker_loads_what_its_settings_name(engine: Engine, tmp_path: Path) -> None:
    from collections import Counter

    from deployments.target.meaning import load_meaning
    from deployments.target.settings import ChainSettings

    tokenizer = str(model("target"))
    assert load_meaning(ChainSettings(), tokenizer, Counter()) is None
    settings = ChainSettings(semantic_model=str(model("sentences")), semantic_budget_ms=7.0)
    loaded = load_meaning(settings, tokenizer, Counter())
    assert loaded is not None
    assert loaded.budget_s == pytest.approx(0.007)
    with pytest.raises(FileNotFoundError, match="scripts/prepare_models"):
        load_meaning(ChainSettings(semantic_model=str(tmp_path)), tokenizer, Counter())
