"""Token ids and tenants as the command line names them."""

import json
import re
from pathlib import Path

from deployments.kv import salt_of
from scripts.kv_lib.problem import Problem

SUFFIX = ".tokens.json"


def read_tokens(given: str) -> list[int]:
    """Ids out of a file (JSON list, or numbers apart by commas or white space), or named directly, as in ``1,2,3``.

    Raises Problem.
    """
    text, path = given, Path(given)
    if not re.fullmatch(r"[\d\s,]+", given):
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise Problem(
                f"--tokens: {path} cannot be read ({error.strerror}): name a file or ids such as 1,2,3"
            ) from None
        except UnicodeDecodeError:
            raise Problem(f"--tokens: {path} is not text: a JSON list of token ids is wanted") from None
    try:
        ids = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [int(part) for part in re.split(r"[\s,]+", text.strip())]
        )
    except ValueError:
        raise Problem(f"--tokens: no token ids in {given}: a JSON list or numbers apart by commas are wanted") from None
    if not ids or not all(type(number) is int and number >= 0 for number in ids):
        raise Problem(f"--tokens: {given} holds something else than token ids")
    return list(ids)


def salt(tenant: str, given: str | None) -> bytes:
    """The salt of a tenant's name, or the one given in hex. Raises Problem."""
    if given is None:
        return salt_of(tenant)
    try:
        return bytes.fromhex(given)
    except ValueError:
        raise Problem("--salt is written in hex, two digits a byte") from None


def tokens_file(path: Path) -> Path:
    """Where the tokens of a captured file lie."""
    return path.with_name(path.name + SUFFIX)
