"""Which validators there are, and the way from what a request or the configuration says to one of them.

A *kind* is a class with parameters. A *configured* validator is a kind under a name of the operator's, with some parameters
already set. A request names either, with the parameters left open; it can never name an import path or a file.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from deployments.evidence.validators.base import ParameterError, Validator
from deployments.evidence.validators.custom import Custom
from deployments.evidence.validators.entities import Entities
from deployments.evidence.validators.json_schema import JsonSchema
from deployments.evidence.validators.json_syntax import JsonSyntax
from deployments.evidence.validators.python_syntax import PythonSyntax
from deployments.evidence.validators.ranges import Ranges

KINDS: dict[str, type[Any]] = {
    kind.name: kind for kind in (PythonSyntax, JsonSyntax, JsonSchema, Ranges, Entities, Custom)
}
MAX_SPEC_BYTES = 64 * 1024
CACHED_SPECS = 256

Spec = Mapping[str, Any]  # {"name": "json_schema", "schema": {…}}


class Registry:
    """Kinds and configured validators by name. Thread-safe: nothing changes after construction but a cache."""

    def __init__(self, configured: Mapping[str, Mapping[str, Any]] | None = None, *, check_only: bool = False) -> None:
        """``configured``: name to ``{"kind": …, parameter: value, …}``. ``check_only``: where requests are checked but validators do not
        run, and the operator's files need not be; see :meth:`check`.

        Raises:
            ParameterError: naming the validator and what is wrong with it.
        """
        self._configured = {name: dict(spec) for name, spec in (configured or {}).items()}
        self._built: dict[bytes, Validator] = {}
        self._check_only = check_only
        for name, spec in self._configured.items():
            if name in KINDS:
                raise ParameterError(f"{name}: is the name of a kind; call the validator otherwise")
            kind = spec.get("kind")
            if kind not in KINDS:
                raise ParameterError(f"{name}.kind: no kind {kind!r}; known: {', '.join(KINDS)}")
            if not check_only:
                self._fixed(name, KINDS[str(kind)], {key: value for key, value in spec.items() if key != "kind"})

    @property
    def configured(self) -> dict[str, dict[str, Any]]:
        return {name: dict(spec) for name, spec in self._configured.items()}

    @property
    def functions(self) -> dict[str, str]:
        """Configured validators that are the operator's own functions: name to import path."""
        return {name: spec["function"] for name, spec in self._configured.items() if spec["kind"] == Custom.name}

    def names(self) -> list[str]:
        """What requests may name."""
        return [name for name in KINDS if name != Custom.name] + sorted(self._configured)

    def parameters(self, name: str) -> list[str]:
        """The parameters that a request may give to a validator."""
        spec = self._configured.get(name, {})
        kind = KINDS[spec.get("kind", name)]
        return [key for key in kind.__struct_fields__ if key not in kind.operator_only and key not in spec]

    def check(self, spec: Spec) -> None:
        """Whether a request may ask for this, as far as can be told without the operator's files.

        Raises:
            ParameterError: as :meth:`resolve`.
        """
        name, allowed = self._name(spec)
        configured = self._configured.get(name, {})
        if self._check_only and KINDS[configured.get("kind", name)].operator_only & set(configured):
            self._allowed(name, spec, allowed)
        else:
            self.resolve(spec)

    def _name(self, spec: Spec) -> tuple[str, list[str]]:
        """Its name, and the parameters that a request may give."""
        name = spec.get("name") if isinstance(spec, Mapping) else None
        if not isinstance(name, str):
            raise ParameterError(f"a validator needs a name; known: {', '.join(self.names())}")
        if name not in self._configured and (name not in KINDS or name == Custom.name):
            raise ParameterError(f"no validator {name!r}; known: {', '.join(self.names())}")
        return name, self.parameters(name)

    @staticmethod
    def _allowed(name: str, spec: Spec, allowed: list[str]) -> dict[str, Any]:
        given = {parameter: value for parameter, value in spec.items() if parameter != "name"}
        for parameter in given:
            if parameter not in allowed:
                raise ParameterError(f"{name}.{parameter}: not a parameter here; known: {', '.join(allowed) or 'none'}")
        return given

    def resolve(self, spec: Spec) -> Validator:
        """The validator that a request asks for.

        Raises:
            ParameterError: unknown name or parameter, a value of the wrong type; names it and what there is.
        """
        name, allowed = self._name(spec)
        key = self._key(name, spec)
        if (found := self._built.get(key)) is not None:
            return found
        given = self._allowed(name, spec, allowed)
        fixed = {key: value for key, value in self._configured.get(name, {}).items() if key != "kind"}
        kind = KINDS[self._configured.get(name, {}).get("kind", name)]
        validator = _built(name, kind, {**fixed, **given})
        if len(self._built) >= CACHED_SPECS:
            self._built.clear()
        self._built[key] = validator
        return validator

    @staticmethod
    def _key(name: str, spec: Spec) -> bytes:
        try:
            key = msgspec.msgpack.encode(spec)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ParameterError(f"{name}: parameters must be plain JSON values: {error}") from None
        if len(key) > MAX_SPEC_BYTES:
            raise ParameterError(f"{name}: parameters larger than {MAX_SPEC_BYTES} bytes")
        return key

    @staticmethod
    def _fixed(name: str, kind: type[Any], given: Mapping[str, Any]) -> None:
        """Check what an operator sets. What a request must add (a schema, say) may be missing."""
        for parameter in given:
            if parameter not in kind.__struct_fields__:
                known = ", ".join(kind.__struct_fields__) or "none"
                raise ParameterError(f"{name}.{parameter}: not a parameter of {kind.name}; known: {known}")
        if all(field.name in given for field in msgspec.structs.fields(kind) if field.required):
            _built(name, kind, given)  # else a request adds what is missing, a schema say


def _built(name: str, kind: type[Any], parameters: Mapping[str, Any]) -> Validator:
    try:
        validator: Validator = msgspec.convert(parameters, kind)
    except msgspec.ValidationError as error:
        # msgspec says where: "Expected `bool`, got `int` - at `$.unfenced`"
        message, _, place = str(error).partition(" - at `$")
        raise ParameterError(f"{name}{place.rstrip('`')}: {message}") from None
    except ValueError as error:
        raise ParameterError(f"{name}: {error}") from None
    return validator
