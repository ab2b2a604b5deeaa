"""Who drafts for which sequence, and how much of a draft is worth verifying: pure decisions from what was measured.

One currency rules all of it: the *worth of a token*, the seconds the engine needs on average for one committed token at
present. A drafted token is verified if (probability that it is accepted) x worth exceeds what its verification adds to the
step; a draft is waited for if what it brings exceeds the wait. Since the worth follows from the decisions, this is
Dinkelbach's iteration for the largest ratio of tokens to time (Management Science 13(7), 1967): it improves with every
round.

Whether drafts that cost something (a model elsewhere, perhaps on a core lent by the target) are asked at all is decided for
the whole step, by batch size: *speedup* of the two ways to run, each relative to plain steps of the same size.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.chain.acceptance.family import LOSSLESS
from deployments.chain.acceptance_rates import AcceptanceRates, Trust, learn, path
from deployments.chain.speedup import Average, Regime
from deployments.chain.step_times import StepTimes

ALONE, SHARED = "alone", "shared"  # lanes: all cores for the target, or a core lent to a draft

_LEARN_STEPS = 12  # steps with drafts by which drafting by models is judged
_MARGIN = 1.01  # by how much doing without must be better
_EARLY_STEPS, _EARLY_MARGIN = 5, 1.25  # where it is clearly worse, fewer do
_SAFETY = 1.2  # by how much a drafted token must be worth more than its verification is expected to cost
_RESUME_MARGIN = 1.15  # by how much they must have been better than doing without is now, to be asked again
_LOCAL_NOW = 1.2  # by how much a draft at hand must beat what models bring on average, to have the core for one step
_PATIENCE = 32  # steps after which it is judged although drafts still read: reading costs, too
_PROBE_SHARE = 0.02  # of the time may go into trying the way that was worse
_PROBE_LEAST_S = 0.1  # what a try is taken to cost at least
_LIKELY_GAIN = 0.2  # of a token's time, by drafting of a model that pays
_LIKELY_LOSS = 0.4  # of the time in which a lent core is used for reading
_CAUTION = 0.6  # more for each doubling of the batch, until it is known what verifying costs there
_FEW = 2  # sequences up to which a core is lent without having been measured to pay
_FIRST_TRY_S = 60.0  # time in larger batches before it is tried there
_FORGET_S = 600.0  # after so long without a try, one is due whatever it costs
_START_GAIN = 1.5  # accepted tokens expected of a model draft nobody has seen yet
_BASE_STEPS = 4  # steps measured with all cores before a core is lent for the first time
_LOCAL_ALPHA = 1 / 8  # of a step, in a sequence's pace
_CLOSE = 1.3  # a speedup below it is a close thing
_CONTROL_CLOSE, _CONTROL = 16, 64  # steps with drafts after which one is done without, where it is close and elsewhere
_GAIN_ALPHA = 0.08
_LEAST_TRUST = 0.25  # below it a sequence asks no model; trust recovers slowly, so it will again


@dataclass(slots=True)
class SourceRecord:
    """What one tenant's requests with policies of one family taught about one source; outlives them."""

    rates: AcceptanceRates = field(default_factory=AcceptanceRates)
    gain: float = _START_GAIN  # accepted tokens of a round it was asked in


@dataclass(slots=True)
class View:
    """One sequence's view of one source."""

    record: SourceRecord
    trust: Trust = field(default_factory=Trust)
    gain: float = 0.0

    def __post_init__(self) -> None:
        self.gain = self.record.gain


@dataclass(frozen=True, slots=True)
class Offer:
    """A draft cut to what is worth verifying. ``expected``: accepted tokens it brings in the mean."""

    length: int
    expected: float


@dataclass(slots=True)
class LocalPace:
    """What one sequence's drafts without waiting brought of late: every text repeats itself more or less."""

    tokens: float = 1.0  # committed a step, the target's own included
    length: float = 0.0  # drafted a step

    def saw(self, offer: Offer) -> None:
        """One step, with the best that was on offer."""
        self.tokens += _LOCAL_ALPHA * (1.0 + offer.expected - self.tokens)
        self.length += _LOCAL_ALPHA * (offer.length - self.length)


