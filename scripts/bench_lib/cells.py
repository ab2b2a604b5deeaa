"""What is measured: cells (a workload), systems (who answers) and the order in which they take turns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Until = Literal["length", "eos"]

MODEL_SOURCE = "model"  # what a request's ``sources`` call the draft process


@dataclass(frozen=True)
class Cell:
    """One workload. Every system answers the same prompts of it."""

    set: str
    batch: int
    temperature: float
    until: Until
    max_tokens: int

    @property
    def label(self) -> str:
        return f"{self.set} · batch {self.batch} · T={self.temperature:g} · until {self.until}"


@dataclass(frozen=True)
class System:
    """One column of the comparison. ``engine`` names the process that serves it: two systems can share one."""

    name: str
    cores: Literal["all", "target"]
    via: Literal["engine", "http"]
    engine: str
    chain_enabled: bool | None = None  # sent with each request where the engine is this project's own
    chain_tokens: int | None = None  # likewise: fewer draft tokens a round than the engine's most
    chain_sources: tuple[str, ...] = ()  # likewise: only these sources draft; empty: all that the engine has
    chain_policy: str = ""  # likewise: the acceptance policy with all its knobs, as JSON; empty: lossless

    @property
    def key(self) -> str:
        """Unique name: ``plain`` on all cores and ``plain`` on the target's core are different rows."""
        name = f"{self.name}_target_core" if self.name == "plain" and self.cores == "target" else self.name
        return name if self.via == "engine" else f"{name}@http"

    @property
    def asks_model(self) -> bool:
        """Is the draft process asked in this system's requests?"""
        return bool(self.chain_enabled) and (not self.chain_sources or MODEL_SOURCE in self.chain_sources)


ENGINE_SYSTEMS: dict[str, System] = {
    system.key: system
    for system in (
        System("plain", "all", "engine", "plain"),
        System("plain", "target", "engine", "plain_target_core"),
        System("ngram", "all", "engine", "ngram"),
        System("suffix", "all", "engine", "suffix"),
        System("chain", "all", "engine", "chain", chain_enabled=True),
        System("chain_no_kv", "all", "engine", "chain_no_kv", chain_enabled=True),
        System("chain_sync", "all", "engine", "chain_sync", chain_enabled=True),
        System("chain_model", "all", "engine", "chain", chain_enabled=True, chain_sources=(MODEL_SOURCE,)),
        System("chain_model_sync", "all", "engine", "chain_sync", chain_enabled=True, chain_sources=(MODEL_SOURCE,)),
        System("chain_suffix", "all", "engine", "chain", chain_enabled=True, chain_sources=("suffix",)),
        System("chain_off", "all", "engine", "chain", chain_enabled=False),
        # only the draft is asked: another source's good guesses would hide what a useless draft costs
        System("wrong_draft", "all", "engine", "wrong_draft", chain_enabled=True, chain_sources=(MODEL_SOURCE,)),
        System("always_the", "all", "engine", "always_the", chain_enabled=True, chain_sources=(MODEL_SOURCE,)),
    )
}


def chain_with_tokens(tokens: int) -> System:
    """The chain held to ``tokens`` draft tokens a round: several of them share one engine."""
    return replace(ENGINE_SYSTEMS["chain"], name=f"chain_t{tokens}", chain_tokens=tokens)


HTTP_SYSTEMS = ("plain", "chain", "chain_off")


def http_system(name: str, url: str = "") -> System:
    """A system behind a base URL; without one, behind a server that the benchmark starts."""
    if name not in HTTP_SYSTEMS:
        raise ValueError(f"no HTTP system {name!r}; there are: {', '.join(HTTP_SYSTEMS)}")
    server = "plain" if name == "plain" else "chain"
    enabled = None if name == "plain" else name == "chain"
    return System(name, "all", "http", f"http:{url or server}", chain_enabled=enabled)


def plan_cells(
    sets: Sequence[str],
    batches: Sequence[int],
    temperatures: Sequence[float],
    until: Sequence[Until],
    tokens: int,
    eos_tokens: int,
) -> list[Cell]:
    """Every combination; ``tokens`` is the forced length, ``eos_tokens`` the bound where the model may stop by itself."""
    return [
        Cell(name, batch, temperature, stop, tokens if stop == "length" else eos_tokens)
        for stop in until
        for temperature in temperatures
        for name in sets
        for batch in batches
    ]


@dataclass(frozen=True)
class Turn:
    """All systems at one cell, directly after one another."""

    repetition: int
    cell: Cell
    systems: tuple[System, ...]


def turns(cells: Sequence[Cell], systems: Sequence[System], repetitions: int) -> Iterator[Turn]:
    """Cell by cell and repetition by repetition, so that drifting machine speed meets every system alike.

    Who starts a turn rotates, so that nobody always runs first.
    """
    turn = 0
    for repetition in range(repetitions):
        for cell in cells:
            first = turn % len(systems)
            yield Turn(repetition, cell, (*systems[first:], *systems[:first]))
            turn += 1
