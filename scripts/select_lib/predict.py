"""Tokens a second of a target with a draft, from measured costs and acceptance. Pure functions; times are milliseconds.

The target verifies the drafts of ``batch`` sequences in one step. Two ways to draft:

synchronous  the draft works while the target waits. A round is ``verify + T * draft + overhead``
             (Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", section 3.3)
overlapped   the draft works while the target verifies, for likely outcomes (``deployments/draft/schedule.py``, after the outcome
             cache of github.com/tanishqkumar/ssd): a round is ``verify + what was not ready + overhead``
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Steps = Sequence[tuple[int, float]]  # drafted tokens a sequence verifies in a step, and what the step takes; ascending
LEAST_BRANCH = 0.01  # the engine starts no branch for an outcome less likely than that


@dataclass(frozen=True)
class DraftCosts:
    """One call of the draft model computes a token for each of ``rows`` lines in ``base + row * rows``; ``unread``: what one more
    token takes in a call that reads several."""

    base: float
    row: float
    unread: float = 0.0

    def call(self, rows: int) -> float:
        """0 for no rows."""
        return self.base + self.row * rows if rows else 0.0


@dataclass(frozen=True)
class Prediction:
    """One source, one length of drafts, one batch. ``round_ms`` of an engine step; ``hidden``: share of the draft's work that the
    target does not wait for."""

    tokens: int
    round_ms: float
    tokens_per_s: float
    hidden: float = 0.0


def expected_committed(chances: Sequence[float]) -> float:
    """Tokens a step commits: the target's own, and each drafted one with the probability that it and all before are accepted.

    ``1 + a1 + a1*a2 + …`` with ``chances[i]`` the acceptance at position ``i`` given acceptance of all before. With equal ``a``
    this is ``(1 - a**(T + 1)) / (1 - a)``, equation 1 of Leviathan et al. 2023.
    """
    total, reached = 1.0, 1.0
    for chance in chances:
        reached *= chance
        total += reached
    return total


def step_ms(steps: Steps, verified: float) -> float:
    """What a step that verifies ``verified`` tokens a sequence takes, along straight lines between those measured."""
    if len(steps) == 1:
        return steps[0][1]
    upper = next((index for index in range(1, len(steps)) if steps[index][0] >= verified), len(steps) - 1)
    (x0, y0), (x1, y1) = steps[upper - 1], steps[upper]
    return y0 + (y1 - y0) * (verified - x0) / (x1 - x0)


def mean_step_ms(steps: Steps, shares: Sequence[float]) -> float:
    """The same for steps of which ``shares[n]`` verify ``n`` tokens."""
    return sum(share * step_ms(steps, count) for count, share in enumerate(shares) if share)


def plain(steps: Steps, batch: int) -> float:
    """Tokens a second without drafts."""
    return 1e3 * batch / step_ms(steps, 0)


def without_model(steps: Steps, shares: Sequence[float], chances: Sequence[float], batch: int) -> Prediction:
    """A source that costs nothing to ask and does not always propose: ``shares[n]`` of the steps verify ``n`` tokens."""
    round_ms = mean_step_ms(steps, shares)
    return Prediction(len(chances), round_ms, 1e3 * batch * expected_committed(chances) / round_ms)


def synchronous(
    steps: Steps,
    costs: DraftCosts,
    chances: Sequence[float],
    batch: int,
    overhead_ms: float,
    *,
    reads_again: bool = False,
) -> Prediction:
    """The target waits for all of every draft.

    ``verify(T + 1) + T * draft + overhead``, and one token more to read after a draft that was accepted whole: nobody has
    computed its last token then. ``reads_again``: accepted tokens are all read again, with the target's hidden states.
    """
    tokens = len(chances)
    unread = expected_committed(chances) - 1.0 if reads_again else _product(chances)
    round_ms = step_ms(steps, tokens) + tokens * costs.call(batch) + unread * batch * costs.unread + overhead_ms
    return Prediction(tokens, round_ms, 1e3 * batch * expected_committed(chances) / round_ms)


@dataclass
class Line:
    """What the draft works on ahead: the main line (``branch`` False) or a branch off it.

    ``chance``: that the target goes this way, so that a token of it is of use. ``needs``: calls until its whole draft waits.
    """

    chance: float
    needs: int
    first: float = 0.0  # of use even where the rest is not: the main line's first call, which reads the last token sent
    done: int = field(default=0)

    @property
    def value(self) -> float:
        """Of its next call; 0 when there is nothing left to do."""
        if self.done >= self.needs:
            return 0.0
        return self.first if self.first and not self.done else self.chance


def lines_ahead(chances: Sequence[float], beyond: float, runners: Sequence[float]) -> list[Line]:
    """What can be worked on while a draft with these ``chances`` is verified.

    ``beyond``: chance that the target's own token after a draft accepted whole is what the draft guesses there. ``runners[r]``:
    of the target's tokens that were not the guess, the share that is its runner-up ``r``: a branch for each.
    """
    tokens = len(chances)
    whole = _product(chances)
    lines = [Line(whole * beyond, tokens + 1, first=whole)]
    reached = 1.0
    for chance in (*chances, beyond):
        for share in runners:
            outcome = reached * (1.0 - chance) * share
            if outcome >= LEAST_BRANCH:
                lines.append(Line(outcome, tokens))
        reached *= chance
    return lines


def work_ahead(lines: Sequence[Line], costs: DraftCosts, batch: int, time_ms: float) -> None:
    """Spend ``time_ms`` on the lines as the engine does: each call takes the lines that bring most value for its time.

    The same lines of all ``batch`` sequences share a call. One that would not end in time is not started.
    """
    left = time_ms
    while True:
        best: list[Line] = []
        rate = value = 0.0
        open_lines = sorted((line for line in lines if line.value > 0.0), key=lambda line: line.value, reverse=True)
        for count, line in enumerate(open_lines, 1):
            value += line.value
            now = value / costs.call(batch * count)
            if now >= rate:
                rate, best = now, open_lines[:count]
        if not best or costs.call(batch * len(best)) > left:
            return
        left -= costs.call(batch * len(best))
        for line in best:
            line.done += 1


def waiting_ms(lines: Sequence[Line], tokens: int, costs: DraftCosts, batch: int) -> float:
    """What the target still waits for on average, after :func:`work_ahead`.

    The ``j``-th call serves every sequence that lacks at least ``j`` tokens, so it is made where any does.
    """
    main, *branches = lines
    lacking: list[tuple[float, int]] = []  # probability, tokens lacking
    lacking.append((main.chance, tokens - max(0, main.done - 1)))
    lacking += [(line.chance, tokens - line.done) for line in branches]
    lacking.append((max(0.0, 1.0 - sum(line.chance for line in lines)), tokens))
    total = 0.0
    for number in range(1, tokens + 1):
        share = sum(chance for chance, count in lacking if count >= number)
        anyone = 1.0 - (1.0 - min(share, 1.0)) ** batch
        total += anyone * costs.base + share * batch * costs.row
    unread = main.first if not main.done else 0.0  # the last token sent was accepted and nobody read it
    return total + unread * batch * costs.unread


def overlapped(
    steps: Steps,
    costs: DraftCosts,
    chances: Sequence[float],
    beyond: float,
    runners: Sequence[float],
    batch: int,
    overhead_ms: float,
) -> Prediction:
    """The draft works ahead while the target verifies; ``steps`` and ``costs`` are those of the two beside each other."""
    tokens = len(chances)
    verify = step_ms(steps, tokens)
    lines = lines_ahead(chances, beyond, runners)
    work_ahead(lines, costs, batch, verify)
    waiting = waiting_ms(lines, tokens, costs, batch)
    everything = tokens * costs.call(batch) + _product(chances) * batch * costs.unread
    round_ms = verify + waiting + overhead_ms
    hidden = 1.0 - waiting / everything if everything else 1.0
    return Prediction(tokens, round_ms, 1e3 * batch * expected_committed(chances) / round_ms, max(0.0, hidden))


def best(predictions: Sequence[Prediction]) -> Prediction:
    """The fastest, the shorter draft among equals."""
    return max(predictions, key=lambda each: (each.tokens_per_s, -each.tokens))


def affordable_ms(steps: Steps, chances_of: Sequence[Sequence[float]], overhead_ms: float) -> tuple[float, int]:
    """The most a draft token may cost before drafting with these chances, one sequence, synchronously, is slower than not drafting.

    ``chances_of``: for each length of drafts. Solves ``committed(T) * verify(0) = verify(T) + T * cost + overhead`` for the cost;
    returns it and the length that affords most. Negative: not even a draft that costs nothing pays.
    """
    alone = step_ms(steps, 0)

    def cost(chances: Sequence[float]) -> float:
        tokens = len(chances)
        return (expected_committed(chances) * alone - step_ms(steps, tokens) - overhead_ms) / tokens

    longest = max(chances_of, key=cost)
    return cost(longest), len(longest)


def break_even(fastest: Callable[[float], float], plain_per_s: float) -> float | None:
    """The acceptance, the same at every position, from which on drafting is faster than not drafting; None where it never is.

    ``fastest(acceptance)``: tokens a second with the best length of drafts, growing with the acceptance.
    """
    if fastest(1.0) <= plain_per_s:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        if fastest(middle) > plain_per_s:
            high = middle
        else:
            low = middle
    return high


def _product(chances: Sequence[float]) -> float:
    result = 1.0
    for chance in chances:
        result *= chance
    return result
