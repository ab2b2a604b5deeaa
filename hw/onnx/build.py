"""From a Hugging Face checkpoint folder to an ONNX draft: onnxruntime-genai's builder, then a trial run, then a manifest."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from hw.onnx.checkpoint import Manifest, ModelShape, tokenizer_fingerprint

# Our name of a provider → the builder's. OpenVINO and QNN run the graph that is built for the CPU.
PROVIDERS = {
    "cpu": "cpu",
    "openvino": "cpu",
    "qnn": "cpu",
    "cuda": "cuda",
    "dml": "dml",
    "webgpu": "webgpu",
    "tensorrt-rtx": "NvTensorRtRtx",
}

# Raise when the same inputs should be built anew because this file builds them differently.
RECIPE = 1

Report = Callable[[float, str], None]
"""Called with the fraction done (0..1) and what is being done."""


class BuildError(Exception):
    """A step of the preparation failed; the text says which, what it printed last, and where the rest is."""


@dataclass(frozen=True)
class BuildOptions:
    """What kind of draft to build.

    ``bits`` 4: k-quant, asymmetric, the sensitive layers at 8 bits (0.81 greedy agreement with the bf16 target where
    plain INT4 has 0.71). ``bits`` 8: symmetric, 0.96.
    ``bits`` 32: not quantised, for comparisons that must be exact.
    """

    bits: int
    provider: str = "cpu"
    block_size: int = 32

    def __post_init__(self) -> None:
        if self.bits not in (4, 8, 32):
            raise ValueError(f"bits is {self.bits}; 4, 8 and 32 can be built")
        if self.provider not in PROVIDERS:
            raise ValueError(f"provider {self.provider!r} is unknown; known are {', '.join(PROVIDERS)}")

    @property
    def algo(self) -> str:
        return {4: "k_quant_mixed", 8: "default", 32: "none"}[self.bits]

    @property
    def name(self) -> str:
        """Of the folder it is kept in."""
        return "draft-fp32" if self.bits == 32 else f"draft-int{self.bits}"

    def as_key(self) -> dict[str, Any]:
        """What of it decides the result, for the cache key."""
        return asdict(self) | {"algo": self.algo, "recipe": RECIPE}


def tool_versions(*packages: str) -> dict[str, str]:
    """Versions of installed packages, without importing them."""
    return {name: version(name) for name in packages}


def builder_command(checkpoint: Path, out: Path, cache: Path, options: BuildOptions) -> list[str]:
    """The command that builds ``out`` from ``checkpoint``.

    ``prune_lm_head``: logits of the last position only. A draft never needs others, and a prefill of 512 tokens gets a
    fifth cheaper.
    """
    extra = ["hf_token=false", "prune_lm_head=true"]
    if options.bits < 32:
        extra += [f"block_size={options.block_size}"]
    if options.bits == 4:
        extra += ["is_symmetric=false", f"algo_config={options.algo}"]
    elif options.bits == 8:
        extra += ["shared_embeddings=true"]
    if options.bits < 32 and PROVIDERS[options.provider] == "cpu":
        extra += ["accuracy_level=4"]  # int8 activations: three times as fast as float32 on several tokens, as exact
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(out)]
    command += [
        "-p",
        "fp32" if options.bits == 32 else f"int{options.bits}",
        "-e",
        PROVIDERS[options.provider],
        "-c",
        str(cache),
    ]
    return [*command, "--extra_options", *extra]


def build_draft(
    checkpoint: Path,
    folder: Path,
    options: BuildOptions,
    *,
    key: str,
    weights: str,
    log: Path,
    environment: dict[str, str],
    report: Report,
    processes: "Processes",
) -> None:
    """Build an ONNX draft of ``checkpoint`` into the empty ``folder``.

    ``key`` and ``weights`` go into the manifest. Raises BuildError when the builder fails or when what it built does
    not run; the caller removes the folder.
    """
    shape = ModelShape.read(checkpoint)
    command = builder_command(checkpoint, folder, folder.parent / "cache", options)
    processes.run(command, log, environment, builder_progress(shape.layers, report), "the ONNX model builder")
    report(0.97, "trial run")
    kv_dtype = trial_run(folder, shape, run=PROVIDERS[options.provider] == "cpu")
    Manifest(
        kind="draft",
        key=key,
        weights=weights,
        tokenizer=tokenizer_fingerprint(folder),
        created_by=tool_versions("onnxruntime-genai", "onnxruntime", "transformers"),
        source=checkpoint.name,
        bits=options.bits,
        algo=options.algo,
        block_size=options.block_size,
        provider=options.provider,
        kv_dtype=kv_dtype,
        last_logits_only=True,
        **asdict(shape),
    ).write(folder)


def builder_progress(layers: int, report: Report) -> Callable[[str], None]:
    """A reader of the builder's output lines that calls ``report``; fractions follow the usual share of time."""

    def read(line: str) -> None:
        if found := re.search(r"[Rr]eading decoder layer (\d+)", line):
            report(0.15 * int(found[1]) / max(layers, 1), "reading")
        elif found := re.search(r"Progress: \[.*\] *([\d.]+)%", line):
            report(0.15 + 0.55 * float(found[1]) / 100, "quantising")
        elif found := re.search(r"Saving .* (\d+)%\|", line):
            report(0.9 + 0.06 * int(found[1]) / 100, "saving")

    return read