@dataclass(frozen=True, slots=True)
class Wish:
    """What one sequence could do in the step to come. ``local``: its best offer that costs no waiting."""

    local: Offer
    model: View | None  # None: no model may draft for it now
    pace: LocalPace = field(default_factory=LocalPace)


@dataclass(frozen=True, slots=True)
class StepDone:
    """One engine step, afterwards."""

    sequences: int
    tokens: int  # computed: one a sequence and the drafted ones
    seconds: float
    wait_s: float  # what the engine waited for drafts before it
    committed: int
    mixed: bool  # models took part as far as the controller let them
    reading: bool  # but one was still reading a sequence
    local: bool  # sources that cost no waiting were allowed
    local_length: int  # what sources that cost no waiting would have had verified, had they been the only ones
    local_expected: float  # and the tokens that was expected to bring


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether models are asked in one step. ``mixed``: they are at this size of batch, in general."""

    ask: bool
    mixed: bool
    reason: str


class Controller:
    """Decisions for one engine. ``lends``: its drafts work on a core that the engine could use itself meanwhile."""

    def __init__(self, lends: bool = False) -> None:
        self.times = StepTimes()
        self.counts: Counter[str] = Counter()
        self._lends = lends
        self._regimes: dict[int, Regime] = {}
        self._records: dict[tuple[str, str, str], SourceRecord] = {}
        self._tokens_per_s = Average()
        self._base_steps = 0
        self._read_s = 0.003  # seconds in which a draft reads one token
        self.lane = ALONE

    @property
    def lends(self) -> bool:
        """Can change as drafts come and go; then what they brought at each size of batch is found out anew."""
        return self._lends

    @lends.setter
    def lends(self, lends: bool) -> None:
        if lends != self._lends:
            self._lends = lends
            self._regimes.clear()

    # --- memory ---------------------------------------------------------------------------------------------------

    def view(self, tenant: str, source: str, family: str = LOSSLESS) -> View:
        """A new sequence's view; starts from what the tenant's earlier ones taught whose policy let as much pass.

        ``family``: of its policy (:mod:`deployments.chain.acceptance.family`). What a lossy request accepts would promise a
        lossless one drafts it then pays for in vain.
        """
        key = tenant, source, family
        record = self._records.pop(key, None) or SourceRecord()
        self._records[key] = record  # latest last
        while len(self._records) > 4096:
            del self._records[next(iter(self._records))]
        return View(record)

    @property
    def token_worth_s(self) -> float:
        """Seconds the engine takes for one committed token, over all sequences; 0 while unknown."""
        return 1.0 / self._tokens_per_s.value if self._tokens_per_s.steps else 0.0

    # --- what happened --------------------------------------------------------------------------------------------

    def verified(self, view: View, confidence: Sequence[float], accepted: int) -> None:
        """A draft was verified: ``accepted`` of its tokens agreed."""
        learn(view.record.rates, view.trust, confidence, accepted)

    def asked(self, view: View, accepted: int) -> None:
        """A round in which a model was asked brought so many accepted tokens (0 also when it brought nothing in time)."""
        view.gain += 2 * _GAIN_ALPHA * (accepted - view.gain)
        view.record.gain += _GAIN_ALPHA * (accepted - view.record.gain)

    def stepped(self, step: "StepDone") -> None:
        """An engine step ended that did nothing but decode."""
        was_plain = step.tokens == step.sequences
        self.times.observe(self.lane, step.tokens, step.seconds, was_plain)
        self._tokens_per_s.add(step.committed, step.seconds + step.wait_s)
        self._base_steps += self.lane == ALONE
        regime = self._regime(step.sequences)
        regime.time_s += step.seconds + step.wait_s
        regime.unplain = 0 if was_plain else regime.unplain + 1
        plain = self.times.predict(ALONE, step.sequences)
        if step.mixed:
            brought = step.committed / step.sequences, (step.seconds + step.wait_s) / plain
            regime.model.add(*brought)
            if not step.reading:
                regime.drafting.add(*brought)
            if step.local:
                alone = self.times.predict(ALONE, step.sequences + step.local_length)
                regime.local.add(1.0 + step.local_expected / step.sequences, alone / plain)
        elif step.local and self.lane == ALONE:
            regime.local.add(step.committed / step.sequences, step.seconds / plain)
            regime.watch()

    # --- decisions ------------------------------------------------------------------------------------------------

    def offer(self, view: View, confidence: Sequence[float], tokens: int) -> Offer:
        """Cut a draft to what pays, in a step of ``tokens`` sequences, which computes as many tokens without drafts."""
        worth = self.token_worth_s
        cost = self.times.slope(self.lane, tokens) * _SAFETY * self._regime(tokens).caution
        expected, length = 0.0, 0
        for probability in path(view.record.rates, view.trust, confidence):
            if probability * worth < cost:
                break
            expected += probability
            length += 1
        if worth == 0.0:  # nothing measured yet
            return Offer(len(confidence), float(len(confidence)))
        return Offer(length, expected)

    def measures(self, sequences: int) -> bool:
        """Whether the coming step should be plain although there are drafts: to know what drafting is compared with."""
        regime = self._regime(sequences)
        often = regime.local.value < _CLOSE
        return not regime.asking and regime.unplain >= (_CONTROL_CLOSE if often else _CONTROL)

    def asks(self, wishes: Sequence[Wish]) -> Decision:
        """Whether models are asked in the coming step, and why (not)."""
        if not any(wish.model is not None for wish in wishes):
            return Decision(False, False, "no_source")
        if self._lends and self._base_steps < _BASE_STEPS:
            return Decision(False, False, "measuring")
        regime = self._regime(len(wishes))
        local = self._local_speed(wishes)
        if not regime.asking:
            # these texts may repeat less than those for which models were the slower way
            if regime.time_s < regime.try_at and regime.usual(len(wishes) <= _FEW) < _RESUME_MARGIN * local:
                return Decision(False, False, "slower")
            self._try(regime)
        regime.steps += 1
        if self._slower(regime, local, len(wishes)):
            self._stop(regime)
            return Decision(False, False, "slower")
        if self._lends and self._better_now(regime, wishes):
            return Decision(False, True, "local_better")
        return Decision(True, True, "faster")

    def _local_speed(self, wishes: Sequence[Wish]) -> float:
        """Speedup over plain steps that these sequences would have without models."""
        batch = len(wishes)
        plain = self.times.predict(ALONE, batch)
        if plain <= 0.0:
            return 1.0
        alone = self.times.predict(ALONE, batch + sum(wish.pace.length for wish in wishes))
        return sum(wish.pace.tokens for wish in wishes) / batch / (alone / plain)

    def _slower(self, regime: Regime, local: float, batch: int) -> bool:
        """Few sequences are read in little time, which short requests would not show; many are read all the time."""
        few = batch <= _FEW
        drafts = regime.drafting
        if drafts.steps >= _LEARN_STEPS or (not few and regime.steps > _PATIENCE):
            return regime.usual(few) * _MARGIN < local
        return drafts.steps >= _EARLY_STEPS and drafts.value * _EARLY_MARGIN < local

    def _better_now(self, regime: Regime, wishes: Sequence[Wish]) -> bool:
        """Whether the drafts at hand, verified with all cores, bring more in this step than models do on average."""
        batch = len(wishes)
        length = sum(wish.local.length for wish in wishes)
        if not length:
            return False
        expected = sum(wish.local.expected for wish in wishes)
        relative = self.times.predict(ALONE, batch + length) / (self.times.predict(ALONE, batch) or 1.0)
        usual = regime.drafting.value if regime.drafting.steps else 1.0 + _START_GAIN
        return (1.0 + expected / batch) / relative > _LOCAL_NOW * usual

    def read(self, tokens: int, seconds: float) -> None:
        """A draft expects to need so long to read so many tokens."""
        if tokens:
            self._read_s += 0.25 * (seconds / tokens - self._read_s)

    def opens(self, unread: int, left: int) -> bool:
        """Whether a draft should read ``unread`` tokens of a sequence that generates at most ``left`` more."""
        gain_s = left * self.token_worth_s * _LIKELY_GAIN
        return not self._lends or gain_s > unread * self._read_s * _LIKELY_LOSS

    def announces(self, sequences: int) -> bool:
        """Whether prompts of new requests should go to the models at once, with so many sequences then running."""
        return self._regime(sequences).asking and not (self._lends and self._base_steps < _BASE_STEPS)

    def wants_model(self, wish: Wish) -> tuple[bool, str]:
        """For one sequence of a step that asks models: is it worth a round, beside what it has for nothing?"""
        if wish.model is None:
            return False, "no_source"
        if wish.model.trust.value < _LEAST_TRUST:
            return False, "useless"
        if wish.local.expected >= wish.model.gain * min(1.0, wish.model.trust.value) and wish.local.length:
            return False, "local_better"
        return True, ""

    def _try(self, regime: Regime) -> None:
        self.counts["try"] += 1
        regime.asking, regime.began, regime.steps = True, regime.time_s, 0
        regime.model, regime.drafting = Average(), Average()

    def _stop(self, regime: Regime) -> None:
        self.counts["stop"] += 1
        lost = max(1.0 - regime.model.value / regime.local.value, 0.05)
        cost_s = max((regime.time_s - regime.began) * lost, _PROBE_LEAST_S)
        regime.asking = False
        regime.try_at = regime.time_s + min(cost_s / _PROBE_SHARE, _FORGET_S)

    def _regime(self, sequences: int) -> Regime:
        """By powers of two. A new one starts from its neighbour: what does not pay for few does not pay for more."""
        index = max(sequences - 1, 0).bit_length()
        regime = self._regimes.get(index)
        if regime is None:
            regime = self._regimes[index] = Regime(1.0 + _CAUTION * index)
            below = [self._regimes[i] for i in sorted(self._regimes) if i < index]
            if (below and not below[-1].asking) or (self._lends and sequences > _FEW):
                regime.asking, regime.try_at = False, _FIRST_TRY_S
        return regime

    def state(self) -> dict[str, float]:
        """Gauges: speedups by batch size, and what a token is worth."""
        result = {"token_worth_ms": self.token_worth_s * 1e3}
        result |= {f"models:{name}": float(count) for name, count in self.counts.items()}
        for index, regime in self._regimes.items():
            size = 1 << index
            result[f"speedup_local:{size}"] = regime.local.value
            result[f"speedup_model:{size}"] = regime.model.value
            result[f"asking:{size}"] = float(regime.asking)
        return result


class Unconditional(Controller):
    """Everything drafted is verified and every source is asked, whatever it costs: for tests and experiments."""

    def offer(self, view: View, confidence: Sequence[float], tokens: int) -> Offer:
        return Offer(len(confidence), float(len(confidence)))

    def asks(self, wishes: Sequence[Wish]) -> Decision:
        any_model = any(wish.model is not None for wish in wishes)
        return Decision(any_model, any_model, "no_source")

    def announces(self, sequences: int) -> bool:
        return True

    def opens(self, unread: int, left: int) -> bool:
        return True

    def measures(self, sequences: int) -> bool:
        return False

    def wants_model(self, wish: Wish) -> tuple[bool, str]:
        return (False, "local_better") if wish.local.length else (wish.model is not None, "no_source")

    @property
    def token_worth_s(self) -> float:
        return 0.0
