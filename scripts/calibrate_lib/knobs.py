"""Which settings of which policies are measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec

from deployments.chain.acceptance.policy import BASES, KNOBS, RANGES, Policy, PolicyError, policy_of

DELTAS = (0.0001, 0.0005, 0.002, 0.01, 0.05, 0.3)  # of the shipped pair, from hardly any mismatch to every one
SIMILARITIES = (0.95, 0.9, 0.85, 0.8, 0.75, 0.6)
SWEPT = ("nkl", "probabilistic", "block", "semantic")
PLAIN, LOSSLESS = "plain", "lossless"


@dataclass(frozen=True)
class Setting:
    """One column of the comparison. ``policy`` is None for plain decoding, without drafts."""

    name: str
    policy: Policy | None
    swept: str = ""  # the policy whose sweep it belongs to; empty: a preset or a reference
    value: float = 0.0  # of the swept knob

    @property
    def lossy(self) -> bool:
        return self.policy is not None and self.policy.lossy

    @property
    def given(self) -> dict[str, Any] | None:
        """What the engine is told; None for what is lossless, as the router does."""
        return msgspec.to_builtins(self.policy) if self.policy is not None and self.lossy else None

    @property
    def spec(self) -> dict[str, Any]:
        """What a config or a request would say: only the knobs that the rule has."""
        assert self.policy is not None
        knobs = {knob: getattr(self.policy, knob) for knob in KNOBS[self.policy.name]}
        return {"name": self.policy.name, **knobs}


REFERENCES = (Setting(PLAIN, None), Setting(LOSSLESS, Policy()))


def swept_knob(policy: str) -> str:
    """The knob that says how much a policy lets pass."""
    return "similarity" if policy == "semantic" else "delta"


def sweep(policy: str, values: Sequence[float], others: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """Every value of the policy's own knob, with every combination of the ``others``.

    Raises:
        PolicyError: no such policy, a knob it does not have, a value out of range.
    """
    knob = swept_knob(policy)
    settings = []
    for rest in product(*others.values()):
        more = dict(zip(others, rest, strict=True))
        for value in sorted(values, reverse=knob == "similarity"):  # the strictest first
            made = policy_of({"name": policy, knob: value, **more})
            text = "".join(f" {name} {_short(setting)}" for name, setting in more.items())
            settings.append(
                Setting(f"{policy} {'δ' if knob == 'delta' else knob} {value:g}{text}", made, policy, value)
            )
    return settings


def of_presets(presets: Mapping[str, Policy]) -> list[Setting]:
    """Each preset as it would be served."""
    return [Setting(name, policy) for name, policy in presets.items()]


def distinct(settings: Iterable[Setting]) -> list[Setting]:
    """Those that have to be measured: presets that say the same are one, and what is lossless is measured once."""
    found: dict[bytes, Setting] = {}
    for setting in settings:
        found.setdefault(msgspec.json.encode(setting.given) if setting.policy is not None else b"", setting)
    return list(found.values())


def parse_knob(text: str) -> tuple[str, list[Any]]:
    """``mask=0.8,0.9`` as a knob and its values.

    Raises:
        ValueError: no such knob, or a value that is not one.
    """
    name, _, values = text.partition("=")
    known = [knob for knob in (*RANGES, "base") if knob not in ("delta", "similarity")]
    if name not in known or not values:
        raise ValueError(f"no knob {text!r}; write NAME=VALUE[,VALUE], of {', '.join(known)}")
    if name == "base":
        wrong = [value for value in values.split(",") if value not in BASES]
        if wrong:
            raise ValueError(f"base: block cannot stand on {wrong[0]!r}; known: {', '.join(BASES)}")
        return name, values.split(",")
    kind = int if isinstance(RANGES[name][1], int) else float
    try:
        return name, [kind(value) for value in values.split(",")]
    except ValueError:
        raise ValueError(f"{name}: not {'an integer' if kind is int else 'a number'}: {values!r}") from None


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


__all__ = ["DELTAS", "LOSSLESS", "PLAIN", "REFERENCES", "SIMILARITIES", "SWEPT", "PolicyError", "Setting", "distinct", "of_presets",
           "parse_knob", "sweep", "swept_knob"]  # fmt: skip
