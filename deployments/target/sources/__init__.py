"""Sources without weights, by name."""

import logging
from collections.abc import Callable, Sequence

from deployments.target.sources import suffix
from deployments.target.sources.lookup import LookupSource
from deployments.target.sources.source import Limits, Proposal, Source
from deployments.target.sources.suffix import SuffixSource

__all__ = ["SOURCES", "Limits", "Proposal", "Source", "make_sources"]

logger = logging.getLogger(__name__)

SOURCES: dict[str, Callable[[Limits], Source]] = {"suffix": SuffixSource, "lookup": LookupSource}


def make_sources(names: Sequence[str], limits: Limits | None = None) -> list[Source]:
    """Make the named sources, in order, each once; "suffix" becomes "lookup" where its library is missing.

    Raises ValueError for a name that is not in SOURCES.
    """
    unknown = [name for name in names if name not in SOURCES]
    if unknown:
        raise ValueError(f"unknown draft source {unknown[0]!r}; known are {', '.join(sorted(SOURCES))}")
    usable = list(names)
    if "suffix" in usable and not suffix.available():
        logger.warning("arctic-inference is not installed: drafting by prompt look-up instead of suffix decoding")
        usable = ["lookup" if name == "suffix" else name for name in usable]
    return [SOURCES[name](Limits() if limits is None else limits) for name in dict.fromkeys(usable)]
