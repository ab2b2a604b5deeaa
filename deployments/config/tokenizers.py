"""Do the target and its drafts spell text with the same tokens? Compared by content: sizes prove nothing."""

import json
from pathlib import Path

from deployments.config.errors import ConfigError
from deployments.config.models import AppConfig


def tokenizer_problems(config: AppConfig, root: str = "args") -> list[str]:
    """One sentence for each draft whose tokenizer differs from the target's, with both fingerprints.

    Padding the vocabulary to a round size is no difference: the padding ids are never proposed.
    """
    if not config.drafts:
        return []
    from hw.onnx.checkpoint import tokenizer_fingerprint

    problems = []
    wanted = tokenizer_fingerprint(config.target.model)
    for index, draft in enumerate(config.drafts):
        got = tokenizer_fingerprint(draft.model)
        if got != wanted:
            problems.append(
                f"{root}.drafts[{index}].model: {draft.name} has another tokenizer than the target: {got} in {draft.model}, "
                f"{wanted} in {config.target.model}; a draft must be made for its target's tokenizer"
            )
    return problems


def require_same_tokenizer(config: AppConfig) -> None:
    """Raise ConfigError for drafts that cannot serve this target."""
    problems = tokenizer_problems(config)
    if problems:
        raise ConfigError(problems)


def vocab_size(model: Path) -> int:
    """The (possibly padded) vocabulary size of a checkpoint or draft folder; 0 when it does not say."""
    for name, keys in (("config.json", ("vocab_size",)), ("genai_config.json", ("model", "vocab_size"))):
        if (model / name).is_file():
            value = json.loads((model / name).read_text())
            for key in keys:
                value = value.get(key, 0) if isinstance(value, dict) else 0
            if value:
                return int(value)
    return 0
