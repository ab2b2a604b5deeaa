"""Tokens a second of every setting as it would be served: drafts on a core of their own, working ahead, as far as they pay."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.bench_lib import settings as engines
from scripts.bench_lib.cells import Cell, System
from scripts.bench_lib.engine import EngineBackend
from scripts.bench_lib.prompts import WARMUP_SET, Prompt, load_prompts
from scripts.calibrate_lib.intervals import Estimate, typical
from scripts.calibrate_lib.knobs import LOSSLESS, PLAIN, REFERENCES, Setting
from scripts.calibrate_lib.pair import Models
from scripts.calibrate_lib.store import Round, Speed, Store, round_key


@dataclass(frozen=True)
class Plan:
    """What is measured how often. One request at a time: that is where a draft pays most, and a policy with it."""

    sets: tuple[str, ...]
    prompts: int  # of each set in a round
    length: int  # forced, so that every setting does the same work
    rounds: int
    temperature: float

    def as_dict(self) -> dict[str, Any]:
        return {"prompts": self.prompts, "length": self.length, "temperature": self.temperature, "sets": self.sets}

    def prompts_of(self, number: int) -> dict[str, list[Prompt]]:
        """Others in every round, as far as the sets reach."""
        return {
            name: [found[(number * self.prompts + i) % len(found)] for i in range(self.prompts)]
            for name, found in ((name, load_prompts(name)) for name in self.sets)
        }


def key(plan: Plan, settings: Sequence[Setting], models: Models) -> str:
    """Of the rounds that can be taken together."""
    how = {
        **plan.as_dict(),
        "sources": models.sources,
        "tokens": [models.tokens, models.most_tokens],
        "dtype": models.dtype,
    }
    return round_key(settings, [], how)


class Served:
    """The engine, its draft process beside it, and the settings in turn."""

    def __init__(self, models: Models, cores: engines.Cores, logs: Path, more: dict[str, Any]) -> None:
        bounds = engines.ChainBounds(models.most_tokens, models.tokens, models.max_batch)
        engine = engines.engine_settings("chain", models.target, cores, "eager", bounds)
        arguments = {
            **engine.arguments,
            "dtype": models.dtype,
            "additional_config": {
                **engine.arguments["additional_config"],
                "chain_sources": list(models.sources),
                **more,
            },
        }
        engine = replace(engine, arguments=arguments, draft_options=("--top-k", str(models.top_k)))
        self._backend = EngineBackend(engine, cores, models.draft, logs)
        self._warmup = load_prompts(WARMUP_SET)

    def start(self, plan: Plan) -> float:
        """Load and warm up; returns seconds."""
        return self._backend.start(self._warmup, [1], [plan.temperature])

    def turn(self, setting: Setting, plan: Plan, number: int) -> Speed:
        """One setting's turn in round ``number``."""
        work = [
            (Cell(name, 1, plan.temperature, "length", plan.length), prompts)
            for name, prompts in plan.prompts_of(number).items()
        ]
        system = System(
            setting.name,
            "all",
            "engine",
            "chain",
            chain_enabled=setting.policy is not None,
            chain_policy=json.dumps(setting.given) if setting.given is not None else "",
        )
        samples = self._backend.measure(work, system, number, self._warmup[number % len(self._warmup)])
        requests = [request for sample in samples for request in sample.requests]
        return Speed(
            setting=setting.name,
            tokens_per_s={sample.cell.set: round(sample.tokens_per_s, 3) for sample in samples},
            accepted=sum(request.accepted for request in requests),
            drafted=sum(request.drafted for request in requests),
            relaxed=int(sum(sample.stats.get("relaxed_tokens", 0.0) for sample in samples)),
        )

    def stop(self) -> None:
        self._backend.stop()


def order(settings: Sequence[Setting], number: int) -> list[Setting]:
    """Who starts a round rotates, so that nobody always runs first; plain and lossless are among them."""
    everyone = [*REFERENCES, *(setting for setting in settings if setting.lossy)]
    first = number * 3 % len(everyone)
    return [*everyone[first:], *everyone[:first]]


def missing(plan: Plan, store: Store, rounds_key: str) -> range:
    """Numbers of the rounds still to be measured; half a round counts for nothing."""
    return range(len(store.rounds_of(rounds_key)), plan.rounds)


def ratio(rounds: Sequence[Round], setting: str, to: str) -> Estimate | None:
    """Tokens a second as a ratio, paired by round and prompt set: what is slow for a while is slow for both."""
    found = []
    for item in rounds:
        turns = {turn.setting: turn.tokens_per_s for turn in item.turns}
        if setting in turns and to in turns:
            found += [turns[setting][name] / turns[to][name] for name in turns[to] if name in turns[setting]]
    return typical(found)


@dataclass(frozen=True)
class SpeedFigures:
    """Of one setting. None: not measured."""

    to_lossless: Estimate | None
    to_plain: Estimate | None
    acceptance: float | None  # of the tokens that were worth verifying
    relaxed: int  # tokens let pass

    @classmethod
    def of(cls, rounds: Sequence[Round], setting: str) -> "SpeedFigures":
        turns = [turn for item in rounds for turn in item.turns if turn.setting == setting]
        drafted = sum(turn.drafted for turn in turns)
        return cls(
            ratio(rounds, setting, LOSSLESS),
            ratio(rounds, setting, PLAIN),
            sum(turn.accepted for turn in turns) / drafted if drafted else None,
            sum(turn.relaxed for turn in turns),
        )
