"""Top-k and top-p without sorting the vocabulary: exact, from the largest few logits, or else vLLM's own full sort.

vLLM keeps a token iff the tokens strictly more likely hold less than ``top_p`` of the mass (after top-k). Whenever the
largest ``HEAD`` logits already hold that much, the rest of the vocabulary cannot be kept. Verifying has ``T + 1`` rows a
request, and a sort of 49,152 logits costs about 4 ms on a CPU core where ``topk`` of 256 costs 0.2 ms.
"""

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from deployments.target import row_kernels

HEAD = 256


def truncate(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Set what top-k / top-p exclude to -inf: ``logits [R, V]`` float32, ``k [R]`` (V: off), ``p [R]``.

    The result is ``logits``, changed in place, or ``out``, another tensor like it. Tokens that tie with the last one kept are kept.
    """
    vocab = logits.shape[1]
    if (k is None and p is None) or vocab <= HEAD:
        return _by_sorting(logits, k, p, out)
    top = logits.topk(HEAD, dim=1).values  # [R, HEAD] descending
    floor = torch.full_like(top[:, :1], float("-inf"))  # [R, 1] smallest logit kept
    if k is not None:
        limited = (k < vocab).unsqueeze(1)
        within = k.clamp(max=HEAD - 1).long().unsqueeze(1)
        kth = top.gather(1, within - 1)
        # undecided if k reaches behind the head, or the k-th logit ties with the first one outside it
        if bool((limited & ((k.unsqueeze(1) >= HEAD) | (kth == top[:, -1:]))).any()):
            return _by_sorting(logits, k, p, out)
        floor = torch.where(limited, kth, floor)
    if p is not None:
        kept = top.masked_fill(top < floor, float("-inf"))
        everything = torch.logsumexp(logits, dim=1, keepdim=True)
        total = (
            everything if k is None else torch.where(limited, torch.logsumexp(kept, dim=1, keepdim=True), everything)
        )
        mass = (kept - total).exp()
        before = mass.cumsum(1) - mass  # [R, HEAD] mass strictly more likely
        bound = p.unsqueeze(1)
        if bool(((before[:, -1:] < bound) & (bound < 1) & torch.isfinite(kept[:, -1:])).any()):
            return _by_sorting(logits, k, p, out)
        inside = (before < bound) & torch.isfinite(kept)
        last = inside.sum(1, keepdim=True).clamp(min=1) - 1
        floor = torch.where(bound < 1, torch.maximum(floor, kept.gather(1, last)), floor)
    return exclude_below(logits, floor, logits if out is None else out)


def exclude_below(logits: torch.Tensor, floor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out = logits [R, V]`` with -inf where they are below ``floor [R, 1]``; ``out`` may be ``logits``."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous():
        row_kernels.exclude_below(logits.numpy(), floor.view(-1).numpy(), out.numpy())
        return out
    if out is logits:
        return logits.masked_fill_(logits < floor, float("-inf"))
    return torch.where(logits < floor, float("-inf"), logits, out=out)


def _by_sorting(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    return apply_top_k_top_p(logits if out is None else out.copy_(logits), k, p)
