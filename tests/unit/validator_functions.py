"""An operator's own validators, well and badly behaved."""

import os
import signal
import time
from pathlib import Path
from typing import Any


def short(text: str, context: dict[str, Any], most: int = 10) -> bool:
    return len(text) <= most


def judged(text: str, context: dict[str, Any]) -> Any:
    return {"yes": True, "no": False, "maybe": None, "pair": ("invalid", "rude"), "lie": 7, "odd": ("fine", "x")}[text]


def printing(text: str, context: dict[str, Any]) -> bool:
    print(text * 100)
    os.write(1, b"\x00\x00\x00\x00 straight to the descriptor")
    return True


def hanging(text: str, context: dict[str, Any]) -> bool:
    while text == "hang":
        pass
    return True


def dying(text: str, context: dict[str, Any]) -> bool:
    if text == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def hungry(text: str, context: dict[str, Any]) -> bool:
    return bool(bytearray(8 << 30))


def leaving(text: str, context: dict[str, Any]) -> bool:
    raise SystemExit(0)


def slow(text: str, context: dict[str, Any], seconds: float = 0.3) -> bool:
    time.sleep(seconds)
    return True


def counting(text: str, context: dict[str, Any], file: str = "") -> bool:
    """Leaves a mark for every run."""
    with Path(file).open("a") as marks:
        marks.write("x")
    return True


def asked(text: str, context: dict[str, Any]) -> tuple[str, str]:
    return "valid", f"{context.get('question')} {context.get('tenant')}"


def marked_slow(text: str, context: dict[str, Any], file: str = "") -> bool:
    """Leaves its process id, then takes long, though not too long."""
    with Path(file).open("a") as marks:
        marks.write(f"{os.getpid()}\n")
    time.sleep(0.6)
    return True
