"""Was a draft that takes the target's hidden states trained on this target? Compared by fingerprint."""

from deployments.config.errors import ConfigError
from deployments.config.models import AppConfig
from hw.onnx.checkpoint import CheckpointError, conditioned_facts, known_weights


def conditioned_problems(config: AppConfig, root: str = "args") -> list[str]:
    """One sentence for each conditioned draft of another target, with both fingerprints."""
    problems = []
    for index, draft in enumerate(config.drafts):
        try:
            facts = conditioned_facts(draft.model)
            wanted = known_weights(config.target.model) if facts is not None else ""
        except CheckpointError as error:
            problems.append(f"{root}.drafts[{index}].model: {error}")
            continue
        if facts is not None and facts.target_weights != wanted:
            problems.append(
                f"{root}.drafts[{index}].model: {draft.name} was trained on the hidden states of another target: "
                f"{facts.target_weights} in {draft.model}, {wanted} in {config.target.model}; train one for this target with scripts/distil"
            )
    return problems


def require_own_target(config: AppConfig) -> None:
    """Raise ConfigError for conditioned drafts that were not trained on this target."""
    problems = conditioned_problems(config)
    if problems:
        raise ConfigError(problems)
