"""Stop strings inside a run of accepted tokens.

vLLM looks for stop strings after all tokens of a step were added. With drafts a step brings several tokens: the text is cut at
the stop, but the tokens behind it stay in ``token_ids``, in the logprobs and in the usage count, and with two stop strings
the one listed first wins over the one that came first. Handing the output processor one token at a time restores
what plain decoding does.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor


def one_by_one(output: EngineCoreOutput) -> list[EngineCoreOutput]:
    """Split a step's output into one a token; what belongs to the end of the step stays with the last."""
    tokens = output.new_token_ids
    pieces = []
    for index, token in enumerate(tokens):
        logprobs = output.new_logprobs.slice_request(index, 1) if output.new_logprobs is not None else None
        mask = output.new_sampling_mask.slice_request(index, 1) if output.new_sampling_mask is not None else None
        if index == len(tokens) - 1:
            output.new_token_ids, output.new_logprobs, output.new_sampling_mask = [token], logprobs, mask
            pieces.append(output)
        else:
            pieces.append(
                EngineCoreOutput(
                    request_id=output.request_id,
                    new_token_ids=[token],
                    new_logprobs=logprobs,
                    new_sampling_mask=mask,
                    new_prompt_logprobs_tensors=output.new_prompt_logprobs_tensors if index == 0 else None,
                    prefill_stats=output.prefill_stats if index == 0 else None,
                )
            )
    if len(pieces) > 1:  # given to the first piece above
        output.new_prompt_logprobs_tensors = None
        output.prefill_stats = None
    return pieces


def install(processor: OutputProcessor) -> None:
    """Make an engine's output processor exact. Call once, before the first request."""
    process = processor.process_outputs

    def process_outputs(outputs: Iterable[EngineCoreOutput], *args: Any, **kwargs: Any) -> Any:
        split: list[EngineCoreOutput] = []
        for output in outputs:
            state = processor.request_states.get(output.request_id)
            detokenizer = state.detokenizer if state is not None else None
            if len(output.new_token_ids) > 1 and getattr(detokenizer, "stop", None):
                split.extend(one_by_one(output))
            else:
                split.append(output)
        return process(split, *args, **kwargs)

    processor.process_outputs = process_outputs  # type: ignore[method-assign]
