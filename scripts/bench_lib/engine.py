"""Parent's side of one engine process and of the draft process beside it."""

import json
import time
from pathlib import Path
from typing import Any

from scripts.bench_lib import settings
from scripts.bench_lib.backend import chain_field
from scripts.bench_lib.cells import Cell, System
from scripts.bench_lib.child import Child, python
from scripts.bench_lib.prompts import Prompt
from scripts.bench_lib.statistics import RequestFigures, Sample

ROOT = Path(__file__).resolve().parents[2]
LOAD_TIMEOUT_S = 900.0  # compiling included
DRAFT_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 600.0


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

    def measure(self, cell: Cell, system: System, repetition: int, prompts: list[Prompt], settle: Prompt) -> Sample:
        for child in reversed(self._children):  # the draft first
            child.thaw()
        worker, chain = self._children[0], chain_field(system)
        worker.ask(RUN_TIMEOUT_S, command="settle", chat=list(settle.messages), tokens=8, chain=chain)
        chats = [list(prompt.messages) for prompt in prompts]
        drafted = self._draft_cpu_seconds()
        answer = worker.ask(
            RUN_TIMEOUT_S,
            command="run",
            groups=[chats[start : start + cell.batch] for start in range(0, len(chats), cell.batch)],
            temperature=cell.temperature,
            max_tokens=cell.max_tokens,
            ignore_eos=cell.until == "length",
            chain=chain,
        )
        for child in self._children:
            child.freeze()
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
        )

    def _draft_cpu_seconds(self) -> float:
        return sum(child.cpu_seconds() for child in self._children[1:])

    def stop(self) -> None:
        for child in self._children:
            child.stop()
        self._children.clear()

    def _connect(self, worker: Child, client_key: str) -> None:
        draft = Child(
            f"{self.name}'s draft",
            self._draft_command(),
            settings.draft_environment(),
            (self._cores.draft,),
            self._logs / f"{self.name}-draft.log",
            ROOT,
        )
        self._children.append(draft)
        endpoint = draft.answer(DRAFT_TIMEOUT_S)
        draft.tell(authorize=client_key)
        time.sleep(0.2)  # the draft reads its input in a thread of its own
        worker.ask(DRAFT_TIMEOUT_S, command="connect", endpoints=[endpoint])

    def _draft_command(self) -> list[str]:
        core = str(self._cores.draft)
        if self._settings.draft == "wrong":
            config: dict[str, Any] = json.loads((Path(self._settings.arguments["model"]) / "config.json").read_text())
            return python("scripts.bench_lib.wrong_draft", "--vocab-size", str(config["vocab_size"]), "--core", core)
        return python(
            "deployments.draft.process", "--model", str(self._draft_model), "--core", core, "--host", "127.0.0.1"
        )
