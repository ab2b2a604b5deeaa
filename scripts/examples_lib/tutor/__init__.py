"""Tutoring: three proofs of one theorem as drafts; what the answer takes over from one stays marked in it."""

from pathlib import Path
from typing import Any

import yaml

from scripts.examples_lib.app import App
from scripts.examples_lib.arithmetic import wrong_equations
from scripts.examples_lib.example import Finding, Report, Step, patiently

LINE = "three proofs of one small theorem as drafts; the scaffold keeps the steps taken over visible in the answer"
PROOFS = Path(__file__).parent / "proofs.yaml"
OPEN, CLOSE = "<draft source=", "</draft>"
MAX_TOKENS = 112


def shipped() -> dict[str, Any]:
    """The theorem and its proofs by name."""
    content: dict[str, Any] = yaml.safe_load(PROOFS.read_text(encoding="utf-8"))
    return content


def run(app: App) -> Report:
    """The drafts are all there are: no model and no source is asked for more."""
    content = shipped()
    proofs: dict[str, str] = content["proofs"]
    question = f"Prove to a pupil, step by step: {content['theorem']}"
    chain = {
        "mode": "answer",
        "k": 0,
        "sources": [],
        "drafts": list(proofs.values()),
        "length": 2 * MAX_TOKENS,
        "scaffold": True,
        "trace": True,
    }
    names = {f"given#{index}": f"proof by {name}" for index, name in enumerate(proofs)}
    step = patiently(
        lambda: Step(question=question, answer=app.ask(question, chain, max_tokens=MAX_TOKENS), names=names)
    )
    return Report(
        steps=[step],
        shows="Of three proofs the target finds one likeliest and says what it can agree with; in the answer that part stands between "
        "<draft> and </draft>, so that a reader sees which steps are a shipped proof's and which the model's.",
        findings=findings(step),
        unchecked="Equations are recomputed; whether a proof in words proves anything, only a reader can tell.",
    )


def findings(step: Step) -> list[Finding]:
    """How far the answer follows its draft, and the equations in it."""
    text, told = step.answer.text, step.told
    result = []
    if told.get("chosen") is not None:
        chosen = told["drafts"][told["chosen"]]["text"]
        kept = scaffold(text)
        steps = chosen.strip().splitlines()
        whole = sum(step in kept for step in steps)
        result.append(
            Finding(
                right=whole == len(steps),
                text=f"Of the {step.name(told['chosen'])}, the likeliest draft, the answer takes over {whole} of {len(steps)} lines "
                f"({len(kept)} of {len(chosen)} characters).",
            )
        )
    wrong = wrong_equations(text)
    said = (
        f"Equations in the answer that do not hold: {'; '.join(wrong)}."
        if wrong
        else "No equation in the answer is wrong."
    )
    return [*result, Finding(right=not wrong, text=said)]


def scaffold(text: str) -> str:
    """What of an answer stands between the marks."""
    if not text.startswith(OPEN):
        return ""
    return text.partition(">")[2].partition(CLOSE)[0]
