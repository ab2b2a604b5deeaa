"""The manifest: everything that decides whether KV bytes of one producer mean something to another engine.

It is made once per producer and configuration, encoded canonically (one byte string for each manifest) and named by its
SHA-256. A record (``hw/kv/record.py``) repeats that name and adds what differs from one block set to the next. Field
tables and rules for other languages: ``docs/kv_block_format.md``.
"""

import hashlib
import json
import re
from decimal import Decimal
from typing import Any, Literal, Self

import msgspec

from hw.kv.codes import Code, Refused

VERSION = 1
MAX_BYTES = 64 * 1024
MAX_LINEAGE = 16

DType = Literal["float32", "float16", "bfloat16", "int8", "int4"]
Scheme = Literal["", "per_token_head_symmetric"]
Order = Literal["NHD", "HND"]
Role = Literal["target_to_draft", "draft_to_target", "migrate"]
Exactness = Literal["bit_exact", "same_function", "approximate"]

BITS: dict[str, int] = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
QUANTISED = ("int8", "int4")

_HEX = re.compile(r"[0-9a-f]{64}")
_DECIMAL = re.compile(r"0|[1-9][0-9]*(\.[0-9]*[1-9])?|0\.[0-9]*[1-9]")
_TEXT = re.compile("[^\x00-\x1f\x7f\ud800-\udfff]{0,256}")
_STEP = re.compile(r"[a-z0-9_.,:()]{1,128}")
_PACKING = re.compile(r"token_major|k_transposed|amx_vnni|opaque:[a-z0-9_.-]{1,64}")
_SIZE = 2**16
_FIELD = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"(?:missing required|contains unknown) field `(\w+)`")


