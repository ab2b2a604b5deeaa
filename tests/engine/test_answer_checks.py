"""Whole drafts checked by a real engine, against log probabilities and outputs computed plainly."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from deployments.target.answer_checks import LATE, AnswerChecks
from tests.engine.conftest import Engine
from tests.engine.prompts import PROMPTS

pytestmark = pytest.mark.engine

LENGTH = 24
LONG = "The shop in the small town by the sea sells books, lamps and paper. " * 12


class Client:
    """The part of vLLM's asynchronous client that checks use, over the engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine.llm.llm_engine
        self.model_config = self._engine.model_config
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self.cached: list[int] = []  # tokens of each prompt that were in the prefix cache
        self.computed = 0  # tokens of prompts that were not
        self.stuck = False

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str) -> AsyncGenerator[Any, None]:
        queue = self._queues[request_id] = asyncio.Queue()
        internal = self._engine.add_request(request_id, prompt, params)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        first = True
        try:
            while True:
                output = await queue.get()
                if first:
                    self.cached.append(output.num_cached_tokens)
                    self.computed += len(prompt["prompt_token_ids"]) - output.num_cached_tokens
                first = False
                yield output
                if output.finished:
                    return
        finally:
            del self._queues[request_id]
            self._engine.abort_request([internal], internal=True)

    async def _step(self) -> None:
        while self._queues:
            await asyncio.sleep(0)
            if self.stuck:
                continue
            for output in self._engine.step():
                if output.request_id in self._queues:
                    self._queues[output.request_id].put_nowait(output)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    async def take_trace(self, name: str) -> Any:
        return self._engine.collective_rpc("take_trace", args=(name,))[0]


