"""Do the target and its drafts spell text with the same tokens? Compared by content: sizes prove nothing."""

from deployments.config.errors import ConfigError
from deployments.config.models import AppConfig
from hw.onnx.checkpoint import CheckpointError, tokenizer_fingerprint


def tokenizer_problems(config: AppConfig, root: str = "args") -> list[str]:
    """One sentence for each draft whose tokenizer differs from the target's, with both fingerprints.

    Padding the vocabulary to a round size is no difference: the padding ids are never proposed.
    """
    if not config.drafts:
        return []
    problems = []
    try:
        wanted = tokenizer_fingerprint(config.target.model)
    except CheckpointError as error:
        return [f"{root}.target.model: {error}"]
    for index, draft in enumerate(config.drafts):
        try:
            got = tokenizer_fingerprint(draft.model)
        except CheckpointError as error:
            problems.append(f"{root}.drafts[{index}].model: {error}")
            continue
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
