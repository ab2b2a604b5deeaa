"""Run by test_bfloat16 in a process of its own: greedy in bfloat16 with a right drafter and without any."""

import json
import sys

from tests.engine.conftest import engine_arguments
from tests.engine.prompts import PROMPTS


def main() -> None:
    from vllm import LLM, SamplingParams

    from deployments.channel.inprocess import InProcessChannel
    from tests.fakes import FakeDrafter, half_right

    llm = LLM(**engine_arguments(dtype="bfloat16"))
    params = SamplingParams(temperature=0, max_tokens=32, logprobs=5, ignore_eos=True)
    plain = llm.generate(PROMPTS, params, use_tqdm=False)
    known = [list(o.prompt_token_ids) + list(o.outputs[0].token_ids) for o in plain]
    channel = InProcessChannel(FakeDrafter(half_right(known, 49152)))
    llm.collective_rpc("set_channels", args=({"a": channel},))
    drafted = llm.generate(PROMPTS, params, use_tqdm=False)
    differences = []
    for prompt, (left, right) in enumerate(zip(plain, drafted, strict=True)):
        a, b = left.outputs[0], right.outputs[0]
        for position, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
            if x != y:
                seen = a.logprobs[position]
                gap = seen[x].logprob - seen[y].logprob if y in seen else None
                differences.append({"prompt": prompt, "position": position, "gap": gap})
                break
    stats = llm.collective_rpc("draft_stats")[0]
    print("RESULT" + json.dumps({"differences": differences, "stats": stats}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
