"""The router's own look at text: what the target is going to read, and what drafts are in its tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from deployments.api.trace import pieces
from deployments.chain.answer.candidate import Candidate, Question


class Prompts:
    """Tokenizer and chat template of one target."""

    def __init__(self, model: Path) -> None:
        """``model``: the target's checkpoint folder. Raises OSError or ValueError where it holds no usable tokenizer."""
        self._tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        # a copy to which "<|im_end|>" inside a draft is ordinary text
        self._plain = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        self._plain.encode_special_tokens = True
        generation = model / "generation_config.json"
        ends = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
        found = [self._tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
        self.stop: list[int] = sorted({int(token) for token in found if token is not None})  # each ends an answer

    @property
    def specials(self) -> tuple[str, ...]:
        """Texts that a tokenizer reads as more than text."""
        added = self._tokenizer.added_tokens_decoder.values()
        return tuple({str(token) for token in added if token.special} | set(self._tokenizer.all_special_tokens))

    def prompt(self, question: Question, template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of the conversation, ready for the answer. Raises what the chat template raises."""
        messages = [{"role": role, "content": text} for role, text in question.messages]
        kwargs = {**(template_kwargs or {}), "add_generation_prompt": True, "tokenize": False}
        text = self._tokenizer.apply_chat_template(messages, **kwargs)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def tokenized(self, candidate: Candidate) -> Candidate:
        """With tokens, text and the ends of the tokens, whichever were there; as the beginning of an answer."""
        if candidate.tokens:
            texts = pieces([[token] for token in candidate.tokens], self.decode)
            return replace(candidate, text="".join(texts), ends=tuple(accumulate(map(len, texts))))
        encoded = self._plain.encode(candidate.text, add_special_tokens=False)
        ends = tuple(accumulate((end for _, end in encoded.offsets), max))
        return replace(candidate, tokens=tuple(encoded.ids), ends=ends)

    def decode(self, tokens: list[int]) -> str:
        """Their text, without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def count(self, text: str) -> int:
        """How many tokens it has."""
        return len(self._plain.encode(text, add_special_tokens=False).ids)


def question_of(messages: Sequence[Any], tenant: str, length: int) -> Question:
    """What the sources are asked.

    Raises:
        ValueError: the conversation is not text, or does not end with the user's question.
    """
    plain = tuple((str(message["role"]), text_of(message.get("content"))) for message in messages)
    if not plain or plain[-1][0] != "user":
        raise ValueError("the last message is not the user's")
    return Question(text=plain[-1][1], messages=plain, tenant=tenant, length=length)


def text_of(content: Any) -> str:
    """A message's content as text, its parts on lines of their own as vLLM joins them. Raises ValueError for other media."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError("a message has a part that is not text")
        parts.append(str(part["text"]))
    return "\n".join(parts)
