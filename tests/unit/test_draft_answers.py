"""Whole answers: what is written equals a plain loop over the model, whatever else is written; ends, refusals, failures."""

import math
import threading

import numpy as np
import pytest

from deployments.chain.protocol import CONTEXT_FULL, DEADLINE, ERROR, NO_SLOT, Sampling
from deployments.draft.answers import BUSY, Answer, Writing, read_request
from hw.onnx.costs import StepCosts
from tests.unit.answer_cases import PROMPT, Asked, greedy, reference, softmax_after, some_prompt
from tests.unit.draft_fakes import VOCAB, Clock, FakeModel, engine, opening, step


def asked(slots: int = 8, context: int = 64, **more: object) -> Asked:
    return Asked(engine(FakeModel(slots=slots, context=context), **more))


def top(answer: Answer) -> tuple[np.ndarray, np.ndarray]:
    shape = (len(answer.tokens), answer.top_k)
    return np.frombuffer(answer.top_ids, "<i4").reshape(shape), np.frombuffer(answer.top_probs, "<f2").reshape(shape)


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_each_row_is_what_the_model_writes_alone(k: int, slots: int) -> None:
    """However many slots there are: with fewer than rows, some write in the slot that another has left."""
    desk = asked(slots)
    answers = desk.ask(k=k, length=12, temperature=0.8, seed=7)
    desk.run()
    assert sorted(answers) == list(range(k))
    for index, answer in answers.items():
        assert answer.tokens == reference(PROMPT, 12, Sampling(0.8, 7 + index))
        assert (answer.finished, answer.reason) == (False, "")
    stats = desk.drafter.stats()
    assert stats["answer_tokens_read"] == len(PROMPT)  # once for all rows
    assert stats["slots_free"] == slots


def test_greedy_means_the_first_answer_and_the_others_differ() -> None:
    desk = asked(writing=Writing(diversity=0.9))
    answers = desk.ask(k=4, length=16, temperature=0.0, seed=5)
    desk.run()
    assert answers[0].tokens == reference(PROMPT, 16, greedy())
    for index in (1, 2, 3):
        assert answers[index].tokens == reference(PROMPT, 16, Sampling(0.9, 5 + index))
    assert len({tuple(answer.tokens) for answer in answers.values()}) > 1


def test_rows_equal_separate_requests_and_the_same_seed_the_same_answer() -> None:
    together, apart, again = asked(), asked(), asked()
    rows = together.ask(k=3, length=10, temperature=1.0, seed=40, top_k=3)
    singles = [apart.ask(k=1, length=10, temperature=1.0, seed=40 + index, top_k=3) for index in range(3)]
    same = again.ask(k=3, length=10, temperature=1.0, seed=40, top_k=3)
    for desk in (together, apart, again):
        desk.run()
    assert rows == same
    for index, single in enumerate(singles):
        assert rows[index].plain() | {"index": 0} == single[0].plain()
    assert len({tuple(answer.tokens) for answer in rows.values()}) == 3


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
def test_candidates_are_the_distribution_at_temperature_1(temperature: float) -> None:
    desk = asked()
    answers = desk.ask(k=2, length=6, temperature=temperature, seed=3, top_k=5)
    desk.run()
    for answer in answers.values():
        ids, probs = top(answer)
        assert answer.top_k == 5
        for position, token in enumerate(answer.tokens):
            expected = softmax_after(PROMPT + answer.tokens[:position])
            likely = np.argsort(-expected)[:5]
            assert ids[position].tolist() == likely.tolist()
            np.testing.assert_allclose(probs[position].astype(float), expected[likely], rtol=2e-3)
            assert probs[position].astype(float).sum() <= 1.0
            assert temperature or answer.index or token == likely[0]
        confidence = np.frombuffer(answer.accept, "<f2")
        assert len(confidence) == 6
        assert ((confidence > 0) & (confidence <= 1)).all()


