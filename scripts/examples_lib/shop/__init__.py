"""What to recommend next: what customers clicked is a rule, what stands near it in the category tree are drafts."""

from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from scripts.examples_lib.app import App
from scripts.examples_lib.example import Finding, Report, Step, drafted, patiently

LINE = "a recommendation: customers' clicks as a rule, neighbours in the category tree as drafts; the target scores them all"
CATALOGUE = Path(__file__).parent / "catalogue.yaml"
VIEWED = "two-person tent"
RULES = "rules"


class Catalogue:
    """Products by category, and which were looked at together."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.branch = {
            product: branch
            for branch, shelves in content["categories"].items()
            for products in shelves.values()
            for product in products
        }
        self.clicks: dict[str, Counter[str]] = {product: Counter() for product in self.branch}
        for one, other, visits in content["clicks"]:
            self.clicks[one][other] += visits
            self.clicks[other][one] += visits

    def favourite(self, product: str) -> str:
        """What was looked at most in the same visits; of equals the first by name."""
        return min(self.clicks[product], key=lambda other: (-self.clicks[product][other], other))

    def neighbours(self, product: str) -> list[str]:
        """The rest of its branch, and what is looked at most of each other branch."""
        branches: dict[str, list[str]] = {}
        for other, branch in self.branch.items():
            if other != product:
                branches.setdefault(branch, []).append(other)
        mine = branches.pop(self.branch[product])
        return [
            *mine,
            *(max(others, key=lambda other: sum(self.clicks[other].values())) for others in branches.values()),
        ]


def catalogue() -> Catalogue:
    return Catalogue(yaml.safe_load(CATALOGUE.read_text(encoding="utf-8")))


def sentence(product: str) -> str:
    return f"I recommend the {product}."


def rules() -> list[dict[str, Any]]:
    """One for each product: what customers who looked at it looked at most."""
    shop = catalogue()
    return [
        {
            "name": f"clicks-{product.replace(' ', '-')}",
            "pattern": rf"\blooks at the {product}\b",
            "draft": sentence(shop.favourite(product)),
        }
        for product in shop.branch
    ]


def run(app: App) -> Report:
    """The answer can only be one of the drafts: ``structured_outputs`` says so to the target."""
    shop = catalogue()
    favourite = shop.favourite(VIEWED)
    products = shop.neighbours(VIEWED)
    others = [product for product in products if product != favourite]
    question = (
        f"A customer of a camping shop looks at the {VIEWED}. Which of these should the shop recommend next: the "
        f"{', the '.join(products)}?"
    )
    chain = {
        "mode": "answer",
        "k": 0,
        "sources": [RULES],
        "drafts": [sentence(product) for product in others],
        "trace": True,
    }
    choice = {"choice": [sentence(product) for product in products]}
    names = {f"given#{index}": f"tree: {product}" for index, product in enumerate(others)} | {
        RULES: f"clicks: {favourite}"
    }
    step = patiently(
        lambda: Step(
            question=question, answer=app.ask(question, chain, max_tokens=24, structured_outputs=choice), names=names
        ),
        drafted(RULES),
    )
    return Report(
        steps=[step],
        shows="Candidates of two kinds compared by one judge. The rule's note says which rule it was; the standing is the mean log "
        "probability that the target gives the words of a draft, and the answer is written under a grammar that knows only the candidates.",
        findings=findings(step, shop, favourite),
        unchecked="Whether a recommendation sells is for customers to say.",
    )


def findings(step: Step, shop: Catalogue, favourite: str) -> list[Finding]:
    """The order of the target beside that of the customers."""
    product = {sentence(product): product for product in shop.branch}
    drafts = step.told.get("drafts", [])
    asked = [draft for draft in drafts if draft["standing"] is not None and draft["text"].strip() in product]
    order = [product[draft["text"].strip()] for draft in sorted(asked, key=lambda draft: -draft["standing"])]
    said = product.get(step.answer.text.strip())
    result = [
        Finding(right=said is not None, text=f"The answer {'is' if said else 'is not'} one of the shop's products.")
    ]
    if not any(draft["source"] == RULES for draft in drafts):
        why = step.told.get("reasons", {}).get(RULES, "it was not asked")
        result.append(Finding(right=False, text=f"The rule drafted nothing ({why})."))
    if favourite in order:
        place = order.index(favourite) + 1
        visits = shop.clicks[VIEWED]
        result.append(
            Finding(
                right=place == 1,
                text=f"Customers look at the {favourite} most ({visits[favourite]} visits); of {len(order)} candidates the target, which "
                f"knows no clicks, finds it number {place}. Its favourite is the {order[0]} ({visits[order[0]]} visits).",
            )
        )
    elif order or step.told.get("decision") == "unscored":
        result.append(Finding(right=False, text="The target did not score the customers' favourite."))
    if order and said:
        result.append(
            Finding(
                right=said == order[0],
                text=f"Written token by token, the answer is the {said}; judged as whole sentences, the {order[0]} is likeliest.",
            )
        )
    return result
