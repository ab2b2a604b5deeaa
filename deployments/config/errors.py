"""Configuration errors a person can act on: the full path of the wrong key, and the nearest right one."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError


class ConfigError(ValueError):
    """One or more problems in a configuration, each a sentence that names its place."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        return ConfigError, (self.problems,)  # crosses Ray task boundaries whole


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the known name nearest to ``name``, or the list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else ""


def path_of(root: str, location: Iterable[str | int]) -> str:
    """Spell a pydantic location as ``args.drafts[0].model``."""
    path = root
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def model_at(model: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel] | None:
    """Find the model class that a location inside ``model`` points at, through lists, dicts and optionals."""
    annotation: Any = model
    for part in location:
        annotation = _step(annotation, part)
    return _plain_model(annotation)


def _step(annotation: Any, part: str | int) -> Any:
    holder = _plain_model(annotation)
    if holder is not None:
        field = holder.model_fields.get(str(part))
        return field.annotation if field is not None else None
    arguments = get_args(annotation)
    if get_origin(annotation) in (list, dict):
        return arguments[-1]
    for argument in arguments:  # Annotated, Optional
        if (found := _step(argument, part)) is not None:
            return found
    return None


def _plain_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, dict):
        return None
    return next((found for item in get_args(annotation) if (found := _plain_model(item)) is not None), None)


def explain(error: ValidationError, model: type[BaseModel], root: str) -> list[str]:
    """Turn pydantic's errors about ``model`` into one sentence each."""
    problems = []
    for item in error.errors(include_url=False):
        location = [part for part in item["loc"] if part != "[key]"]
        path = path_of(root, location)
        match item["type"]:
            case "extra_forbidden":
                holder = model_at(model, location[:-1])
                known = holder.model_fields if holder is not None else ()
                problems.append(f"{path}: unknown key{nearest(str(location[-1]), known)}")
            case "missing":
                problems.append(f"{path}: required, but missing")
            case "value_error":
                text = str(item["ctx"]["error"])
                # checks across sections name their own place, under the usual root
                problems.append(f"{path}: {text}" if location else text.replace("args", root, 1))
            case _:
                got = item.get("input")
                shown = f" (got {got!r})" if not isinstance(got, dict | list) else ""
                problems.append(f"{path}: {item['msg']}{shown}")
    return problems