def test_many_requests_at_once_disturb_nothing() -> None:
    desk = asked(slots=6, context=128)
    wanted = []
    for seed in range(10):
        prompt = some_prompt(seed, 5 + 7 * seed)
        k, length = 1 + seed % 3, 4 + seed
        wanted.append((prompt, length, desk.ask(prompt, k=k, length=length, temperature=0.7, seed=seed)))
    desk.run()
    for seed, (prompt, length, answers) in enumerate(wanted):
        assert [answers[i].tokens for i in range(len(answers))] == [
            reference(prompt, length, Sampling(0.7, seed + i)) for i in range(1 + seed % 3)
        ]
    calls = [size for kind, size in desk.drafter._model.calls if kind == "decode"]
    assert max(calls) == 3  # rows of several requests in one call, at most half of the slots


# --- ends -------------------------------------------------------------------------------------------------------------


def test_an_answer_ends_before_its_stop_token() -> None:
    text = reference(PROMPT, 12, greedy())
    stop = next(token for token in text if text.index(token) >= 3)
    desk = asked()
    answers = desk.ask(k=3, length=12, stop=[stop, 9999], top_k=2)
    desk.run()
    assert answers[0].tokens == text[: text.index(stop)]
    assert (answers[0].finished, answers[0].reason) == (True, "")
    for answer in answers.values():
        assert stop not in answer.tokens
        assert answer.finished == (len(answer.tokens) < 12)
        assert top(answer)[0].shape == (len(answer.tokens), 2)


def test_an_answer_may_be_empty() -> None:
    desk = asked()
    answers = desk.ask(k=5, stop=list(range(VOCAB)), top_k=4)
    desk.run()
    assert all(answer == Answer(index=index, tokens=[], finished=True) for index, answer in answers.items())
    assert len(answers) == 5
    assert desk.drafter.stats()["slots_free"] == 8


def test_the_context_cuts_an_answer_and_refuses_a_prompt() -> None:
    desk = asked(context=16)
    cut = desk.ask(some_prompt(1, 10), length=12)
    last = desk.ask(some_prompt(2, 15), length=12)
    over = desk.ask(some_prompt(3, 16), k=2)
    assert [answer.reason for answer in over.values()] == [CONTEXT_FULL, CONTEXT_FULL]
    desk.run()
    assert cut[0].tokens == reference(some_prompt(1, 10), 6, greedy())
    assert len(last[0].tokens) == 1
    assert (cut[0].reason, last[0].reason, cut[0].finished) == (CONTEXT_FULL, CONTEXT_FULL, False)


def test_the_deadline_hands_over_what_there_is() -> None:
    clock = Clock()
    model = FakeModel(slots=8, context=512, clock=clock)
    model.costs = StepCosts(0.010, 0.002, 0.005, 0.001)
    desk = Asked(engine(model, clock=clock))
    soon = desk.ask(k=3, length=400, temperature=0.7, seed=1, deadline_s=0.5, top_k=2)
    never = desk.ask(some_prompt(1, 400), deadline_s=0.1)
    started = clock.now
    desk.run()
    assert clock.now <= started + 0.5
    assert never[0] == Answer(index=0, tokens=[], reason=DEADLINE)
    for index, answer in soon.items():
        assert 10 < len(answer.tokens) < 400
        assert answer.tokens == reference(PROMPT, len(answer.tokens), Sampling(0.7, 1 + index))
        assert (answer.finished, answer.reason) == (False, DEADLINE)
        assert len(top(answer)[0]) == len(answer.tokens)
    stats = desk.drafter.stats()
    assert (stats["slots_free"], stats["answers_running"], stats["answer:deadline"]) == (8, 0, 4)


def test_cancelling_frees_everything_and_says_nothing() -> None:
    desk = asked(slots=4)
    first = desk.ask(k=2, length=50)
    second = desk.ask(k=3, length=50)
    for _ in range(5):
        desk.drafter.idle(1e-9)
    for job in desk.jobs:
        job.cancel()
    desk.run()
    assert first == second == {}
    stats = desk.drafter.stats()
    assert (stats["slots_free"], stats["answer_slots"], stats["answers_waiting"]) == (4, 0, 0)
    assert stats["answer:cancelled"] == 5


# --- refusals and failures --------------------------------------------------------------------------------------------


