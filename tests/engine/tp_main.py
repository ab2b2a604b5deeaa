"""Run by test_tensor_parallel in a process of its own: a two-rank target, with and without a drafter over the channel."""

import json
import sys
import time
from typing import Any

import msgspec
import torch


def tiny_checkpoint(source: str, folder: str) -> None:
    """A random Llama whose heads divide by two, with the tokenizer of ``source``."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def hidden_error(folder: str, commits: list[Any]) -> float:
    """How far the hidden states that came with commits are from those of transformers, at most; every position was sent."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokens: dict[str, list[int]] = {}
    rows: dict[str, list[Any]] = {}
    worst = 0.0
    for commit in commits:
        known = [] if commit.opens else tokens[commit.session]
        tokens[commit.session] = known[: commit.length - len(commit.tokens)] + commit.tokens
        if commit.opens:
            rows[commit.session] = []
        assert not commit.hidden or commit.hidden_start == len(rows[commit.session])
        rows[commit.session] += [torch.tensor(row, dtype=torch.float32) for row in commit.hidden_rows(128).tolist()]
    for session, found in rows.items():
        with torch.inference_mode():
            expected = model(torch.tensor([tokens[session]])).last_hidden_state[0, : len(found)]
        worst = max(worst, float((torch.stack(found) - expected).abs().max()))
    return worst


def main() -> None:
    from vllm import LLM, SamplingParams

    from deployments.chain.faults import FaultPolicy
    from deployments.channel.server import DraftServer
    from tests.fakes import FakeDrafter, half_right

    source, folder, sentences = sys.argv[1:]
    tiny_checkpoint(source, folder)
    llm = LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        worker_cls="deployments.target.worker.CpuTargetWorker",
        speculative_config={
            "method": "custom_class",
            "model": "deployments.target.proposer.ChainProposer",
            "num_speculative_tokens": 3,
        },
        enable_prefix_caching=False,
        additional_config={
            "chain_semantic_model": sentences,
            "chain_semantic_budget_ms": 5000.0,
            "chain_adaptive": False,  # what is verified does not depend on how busy the machine is
            "chain_hidden": True,
        },
    )
    prompts = [f"number {n} of" for n in range(6)]
    params = [SamplingParams(temperature=t, seed=4, max_tokens=24, ignore_eos=True) for t in (0, 0, 0, 1.0, 1.0, 1.0)]
    plain = llm.generate(prompts, params, use_tqdm=False)
    known = [list(o.prompt_token_ids) + list(o.outputs[0].token_ids) for o in plain]
    commits: list[Any] = []

    class Recording(FakeDrafter):
        def _draft(self, commit: Any) -> Any:
            commits.append(commit)
            return super()._draft(commit)

    server = DraftServer(Recording(half_right(known, 49152)), "127.0.0.1", "d", FaultPolicy())
    keys = llm.collective_rpc("client_key")
    server.authorize(keys[0])
    server.start()
    while None in (offers := llm.collective_rpc("kv_offer")):  # fingerprints are being made
        time.sleep(0.1)
    endpoint = {**msgspec.to_builtins(server.endpoint()), "kv": "hidden"}
    connected = llm.collective_rpc("connect_drafts", args=([endpoint],))
    drafted = llm.generate(prompts, params, use_tqdm=False)
    stats = llm.collective_rpc("draft_stats")
    seen = list(commits)
    policy = {"extra_args": {"chain": '{"policy": {"name": "semantic", "similarity": 0.0, "mask": 1.0}}'}}
    loose = [SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, **policy) for _ in prompts]
    llm.generate(prompts, loose, use_tqdm=False)
    after = llm.generate(prompts, params, use_tqdm=False)  # ranks that had parted would not agree any more
    print(
        "RESULT"
        + json.dumps(
            {
                "equal": [list(o.outputs[0].token_ids) for o in drafted]
                == [list(o.outputs[0].token_ids) for o in plain],
                "connected": connected,
                "offers": offers,
                "hidden_positions": sum(len(commit.hidden) // 256 for commit in seen),
                "hidden_error": hidden_error(folder, seen),
                "stats": stats,
                "equal_after": [list(o.outputs[0].token_ids) for o in after]
                == [list(o.outputs[0].token_ids) for o in plain],
                "semantic": llm.collective_rpc("draft_stats"),
            }
        ),
        flush=True,
    )
    server.stop()


if __name__ == "__main__":
    main()
