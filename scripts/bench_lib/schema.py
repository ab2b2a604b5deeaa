"""The form of a result file, checked before it is written: readers and the README rely on it."""

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
