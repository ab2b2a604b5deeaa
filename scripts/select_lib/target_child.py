"""Child process: the target. It answers prompts, times its steps and hands out KV of prompts.

Commands: those of :mod:`scripts.profile_lib.engine_child`, ``render``, ``answer``, ``read``, ``kv_offer``, ``kv``.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.chain.protocol import PROTOCOL_VERSION, Draft, Drafts, Step
from deployments.kv import INLINE
from hw.kv.manifest import Manifest
from hw.kv.record import parse
from scripts.profile_lib.commands import serve
from scripts.profile_lib.engine_child import TimedEngine

OFF = json.dumps({"enabled": False})
OFFER_S = 120.0  # fingerprints of a checkpoint that was not prepared take long
_STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}  # as bits, where numpy has no such type


class Capture:
    """In a draft's place: keeps the KV it is sent, ``[2 * layers, heads, positions, head_dim]``, and drafts nothing."""

    def __init__(self, manifest: Manifest) -> None:
        self.kv: npt.NDArray[Any] | None = None
        self._manifest = manifest

    def step(self, step: Step) -> Drafts:
        geometry = self._manifest.geometry
        for commit in step.commits:
            if commit.kv and self.kv is None:
                record = parse(commit.kv)
                rows = np.frombuffer(record.row(0), _STORED[self._manifest.numerics.k])
                tokens = record.header.subject.valid_tokens
                self.kv = rows.reshape(2 * geometry.layers, geometry.heads, tokens, geometry.head_dim).copy()
        drafts = [Draft(commit.session, commit.epoch, commit.length, [], "error") for commit in step.commits]
        return Drafts(PROTOCOL_VERSION, "capture", step.number, drafts)

    def disconnect(self, target: str) -> None:
        """What was captured stays."""


class TargetChild(TimedEngine):
    """Each public method is one command."""

    def render(self, chats: list[list[dict[str, str]]]) -> dict[str, Any]:
        """Token ids of each chat as the target is served: its own chat template."""
        tokenizer = self._llm.get_tokenizer()
        texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        return {"prompts": [list(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]}

    def answer(self, prompts: list[list[int]], seeds: list[int], temperature: float, max_tokens: int) -> dict[str, Any]:
        """The target's own answers, all at once and without drafts, as token ids; they end where the target ends them."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=max_tokens,
                seed=seed,
                detokenize=False,
                extra_args={"chain": OFF},
            )
            for seed in seeds
        ]
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return {"answers": [list(output.outputs[0].token_ids) for output in outputs]}

    def read(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Seconds that each prompt takes to its first token, one after another, none of it known before."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args={"chain": OFF})
        seconds = []
        for ids in prompts:
            self._llm.reset_prefix_cache()
            began = time.perf_counter()
            self._llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds}

    def kv_offer(self) -> dict[str, Any]:
        """What a draft must know to take this target's KV, as hex; empty where it moves none."""
        manifest = self._manifest()
        return {"manifest": manifest.encode().hex() if manifest is not None else ""}

    def kv(self, prompts: list[list[int]], files: list[str]) -> dict[str, Any]:
        """Write each prompt's KV, ``[2 * layers, heads, positions, head_dim]`` in the target's own type, to a file.

        ``written``: which of them; what is too large for one message to a draft is not.
        """
        manifest = self._manifest()
        assert manifest is not None, "this target's KV cannot be moved"
        return {"written": [self._capture(manifest, ids, Path(file)) for ids, file in zip(prompts, files, strict=True)]}

    def _capture(self, manifest: Manifest, prompt: list[int], file: Path) -> bool:
        from vllm import SamplingParams

        from deployments.channel.inprocess import InProcessChannel

        capture = Capture(manifest)
        worker = self._worker()
        worker.set_channels({"capture": InProcessChannel(capture, "capture")})
        worker._kv.connect([{"name": "capture", "kv": INLINE}])
        worker._proposer.rounds.send_kv(worker._kv.export)
        try:
            chain = json.dumps({"sources": ["model"]})
            params = SamplingParams(
                max_tokens=3, temperature=0.0, ignore_eos=True, detokenize=False, extra_args={"chain": chain}
            )
            self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        finally:
            worker._proposer.rounds.send_kv(None)
            self._draft_wrong()
        if capture.kv is None:
            return False
        np.save(file, capture.kv[:, :, : len(prompt)])
        return True

    def _draft_wrong(self) -> None:
        """What :meth:`time_steps` needs: a channel that was replaced is closed, so it is made anew."""
        from deployments.channel.inprocess import InProcessChannel
        from scripts.bench_lib.wrong_draft import WrongDrafter

        channel = InProcessChannel(WrongDrafter("wrong", self._llm.model_config.get_vocab_size()), "wrong")
        self._worker().set_channels({channel.name: channel})

    def _manifest(self) -> Manifest | None:
        until = time.monotonic() + OFFER_S
        while (offer := self._llm.collective_rpc("kv_offer")[0]) is None:
            if time.monotonic() > until:
                return None
            time.sleep(0.1)
        return Manifest.decode(offer["manifest"]) if offer.get("manifest") else None

    def _worker(self) -> Any:
        driver = self._llm.llm_engine.model_executor.driver_worker
        return getattr(driver, "worker", driver)


if __name__ == "__main__":
    serve(TargetChild())