class ManifestError(Refused):
    """A manifest that is malformed, too long, of another version or not canonical; ``field`` names what is wrong."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    def _check(self, field: str, ok: bool, want: str) -> None:
        if not ok:
            name = type(self).__name__.lower()
            place = field if name == "manifest" else f"{name}.{field}"
            raise ManifestError(Code.MANIFEST_MALFORMED, place, getattr(self, field), want)

    def _check_int(self, field: str, least: int, most: int) -> None:
        value = getattr(self, field)
        self._check(field, type(value) is int and least <= value <= most, f"an integer in {least}..{most}")

    def _check_text(self, field: str, pattern: re.Pattern[str], want: str, empty: bool = False) -> None:
        value = getattr(self, field)
        self._check(field, isinstance(value, str) and ((empty and not value) or bool(pattern.fullmatch(value))), want)

    def _check_choice(self, field: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, field)
        self._check(field, isinstance(value, str) and value in choices, "one of " + ", ".join(map(repr, choices)))


class Identity(_Part, frozen=True):
    """What produced the bytes. Digests are SHA-256 as 64 lower-case hex digits; ``adapter`` "" is no adapter."""

    model: str  # for people; never decides anything
    weights: str
    adapter: str  # of the adapter's content, not its name
    tokenizer: str
    compute: str  # see :func:`compute_fingerprint`

    def __post_init__(self) -> None:
        self._check_text("model", _TEXT, "at most 256 characters without control characters")
        for field in ("weights", "tokenizer", "compute"):
            self._check_text(field, _HEX, "64 lower-case hex digits")
        self._check_text("adapter", _HEX, "64 lower-case hex digits, or empty for none", empty=True)


class Geometry(_Part, frozen=True):
    """Which slice of the model's KV this is, in global layer and head numbers; all sizes count elements.

    ``block_tokens`` 0 is unblocked: one block exactly as long as the row's tokens (ONNX ``past_key_values``, and the
    canonical payload). Otherwise a row holds whole blocks, and tokens of the last one past the valid ones are zero.
    """

    first_layer: int
    layers: int
    kv_heads: int  # of the whole model, over all tensor-parallel ranks
    first_head: int
    heads: int
    head_dim: int
    head_dim_v: int
    block_tokens: int

    def __post_init__(self) -> None:
        self._check_int("first_layer", 0, _SIZE)
        for field in ("layers", "kv_heads", "heads", "head_dim", "head_dim_v"):
            self._check_int(field, 1, _SIZE)
        self._check_int("first_head", 0, _SIZE)
        self._check_int("block_tokens", 0, _SIZE)
        self._check("heads", self.first_head + self.heads <= self.kv_heads, "at most kv_heads - first_head")


class Numerics(_Part, frozen=True):
    """How a number is stored. bfloat16 is carried as 16-bit words; int4 as two elements a byte, the even one low.

    ``per_token_head_symmetric``: value = integer * scale, one scale of dtype ``scale`` for each token and head; int8
    uses -127..127 and int4 (two's complement nibbles) -7..7. Scheme and scale are empty when neither K nor V is quantised.
    """

    k: DType
    v: DType
    scheme: Scheme
    scale: str

    def __post_init__(self) -> None:
        self._check_choice("k", tuple(BITS))
        self._check_choice("v", tuple(BITS))
        quantised = self.k in QUANTISED or self.v in QUANTISED
        self._check_choice("scheme", ("per_token_head_symmetric",) if quantised else ("",))
        self._check_choice("scale", ("float16", "float32") if quantised else ("",))


class Layout(_Part, frozen=True):
    """Where an element lies. A row is ``[layers, blocks]`` of blocks; a block is ``[tokens, heads, dim]`` (NHD) or
    ``[heads, tokens, dim]`` (HND).

    ``packing`` is the order inside a (block, head): ``token_major`` is ``[tokens, dim]``; ``k_transposed`` holds K as
    ``[dim, tokens]`` and V as ``[tokens, dim]``; ``amx_vnni`` holds K as ``[tokens/16, dim/2, 16, 2]`` and V as
    ``[dim/16, tokens/2, 16, 2]``; ``opaque:<name>`` is known only to engines of that name, and moves as whole full blocks,
    K and V together.
    """

    order: Order
    packing: str

    def __post_init__(self) -> None:
        self._check_choice("order", ("NHD", "HND"))
        self._check_text("packing", _PACKING, "token_major, k_transposed, amx_vnni or opaque:<name>")
        interior = self.packing in ("k_transposed", "amx_vnni")
        self._check("order", not interior or self.order == "HND", "'HND' for this packing")

    @property
    def opaque(self) -> bool:
        return self.packing.startswith("opaque:")


class Rope(_Part, frozen=True):
    """Whether keys are rotated, and by what. A model without RoPE has ``rotary_dim`` 0 and an empty ``theta``."""

    applied: bool
    style: Literal["neox", "interleaved"]
    rotary_dim: int
    theta: str  # exact decimal, see :func:`decimal`
    scaling: str  # :func:`json_digest` of the scaling parameters; empty for none

    def __post_init__(self) -> None:
        self._check("applied", type(self.applied) is bool, "true or false")
        self._check_choice("style", ("neox", "interleaved"))
        self._check_int("rotary_dim", 0, _SIZE)
        self._check("rotary_dim", self.rotary_dim % 2 == 0, "an even number")
        self._check_text("theta", _DECIMAL, "a plain decimal such as '10000', or empty for none", empty=True)
        self._check("theta", bool(self.theta) == (self.rotary_dim > 0), "set exactly when rotary_dim is above 0")
        self._check("applied", not self.applied or self.rotary_dim > 0, "false when rotary_dim is 0")
        self._check_text("scaling", _HEX, "64 lower-case hex digits, or empty for none", empty=True)


class Attention(_Part, frozen=True):
    """What of the cache attention reads: ``window`` last tokens (0: all), plus ``sinks`` first ones; ``softcap`` as text."""

    window: int
    sinks: int
    softcap: str  # exact decimal, empty for none

    def __post_init__(self) -> None:
        self._check_int("window", 0, 2**31 - 1)
        self._check_int("sinks", 0, 2**31 - 1)
        self._check_text("softcap", _DECIMAL, "a plain decimal such as '50', or empty for none", empty=True)


class Manifest(_Part, frozen=True):
    """All of it. Build with :func:`manifest_for`; every part checks itself, so a Manifest that exists is well formed.

    ``exactness``: ``bit_exact`` bytes were computed by an engine with this compute fingerprint;
    ``same_function`` ones come from the same weights by other arithmetic; ``approximate`` is anything else. ``lineage``
    lists the lossy conversions the bytes went through, oldest first (``str`` of the steps in ``hw/kv/steps.py``).
    """

    version: int
    identity: Identity
    geometry: Geometry
    numerics: Numerics
    layout: Layout
    rope: Rope
    attention: Attention
    exactness: Exactness
    lineage: tuple[str, ...]
    role: Role
    endian: Literal["little"]

    def __post_init__(self) -> None:
        if type(self.version) is not int or self.version != VERSION:
            raise ManifestError(Code.MANIFEST_VERSION, "version", self.version, VERSION)
        self._check_choice("exactness", ("bit_exact", "same_function", "approximate"))
        self._check_choice("role", ("target_to_draft", "draft_to_target", "migrate"))
        self._check_choice("endian", ("little",))
        known = isinstance(self.lineage, tuple) and all(isinstance(s, str) and _STEP.fullmatch(s) for s in self.lineage)
        self._check("lineage", known and len(self.lineage) <= MAX_LINEAGE, f"at most {MAX_LINEAGE} names of steps")
        self._check(
            "exactness", not self.lineage or self.exactness == "approximate", "'approximate' after a lossy step"
        )
        geometry, numerics = self.geometry, self.numerics
        even = geometry.head_dim % 2 == 0 or numerics.k != "int4"
        even &= geometry.head_dim_v % 2 == 0 or numerics.v != "int4"
        self._check("geometry", even, "an even head dim for int4")
        self._check("rope", self.rope.rotary_dim <= geometry.head_dim, "rotary_dim at most head_dim")
        self._check("geometry", not self.layout.opaque or geometry.block_tokens > 0, "block_tokens above 0 when opaque")
        if self.layout.packing == "amx_vnni":
            words = BITS[numerics.k] == BITS[numerics.v] == 16
            self._check("numerics", words, "16-bit K and V for amx_vnni")
            fits = geometry.block_tokens > 0 and geometry.block_tokens % 16 == 0
            fits &= geometry.head_dim % 2 == 0 and geometry.head_dim_v % 16 == 0
            self._check("geometry", fits, "blocks of a multiple of 16 tokens and dims of a multiple of 16 for amx_vnni")

    def encode(self) -> bytes:
        """The only byte string that stands for this manifest; at most ``MAX_BYTES``."""
        return msgspec.json.encode(self, order="sorted")

    def digest(self) -> bytes:
        """SHA-256 of :meth:`encode`, 32 bytes."""
        return hashlib.sha256(self.encode()).digest()

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Self:
        """The manifest that ``data`` stands for.

        Raises ManifestError for anything but the output of :meth:`encode`: unknown, missing or repeated fields, values
        out of range, another spelling of the same values, more than ``MAX_BYTES``.
        """
        if len(data) > MAX_BYTES:
            raise ManifestError(Code.MANIFEST_TOO_LONG, "manifest", f"{len(data)} bytes", f"at most {MAX_BYTES} bytes")
        try:
            found = msgspec.json.decode(data, type=cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, ManifestError):
                raise error.__cause__ from None
            raise ManifestError(Code.MANIFEST_MALFORMED, _place(str(error)), str(error), "a valid manifest") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ManifestError(Code.MANIFEST_MALFORMED, "manifest", str(error), "JSON in UTF-8") from None
        if found.encode() != bytes(data):
            raise ManifestError(Code.MANIFEST_NOT_CANONICAL, "manifest", "another spelling", "the canonical encoding")
        return found


def manifest_for(
    identity: Identity,
    geometry: Geometry,
    numerics: Numerics,
    layout: Layout,
    rope: Rope,
    attention: Attention,
    *,
    role: Role,
    exactness: Exactness,
    lineage: tuple[str, ...] = (),
) -> Manifest:
    """A manifest of the current version. Raises ManifestError, naming the field, when the facts do not fit together."""
    return Manifest(
        VERSION, identity, geometry, numerics, layout, rope, attention, exactness, lineage, role, "little"
    )  # fmt: skip


def compute_fingerprint(
    *, engine: str, engine_version: str, dtype: str, attention: str, isa: str, packing: str, batch_invariant: bool
) -> str:
    """SHA-256 (hex) of what decides the bits an engine computes from given weights and tokens.

    Bytes marked ``bit_exact`` were computed by an engine of this fingerprint and not changed since: using them is what that
    engine's own prefix cache does. Without ``batch_invariant`` the same tokens in another batch may still come out with
    other last bits there. Raises ManifestError for an empty fact.
    """
    facts = {
        "engine": engine,
        "engine_version": engine_version,
        "dtype": dtype,
        "attention": attention,
        "isa": isa,
        "packing": packing,
    }
    for name, value in facts.items():
        if not value:
            raise ManifestError(Code.MANIFEST_MALFORMED, f"compute.{name}", value, "a known value")
    return json_digest({**facts, "batch_invariant": bool(batch_invariant)})


def json_digest(value: Any) -> str:
    """SHA-256 (hex) of canonical JSON: sorted keys, no spaces, UTF-8. For RoPE scaling parameters and the like."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def decimal(value: float | int) -> str:
    """The shortest plain decimal that reads back as ``value``: 10000.0 -> "10000", 0.5 -> "0.5". No sign, no exponent."""
    text = format(Decimal(repr(value)), "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    if not _DECIMAL.fullmatch(text):
        raise ManifestError(Code.MANIFEST_MALFORMED, "decimal", value, "a finite number that is not negative")
    return text


def _place(message: str) -> str:
    at, missing = _FIELD.search(message), _MISSING.search(message)
    return ".".join(part for part in (at and at.group(1), missing and missing.group(1)) if part) or "manifest"
