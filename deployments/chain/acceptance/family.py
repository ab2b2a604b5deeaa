"""Requests by how much their policy lets pass: what is measured of one family says nothing of another's acceptance."""

import math

from deployments.chain.acceptance.policy import Policy

LOSSLESS = ""
_LEAST_OCTAVE = -10  # a smaller delta is as good as none


def family(policy: Policy | None) -> str:
    """A short name, one of some fifty whatever a client asks for: the rule, and how far it goes in coarse steps.

    Lossless policies, a delta of 0 among them, are all of the family ``LOSSLESS``: the output cannot tell them apart.
    """
    if policy is None or not policy.lossy:
        return LOSSLESS
    if policy.rule == "semantic":
        return f"semantic:{round(policy.similarity, 1)}"
    octave = max(round(math.log2(policy.delta)), _LEAST_OCTAVE)
    return f"{policy.name}:{policy.rule}:{octave}"
