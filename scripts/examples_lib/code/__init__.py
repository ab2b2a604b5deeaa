"""Completing a function: a validator that compiles drafts keeps broken ones from agreeing with each other."""

from pathlib import Path
from typing import Any

import yaml

from deployments.evidence.validators.code_blocks import code_of
from deployments.evidence.validators.python_syntax import LANGUAGES, PythonSyntax
from scripts.examples_lib.app import App
from scripts.examples_lib.arithmetic import NotArithmetic, values
from scripts.examples_lib.example import Finding, Report, Step, patiently

LINE = "code completion: two drafts that are equal and do not compile, one that does, and samples of the draft model"
DRAFTS = Path(__file__).parent / "drafts.yaml"
VALIDATOR = PythonSyntax.name
FUNCTION = "is_leap"
GOLD = {1900: False, 1996: True, 2000: True, 2023: False, 2100: False}
QUESTION = """Complete this Python function. Answer with the whole function in one code block and nothing else.

```python
def is_leap(year: int) -> bool:
    \"\"\"Whether a year of the Gregorian calendar is a leap year.\"\"\"
```"""
MAX_TOKENS = 96
LATE = "not there within"  # how a validator's tag begins that a busy machine did not get to


def shipped() -> list[str]:
    """The drafts of this example: the first two are broken and the same."""
    drafts: list[str] = yaml.safe_load(DRAFTS.read_text(encoding="utf-8"))["drafts"]
    return drafts


def run(app: App) -> Report:
    """A tag that comes too late is unknown, and there the next time; so it is asked again then."""
    drafts = shipped()
    chain = {
        "mode": "answer",
        "k": 2,
        "drafts": drafts,
        "sources": ["model"],
        "length": MAX_TOKENS,
        "validators": [VALIDATOR],
        "trace": True,
    }
    names = {f"given#{index}": f"snippet {index + 1}" for index in range(len(drafts))}
    step = patiently(
        lambda: Step(question=QUESTION, answer=app.ask(QUESTION, chain, max_tokens=MAX_TOKENS, seed=7), names=names),
        lambda told: not any(tag["why"].startswith(LATE) for draft in told.get("drafts", []) for tag in draft["tags"]),
    )
    return Report(
        steps=[step],
        shows="Snippets 1 and 2 say the same and have distance 0: without a validator they would be the consensus. Tagged invalid they "
        "take no part. The answer is the target's own; drafts that it may verify are only those that compile.",
        findings=findings(step),
        unchecked="A draft that compiles can still be wrong: snippet 3 is, about centuries.",
    )


def findings(step: Step) -> list[Finding]:
    """The tags, who took part, and what the answer's function returns."""
    told = step.told
    drafts = told.get("drafts", [])
    invalid = {index for index, draft in enumerate(drafts) if "invalid" in _tags(draft)}
    result = []
    for index, draft in enumerate(drafts):
        broken = draft["source"] in ("given#0", "given#1")
        tags = _tags(draft)
        if broken:
            result.append(
                Finding(
                    right=tags == ["invalid"],
                    text=f"{step.name(index)} does not compile and is tagged {', '.join(tags) or 'nothing'}.",
                )
            )
        elif "invalid" in tags:
            result.append(
                Finding(
                    right=not draft["source"].startswith("model"),
                    text=f"{step.name(index)} does not compile: {_why(draft)}.",
                )
            )
    used = invalid & {*told.get("given", []), *told.get("agreeing", [])}
    if drafts and len(invalid) < len(drafts):
        names = ", ".join(step.name(index) for index in sorted(used))
        result.append(Finding(right=not used, text=f"Invalid drafts given to the target: {names or 'none'}."))
    return [*result, *of_code(step.answer.text)]


def of_code(text: str) -> list[Finding]:
    """Whether the answer's function compiles, and is right; it is executed only if it does nothing but compute."""
    code = "\n".join(block.code for block in code_of(text, LANGUAGES))
    tag = PythonSyntax().check(text, {})
    if tag.tag != "valid":
        return [Finding(right=False, text=f"The answer is no whole Python function: {tag.why}.")]
    try:
        said = dict(zip(GOLD, values(code, FUNCTION, list(GOLD)), strict=True))
    except (NotArithmetic, SyntaxError, ValueError) as error:
        return [Finding(right=False, text=f"The answer compiles, and cannot be tried: {error}.")]
    wrong = [f"{year}: {said[year]}, not {gold}" for year, gold in GOLD.items() if said[year] is not gold]
    years = ", ".join(map(str, GOLD))
    if wrong:
        return [Finding(right=False, text=f"The answer's function is wrong about {'; '.join(wrong)}.")]
    return [Finding(right=True, text=f"The answer's function is right about {years}.")]


def _tags(draft: dict[str, Any]) -> list[str]:
    return [tag["tag"] for tag in draft["tags"]]


def _why(draft: dict[str, Any]) -> str:
    return next((str(tag["why"]) for tag in draft["tags"] if tag["tag"] == "invalid"), "")
