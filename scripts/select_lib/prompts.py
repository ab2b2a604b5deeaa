"""The prompts that are answered: sets of this repository, or a file of the user's."""

import json
from pathlib import Path
from typing import Any

from scripts.bench_lib.prompts import MEASURED_SETS, Prompt, load_prompts

MOST_BYTES = 16 << 20


def load(names: list[str], file: Path | None, count: int) -> list[Prompt]:
    """``count`` prompts of each set, or of ``file``. Raises ``ValueError`` saying what is wrong and where."""
    if file is not None:
        return read_file(file)[:count]
    for name in names:
        if name not in MEASURED_SETS:
            raise ValueError(f"--set: there is no {name!r}; there are: {', '.join(MEASURED_SETS)}")
    return [prompt for name in names for prompt in load_prompts(name)[:count]]


def read_file(path: Path) -> list[Prompt]:
    """A prompt a line: ``{"messages": [...]}``, ``{"prompt": "..."}`` (both may have ``"set"``), or plain text in other files."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"--prompts {path}: larger than {MOST_BYTES >> 20} MiB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path}: cannot be read: {error}") from None
    found = [
        _prompt(line, path.suffix == ".jsonl", f"{path.name}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise ValueError(f"--prompts {path}: no prompts in it")
    return found


def _prompt(line: str, is_json: bool, where: str) -> Prompt:
    if not is_json:
        return Prompt(where, "file", ({"role": "user", "content": line.strip()},))
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if messages is None and isinstance(record, dict) and isinstance(record.get("prompt"), str):
        messages = [{"role": "user", "content": record["prompt"]}]
    if not isinstance(messages, list) or not messages or not all(_is_message(message) for message in messages):
        raise ValueError(f'{where}: needs "messages" (role and content) or "prompt" with text')
    return Prompt(str(record.get("id") or where), str(record.get("set") or "file"), tuple(messages))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(str(message.get(key, "")).strip() for key in ("role", "content"))
