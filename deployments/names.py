"""The names of our deployments in Serve: what dashboards show and ``deployments:`` in a Serve config may override."""

from deployments.config import AppConfig

ROUTER = "Router"
EVIDENCE = "Evidence"


def target_name(model_id: str) -> str:
    """Spelled as ``ray.serve.llm`` spells model ids."""
    return "Target:" + model_id.replace("/", "--").replace(".", "_")


def draft_name(name: str) -> str:
    """One for each configured draft."""
    return f"Draft:{name}"


def deployment_names(config: AppConfig) -> list[str]:
    """All of an application's."""
    drafts = [draft_name(draft.name) for draft in config.drafts if draft.replicas]
    evidence = [EVIDENCE] if config.evidence is not None else []
    return [ROUTER, target_name(config.target.name), *drafts, *evidence]
