"""Command-line options of ``scripts/calibrate`` and what they may be."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.config.errors import ConfigError
from scripts.bench_lib.engine import ROOT
from scripts.bench_lib.prompts import MEASURED_SETS
from scripts.calibrate_lib import knobs
from scripts.calibrate_lib.floors import Floor, parse_floor
from scripts.calibrate_lib.item_sets import GOLD_SETS, SETS, Item, load_items
from scripts.calibrate_lib.knobs import Setting
from scripts.calibrate_lib.pair import Models, read_pair
from scripts.calibrate_lib.quality import Sampling
from scripts.calibrate_lib.speed import Plan

EPILOG = """\
how it measures
  Quality: every setting answers the same items, target and draft in one process in which time plays no part: whatever the draft
  says is verified, so that every mismatch is judged, and the same command gives the same figures on a busy machine.
  Speed: every setting as it is served, in turn with lossless and plain decoding, on the benchmark's prompts. These figures need a
  quiet machine. Everything measured is kept in --out; a second run measures only what is missing there, Ctrl-C loses one cell.

floors
  changed<=1%        at most 1 % of the answers changed (default)
  differing<=2%      of the tokens                     relaxed<=1%        of the tokens let pass
  agreement>=95%     of the answers, as far as it counts: the number, the code, the words
  similarity>=0.98   of the sentence model             perplexity<=1.02   relative to the target's own
  score>=-2%         change of the task score

examples
  scripts/calibrate                                                    the shipped pair, nkl and the presets
  scripts/calibrate --policy probabilistic --deltas 0.01,0.1,1         another policy
  scripts/calibrate --policy block --knob min_block_len=2,3,4          with every combination of knobs
  scripts/calibrate --config my.yaml --floor "score>=-2%" --write my.yaml --preset chat
  scripts/calibrate --quick                                            two settings, three items of each set, no speed
