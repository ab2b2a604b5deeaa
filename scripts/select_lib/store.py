"""What was measured, in one JSON file written anew after every part: a run goes on where another one ended.

A part is kept under a digest of everything it depends on, models and versions included, so what was measured under other
conditions is never taken for this run's. ``report`` is what the last run made of its parts.
"""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1


class NotOurs(ValueError):
    """The file is something else; the text says what to do."""


@dataclass
class Store:
    """``parts`` by key."""

    path: Path
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, *, fresh: bool = False) -> "Store":
        """What is kept in ``path``; empty where there is no file, or with ``fresh``. Raises :class:`NotOurs`."""
        if fresh or not path.exists():
            return cls(path)
        hint = f"choose another --out, or --fresh to replace {path.name}"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT or content["tool"] != "select_draft":
                raise NotOurs(f"{path}: is of another format or tool; {hint}")
            parts = content["parts"]
            if not isinstance(parts, dict) or not all(isinstance(part, dict) for part in parts.values()):
                raise TypeError("parts are no objects")
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, NotOurs):
                raise
            raise NotOurs(f"{path}: is not a result of scripts/select_draft ({error}); {hint}") from None
        return cls(path, parts)

    def keep(self, key: str, part: dict[str, Any]) -> None:
        """Add a part and write the file."""
        self.parts[key] = part
        self.save()

    def save(self, **report: Any) -> None:
        """Write everything, ``report`` at its head, in one move."""
        content = {"format": FORMAT, "tool": "select_draft", **report, "parts": self.parts}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(_lines(content))
            os.chmod(temporary, 0o644)
            os.replace(temporary, self.path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def part_key(kind: str, **what: Any) -> str:
    """Names a part by what it depends on; ``kind`` is readable in the file."""
    return f"{kind}-{digest(what)}"


def digest(value: Any) -> str:
    """20 hex digits."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=10).hexdigest()


def _lines(content: dict[str, Any]) -> str:
    """JSON with a part a line: what changed between two runs is what differs between lines."""
    head = json.dumps({name: value for name, value in content.items() if name != "parts"}, indent=1)
    parts = ",\n".join(f'  "{key}": {json.dumps(part)}' for key, part in content["parts"].items())
    return f'{head[:-2]},\n "parts": {{\n{parts}\n }}\n}}\n'
