"""How often systems are right and how steadily they answer, with intervals that know that wordings of a question belong together."""

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

RESAMPLES = 4000
SEED = 20_240_601


def interval(per_question: Values, statistic: Callable[[Values], Values] | None = None) -> tuple[float, float, float]:
    """Mean over questions and its 95% interval, by a bootstrap over whole questions.

    ``per_question [Q, …]``; ``statistic`` maps resampled means ``[R, …]`` to ``[R]`` (None: they are that). Wordings of one question
    stand and fall together, so resampling answers would claim too much.
    """
    pick = np.random.default_rng(SEED).integers(0, len(per_question), (RESAMPLES, len(per_question)))
    means = per_question[pick].mean(axis=1)
    point = per_question.mean(axis=0)[None]
    resampled = means if statistic is None else statistic(means)
    whole = point if statistic is None else statistic(point)
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    return float(whole[0]), float(low), float(high)


def accuracy(right: npt.NDArray[np.bool_]) -> Values:
    """Share of wordings answered right, ``[Q]``, of ``right [Q, W]``."""
    result: Values = right.mean(axis=1, dtype=np.float64)
    return result


def consistency(readings: Sequence[Sequence[str | None]]) -> Values:
    """Share of pairs of wordings with the same reading, ``[Q]``. What cannot be read agrees with nothing, not even itself."""
    shares = []
    for row in readings:
        pairs = list(combinations(row, 2))
        same = sum(first is not None and first == second for first, second in pairs)
        shares.append(same / len(pairs) if pairs else np.nan)
    return np.asarray(shares, np.float64)


def ratio(of: Values, to: Values) -> tuple[float, float, float]:
    """Ratio of the sums of two costs ``[Q]`` and its 95% interval, resampled over whole questions."""
    return interval(np.stack([of, to], axis=1), lambda means: means[:, 0] / means[:, 1])
