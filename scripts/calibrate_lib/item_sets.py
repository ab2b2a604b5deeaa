"""What is answered: original items with an answer that a program can check, and the benchmark's prompts, which have none."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from scripts.bench_lib.prompts import MEASURED_SETS, load_prompts

FOLDER = Path(__file__).resolve().parent / "items"
GOLD_SETS = ("arithmetic", "extraction", "code")
PROMPT_SETS = tuple(name for name in MEASURED_SETS if name not in GOLD_SETS)
SETS = (*GOLD_SETS, *PROMPT_SETS)

Check = Literal["none", "number", "field", "python", "json"]


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One chat to answer. ``check`` says how its answer is scored; ``none``: there is no right one."""

    id: str
    set: str
    prompt: str
    max_tokens: int
    check: Check = "none"
    gold: str = ""  # number, field: what the answer has to say
    others: tuple[str, ...] = ()  # field: what it must not say
    needs: tuple[str, ...] = ()  # python: names that it defines; json: keys that it has

    @property
    def seed(self) -> int:
        """The same in every run, and another for every item."""
        return int.from_bytes(hashlib.blake2b(self.id.encode(), digest_size=4).digest(), "little")


def load_items(name: str, prompt_tokens: int, most: int | None = None, folder: Path = FOLDER) -> list[Item]:
    """The first ``most`` items of one set. ``prompt_tokens``: longest answer to a prompt of the benchmark.

    Raises:
        ValueError: there is no such set, or an item of it is not one; names the file and the item.
    """
    if name in PROMPT_SETS:
        found = [
            Item(id=prompt.id, set=name, prompt=prompt.messages[-1]["content"], max_tokens=prompt_tokens)
            for prompt in load_prompts(name)
            if len(prompt.messages) == 1
        ]
    elif name in GOLD_SETS:
        found = _gold(folder / f"{name}.yaml", name)
    else:
        raise ValueError(f"no set {name!r}; there are: {', '.join(SETS)}")
    return found[:most]


def _gold(path: Path, name: str) -> list[Item]:
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    if content.get("set") != name or not content.get("items"):
        raise ValueError(f"{path.name}: must be set {name!r} with items")
    common = {"set": name, "check": content["check"], "max_tokens": content["max_tokens"]}
    items = []
    for entry in content["items"]:
        try:
            item = msgspec.convert({**common, **entry}, Item)
        except (msgspec.ValidationError, TypeError) as error:
            raise ValueError(f"{path.name}: {entry.get('id', entry)}: {error}") from None
        if not (item.gold if item.check in ("number", "field") else item.needs):
            raise ValueError(f"{path.name}: {item.id}: nothing that an answer could be checked against")
        items.append(item)
    if len({item.id for item in items}) != len(items):
        raise ValueError(f"{path.name}: two items have the same id")
    return items


def digest(items: Sequence[Item]) -> str:
    """Changes with anything that an answer or its score depends on."""
    return hashlib.blake2b(msgspec.json.encode(list(items)), digest_size=8).hexdigest()
