"""How a request wants acceptance decided: the name of a rule and its knobs, checked once where the request comes in."""

from collections.abc import Mapping
from typing import Any

import msgspec

from deployments.chain.protocol import MAX_DRAFT_TOKENS

DELTA = 0.15
DELTA_MAX_FACTOR = 2.0  # the cap where none is given, as a multiple of delta
MAX_LENGTH_SCALE = 1 << 20

NKL_KNOBS = ("delta", "alpha", "delta_max", "mask", "length_scale")
KNOBS: dict[str, tuple[str, ...]] = {  # by rule
    "lossless": (),
    "nkl": NKL_KNOBS,
    "block": ("min_block_len", "base", *NKL_KNOBS),
    "probabilistic": NKL_KNOBS,
    "semantic": ("similarity", "mask"),
}
NAMES = tuple(KNOBS)
BASES = ("lossless", "nkl", "probabilistic")  # what ``block`` can stand on

# Inclusive ranges; an integer bound means that the knob is an integer.
RANGES: dict[str, tuple[float, float]] = {
    "delta": (0.0, 1.0),
    "alpha": (0.0, 1.0),
    "delta_max": (0.0, 1.0),
    "mask": (0.0, 1.0),
    "similarity": (0.0, 1.0),
    "min_block_len": (1, MAX_DRAFT_TOKENS),
    "length_scale": (0, MAX_LENGTH_SCALE),
}


class PolicyError(ValueError):
    """A policy that is not one. ``param`` is the knob at fault, empty for the whole; the message says what there is."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.param, self.message = param, message


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """One rule with its knobs. Build it from outside input with :func:`policy_of`, which refuses what a rule does not have.

    Raises:
        PolicyError: no such rule, a value out of range; while decoding, msgspec's ``ValidationError``.
    """

    name: str = "lossless"
    delta: float = DELTA  # largest NKL that passes, at the first token of a draft
    alpha: float = 0.08  # how much more passes further into a draft
    delta_max: float = DELTA * DELTA_MAX_FACTOR  # and never more than this
    mask: float = 0.9  # where the target gives one token more than this, only that token passes; 1: off
    length_scale: int = 0  # delta shrinks as 1/length once so many tokens are generated; 0: it does not
    min_block_len: int = 3  # ``block``: a shorter run of matches counts as far as the target's own tokens go
    base: str = "nkl"  # ``block``: the rule that says what matches
    similarity: float = 0.75  # ``semantic``: least cosine of the two continuations

    def __post_init__(self) -> None:
        _check_names(self.name, self.base)
        for knob in RANGES:
            _check_range(knob, getattr(self, knob))
        if self.delta_max < self.delta:
            raise PolicyError("delta_max", f"must be in [delta, 1] = [{self.delta}, 1], got {self.delta_max}")

    @property
    def rule(self) -> str:
        """The rule that judges single tokens."""
        return self.base if self.name == "block" else self.name

    @property
    def lossy(self) -> bool:
        """Whether the output can differ from the target's own."""
        return self.rule == "semantic" or (self.rule != "lossless" and self.delta > 0.0)

    @property
    def block(self) -> int:
        """Shortest run of matches that counts."""
        return self.min_block_len if self.name == "block" else 1


def policy_of(given: Mapping[str, Any]) -> Policy:
    """Check ``{"name": …, knob: value, …}``. Without ``delta_max`` the cap is twice ``delta``.

    Raises:
        PolicyError: unknown name or knob, a knob of another rule, a value of the wrong type or out of range.
    """
    name = given.get("name")
    if name is None:
        raise PolicyError("name", f"required; known: {', '.join(NAMES)}")
    _check_names(name, given.get("base", "nkl"))
    values = {knob: _checked(name, knob, value) for knob, value in given.items() if knob != "name"}
    if "delta_max" not in values and "delta" in values:
        values["delta_max"] = min(1.0, DELTA_MAX_FACTOR * values["delta"])
    return Policy(name=name, **values)


def require_offered(policy: Policy, *, semantic: bool) -> None:
    """PolicyError for what this application cannot do; ``semantic``: whether it has a sentence model."""
    if policy.rule == "semantic" and not semantic:
        others = ", ".join(name for name in NAMES if name != "semantic")
        raise PolicyError(
            "name",
            "semantic needs a sentence model, and this application has none (its operator sets args.chain.semantic); "
            f"offered: {others}",
        )


def _check_names(name: Any, base: Any) -> None:
    if not isinstance(name, str) or name not in KNOBS:
        raise PolicyError("name", f"no policy {name!r}; known: {', '.join(NAMES)}")
    if not isinstance(base, str) or base not in BASES:
        raise PolicyError("base", f"block cannot stand on {base!r}; known: {', '.join(BASES)}")


def _check_range(knob: str, value: Any) -> None:
    low, high = RANGES[knob]
    integer = isinstance(high, int)
    kinds = int if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:  # NaN is not, either
        raise PolicyError(knob, f"must be {'an integer' if integer else 'a number'} in [{low}, {high}], got {value!r}")


def _checked(name: str, knob: str, value: Any) -> Any:
    if knob not in KNOBS[name]:
        known = ", ".join(KNOBS[name]) or "none"
        raise PolicyError(knob, f"not a parameter of {name}; its parameters: {known}")
    if knob == "base":
        return value
    _check_range(knob, value)
    return value if isinstance(RANGES[knob][1], int) else float(value)


LOSSLESS = Policy()
