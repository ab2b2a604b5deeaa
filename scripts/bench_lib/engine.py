"""Parent's side of one engine process and of the draft process beside it."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench_lib import settings
from scripts.bench_lib.backend import Work, chain_field
from scripts.bench_lib.cells import MODEL_SOURCE, Cell, System
from scripts.bench_lib.child import Child, python
from scripts.bench_lib.prompts import Prompt
from scripts.bench_lib.statistics import RequestFigures, Sample

ROOT = Path(__file__).resolve().parents[2]
LOAD_TIMEOUT_S = 900.0  # compiling included
DRAFT_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 600.0
TENANT = "bench"  # of all measured requests: vLLM's suffix mode shares earlier answers, too
# settles on the draft process itself: another source's guesses would hide that it does not answer yet
ASK_MODEL = json.dumps({"enabled": True, "sources": [MODEL_SOURCE]})


class EngineBackend:
    """Starts, freezes, thaws and stops the processes of one engine."""

    def __init__(self, engine: settings.EngineSettings, cores: settings.Cores, draft_model: Path, logs: Path) -> None:
        self.name = engine.name
        self._settings = engine
        self._cores = cores
        self._draft_model = draft_model
        self._logs = logs
        self._children: list[Child] = []

    def start(self, warmup: list[Prompt], batches: list[int], temperatures: list[float]) -> float:
        started = time.perf_counter()
        worker = Child(
            self.name,
            python("scripts.bench_lib.engine_worker"),
            settings.engine_environment(self._settings.cores),
            self._settings.cores,
            self._logs / f"{self.name}.log",
            ROOT,
        )
        self._children.append(worker)
        loaded = worker.ask(LOAD_TIMEOUT_S, command="load", arguments=self._settings.arguments)
        if self._settings.draft != "none":
            self._connect(worker, loaded["client_key"])
        chain = json.dumps({"enabled": True}) if self._settings.draft != "none" else None
        worker.ask(
            LOAD_TIMEOUT_S,
            command="warm_up",
            chats=[list(prompt.messages) for prompt in warmup],
            batches=batches,
            temperatures=temperatures,
            chain=chain,
        )
        for child in self._children:
            child.freeze()
        return time.perf_counter() - started

    def measure(self, work: Sequence[Work], system: System, repetition: int, settle: Prompt) -> list[Sample]:
        for child in reversed(self._children):  # the draft first
            child.thaw()
        self._children[0].ask(
            RUN_TIMEOUT_S,
            command="settle",
            chat=list(settle.messages),
            tokens=8,
            chain=ASK_MODEL if system.asks_model else chain_field(system),
            asks_model=system.asks_model,
        )
        samples = [
            self._run(cell, prompts, system, repetition, forget=index == 0)
            for index, (cell, prompts) in enumerate(work)
        ]
        for child in self._children:
            child.freeze()
        return samples

    def _run(self, cell: Cell, prompts: list[Prompt], system: System, repetition: int, *, forget: bool) -> Sample:
        chats = [list(prompt.messages) for prompt in prompts]
        counted, drafted = self._draft_stats(), self._draft_cpu_seconds()
        answer = self._children[0].ask(
            RUN_TIMEOUT_S,
            command="run",
            groups=[chats[start : start + cell.batch] for start in range(0, len(chats), cell.batch)],
            temperature=cell.temperature,
            max_tokens=cell.max_tokens,
            ignore_eos=cell.until == "length",
            chain=chain_field(system, TENANT),
            forget=forget,
        )
        return Sample(
            cell,
            system,
            repetition,
            answer["seconds"],
            tuple(RequestFigures(**request) for request in answer["requests"]),
            tuple(answer["overhead_ms"]),
            answer["cpu_seconds"],
            self._draft_cpu_seconds() - drafted if len(self._children) > 1 else None,
            answer["stats"],
            {name: value - counted.get(name, 0.0) for name, value in self._draft_stats().items()},
        )

    def _draft_stats(self) -> dict[str, float]:
        """The draft process' counters since its start; empty without one."""
        return self._children[1].ask(DRAFT_TIMEOUT_S, stats=True) if len(self._children) > 1 else {}

    def _draft_cpu_seconds(self) -> float:
        return sum(child.cpu_seconds() for child in self._children[1:])

    def stop(self) -> None:
        for child in self._children:
            child.stop()
        self._children.clear()

    def _connect(self, worker: Child, client_key: str) -> None:
        draft = Child(
            f"{self.name}'s draft",
            draft_command(self._settings, self._draft_model, self._cores.draft),
            settings.draft_environment(),
            (self._cores.draft,),
            self._logs / f"{self.name}-draft.log",
            ROOT,
        )
        self._children.append(draft)
        endpoint = draft.answer(DRAFT_TIMEOUT_S)
        draft.tell(authorize=client_key)
        time.sleep(0.2)  # the draft reads its input in a thread of its own
        if self._settings.draft in ("real", "sync"):
            offer = worker.ask(DRAFT_TIMEOUT_S, command="kv_offer")
            endpoint["kv"] = draft.ask(DRAFT_TIMEOUT_S, meet=offer)["kv"]
        worker.ask(DRAFT_TIMEOUT_S, command="connect", endpoints=[endpoint])


def draft_command(engine: settings.EngineSettings, draft_model: Path, core: int) -> list[str]:
    """Command line of the draft process beside ``engine``."""
    if engine.draft in ("real", "sync"):
        more = [*engine.draft_options, *([] if engine.draft == "real" else ["--ahead", "0"])]
        return python(
            "deployments.draft.process", "--model", str(draft_model), "--core", str(core), "--host", "127.0.0.1", *more
        )
    target = Path(engine.arguments["model"])
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    say = ["--say", " the", "--tokenizer", str(target)] if engine.draft == "the" else []
    return python("scripts.bench_lib.wrong_draft", "--vocab-size", str(config["vocab_size"]), "--core", str(core), *say)
