"""JSON stays JSON: thirty requests at once under a policy that lets almost anything pass, and a source that proposes Markdown fences.

A grammar lets white space between JSON's tokens go on without end, and a small model uses that: such answers end by
length. They are counted apart, and all they lack is an end.
"""

import json
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.conftest import Engine
from tests.engine.policies import ANY, ids, pushing, request

pytestmark = pytest.mark.engine

PROMPT = "<|im_start|>user\nDescribe {} as compact JSON on one line.<|im_end|>\n<|im_start|>assistant\n"
THINGS = [
    f"{adjective} {noun}"
    for adjective in ("a red", "a small", "an old", "a new", "a loud")
    for noun in ("car", "town", "king", "pen", "dog", "inn")
]


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """An object of exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


NAME = {"type": "string", "maxLength": 12}
SCHEMAS = [  # all of them end
    closed({"name": NAME, "kind": {"enum": ["person", "place", "thing"]}, "known": {"type": "boolean"}}),
    closed({"name": NAME, "size": {"type": "integer", "minimum": 0, "maximum": 999}, "kind": {"enum": ["old", "new"]}}),
    closed({"tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3}}),
    closed({"of": closed({"name": NAME, "parts": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 2}})}),
    closed({"name": NAME, "next": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 6}]}}),
]


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is what a schema of those above says."""
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    kind = schema["type"]
    if kind == "object":
        return list(value) == schema["required"] and all(fits(value[k], s) for k, s in schema["properties"].items())
    if kind == "array":
        few = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
        return few and all(fits(item, schema["items"]) for item in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    return value is None if kind == "null" else isinstance(value, bool)


@pytest.mark.parametrize("name", ["nkl", "block"])
def test_json_stays_json_when_a_source_proposes_fences(engine: Engine, name: str) -> None:
    fences = [token for token in ids(engine, '```json\n{"name": "```"}\n```') if token not in ids(engine, "\n")]
    engine.drafts(a=pushing(fences))
    policy = {**ANY, "name": name, **({"min_block_len": 2} if name == "block" else {})}
    schemas = [SCHEMAS[index % len(SCHEMAS)] for index in range(len(THINGS))]
    asked = [
        request(
            policy,
            72,
            temperature=0.0 if (index // len(SCHEMAS)) % 2 else 0.8,
            seed=index,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        for index, schema in enumerate(schemas)
    ]
    got = engine.generate([PROMPT.format(thing) for thing in THINGS], asked)
    stats = engine.stats()
    assert stats["relaxed_tokens"] > 0, "inside strings a fence is as good as any text"
    whole = {"greedy": 0, "sampled": 0}
    cut = 0
    for output, schema, params in zip(got, schemas, asked, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "length":
            assert answer.text[-20:].isspace(), answer.text
            cut += 1
            continue
        assert fits(json.loads(answer.text), schema), answer.text
        whole["sampled" if params.temperature else "greedy"] += 1
    assert cut < len(THINGS) / 3
    assert min(whole.values()) >= 5
    assert sum(whole.values()) + cut == len(THINGS)
    fenced = sum("`" in output.outputs[0].text for output in got)
    assert fenced > 0, "no fence got into any string: the source was not what this test needs"