"""
QUICK_DELTAS, QUICK_ITEMS = (0.002, 0.6), 3


@dataclass(frozen=True)
class Options:
    """The command line, checked."""

    models: Models
    policies: list[str]
    settings: list[Setting]  # to be measured, without the references; two may say the same
    sets: dict[str, list[Item]]
    sampling: Sampling
    speed: Plan | None
    floor: Floor
    write: Path | None
    preset: str
    sentences: Path
    out: Path
    report: Path
    fresh: bool
    processes: int | None  # that answer side by side; None: as many as there are cores, up to a few
    argv: tuple[str, ...]

    @property
    def semantic(self) -> bool:
        """Whether a setting needs the sentence model to decide, not only to compare."""
        return any(setting.policy is not None and setting.policy.rule == "semantic" for setting in self.settings)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="scripts/calibrate",
        description="Measure what an acceptance policy trades on a pair of models and recommend a setting for a quality floor.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("--policy", metavar="A,B", default="nkl", help=f"swept, of {', '.join(knobs.SWEPT)} (default: nkl)")
    add("--deltas", metavar="X,Y", help=f"values of δ (default: {_list(knobs.DELTAS)})")
    add("--similarities", metavar="X,Y", help=f"of semantic (default: {_list(knobs.SIMILARITIES)})")
    add("--knob", metavar="NAME=X,Y", action="append", default=[], help="another knob of the policies; may be repeated")
    add("--no-presets", action="store_true", help="leave out the presets of the config")
    add(
        "--config",
        type=Path,
        metavar="FILE",
        default=ROOT / "ray_config.yaml",
        help="says which pair (default: ray_config.yaml)",
    )
    add("--draft-name", metavar="NAME", help="the draft of that name in the config (default: its first)")
    add("--target", type=Path, metavar="DIR", help="target checkpoint instead of the config's")
    add("--draft", type=Path, metavar="DIR", help="draft model instead of the config's")
    add("--draft-tokens", type=int, metavar="T", help="drafted in a round (default: the config's)")
    add(
        "--sets",
        metavar="A,B",
        default=",".join((*GOLD_SETS, "prose")),
        help=f"of {', '.join(SETS)} (default: {','.join((*GOLD_SETS, 'prose'))})",
    )
    add("--items", type=int, metavar="N", help="at most so many of each set (default: all)")
    add(
        "--tokens",
        type=int,
        metavar="N",
        default=40,
        help="longest answer to a prompt without a right answer (default: 40)",
    )
    add(
        "--temperature",
        type=float,
        metavar="X",
        default=0.0,
        help="above 0, changed means: other than lossless with the same seed",
    )
    add("--batch", type=int, metavar="N", default=8, help="answered at once; does not change the answers (default: 8)")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the target whose answers are compared; in bfloat16 ties change answers, too (default: float32)",
    )
    add("--no-speed", action="store_true", help="only the figures that do not depend on the machine")
    add("--speed-rounds", type=int, metavar="N", default=3, help="turns of every setting (default: 3)")
    add("--speed-length", type=int, metavar="N", default=48, help="forced length of each answer (default: 48)")
    add("--floor", default="changed<=1%", metavar="F", help='quality floor (default: "changed<=1%%"), see below')
    add(
        "--write",
        type=Path,
        metavar="CONFIG",
        help="write what is recommended into this config as a preset, beside a copy of it",
    )
    add("--preset", default="calibrated", metavar="NAME", help="its name (default: calibrated)")
    add(
        "--sentences",
        type=Path,
        metavar="DIR",
        default=ROOT / "models" / "sentences",
        help="sentence model (default: models/sentences)",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        default=ROOT / "results" / "calibration.json",
        help="what was measured; plots are written beside it (default: results/calibration.json)",
    )
    add("--report", type=Path, metavar="FILE", help="Markdown report (default: beside --out)")
    add(
        "--processes",
        type=int,
        metavar="N",
        help="that answer side by side, a core and 3 GiB each (default: a core each, up to 4)",
    )
    add("--fresh", action="store_true", help="measure everything anew")
    add("--quick", action="store_true", help="two δ, three items of each set, no presets, no speed: does it work?")
    return result


def read_options(argv: Sequence[str]) -> Options:
    """Parse; exits with a sentence on what cannot be."""
    command = parser()
    raw = command.parse_args(argv)
    if raw.quick:
        raw.items = QUICK_ITEMS if raw.items is None else raw.items
        raw.deltas = raw.deltas or _list(QUICK_DELTAS)
        raw.no_presets = raw.no_speed = True
    try:
        return _checked(raw, argv)
    except ConfigError as error:
        command.error("; ".join(error.problems))
    except ValueError as error:  # PolicyError is one
        command.error(str(error))


def _checked(raw: argparse.Namespace, argv: Sequence[str]) -> Options:
    whole = (raw.tokens, raw.batch, raw.speed_rounds, raw.speed_length, raw.items, raw.draft_tokens, raw.processes)
    low = min(number for number in whole if number is not None)
    if low < 1 or raw.temperature < 0:
        raise ValueError(
            "--tokens, --items, --batch, --draft-tokens, --processes, --speed-rounds and --speed-length start at 1, --temperature at 0"
        )
    models = read_pair(raw.config, raw.draft_name).with_folders(raw.target, raw.draft)
    if models.top_k == 0:
        raise ValueError(f"{raw.config}: its draft sends no probabilities (top_k 0): every policy is lossless with it")
    names = _split(raw.policy)
    settings = _settings(raw, names) + ([] if raw.no_presets else knobs.of_presets(models.presets))
    if not settings:
        raise ValueError("nothing to measure: no policy and no presets")
    semantic = any(setting.policy is not None and setting.policy.rule == "semantic" for setting in settings)
    if semantic and not (raw.sentences / "model.onnx").is_file():
        raise ValueError(f"semantic needs a sentence model: none in {raw.sentences}; run scripts/prepare_models")
    sets = {name: load_items(name, raw.tokens, raw.items) for name in _split(raw.sets)}
    if not sets:
        raise ValueError("--sets names at least one")
    sampling = Sampling(raw.temperature, raw.batch, raw.draft_tokens or models.tokens, models.top_k, raw.dtype)
    speed = Plan(MEASURED_SETS, 1, raw.speed_length, raw.speed_rounds, raw.temperature)
    return Options(
        models=models,
        policies=names,
        settings=settings,
        sets=sets,
        sampling=sampling,
        speed=None if raw.no_speed else speed,
        floor=parse_floor(raw.floor),
        write=raw.write,
        preset=raw.preset,
        sentences=raw.sentences,
        out=raw.out,
        report=raw.report or raw.out.with_suffix(".md"),
        fresh=raw.fresh,
        processes=raw.processes,
        argv=tuple(argv),
    )


def _settings(raw: argparse.Namespace, names: Sequence[str]) -> list[Setting]:
    others = dict(knobs.parse_knob(text) for text in raw.knob)
    deltas = _numbers(raw.deltas, "--deltas") if raw.deltas else knobs.DELTAS
    near = _numbers(raw.similarities, "--similarities") if raw.similarities else knobs.SIMILARITIES
    found: list[Setting] = []
    for name in names:
        if name not in knobs.SWEPT:
            raise ValueError(f"--policy: cannot sweep {name!r}; there are: {', '.join(knobs.SWEPT)}")
        found += knobs.sweep(name, near if name == "semantic" else deltas, others)
    return found


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(part) for part in _split(text)))
    except ValueError:
        raise ValueError(f"{option} takes numbers, not {text!r}") from None


def _split(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _list(values: Sequence[Any]) -> str:
    return ",".join(f"{value:g}" for value in values)
