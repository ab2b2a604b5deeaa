"""The target and the draft that are calibrated, as a Serve config describes them."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deployments.chain.acceptance.policy import Policy
from deployments.config.errors import ConfigError
from deployments.config.load import load_args
from deployments.config.models import AppConfig, Semantic
from deployments.config.presets import policies
from deployments.config.serve_file import chain_applications, read

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Models:
    """What is loaded, and what of the config bears on what is accepted."""

    target: Path
    draft: Path
    provider: str
    dtype: str  # that the target is served in
    tokens: int  # the draft's, of a round
    top_k: int  # probabilities sent with each
    most_tokens: int  # of a round, from any source
    sources: tuple[str, ...]  # without weights
    max_batch: int
    semantic_ms: float  # of an engine step, for comparing by meaning
    presets: dict[str, Policy]

    def with_folders(self, target: Path | None, draft: Path | None) -> "Models":
        """The same with other models."""
        return replace(self, target=target or self.target, draft=draft or self.draft)

    def fingerprints(self) -> dict[str, str]:
        """Digests of the files that make up the two models."""
        return {"target": fingerprint(self.target), "draft": fingerprint(self.draft)}


def read_pair(path: Path, draft: str | None = None) -> Models:
    """The pair of the chain's application in a Serve config, with its first draft or the one named ``draft``.

    Raises:
        ConfigError: the file is not a valid config, or has no such draft.
    """
    content = read(path)
    found = [application for _, application in chain_applications(content)]
    if not found:
        raise ConfigError([f"{path}: no application of this project"])
    config: AppConfig = load_args(found[0].get("args") or {}, path.resolve().parent)
    drafts = {spec.name: spec for spec in config.drafts}
    if not drafts or (draft is not None and draft not in drafts):
        raise ConfigError([f"{path}: no draft {draft or ''}; there are: {', '.join(drafts) or 'none'}"])
    spec = drafts[draft] if draft is not None else config.drafts[0]
    return Models(
        target=config.target.model,
        draft=spec.model,
        provider=spec.provider,
        dtype=config.target.dtype,
        tokens=spec.tokens,
        top_k=spec.top_k,
        most_tokens=config.draft_tokens,
        sources=tuple(config.chain.sources),
        max_batch=config.chain.max_batch or 0,
        semantic_ms=(config.chain.semantic or Semantic()).budget_ms,
        presets=policies(config.chain.presets),
    )


def fingerprint(folder: Path) -> str:
    """Of the names and contents of a model's files; the same wherever its folder lies."""
    total = hashlib.blake2b(digest_size=12)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        total.update(str(file.relative_to(folder)).encode() + b"\0")
        with file.open("rb") as content:
            while part := content.read(_CHUNK):
                total.update(part)
    return total.hexdigest()


def as_dict(models: Models) -> dict[str, Any]:
    """What a report says of it; names of folders, never where they lie."""
    return {
        "target": models.target.name,
        "draft": models.draft.name,
        "provider": models.provider,
        "served_dtype": models.dtype,
        "draft_tokens": models.tokens,
        "top_k": models.top_k,
    }
