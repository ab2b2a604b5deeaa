"""Rules of thumb about a draft, and what the measured costs make of them. Sentences for people."""

from collections.abc import Sequence
from statistics import fmean

from hw.onnx.checkpoint import CONDITIONED
from scripts.select_lib.answers import GREEDY
from scripts.select_lib.candidates import Candidate, Target
from scripts.select_lib.predict import step_ms
from scripts.select_lib.rows import Row, modes_of

SMALL, LARGE = (
    0.1,
    1 / 3,
)  # of the target's bytes: a draft is usually smaller than the first, and should be than the second
PAYS = 0.75  # acceptance at the first position below which drafting is said to stop paying
DOMAIN = 0.15  # acceptance so far below that of other texts is another domain


def of_facts(candidate: Candidate, target: Target) -> list[str]:
    """What the folders say, before anything ran."""
    facts = candidate.manifest
    if facts is None:
        return []
    found = []
    share = candidate.nbytes / target.nbytes
    if share > LARGE:
        found.append(
            f"its weights are {share:.0%} of the target's bytes; a draft usually has {SMALL:.0%}, at most a third"
        )
    elif share > SMALL and candidate.kind != CONDITIONED:
        found.append(f"its weights are {share:.0%} of the target's bytes; a draft usually has up to {SMALL:.0%}")
    if candidate.kind == CONDITIONED:
        return found  # trained for this very target
    shape = target.shape
    if facts.architecture != shape.architecture:
        found.append(f"it is a {facts.architecture}, the target a {shape.architecture}: they may think differently")
    if facts.rope_theta != shape.rope_theta or (facts.rope_scaling or "") != shape.rope_scaling:
        found.append(
            f"its positions are other ones (RoPE θ {facts.rope_theta:g}{_scaled(facts.rope_scaling)}, the target's "
            f"{shape.rope_theta:g}{_scaled(shape.rope_scaling)}): expect less acceptance in long contexts"
        )
    if facts.max_context < shape.max_context:
        found.append(
            f"it reads at most {facts.max_context} tokens, the target {shape.max_context}: beyond, nothing is drafted"
        )
    return found


def of_measurements(row: Row, sets: Sequence[str]) -> list[str]:
    """What its acceptance and costs say."""
    found = []
    first = row.first(GREEDY)
    if row.candidate.asks_model and first is not None and first < PAYS:
        affordable, tokens = row.affordable()
        cost, step = row.token_ms(row.context, 1), step_ms(row.step_costs(1, beside=False), 0)
        can = (
            f"here it pays, drafted while the target waits, for drafts that cost up to {affordable / step:.2f} of a target's step a "
            f"token ({tokens} a round)"
            if affordable > 0
            else "here no draft of that acceptance pays while the target waits for it, whatever it costs"
        )
        found.append(
            f"acceptance at the first position is {first:.2f}; below {PAYS:g} drafting is said to stop paying: {can}; this one costs "
            f"{cost / step:.2f}"
        )
    if row.candidate.asks_model:
        needs = {mode: row.break_even(mode) for mode in modes_of(row.candidate)}
        if all(share is None for share in needs.values()):
            found.append("at its costs no acceptance makes it pay here")
    found += _domains(row, sets)
    return found


def _domains(row: Row, sets: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(sets))
    if len(names) < 2 or not row.candidate.asks_model:
        return []  # text that does not repeat is no other domain
    known = {name: share for name in names if (share := row.first(GREEDY, name)) is not None}
    found = []
    for name, share in known.items():
        others = [other for each, other in known.items() if each != name]
        if others and share < fmean(others) - DOMAIN:
            found.append(
                f"on {name} its acceptance is {share:.2f}, elsewhere {fmean(others):.2f}: it may not know that domain"
            )
    return found


def _scaled(scaling: str | None) -> str:
    return f", {scaling}" if scaling else ""