def trial_run(folder: Path, shape: ModelShape, *, run: bool = True) -> str:
    """Check that a built model has the inputs and outputs drafts rely on, and (``run``) that it computes.

    Runs a prefill of three tokens, then one token for two sequences at once with that past; results must be finite,
    logits float [batch, 1, vocab]. Returns numpy's name of the past's element type. Raises BuildError.
    """
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 3
    if not run:
        # No provider here for these kernels: read the graph without preparing to run it.
        import onnx

        inputs = {value.name: value for value in onnx.load(folder / "model.onnx", load_external_data=False).graph.input}
        missing = expected_inputs(shape.layers) ^ set(inputs)
        if missing:
            raise BuildError(f"{folder}: unexpected or missing inputs: {', '.join(sorted(missing)[:4])}")
        kind = inputs["past_key_values.0.key"].type.tensor_type.elem_type
        return str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind)))

    session = ort.InferenceSession(str(folder / "model.onnx"), settings, providers=["CPUExecutionProvider"])
    types = {value.name: value.type for value in session.get_inputs()}
    missing = expected_inputs(shape.layers) ^ set(types)
    if missing:
        raise BuildError(f"{folder}: unexpected or missing inputs: {', '.join(sorted(missing)[:4])}")
    kv_dtype = {"tensor(float)": "float32", "tensor(float16)": "float16"}.get(types["past_key_values.0.key"])
    if kv_dtype is None:
        raise BuildError(f"{folder}: the past is {types['past_key_values.0.key']}, which drafts cannot hold")

    names = [value.name for value in session.get_outputs()]
    empty = np.zeros((1, shape.kv_heads, 0, shape.head_dim), kv_dtype)
    feeds = {name: empty for name in types if name.startswith("past_key_values")}
    feeds |= {"input_ids": np.array([[1, 2, 3]], np.int64), "attention_mask": np.ones((1, 3), np.int64)}
    first = dict(zip(names, session.run(None, feeds), strict=True))
    feeds = {
        name: np.repeat(first[name.replace("past_key_values", "present")], 2, axis=0)
        for name in types
        if name.startswith("past_key_values")
    }
    feeds |= {"input_ids": np.array([[4], [5]], np.int64), "attention_mask": np.ones((2, 4), np.int64)}
    second = dict(zip(names, session.run(None, feeds), strict=True))
    for name, logits, batch in (("prefill", first["logits"], 1), ("step", second["logits"], 2)):
        if logits.shape != (batch, 1, shape.vocab_size):
            raise BuildError(f"{folder}: {name} gives logits {logits.shape}, not {(batch, 1, shape.vocab_size)}")
        if not np.isfinite(logits).all():
            raise BuildError(f"{folder}: {name} gives logits that are not finite")
    return kv_dtype


def expected_inputs(layers: int) -> set[str]:
    """Names of a draft's inputs."""
    past = {f"past_key_values.{layer}.{part}" for layer in range(layers) for part in ("key", "value")}
    return past | {"input_ids", "attention_mask"}


class Processes:
    """Child processes whose output goes to a log, and which end when we do."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(
        self,
        command: Sequence[str],
        log: Path,
        environment: dict[str, str],
        on_line: Callable[[str], None],
        what: str,
    ) -> None:
        """Run to the end, passing each line (also those ended by a carriage return) to ``on_line``; BuildError if it fails."""
        log.parent.mkdir(parents=True, exist_ok=True)
        tail: list[str] = []
        with log.open("a", encoding="utf-8") as sink:
            sink.write("$ " + " ".join(command) + "\n")
            sink.flush()
            with self._lock:
                if self._stopped:
                    raise BuildError(f"{what} was stopped")
                child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
                )
                self._running.add(child)
            assert child.stdout is not None
            try:
                rest = b""
                while chunk := child.stdout.read1(65536):  # type: ignore[attr-defined]
                    *lines, rest = re.split(rb"[\r\n]+", rest + chunk)
                    for raw in lines:
                        line = raw.decode("utf-8", "replace").rstrip()
                        if line:
                            sink.write(line + "\n")
                            tail = [*tail[-7:], line]
                            on_line(line)
                if rest:
                    tail.append(rest.decode("utf-8", "replace"))
                    sink.write(tail[-1] + "\n")
                code = child.wait()
            finally:
                self._end(child)
        if code:
            shown = "\n".join(f"    {line}" for line in tail)
            raise BuildError(f"{what} failed (exit {code}). Its last lines:\n{shown}\n  All of them: {log}")

    def stop(self) -> None:
        """End all of them, now and from now on."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for child in running:
            self._end(child)

    def _end(self, child: "subprocess.Popen[bytes]") -> None:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        with self._lock:
            self._running.discard(child)
