"""A clause question seen from three sides: two lawyers and the contract itself."""

import re
from dataclasses import dataclass
from pathlib import Path

from scripts.examples_lib.app import App
from scripts.examples_lib.example import Finding, Report, Step, patiently

LINE = (
    "a question about a contract, drafted by two lawyers and by retrieval; the target decides with all three before it"
)
CONTRACT = Path(__file__).parent / "hire_agreement.md"
FACTS = (
    "A rowing boat came back to the jetty at eight because of fog. The hirer had called the jetty at half past five."
)
QUESTION = f"{FACTS} Must the hirer pay a late fee under the hire agreement? Answer yes or no first, then give the reason in one sentence."
GOLD = "no"
CLAUSE = "no late fee is due"  # the words that decide
DENIAL = re.compile(r"\b(no late fee|no fee|(not|n't|never)( \w+){0,2} (pay|owe|due))\b", re.IGNORECASE)
OBLIGATION = re.compile(r"\b(must|should|has to|have to|needs to|is to) pay\b|\bowes?\b", re.IGNORECASE)
RETRIEVAL = "retrieval"
MAX_TOKENS = 56


@dataclass(frozen=True, slots=True)
class Lawyer:
    """Who writes a draft, on whose behalf."""

    name: str
    instruction: str
    stands_for: str  # what a lawyer of that side says to the question


LAWYERS = (
    Lawyer(
        "owner's lawyer",
        "You are the lawyer of the boat's owner. Say in one sentence why the hirer must pay the late fee.",
        "yes",
    ),
    Lawyer(
        "hirer's lawyer",
        "You are the lawyer of the hirer. Say in one sentence why the hirer need not pay the late fee.",
        "no",
    ),
)


def run(app: App) -> Report:
    """Two lawyers write first, each under instructions of its own; then the question is asked with their drafts."""
    contract = CONTRACT.read_text(encoding="utf-8")
    drafts = [
        app.ask(
            f"{FACTS} Must the hirer pay a late fee?",
            {},
            system=f"{lawyer.instruction} The contract:\n\n{contract}",
            max_tokens=MAX_TOKENS,
        ).text
        for lawyer in LAWYERS
    ]
    chain = {
        "mode": "answer",
        "k": 0,  # no samples of the draft models: the lawyers have written already
        "sources": [RETRIEVAL],
        "drafts": drafts,
        "length": 2 * MAX_TOKENS,
        "resolve": "write",
        "trace": True,
    }
    names = {f"given#{index}": lawyer.name for index, lawyer in enumerate(LAWYERS)} | {
        RETRIEVAL: "the contract (retrieval)"
    }
    step = patiently(
        lambda: Step(question=QUESTION, answer=app.ask(QUESTION, chain, max_tokens=MAX_TOKENS), names=names),
        lambda told: (
            any(draft["source"] == RETRIEVAL for draft in told.get("drafts", [])) or told.get("outcome") == "consensus"
        ),
    )
    return Report(
        steps=[step],
        shows="Three viewpoints on one question, side by side. Both lawyers are the target itself, differently instructed, with the contract "
        "before them. The question does not quote it: what the target knows of it when it decides, it has from the drafts, and the trace "
        "says which passage of which document that was.",
        findings=findings(step, contract),
        unchecked="Yes and no are read off the words; whether the reason given is the clause's, only a reader can tell.",
    )


def findings(step: Step, contract: str) -> list[Finding]:
    """Retrieval's passage, and what each writer says to the question."""
    drafts = step.told.get("drafts", [])
    texts = {draft["source"]: draft["text"] for draft in drafts}
    result = []
    if RETRIEVAL in texts:
        note = next(draft["note"] for draft in drafts if draft["source"] == RETRIEVAL)
        right = CLAUSE in texts[RETRIEVAL].lower()
        result.append(
            Finding(
                right=right, text=f"Retrieval drafted {note}: this {'is' if right else 'is not'} the clause on fog."
            )
        )
    else:
        why = step.told.get("reasons", {}).get(RETRIEVAL, "it was not asked")
        result.append(
            Finding(right=False, text=f"Retrieval drafted nothing ({why}): nobody showed the target the contract.")
        )
    said = [
        (f"The {lawyer.name}", texts.get(f"given#{index}", ""), lawyer.stands_for)
        for index, lawyer in enumerate(LAWYERS)
    ]
    for who, text, wanted in [*said, ("The answer", step.answer.text, GOLD)]:
        verdict = yes_or_no(text)
        because = "by the clause on fog it is no" if who == "The answer" else f"that side's answer is {wanted}"
        result.append(
            Finding(right=verdict == wanted, text=f"{who} says {verdict or 'neither yes nor no'}; {because}.")
        )
        if invented := numbers(text) - numbers(contract + QUESTION):
            result.append(Finding(right=False, text=f"{who} has numbers from nowhere: {', '.join(sorted(invented))}."))
    return result


def yes_or_no(text: str) -> str:
    """The word in the first sentence, else what the text says of paying: "yes", "no", "both", or nothing."""
    first = re.search(r"\b(yes|no)[,.;:]", re.split(r"(?<=[.\n])", text.strip())[0], re.IGNORECASE)
    if first:
        return first[1].lower()
    rest, no = DENIAL.subn("", text)
    yes = OBLIGATION.search(rest)
    return "both" if yes and no else "yes" if yes else "no" if no else ""


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+", text))