def test_too_many_requests_are_refused_at_once() -> None:
    desk = asked(writing=Writing(waiting=4))
    taken = [desk.ask(length=2, tenant="a") for _ in range(3)]
    assert [len(answers) for answers in taken] == [0, 0, 1]  # half for one tenant
    assert taken[2][0].reason == BUSY
    others = [desk.ask(length=2, tenant=name) for name in "bcd"]
    assert [len(answers) for answers in others] == [0, 0, 1]
    desk.run()
    assert desk.drafter.stats()["answer:busy"] == 2
    again = desk.ask(length=2, tenant="a")
    desk.run()
    assert again[0].tokens == reference(PROMPT, 2, greedy())


def test_without_a_slot_a_request_waits_and_then_says_so() -> None:
    clock = Clock()
    desk = Asked(engine(FakeModel(slots=2, clock=clock), clock=clock, ahead=0))
    step(desk.drafter, [opening("a", PROMPT), opening("b", PROMPT)])
    waiting = desk.ask(length=4, deadline_s=1.0)
    patient = desk.ask(length=4, deadline_s=10.0)
    desk.run()
    clock.now += 2.0
    desk.run()
    assert waiting[0].reason == NO_SLOT
    step(desk.drafter, closed=["a"], number=2)
    desk.run()
    assert patient[0].tokens == reference(PROMPT, 4, greedy())


def test_a_failing_row_or_prompt_fails_alone() -> None:
    desk = asked(slots=8)
    rows = [reference(PROMPT, 12, Sampling(0.7, seed)) for seed in range(4)]
    only = [token for token in rows[2][1:-1] if all(token not in rows[index] for index in (0, 1, 3))]
    bad = only[0]
    model = desk.drafter._model
    model.bad_token = bad
    answers = desk.ask(k=4, length=12, temperature=0.7, seed=0)
    prompt = desk.ask([bad, 1, 2])
    desk.run()
    assert prompt[0] == Answer(index=0, tokens=[], reason=ERROR)
    for index in range(4):
        assert answers[index].reason == (ERROR if index == 2 else "")
        assert answers[index].tokens == rows[index][: rows[2].index(bad) + 1 if index == 2 else 12]
    assert desk.drafter.stats()["slots_free"] == 8


def test_logits_that_are_no_numbers_end_the_row() -> None:
    desk = asked()
    text = reference(PROMPT, 8, greedy())
    desk.drafter._model.nan_token = text[2]
    answers = desk.ask(length=8)
    desk.run()
    assert (answers[0].tokens, answers[0].reason) == (text[: text.index(text[2]) + 1], ERROR)


def test_whoever_asked_and_is_gone_disturbs_nobody() -> None:
    desk = asked()

    def gone(answer: Answer) -> None:
        raise RuntimeError("event loop is closed")

    desk.drafter.write(read_request({"prompt": PROMPT, "k": 2, "length": 3}), gone)
    answers = desk.ask(length=5)
    desk.run()
    assert answers[0].tokens == reference(PROMPT, 5, greedy())
    assert desk.drafter.stats()["slots_free"] == 8


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": "text"}, "prompt"),
        ({"k": 0}, "k"),
        ({"k": 9}, "k"),
        ({"length": 0}, "length"),
        ({"length": 10**6}, "length"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"deadline_s": math.inf}, "deadline_s"),
        ({"stop": [1.5]}, "stop"),
        ({"lenght": 3}, "lenght"),
    ],
)
def test_what_cannot_be_honoured_is_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_request({"prompt": PROMPT, **wrong})


def test_tokens_the_model_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match=f"below {VOCAB}"):
        asked().ask([1, VOCAB])


def test_requests_come_from_any_thread() -> None:
    desk = asked(slots=8, writing=Writing(waiting=64))
    threads = [
        threading.Thread(target=lambda seed=seed: desk.ask(length=6, temperature=0.7, seed=seed)) for seed in range(24)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or desk.drafter.stats()["answers_waiting"]:
        desk.drafter.idle(1e-3)
    desk.run()
    found = {(job.request.seed, tuple(a[0].tokens)) for job, a in zip(desk.jobs, desk.answers, strict=True) if a}
    assert len(desk.jobs) == 24
    assert {tokens for _, tokens in found} == {tuple(reference(PROMPT, 6, Sampling(0.7, seed))) for seed in range(24)}
