"""Named acceptance policies: those that come with the application and those an operator adds.

The shipped ones are starting points, chosen by what a wrong token costs in each scenario; docs/acceptance.md says what each trades.
"""

from collections.abc import Mapping
from typing import Any

from deployments.chain.acceptance.policy import NAMES, Policy, PolicyError, policy_of, require_offered

SHIPPED: dict[str, dict[str, Any]] = {
    "chat": {"name": "nkl", "delta": 0.05, "length_scale": 512},
    "code": {"name": "block", "base": "nkl", "delta": 0.02, "mask": 0.7},  # one wrong token breaks it
    "extraction": {"name": "lossless"},  # what is copied must be what is there
    "legal": {"name": "lossless"},  # every word counts
    "creative": {"name": "probabilistic", "delta": 0.15},
}


def with_shipped(given: Mapping[str, Mapping[str, Any]], *, semantic: bool = False) -> dict[str, dict[str, Any]]:
    """The shipped presets with the operator's on top; ``semantic``: there is a sentence model. Raises ValueError naming the preset and what is wrong with it."""
    for name, spec in given.items():
        if name in NAMES:
            raise ValueError(f"{name}: is the name of a policy; call the preset otherwise")
        try:
            require_offered(policy_of(spec), semantic=semantic)
        except PolicyError as error:
            raise ValueError(f"{name}.{error}") from None
    return {**SHIPPED, **{name: dict(spec) for name, spec in given.items()}}


def policies(presets: Mapping[str, Mapping[str, Any]]) -> dict[str, Policy]:
    """Presets by name as policies."""
    return {name: policy_of(spec) for name, spec in presets.items()}
