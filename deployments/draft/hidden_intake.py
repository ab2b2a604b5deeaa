"""The target's hidden states, for a draft that was trained on them: met once a target, then checked and put into slots.

What comes with a commit belongs to positions this draft has guessed over with its own features: those are computed again.
A refusal changes nothing: the draft goes on with its own features.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from deployments.chain.protocol import Commit
from deployments.draft.lines import Session
from deployments.draft.model import HiddenModel
from deployments.kv import HIDDEN

logger = logging.getLogger(__name__)

TAKEN, REFUSED, NONE = "hidden_taken", "hidden_refused:", "hidden_none"

_SHAPE = "shape"  # not rows of the agreed size, or of positions that are not committed
_VALUES = "values"  # not numbers


class HiddenIntake:
    """One draft's. ``meet`` may be called from any thread, the rest belongs to the drafting one.

    ``target_weights``: fingerprint of the checkpoint whose hidden states the draft was trained on.
    """

    def __init__(self, model: HiddenModel, target_weights: str) -> None:
        self.token_ids = model.token_ids
        self._model = model
        self._weights = target_weights
        self._complained = ""

    def meet(self, offer: Mapping[str, Any]) -> str:
        """``HIDDEN`` for a target whose hidden states these are; else empty, and the log says why."""
        hidden = offer.get("hidden")
        if not isinstance(hidden, Mapping):
            return ""
        if hidden.get("weights") != self._weights:
            theirs = hidden.get("weights")
            self._complain(f"this draft was trained on the hidden states of {self._weights}, the target is {theirs}")
            return ""
        if hidden.get("size") != self._model.hidden_size:
            self._complain(
                f"hidden states have {hidden.get('size')} values, this draft takes {self._model.hidden_size}"
            )
            return ""
        return HIDDEN

    def _complain(self, problem: str) -> None:
        if problem != self._complained:  # once, not whenever a target asks, which is every second
            logger.warning("%s: it drafts without them", problem)
        self._complained = problem

    def take(self, session: Session, commit: Commit) -> str:
        """Put what a commit brings into the session's slot, the commit itself having been applied; returns what to count, if anything."""
        rows = commit.hidden_rows(self._model.hidden_size)
        refused = _SHAPE if rows is None else "" if np.isfinite(rows).all() else _VALUES
        if rows is None or refused:
            rows = np.empty((0, self._model.hidden_size), np.float16)
        start = commit.hidden_start if len(rows) else commit.length - 1
        if commit.opens:
            # What the target took from its prefix cache, or no longer has, has no feature.
            self._model.open_hidden(session.slot, start)
            session.informed(0)
        elif len(rows) and start > session.computed:
            self._model.skip_hidden(session.slot, session.computed, start)
        if len(rows):
            self._model.write_hidden(session.slot, start, rows)
            session.informed(start + 1)
        return REFUSED + refused if refused else TAKEN if len(rows) else NONE if commit.want else ""
