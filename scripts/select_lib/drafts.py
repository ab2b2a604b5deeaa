"""One candidate in a process of its own: led along the target's answers, and timed. Times are milliseconds."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Self

from hw.kv.codes import Refused
from hw.kv.manifest import Manifest
from hw.kv.steps import Cast
from hw.kv.verdict import Local, Reject, check_manifest
from hw.onnx.checkpoint import CONDITIONED, CheckpointError
from scripts.bench_lib import settings
from scripts.bench_lib.child import Child, python
from scripts.bench_lib.engine import DRAFT_TIMEOUT_S, ROOT, RUN_TIMEOUT_S
from scripts.profile_lib.figures import paired_ratio, within
from scripts.select_lib.answers import TEMPERATURES, Answers, Folder
from scripts.select_lib.candidates import MODEL, Candidate
from scripts.select_lib.options import Options

CONTEXTS = (64, 512, 1024)
CALLS = 8  # timed in one turn of a cell
STEPS = 6  # of the target, likewise
LEAST_SECOND_BATCH = 4
READ_TOKENS = 256  # of the prompt whose reading is timed
BESIDE_VERIFIED = 4
BESIDE_HEAD_START_S = 0.2
BESIDE_ALONE_S = 0.6
BESIDE_CONTEXT = 128
TOGETHER: dict[str, float | None] = {"target_slower": 1.0, "draft_slower": 1.0}  # where they have no two cores

Tell = Callable[[float, str], None]  # how much of a stage is done (0 to 1), and what comes next


class DraftProcess:
    """Alive for the length of a block. Failures are a ``RuntimeError``."""

    def __init__(self, candidate: Candidate, options: Options, cores: settings.Cores, logs: Path) -> None:
        self._candidate, self._options, self._cores = candidate, options, cores
        self._loaded: dict[str, Any] = {}
        self._child = Child(
            candidate.name,
            python("scripts.select_lib.draft_child"),
            settings.draft_environment(),
            (cores.draft,),
            logs / f"{candidate.name}.log",
            ROOT,
        )

    def __enter__(self) -> Self:
        try:
            self._loaded = self._child.ask(
                DRAFT_TIMEOUT_S,
                command="load",
                kind=self._candidate.kind,
                folder=str(self._candidate.folder or ""),
                provider=self._options.provider,
                core=self._cores.draft,
                slots=max(draft_batches(self._options)),
                context=settings.MAX_MODEL_LEN,
                vocab_size=self._options.target.shape.vocab_size,
            )
        except BaseException:
            self._child.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()

    def follow(self, answers: Answers, folder: Folder, tell: Tell) -> dict[str, Any]:
        """A trail for each greedy and each sampled answer, and the verdict on the target's KV."""
        candidate = self._candidate
        verdict, takes = kv_verdict(candidate, answers.manifest, self._options.provider)
        part: dict[str, Any] = {"kv": verdict}
        todo = [(kind, index) for kind in TEMPERATURES for index in range(len(answers.prompts))]
        for number, (kind, index) in enumerate(todo):
            tell(0.1 + 0.4 * number / len(todo), f"{candidate.name} follows the answers, {kind}")
            has_kv = takes and bool(answers.kv) and answers.kv[index]
            part.setdefault(kind, []).append(
                self._child.ask(
                    RUN_TIMEOUT_S,
                    command="follow",
                    prompt=answers.prompts[index],
                    answer=answers.of(kind)[index],
                    limit=answers.limit,
                    seed=answers.seed(kind, index),
                    temperature=TEMPERATURES[kind],
                    kv=str(folder.kv_file(index)) if has_kv else "",
                    kv_type=answers.kv_type,
                    features=str(folder.features_file(kind, index)) if candidate.kind == CONDITIONED else "",
                )
            )
        return part

    def costs(self, tell: Tell) -> dict[str, Any]:
        """What a call takes by context and sequences, what reading takes, memory, and how long it took to load."""
        candidate, options, loaded = self._candidate, self._options, self._loaded
        contexts = [context for context in CONTEXTS if context < loaded["context"]]
        cells = [(context, batch) for context in contexts for batch in draft_batches(options)]
        samples: dict[tuple[int, int], list[float]] = {}
        reading: dict[int, list[float]] = {}
        for turn in range(options.repetitions):
            tell(0.5 + 0.3 * turn / options.repetitions, f"{candidate.name}: what a token costs")
            for context, batch in cells[:: -1 if turn % 2 else 1]:
                answer = self._child.ask(RUN_TIMEOUT_S, command="time_calls", context=context, batch=batch, calls=CALLS)
                samples.setdefault((context, batch), []).extend(answer["ms"])
            for tokens in (1, 2, min(READ_TOKENS, loaded["context"])):
                calls = 2 if tokens > 2 else CALLS
                answer = self._child.ask(RUN_TIMEOUT_S, command="time_reading", tokens=tokens, calls=calls)
                reading.setdefault(tokens, []).extend(answer["ms"])
        longest = max(reading)
        return {
            "calls": [[context, batch, median(samples[context, batch])] for context, batch in cells],
            "read_token_ms": median(reading[longest]) / longest,
            "unread_ms": max(0.0, median(reading[2]) - median(reading[1])),
            "load_s": loaded["load_s"],
            "memory_mib": loaded["memory_mib"],
            "kv_bytes": loaded["kv_bytes"],
        }

    def beside(self, target: Child) -> dict[str, float | None]:
        """How many times as long a step of each takes while the other one works; None where nothing was timed."""
        draft = self._child
        keys = ("target_alone", "target_beside", "draft_alone", "draft_beside")
        samples: dict[str, list[list[float]]] = {key: [] for key in keys}
        steps = {
            "command": "time_steps",
            "batch": 1,
            "steps": 2 * STEPS,
            "verified": BESIDE_VERIFIED,
            "threads": len(self._cores.target),
        }
        for _ in range(self._options.repetitions):
            samples["target_alone"].append(target.ask(RUN_TIMEOUT_S, **steps)["ms"])
            draft.tell(command="compute", batch=1, context=BESIDE_CONTEXT)
            time.sleep(BESIDE_HEAD_START_S)
            began = time.perf_counter()
            time.sleep(BESIDE_ALONE_S)
            samples["draft_alone"].append(_pieces(draft, began, time.perf_counter()))
            draft.tell(command="compute", batch=1, context=BESIDE_CONTEXT)
            time.sleep(BESIDE_HEAD_START_S)
            both = target.ask(RUN_TIMEOUT_S, **steps)
            samples["target_beside"].append(both["ms"])
            samples["draft_beside"].append(_pieces(draft, both["began"], both["ended"]))
        return {
            "target_slower": paired_ratio(samples["target_beside"], samples["target_alone"]),
            "draft_slower": paired_ratio(samples["draft_beside"], samples["draft_alone"]),
        }


