"""What the steps of ``scripts/distil`` share: a draft at its beginning, out of a checkpoint, and out into the world."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hw.onnx.build import BuildOptions, Processes, build_draft
from hw.onnx.cache import staged
from hw.onnx.checkpoint import CheckpointError, Manifest, weights_fingerprint
from hw.onnx.conditioned_build import NAME, ConditionedOptions, build_conditioned, describe
from hw.onnx.conditioned_weights import MOST_BYTES, ConditionedShape, write_trained
from scripts.bench_lib import machine
from scripts.bench_lib.engine import ROOT
from scripts.distil_lib import record
from scripts.distil_lib.cut import CutDraft, save_cut
from scripts.distil_lib.draft import ConditionedDraft, Draft
from scripts.distil_lib.export import compare, trained_of
from scripts.distil_lib.feed import held_sequences, sample, token_counts
from scripts.distil_lib.measure import measure
from scripts.distil_lib.options import MEASURED_FOLDER, Options
from scripts.distil_lib.shards import ShardError, shard_names
from scripts.distil_lib.target import Target
from scripts.distil_lib.train import read_checkpoint

SAMPLE = 40_000  # tokens a draft's beginning is fitted to
FINAL = 400  # held-out answers the last figures are taken on, at most

Report = Callable[[float, str], None]


def frequent(folder: Path, target: Target, size: int) -> torch.Tensor:
    """Ids of the ``size`` tokens the target writes most, int64, ascending; among equals the lower ones, which are the more
    common in a vocabulary of merges."""
    names = shard_names(folder)
    if not names:
        raise ShardError(f"{folder} has no shards: scripts/distil generate writes them")
    counts = token_counts(folder, target.weights, target.shape.vocabulary, names)
    size = min(size, target.shape.vocabulary)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def begin(options: Options, target: Target) -> Draft:
    """A draft before training."""
    recipe = options.recipe
    head = frequent(options.out, target, recipe.head)
    if options.kind == "cut":
        return CutDraft(target, recipe.layers, head).to(target.device)
    return ConditionedDraft.begin(
        target, recipe.layers, head, sample(options.out, target, tokens=SAMPLE, longest=recipe.longest)
    )


def restored(content: dict[str, Any], target: Target, kind: str, head_ids: torch.Tensor | None = None) -> Draft:
    """The draft of a checkpoint's content. ``head_ids``: other tokens for its head than in training (it is the target's)."""
    head = content["head_ids"] if head_ids is None else head_ids
    layers = content["recipe"]["layers"]
    draft: Draft
    if kind == "cut":
        draft = CutDraft(target, layers, head)
    else:
        shape = ConditionedShape(**asdict(target.shape) | {"layers": layers, "head_size": len(head)})
        draft = ConditionedDraft(shape, target.embedding, target.head, head)
    draft.to(target.device).load_state_dict(content["draft"])
    return draft


def _measured(options: Options, draft: Draft, target: Target) -> dict[str, Any]:
    """Figures on this run's held-out answers, and on the project's prompt sets where answers to them were drawn."""
    found: dict[str, Any] = {}
    longest = options.recipe.longest
    held = held_sequences(options.out, target, most=FINAL, longest=longest)
    if held:
        figures = measure(draft, held, target, longest)
        found["held-out answers of the generator"] = {"answers": len(held), "figures": figures.as_dict()}
    for folder in sorted((options.out / MEASURED_FOLDER).glob("*")):
        sequences = held_sequences(folder, target, most=FINAL, longest=longest, every=True)
        if sequences:
            figures = measure(draft, sequences, target, longest)
            found[f"prompt set {folder.name}"] = {"answers": len(sequences), "figures": figures.as_dict()}
    return found


def _record(options: Options, content: dict[str, Any], target: Target, measured: dict[str, Any]) -> dict[str, Any]:
    state = content["state"]
    recipe = {**content["recipe"], **content["recipe"]["weights"]}
    recipe.pop("weights")
    try:
        source = Manifest.read(target.folder).source
    except CheckpointError:  # a checkpoint this project did not prepare
        source = target.folder.resolve().name
    return {
        "name": options.name,
        "kind": options.kind,
        "target": {"source": source, "weights": target.weights},
        "licence": record.licence(target.folder),
        "data": record.data_of(options.out, target.weights),
        "recipe": recipe,
        "trained": {
            "steps": state["step"], "tokens": state["tokens"], "seconds": round(state["seconds"], 1), "threads": options.threads,
        },
        "measured": measured,
        "notes": list(options.notes),
        "machine": machine.machine(),
        "versions": machine.versions(),
        "commit": machine.commit(ROOT),
        "curve": state["curve"],
    }  # fmt: skip


def export_conditioned(options: Options, report: Report) -> Iterator[str]:
    """Weights and record into ``options.weights``, the ONNX folder into ``options.models``; yields what is worth a line."""
    torch.set_num_threads(options.threads)
    target = Target(options.target, options.device)
    content = read_checkpoint(options.checkpoint, target.weights, options.recipe)
    report(0.1, "measuring")
    # All answers there are now say which tokens matter; in training there were fewer.
    head = frequent(options.out, target, options.recipe.head)
    draft = restored(content, target, "conditioned", head)
    assert isinstance(draft, ConditionedDraft)
    written = _record(options, content, target, _measured(options, draft, target))
    path = options.weights / f"{options.name}.safetensors"
    report(0.5, "writing weights")
    write_trained(path, trained_of(draft, target))
    size = path.stat().st_size
    if size > MOST_BYTES:
        yield f"{path} has {size / 1e6:.1f} MB: more than the {MOST_BYTES / 1e6:.0f} MB that are shipped"
    record.write_record(path.with_suffix(".json"), written)
    report(0.6, "building the ONNX model")
    folder = options.models / NAME
    how = ConditionedOptions(options.bits, options.head_bits)
    with staged(folder) as made:
        build_conditioned(path, options.target, made, how, options.models)
        report(0.8, "comparing it with what was trained")
        held = held_sequences(options.out, target, most=FINAL, longest=options.recipe.longest)
        compared = compare(made, draft, held, options.recipe.longest)
        written["exports"] = [{"bits": options.bits, "head_bits": options.head_bits, "compared": compared.as_dict()}]
        record.write_record(path.with_suffix(".json"), written)
        describe(path, options.target, made, how, options.models)  # with the whole record inside
    record.plot(written["curve"], path.with_suffix(".png"))
    for name, entry in written["measured"].items():
        figures = entry["figures"]
        yield f"{name}: first guess {figures['first']:.3f}, {figures['committed']:.2f} tokens a verify"
    yield f"ONNX: the same guess at {compared.agreement:.1%} of {compared.positions:,} positions"
    yield f"written: {path} ({size / 1e6:.1f} MB), its record beside it, {folder}"


def export_cut(options: Options, report: Report) -> Iterator[str]:
    """A checkpoint into ``options.out``/cut, an ordinary ONNX draft of it into ``options.models``."""
    torch.set_num_threads(options.threads)
    target = Target(options.target, options.device)
    content = read_checkpoint(options.checkpoint, target.weights, options.recipe)
    draft = restored(content, target, "cut")
    assert isinstance(draft, CutDraft)
    report(0.1, "measuring")
    written = _record(options, content, target, _measured(options, draft, target))
    checkpoint = options.out / "cut"
    shutil.rmtree(checkpoint, ignore_errors=True)
    save_cut(draft, target, checkpoint)
    record.write_record(options.out / f"{options.name}.json", written)
    record.plot(written["curve"], options.out / f"{options.name}.png")
    bits = options.bits
    folder = options.models / f"draft-cut-int{bits}" if bits < 32 else options.models / "draft-cut-fp32"
    processes = Processes()
    log = options.out / "build.log"
    try:
        with staged(folder) as made:
            build_draft(
                checkpoint, made, BuildOptions(bits), key="", weights=weights_fingerprint(checkpoint), log=log,
                environment=_environment(made.parent), report=lambda done, text: report(0.3 + 0.7 * done, text), processes=processes,
            )  # fmt: skip
    finally:
        processes.stop()
    for name, entry in written["measured"].items():
        yield f"{name}: first guess {entry['figures']['first']:.3f}, {entry['figures']['committed']:.2f} tokens a verify"
    yield f"written: {checkpoint}, {folder}"


def _environment(scratch: Path) -> dict[str, str]:
    from hw.onnx.preparation import child_environment

    return child_environment(scratch)
