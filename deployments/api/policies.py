"""A request's ``chain.policy``: the name of a preset or of a policy, or a policy with its parameters."""

from collections.abc import Mapping
from typing import Any

from deployments.api.errors import RequestError
from deployments.chain.acceptance.policy import (
    LOSSLESS,
    NAMES,
    Policy,
    PolicyError,
    policy_of,
    require_offered,
)

PARAM = "chain.policy"


def resolve_policy(
    asked: str | dict[str, Any] | None,
    presets: Mapping[str, Policy],
    *,
    allow_lossy: bool = True,
    semantic: bool = False,
) -> Policy:
    """Return the policy a request is to be decoded with; without one, ``lossless``. ``semantic``: there is a sentence model.

    Raises:
        RequestError: 400 naming the parameter, with the known names or the allowed range.
    """
    if asked is None:
        return LOSSLESS
    if isinstance(asked, str) and asked in presets:
        policy = presets[asked]
    elif isinstance(asked, str) and asked not in NAMES:
        raise RequestError(
            f"{PARAM}: no policy or preset {asked!r}; policies: {', '.join(NAMES)}; presets: {', '.join(sorted(presets))}.",
            PARAM,
        )
    else:
        policy = _policy({"name": asked} if isinstance(asked, str) else asked, semantic)
    if policy.lossy and not allow_lossy:
        exact = [name for name, preset in sorted(presets.items()) if not preset.lossy]
        raise RequestError(
            f"{PARAM}: policies that can change the answer are switched off here; there are: {', '.join(['lossless', *exact])}.",
            PARAM,
        )
    return policy


def _policy(given: Mapping[str, Any], semantic: bool) -> Policy:
    try:
        policy = policy_of(given)
        require_offered(policy, semantic=semantic)
    except PolicyError as error:
        raise RequestError(f"{PARAM}.{error}.", f"{PARAM}.{error.param}") from None
    return policy
