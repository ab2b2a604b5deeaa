"""What becomes of drafts of whole answers, and what validators say of them, for Prometheus."""

from ray.serve import metrics

DRAFTS = "chain_evidence_drafts_total"
TAGS = "chain_validator_tags_total"


class Metrics:
    """Counted as it happens: a few drafts for each request, not for each token."""

    def __init__(self) -> None:
        self._drafts = metrics.Counter(
            DRAFTS,
            description="Times a source of whole answers was asked, by outcome: a draft, or why there is none",
            tag_keys=("source", "outcome"),
        )
        self._tags = metrics.Counter(
            TAGS,
            description="Tags of drafts by validators; a reason where a tag is no verdict",
            tag_keys=("validator", "tag", "reason"),
        )

    def tagged(self, validator: str, tag: str, reason: str) -> None:
        """A validator's tag of one draft; ``reason`` is empty for a verdict."""
        self._tags.inc(1, {"validator": validator, "tag": tag, "reason": reason or "none"})

    def drafted(self, source: str, reason: str) -> None:
        """A source answered; ``reason`` is empty for a draft."""
        self._drafts.inc(1, {"source": source, "outcome": reason or "draft"})