def draft_batches(options: Options) -> list[int]:
    """Sequences at once that a draft is timed with. Two sizes at least: branches share calls with the main line."""
    return sorted({*options.batches, LEAST_SECOND_BATCH})


def kv_verdict(candidate: Candidate, offer: str, provider: str) -> tuple[str, bool]:
    """What a draft would do with this target's KV: a verdict in words, and whether it takes it. ``offer``: the manifest in hex."""
    if candidate.kind != MODEL or candidate.folder is None:
        return "takes hidden states" if candidate.kind == CONDITIONED else "takes none", False
    if not offer:
        return "the target's cannot be moved", False
    from hw.onnx.kv_identity import draft_manifest

    try:
        local = draft_manifest(candidate.folder, provider)
        verdict = check_manifest(
            Manifest.decode(bytes.fromhex(offer)),
            Local("draft", local, local.identity.weights, frozenset({Cast.name})),
        )
    except (CheckpointError, Refused) as error:
        return f"REJECT ({error})", False
    if isinstance(verdict, Reject):
        return f"REJECT ({verdict.label}: {verdict.field})", False
    return verdict.label.upper(), True


def _pieces(draft: Child, began: float, ended: float) -> list[float]:
    """Stop the draft; milliseconds of its calls that lie between the two times."""
    draft.tell(command="rest")
    pieces: Sequence[tuple[float, float]] = draft.answer(DRAFT_TIMEOUT_S)["pieces"]
    draft.answer(DRAFT_TIMEOUT_S)  # to "rest"
    return [1e3 * seconds for seconds in within(pieces, began, ended)]
