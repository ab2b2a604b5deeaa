"""What becomes of drafts of whole answers, for Prometheus."""

from ray.serve import metrics

DRAFTS = "chain_evidence_drafts_total"


class Metrics:
    """Counted as it happens: a few drafts for each request, not for each token."""

    def __init__(self) -> None:
        self._drafts = metrics.Counter(
            DRAFTS,
            description="Times a source of whole answers was asked, by outcome: a draft, or why there is none",
            tag_keys=("source", "outcome"),
        )

    def drafted(self, source: str, reason: str) -> None:
        """A source answered; ``reason`` is empty for a draft."""
        self._drafts.inc(1, {"source": source, "outcome": reason or "draft"})