class Checks:
    """Checks of the engine under test, each awaited to its end."""

    def __init__(self, engine: Engine) -> None:
        engine.drafts()
        self.engine = engine
        self.client = Client(engine)
        self._checks = AnswerChecks(self.client, self.client.take_trace)  # type: ignore[arg-type]

    def verify(self, *arguments: Any) -> list[dict[str, Any]]:
        return self._run(self._checks.verify(*arguments))

    def score(self, *arguments: Any) -> list[dict[str, Any]]:
        return self._run(self._checks.score(*arguments))

    def _run(self, check: Coroutine[Any, Any, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        async def whole() -> list[dict[str, Any]]:
            result = await check
            self.client.stuck = False
            if self.client._stepping is not None:
                await self.client._stepping
            return result

        return asyncio.run(whole())


@pytest.fixture
def checks(engine: Engine) -> Checks:
    engine.llm.reset_prefix_cache()
    return Checks(engine)


def ids(engine: Engine, text: str) -> list[int]:
    return list(engine.llm.get_tokenizer().encode(text, add_special_tokens=False))


def answer(engine: Engine, prompt: list[int], **sampling: Any) -> list[int]:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **sampling)
    (output,) = engine.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def changed(tokens: list[int], at: int) -> list[int]:
    return [*tokens[:at], (tokens[at] + 7) % 49152, *tokens[at + 1 :]]


def logprobs(engine: Engine, prompt: list[int], draft: list[int], top: int = 1) -> list[dict[int, Any]]:
    """Of each draft token, as vLLM gives them without any cache."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=top)
    (output,) = engine.llm.generate([{"prompt_token_ids": prompt + draft}], params, use_tqdm=False)
    return list(output.prompt_logprobs[len(prompt) :])


class TestVerify:
    @pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}])
    def test_accepts_what_the_target_would_say(self, checks: Checks, sampling: dict[str, Any]) -> None:
        engine = checks.engine
        prompt = ids(engine, PROMPTS[0])
        says = answer(engine, prompt, **sampling)
        drafts = [says[:-1], changed(says, 10)[:-1], changed(says, 0), says[:3]]
        found = checks.verify(prompt, drafts, None, sampling, 60.0)
        assert [item["accepted"] for item in found] == [LENGTH - 1, 10, 0, 3]
        assert [item["own"] for item in found] == [says[LENGTH - 1], says[10], says[0], says[3]]
        assert {item["relaxed"] for item in found} == {0}
        assert {item["reason"] for item in found} == {""}
        told = logprobs(engine, prompt, says)
        for item in found:
            count = item["accepted"]
            mean = np.mean([told[i][says[i]].logprob for i in range(count)]) if count else 0.0
            assert item["logprob"] == pytest.approx(mean, abs=2e-3)

    def test_a_right_draft_takes_a_step_for_every_few_tokens_and_a_wrong_one_ends(self, checks: Checks) -> None:
        engine = checks.engine
        prompt = ids(engine, PROMPTS[1])
        says = answer(engine, prompt, temperature=0.0)
        engine.drafts()
        checks.verify(prompt, [says[:-1]], None, {"temperature": 0.0}, 60.0)
        assert engine.stats()["accepted:given"] >= 0.75 * (LENGTH - 1)
        engine.drafts()
        checks.verify(prompt, [changed(says, 2)], None, {"temperature": 0.0}, 60.0)
        assert engine.stats()["committed_tokens"] < LENGTH / 2

    def test_what_ends_the_answer_has_no_token_of_the_target_behind_it(self, checks: Checks) -> None:
        engine = checks.engine
        prompt = ids(engine, PROMPTS[0])
        says = answer(engine, prompt, temperature=0.0)[:6]
        sampling = {"temperature": 0.0, "stop_token_ids": [says[5]]}
        if says[5] in says[:5]:
            pytest.skip("the answer repeats the token that is to end it")
        whole, part = checks.verify(prompt, [says, says[:5]], None, sampling, 60.0)
        assert (whole["accepted"], whole["own"]) == (6, None)
        assert (part["accepted"], part["own"]) == (5, says[5])

    def test_bias_bans_and_penalties_count(self, checks: Checks) -> None:
        prompt = ids(checks.engine, PROMPTS[0])
        first = answer(checks.engine, prompt, temperature=0.0)[0]
        sampling = {"temperature": 0.0, "logit_bias": {str(first): -100.0}, "min_p": 0.1, "presence_penalty": 0.5}
        (found,) = checks.verify(prompt, [[first]], None, sampling, 60.0)
        assert found["accepted"] == 0
        assert found["own"] not in (None, first)

    def test_a_policy_is_taken_and_without_probabilities_only_matches_pass(self, checks: Checks) -> None:
        prompt = ids(checks.engine, PROMPTS[2])
        says = answer(checks.engine, prompt, temperature=0.0)
        policy = {"name": "nkl", "delta": 0.6, "delta_max": 1.0, "mask": 1.0}
        drafts = [says[:-1], changed(says, 4)]
        found = checks.verify(prompt, drafts, policy, {"temperature": 0.0}, 60.0)
        assert [(item["accepted"], item["relaxed"]) for item in found] == [(LENGTH - 1, 0), (4, 0)]


class TestScore:
    def test_log_probabilities_are_those_of_a_plain_pass(self, checks: Checks) -> None:
        engine = checks.engine
        prompt = ids(engine, PROMPTS[0])
        says = answer(engine, prompt, temperature=0.0)
        drafts = [says, changed(says, 3), says[:1]]
        found = checks.score(prompt, drafts, 5, 60.0)
        for draft, item in zip(drafts, found, strict=True):
            assert item["reason"] == ""
            plain = logprobs(engine, prompt, draft, 5)
            assert item["logprobs"] == pytest.approx(
                [p[t].logprob for p, t in zip(plain, draft, strict=True)], abs=2e-3
            )
            top = np.frombuffer(item["top_ids"], "<i4").reshape(len(draft), 5)
            probs = np.frombuffer(item["top_probs"], "<f2").reshape(len(draft), 5).astype(float)
            for row, position in enumerate(plain):
                likeliest = sorted((p for p in position.values() if p.rank <= 5), key=lambda p: p.rank)
                assert probs[row] == pytest.approx([np.exp(p.logprob) for p in likeliest], abs=2e-3)
                assert position[int(top[row, 0])].rank == 1
        assert sum(found[0]["logprobs"]) > sum(found[1]["logprobs"])
        bare = checks.score(prompt, drafts, 0, 60.0)
        assert [item["logprobs"] for item in bare] == [pytest.approx(item["logprobs"], abs=2e-3) for item in found]
        assert {item["top_ids"] for item in bare} == {b""}

    def test_a_long_prompt_is_read_once(self, checks: Checks) -> None:
        """Whole blocks of it: 128 tokens on CPUs."""
        engine = checks.engine
        prompt = ids(engine, LONG + PROMPTS[0])
        assert 128 < len(prompt) < 256
        drafts = [ids(engine, " one two three four five"), ids(engine, " six seven eight"), ids(engine, " nine")]
        found = checks.score(prompt, drafts, 2, 60.0)
        assert sorted(checks.client.cached) == [0, 128, 128]
        for draft, item in zip(drafts, found, strict=True):
            plain = logprobs(engine, prompt, draft)
            assert item["logprobs"] == pytest.approx(
                [p[t].logprob for p, t in zip(plain, draft, strict=True)], abs=2e-3
            )

    def test_a_draft_that_lies_in_the_prefix_cache_is_read_again(self, checks: Checks) -> None:
        engine = checks.engine
        prompt = ids(engine, LONG)[:120]
        draft = ids(engine, LONG)[:60]
        first = checks.score(prompt, [draft], 2, 60.0)
        checks.client.cached.clear()
        assert checks.score(prompt, [draft], 2, 60.0) == first
        assert checks.client.cached == [128, 0]
        plain = logprobs(engine, prompt, draft)
        told = [p[t].logprob for p, t in zip(plain, draft, strict=True)]
        assert first[0]["logprobs"] == pytest.approx(told, abs=2e-3)


class TestWhatCannotBeChecked:
    def test_each_draft_has_its_reason_and_the_others_are_checked(self, checks: Checks) -> None:
        prompt = ids(checks.engine, PROMPTS[0])
        good = answer(checks.engine, prompt, temperature=0.0)[:4]
        drafts = [good, [10**6], [], [1] * 3000, [1] * 1020, [-1], good, good, good]
        for found in (
            checks.verify(prompt, drafts, None, {"temperature": 0.0}, 60.0),
            checks.score(prompt, drafts, 2, 60.0),
        ):
            reasons = [item["reason"] for item in found]
            assert [bool(reason) for reason in reasons] == [False, True, False, True, True, True, False, False, True]
            assert "token 1000000 is outside the vocabulary" in reasons[1]
            assert "leave no room in the context of 1024 tokens" in reasons[4]
            assert "at most 8 drafts" in reasons[8]

    def test_wrong_sampling_and_policies_are_named(self, checks: Checks) -> None:
        for policy, sampling, word in (
            (None, {"temprature": 1.0}, "temprature"),
            (None, {"top_p": 7.0}, "top_p"),
            (None, {"min_p": 2.0}, "min_p"),
            ({"name": "nkl", "delta": 7.0}, {"temperature": 0.0}, "delta"),
        ):
            (found,) = checks.verify([1, 2], [[3]], policy, sampling, 60.0)
            assert word in found["reason"]
            assert found["accepted"] == 0

    def test_no_prompt(self, checks: Checks) -> None:
        assert checks.score([], [[1]], 2, 60.0)[0]["reason"] == "the prompt is empty"

    def test_the_deadline_ends_what_is_not_done_and_leaves_nothing_running(self, checks: Checks) -> None:
        prompt = ids(checks.engine, PROMPTS[0])
        for check in (
            lambda: checks.verify(prompt, [[1, 2], [3]], None, {"temperature": 0.0}, 0.05),
            lambda: checks.score(prompt, [[1, 2], [3]], 2, 0.05),
        ):
            checks.client.stuck = True
            assert [item["reason"] for item in check()] == [LATE, LATE]
            assert not checks.engine.llm.llm_engine.has_unfinished_requests()
