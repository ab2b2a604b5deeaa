"""Ranks of tokens for log probabilities, on CPUs without a compiler.

vLLM counts them with a function that torch compiles when the first request wants log probabilities. On CPUs that takes a C++
compiler on the machine, holds the engine up for seconds and, where it fails, ends the engine with all its requests. NumPy
counts in a fifth of the time in which a row is normalised; torch in eager mode takes eight times as long as that.
"""

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.sample import sampler


def count_at_least(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of each row ``rows [R, V]`` how many entries are not below ``values [R, 1]``: ``[R]`` int64, the value itself counted."""
    at_least: torch.Tensor = torch.from_numpy(np.count_nonzero(rows.numpy() >= values.numpy(), axis=1))
    return at_least


def install() -> None:
    """Have vLLM's samplers in this process count so. GPUs keep the compiled kernel, which spares them copies."""
    if current_platform.is_cpu():
        sampler.batched_count_greater_than = count_at_least
