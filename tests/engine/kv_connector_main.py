"""Run by test_kv_connector: one vLLM engine with the connector in a process of its own, driven by lines of JSON."""

import hashlib
import json
import sys
from collections import Counter
from typing import Any

from tests.engine.conftest import engine_arguments

STOCK = {"worker_cls": "auto", "speculative_config": None, "additional_config": {}}


class Replica:
    """The engine and what the test asks of it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        stock = STOCK if arguments.pop("stock") else {}
        self.llm = LLM(**engine_arguments(**stock, **arguments))
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.worker = get_kv_transfer_group()._worker
        self.counts: Counter[str] = Counter()

    def ready(self) -> dict[str, Any]:
        return {
            "movable": self.worker.wait(60.0),
            "manifest": self.worker.manifest.encode().hex(),
            "place": self.worker.place and [self.worker.place.epoch, self.worker.place.address],
            "block_tokens": self.core.scheduler.block_size,
            "free": self.free(),
        }

    def free(self) -> int:
        return self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def forget(self) -> bool:
        return self.llm.reset_prefix_cache()

    def generate(self, prompts: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
        """Each prompt is ``{"tokens": [...], "salt": ..., "params": ...}``; all of them at the same time."""
        sampling = [_sampling(item, tokens) for item in prompts]
        outputs = self.llm.generate([_prompt(item) for item in prompts], sampling, use_tqdm=False)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "gaps": [_gap(found) for found in output.outputs[0].logprobs],
                "params": output.kv_transfer_params,
                "cached": output.num_cached_tokens,
            }
            for output in outputs
        ]

    def abort(self, prompt: dict[str, Any], steps: int | None) -> dict[str, Any]:
        """Abort a request after so many steps, or once it runs; step until everything is quiet."""
        engine = self.llm.llm_engine
        engine.add_request("aborted", _prompt(prompt), _sampling(prompt, 8))
        scheduler = self.core.scheduler
        for _ in range(steps or 0):
            engine.step()
        while steps is None and not scheduler.running:
            engine.step()
        states = [request.status.name for request in scheduler.requests.values()]
        engine.abort_request(["aborted"])
        while scheduler.has_requests():
            self.core.step_fn()
        return {"states": states, "left": len(scheduler.requests), "pending": self.worker.imports.pending}

    def preempt(self, prompt: dict[str, Any], tokens: int, computed: int) -> dict[str, Any]:
        """Preempt a request once it has computed so many positions, then let it go on to its end."""
        engine, scheduler = self.llm.llm_engine, self.core.scheduler
        engine.add_request("preempted", _prompt(prompt), _sampling(prompt, tokens))
        outputs: list[Any] = []
        while not any(request.num_computed_tokens >= computed for request in scheduler.running):
            outputs += engine.step()
        scheduler.reset_prefix_cache(reset_running_requests=True)
        while engine.has_unfinished_requests():
            outputs += engine.step()
        return {"tokens": list(outputs[-1].outputs[0].token_ids), "params": outputs[-1].kv_transfer_params}

    def refuse(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """Whether the pages change until a load is refused, and what the request answers in the end."""
        engine = self.llm.llm_engine
        before = self._pages()
        engine.add_request("refused", _prompt(prompt), _sampling(prompt, 4))
        outputs: list[Any] = []
        while not any(event.startswith("import_refused") for event in self.counts):
            outputs += engine.step()
        same = self._pages() == before
        while engine.has_unfinished_requests():
            outputs += engine.step()
        return {"same": same, "tokens": list(outputs[-1].outputs[0].token_ids)}

    def _pages(self) -> bytes:
        cache = self.worker._cache
        return hashlib.sha256(cache.read_raw(range(cache.blocks)).data).digest()

    def take_counts(self) -> dict[str, int]:
        """Counts of both sides since the last call; the engine's logger takes the rest away with it."""
        taken, self.counts = self.counts, Counter()
        return dict(taken)

    def keep_counts(self) -> None:
        """Everything the connector reports is added up here too."""
        scheduler, worker = self.core.scheduler.connector, self.worker
        for side, method in ((scheduler, "get_kv_connector_stats"), (worker, "take_counts")):
            original = getattr(side, method)

            def counted(original: Any = original, side: Any = side) -> Any:
                found = original()
                self.counts.update(found if isinstance(found, Counter) else found.data if found else {})
                return found

            setattr(side, method, counted)

    def close_exports(self) -> None:
        self.worker.exports.close()

    def integrity(self) -> dict[str, float]:
        self.worker.exports.check_integrity()
        return self.worker.exports.stats()


def _prompt(item: dict[str, Any]) -> dict[str, Any]:
    salt = {"cache_salt": item["salt"]} if item.get("salt") else {}
    return {"prompt_token_ids": item["tokens"], **salt}


def _sampling(item: dict[str, Any], tokens: int) -> Any:
    from vllm import SamplingParams

    extra = {"kv_transfer_params": item["params"]} if item.get("params") else None
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2, extra_args=extra)


def _gap(found: Any) -> float:
    """How far the second-best token is behind the best."""
    best = sorted((item.logprob for item in found.values()), reverse=True)
    return best[0] - best[1]


def main() -> None:
    replica = Replica(json.loads(sys.argv[1]))
    replica.keep_counts()
    for line in sys.stdin:
        method, arguments = json.loads(line)
        print("RESULT" + json.dumps(getattr(replica, method)(**arguments)), flush=True)
    replica.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
