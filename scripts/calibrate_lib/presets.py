"""Write a policy into a Serve config as a preset, and leave everything else of the file as it is, comments included.

The place is found with PyYAML's node marks, the text is changed there, and the result is read again: it must say the same as
before but for the preset, and be a valid config. Only then does it take the file's place, in one move, beside a copy of the old one.
"""

import copy
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from deployments.config.errors import ConfigError
from deployments.config.load import load_args
from deployments.config.serve_file import BUILDER, chain_applications, read


class PresetError(ValueError):
    """Nothing was written; says why."""


def write_preset(path: Path, name: str, policy: Mapping[str, Any]) -> Path:
    """Set ``args.chain.presets.NAME`` of the chain's application in ``path``; returns the copy of the old file.

    Raises:
        PresetError: the file has no such application or several, is written in a way that cannot be changed safely, or would
            not be valid afterwards.
    """
    path = path.resolve()
    try:
        before = read(path)
        text = path.read_text(encoding="utf-8")
    except ConfigError as error:
        raise PresetError(str(error)) from None
    found = list(chain_applications(before))
    if len(found) != 1:
        raise PresetError(f"{path}: {len(found)} applications of {BUILDER}; a preset is written where there is one")
    index = found[0][0]
    wanted = copy.deepcopy(before)
    args = wanted["applications"][index].setdefault("args", {})
    chain = args["chain"] = args.get("chain") or {}
    chain["presets"] = {**(chain.get("presets") or {}), name: dict(policy)}
    changed = _changed(text, index, name, policy)
    try:
        same = yaml.safe_load(changed) == wanted
    except yaml.YAMLError:
        same = False
    if not same:
        snippet = yaml.safe_dump({"presets": {name: dict(policy)}}, default_flow_style=None, sort_keys=False)
        raise PresetError(f"{path}: cannot be changed safely; add to args.chain by hand:\n{snippet}")
    try:
        load_args(args, path.parent)
    except ConfigError as error:
        raise PresetError(f"{path}: would not be valid: {error}") from None
    return _replace(path, changed)


def _changed(text: str, index: int, name: str, policy: Mapping[str, Any]) -> str:
    """``text`` with the preset in it."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    application = _value(root, "applications").value[index]
    value, key = _flow(policy), _flow(name)
    args = _value(application, "args")
    chain = _value(args, "chain") if args is not None else None
    presets = _value(chain, "presets") if isinstance(chain, yaml.MappingNode) else None
    if isinstance(presets, yaml.MappingNode):
        old = _value(presets, name)
        if old is not None:
            return _spliced(text, old.start_mark.index, _end(old), value)
        if presets.value:
            return _added(text, presets, key, value)
        return _spliced(text, presets.start_mark.index, presets.end_mark.index, f"{{{key}: {value}}}")
    preset = f"{{{key}: {value}}}"
    for holder, entry, missing in (
        (chain, "presets", preset),
        (args, "chain", f"{{presets: {preset}}}"),
        (application, "args", f"{{chain: {{presets: {preset}}}}}"),
    ):
        if isinstance(holder, yaml.MappingNode):
            null = _value(holder, entry)
            if null is not None:  # there without a value
                start = null.start_mark.index
                return _spliced(text, start, _end(null), missing if text[start - 1 : start] == " " else f" {missing}")
            if holder.value:
                return _added(text, holder, entry, missing)
    raise PresetError("there is no place for a preset")


def _added(text: str, holder: yaml.MappingNode, key: str, value: str) -> str:
    """One more entry at the end of a mapping that has some."""
    end = _end(holder.value[-1][1])
    if holder.flow_style:
        return _spliced(text, end, end, f", {key}: {value}")
    entry = f"{' ' * holder.value[0][0].start_mark.column}{key}: {value}\n"
    if text[end - 1] != "\n":  # it does after a block scalar
        line_end = text.find("\n", end)
        if line_end < 0:
            return f"{text}\n{entry}"
        end = line_end + 1
    return _spliced(text, end, end, entry)


def _end(node: yaml.Node) -> int:
    """Index behind a node's last character: the mark of a block collection reaches to what follows it, its last scalar's does not."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    end: int = node.end_mark.index
    return end


def _value(node: yaml.Node | None, key: str) -> Any:
    """The node under ``key`` of a mapping; None where there is none."""
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for entry, value in node.value if entry.value == key), None)


def _flow(value: Any) -> str:
    """On one line, as YAML."""
    if isinstance(value, Mapping):
        value = dict(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1 << 20)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def _spliced(text: str, start: int, end: int, new: str) -> str:
    return text[:start] + new + text[end:]


def _replace(path: Path, text: str) -> Path:
    """Put ``text`` in the place of the file, in one move; the old one goes into a copy that overwrites nothing."""
    number, backup = 0, path.with_name(path.name + ".bak")
    while backup.exists():
        number += 1
        backup = path.with_name(f"{path.name}.bak{number}")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode & 0o7777)
        backup.write_bytes(path.read_bytes())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return backup
