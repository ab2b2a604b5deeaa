"""From training to the token chain: a draft engine over an exported folder guesses what the trained module does in torch."""

from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.chain.protocol import PROTOCOL_VERSION, Commit, Sampling, Step
from deployments.draft.build import build_engine
from deployments.kv import HIDDEN
from hw.onnx.conditioned_build import ConditionedOptions, build_conditioned
from hw.onnx.conditioned_weights import read_trained, write_trained
from scripts.distil_lib.draft import ConditionedDraft
from scripts.distil_lib.export import trained_of
from scripts.distil_lib.target import Target
from tests.unit.distil_fakes import VOCABULARY, tiny_target
from tests.unit.test_distil_draft import draft_of

WANT = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("tiny"))


def guessed(draft: ConditionedDraft, tokens: list[int], rows: torch.Tensor) -> list[int]:
    """Greedily, one token at a time: features of committed positions, then own ones."""
    ids, features, found = list(tokens), rows, []
    with torch.no_grad():
        while len(found) < WANT:
            padded = torch.cat([features, torch.zeros(len(ids) - len(features), features.shape[1])])[None]
            output = draft.unroll(torch.tensor([ids]), padded, 1)[0][0, -1]
            found.append(int(draft.head_ids[draft.logits(output).argmax()]))
            ids.append(found[-1])
            features = torch.cat([features, output[None]])
    return found


@pytest.mark.parametrize("layers", [1, 2])
def test_the_engine_guesses_as_the_module_does(target: Target, layers: int, tmp_path: Path) -> None:
    draft = draft_of(target, layers)
    write_trained(tmp_path / "w.safetensors", trained_of(draft, target))
    stored = read_trained(tmp_path / "w.safetensors")  # in half the precision
    draft.load_state_dict({name: torch.from_numpy(value) for name, value in stored.tensors.items()}, strict=False)
    options = ConditionedOptions(bits=32, head_bits=32)
    build_conditioned(tmp_path / "w.safetensors", target.folder, tmp_path / "onnx", options, tmp_path)
    engine = build_engine(tmp_path / "onnx", slots=2, context=100, target_vocab_size=VOCABULARY)
    assert engine.meet({"hidden": {"size": 32, "weights": target.weights}}) == HIDDEN
    rng = np.random.default_rng(layers)
    tokens = rng.integers(0, VOCABULARY, 12).tolist()
    sent = 0
    for number in range(6):
        rows = target.features(torch.tensor([tokens]))[0, :-1].half()
        new = tokens[sent:]
        start = max(0, sent - 1)
        commit = Commit(
            session="s",
            epoch=0,
            length=len(tokens),
            tokens=new,
            want=WANT,
            sampling=Sampling(0.0, 1),
            hidden=rows[start:].numpy().astype("<f2").tobytes(),
            hidden_start=start,
        )
        (made,) = engine.step(Step(PROTOCOL_VERSION, "t", number, 60.0, [commit], [])).drafts
        assert made.tokens == guessed(draft, tokens, rows.float())
        sent = len(tokens)
        tokens += [*made.tokens[: int(rng.integers(0, WANT + 1))], int(rng.integers(0, VOCABULARY))]
    assert engine.stats()["hidden_taken"] == 6
