"""From a llama GGUF file to a Hugging Face checkpoint folder: bfloat16 safetensors, tokenizer, chat template.

    python -m hw.onnx.checkpoint_gguf FILE.gguf FOLDER NAME

Everything comes out of the file itself; nothing is looked up on a model hub.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from hw.onnx.checkpoint import CheckpointError, read_json

# How text is cut before merging, per `tokenizer.ggml.pre`. transformers' GGUF reader knows byte-level cutting only: without
# the digit rule "  1" would become other tokens than those the model was trained on.
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "default": [],
    "gpt-2": [],
    "smollm": [{"type": "Digits", "individual_digits": True}],
}


def dequantise(gguf: Path, folder: Path, name: str) -> None:
    """Write the checkpoint of ``gguf`` into ``folder`` (created); ``name`` becomes the model's name in its config.

    Raises CheckpointError when the file's tokenizer is of a kind whose text cutting is not known here, or when the
    result does not hold together (end-of-sequence id, chat template).
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    fields = GGUFReader(gguf).fields
    kind = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else "default"
    if kind not in _PRE_TOKENIZERS:
        raise CheckpointError(f"{gguf.name}: tokenizer.ggml.pre is {kind!r}; known are {', '.join(_PRE_TOKENIZERS)}")

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    tidy(folder, name, kind)


def tidy(folder: Path, name: str, kind: str) -> None:
    """Correct what the conversion leaves behind in a saved checkpoint's JSON files, then check that they agree.

    ``kind`` is the GGUF file's ``tokenizer.ggml.pre``.
    """
    config = read_json(folder / "config.json")
    config["_model_name_or_path"] = name
    _write(folder / "config.json", config)

    tokenizer = read_json(folder / "tokenizer.json")
    steps = _PRE_TOKENIZERS[kind]
    if steps and tokenizer["pre_tokenizer"]["type"] != "Sequence":
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, tokenizer["pre_tokenizer"]]}
    _write(folder / "tokenizer.json", tokenizer, indent=None)

    settings = read_json(folder / "tokenizer_config.json")
    for key in ("is_local", "local_files_only", "backend"):
        settings.pop(key, None)
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    _write(folder / "tokenizer_config.json", settings)

    # vLLM stops at this file's eos, and takes sampling defaults from it: none, so that clients get what they ask for.
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    _write(folder / "generation_config.json", generation | {"transformers_version": config["transformers_version"]})

    texts = {token["id"]: token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    eos = texts.get(config["eos_token_id"])
    if eos is None or eos != settings.get("eos_token"):
        raise CheckpointError(
            f"{folder}: eos id {config['eos_token_id']} is {eos!r} in tokenizer.json, {settings.get('eos_token')!r} "
            "in tokenizer_config.json"
        )
    template = folder / "chat_template.jinja"
    if not template.is_file() or eos not in template.read_text(encoding="utf-8"):
        raise CheckpointError(f"{folder}: no chat template that ends a message with {eos!r}")


def _write(path: Path, value: dict[str, Any], indent: int | None = 2) -> None:
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    dequantise(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
