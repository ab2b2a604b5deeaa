"""The form of a result file, checked before it is written: readers and the README rely on it.

Keys are only ever added. Always there: ``commit``, ``machine``, ``round_overhead_ms`` (``p50``, ``p99``; milliseconds a round
takes beyond drafting and verifying) and ``runs``, one object for each cell and system with the keys of ``_RUN_KEYS``.

A run may have

- ``outcome_cache``: ``hits``, ``misses`` and ``hit_rate`` of the draft. A hit: the target chose another token than the draft's
  guess, and the draft had already gone on behind that token.
- ``round_ms``: what a mean round of the chain was spent on, milliseconds: ``verify``, ``wait`` (for the draft), ``draft`` (its
  work) and ``overhead``, as far as the engine says.

A result may have

- ``transition``: the phases of a changing load on the chain's engine, each with ``phase`` (from 1), ``batch``,
  ``tokens_per_s``, ``acceptance`` (pooled), ``tokens_per_verify`` and ``drafted_rounds`` (share of the sequences' engine steps
  that checked a draft).
- ``budget``: ``minutes`` given and ``left_out``, sentences on what they did not suffice for.
"""

from typing import Any

_RUN_KEYS: dict[str, tuple[type, ...]] = {
    "set": (str,),
    "batch": (int,),
    "temperature": (int, float),
    "system": (str,),
    "until": (str,),
    "cores": (str,),
    "via": (str,),
    "tokens_per_s": (dict,),
    "ratio_plain_all_cores": (int, float, type(None)),
    "ratio_plain_target_core": (int, float, type(None)),
    "acceptance": (dict,),
    "tokens_per_verify": (int, float, type(None)),
}
_CHOICES = {"until": {"length", "eos"}, "cores": {"all", "target"}, "via": {"engine", "http"}}


def problems(result: Any) -> list[str]:
    """What is wrong with a result, as sentences; empty when it is right. More keys than these are allowed."""
    if not isinstance(result, dict):
        return ["the result is not an object"]
    found = [f"{key} is missing" for key in ("commit", "machine", "runs", "round_overhead_ms") if key not in result]
    if found:
        return found
    for key in ("commit", "machine"):
        if not isinstance(result[key], str) or not result[key]:
            found.append(f"{key} is not a text")
    found += _numbers("round_overhead_ms", result["round_overhead_ms"], ("p50", "p99"), optional=True)
    if not isinstance(result["runs"], list):
        return [*found, "runs is not a list"]
    for index, run in enumerate(result["runs"]):
        found += _run(f"runs[{index}]", run)
    return found + _transition(result.get("transition", []))


def _transition(phases: Any) -> list[str]:
    if not isinstance(phases, list):
        return ["transition is not a list"]
    found = []
    for index, phase in enumerate(phases):
        found += _numbers(f"transition[{index}]", phase, ("phase", "batch", "tokens_per_s"), optional=False)
        found += _numbers(f"transition[{index}]", phase, ("acceptance", "tokens_per_verify"), optional=True)
    return found


def _run(where: str, run: Any) -> list[str]:
    if not isinstance(run, dict):
        return [f"{where} is not an object"]
    found = []
    for key, kinds in _RUN_KEYS.items():
        if key not in run:
            found.append(f"{where}.{key} is missing")
        elif not isinstance(run[key], kinds) or isinstance(run[key], bool):
            found.append(f"{where}.{key} is {run[key]!r}")
    if found:
        return found
    found += [
        f"{where}.{key} is {run[key]!r}, not one of {sorted(allowed)}"
        for key, allowed in _CHOICES.items()
        if run[key] not in allowed
    ]
    rates = run["tokens_per_s"]
    found += _numbers(f"{where}.tokens_per_s", rates, ("median", "min", "max"), optional=False)
    if not found and not 0 < rates["min"] <= rates["median"] <= rates["max"]:
        found.append(f"{where}.tokens_per_s is out of order: {rates}")
    found += _numbers(f"{where}.acceptance", run["acceptance"], ("pooled", "per_request"), optional=True)
    if "outcome_cache" in run:
        found += _numbers(f"{where}.outcome_cache", run["outcome_cache"], ("hit_rate",), optional=True)
        found += _numbers(f"{where}.outcome_cache", run["outcome_cache"], ("hits", "misses"), optional=False)
    if "round_ms" in run:
        found += _numbers(f"{where}.round_ms", run["round_ms"], tuple(run["round_ms"]), optional=False)
    return found


def _numbers(where: str, value: Any, keys: tuple[str, ...], *, optional: bool) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where} is not an object"]
    found = []
    for key in keys:
        number = value.get(key, "missing")
        if number is None and optional:
            continue
        if not isinstance(number, int | float) or isinstance(number, bool):
            found.append(f"{where}.{key} is {number!r}")
    return found
