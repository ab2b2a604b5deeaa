"""Whether JSON follows a schema. The work is jsonschema's; the dialect is the schema's ``$schema``, else 2020-12."""

from typing import Any, ClassVar

import msgspec

from deployments.evidence.validators.base import VALID, Context, Tag, invalid, unknown
from deployments.evidence.validators.code_blocks import code_of
from deployments.evidence.validators.json_syntax import LANGUAGES, objection, parse

MAX_SCHEMA_BYTES = 32 * 1024
MAX_PLACE = 80


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every JSON block (the whole text without fences) must follow ``schema``. References outside it are never fetched.

    Raises:
        ValueError: the schema is too large or not one.
    """

    name: ClassVar[str] = "json_schema"
    isolated: ClassVar[bool] = True  # patterns of a schema may backtrack without end, holding the interpreter
    whole: ClassVar[bool] = True
    operator_only: ClassVar[frozenset[str]] = frozenset()

    schema: dict[str, Any] | bool

    def __post_init__(self) -> None:
        from jsonschema.exceptions import SchemaError

        if len(msgspec.json.encode(self.schema)) > MAX_SCHEMA_BYTES:
            raise ValueError(f"schema: larger than {MAX_SCHEMA_BYTES} bytes")
        try:
            _validator_class(self.schema).check_schema(self.schema)
        except SchemaError as error:
            raise ValueError(f"schema: not a JSON schema: {error.message} at {_place(error.absolute_path)}") from None
        except RecursionError:
            raise ValueError("schema: too deeply nested") from None

    def check(self, text: str, context: Context) -> Tag:
        from jsonschema.exceptions import best_match
        from referencing import Registry
        from referencing.exceptions import Unresolvable

        found = code_of(text, LANGUAGES)
        if not found:
            return unknown("no JSON")
        # an explicit registry: the default one would fetch references from the network
        validator = _validator_class(self.schema)(self.schema, registry=Registry())
        for block in found:
            try:
                value = parse(block.code)
            except ValueError as error:
                return objection(block, error)
            try:
                worst = best_match(validator.iter_errors(value))
            except Unresolvable as error:
                return unknown(f"the schema refers to {error.ref!r}, which is not inside it")
            if worst is not None:
                return invalid(f"{_place(worst.absolute_path)}: {worst.message}")
        return VALID


def _validator_class(schema: Any) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    return validator_for(schema, default=Draft202012Validator)


def _place(path: Any) -> str:
    text = "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text if len(text) <= MAX_PLACE else text[: MAX_PLACE - 1] + "…"
