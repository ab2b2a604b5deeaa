"""Why something of the KV plane was refused: one stable code for each cause, and the exception that carries it."""

from enum import StrEnum


class Code(StrEnum):
    """Stable: they label counters and are listed in ``docs/kv_block_format.md``. A code is never reused or renamed."""

    # --- the bytes of a manifest or record
    MANIFEST_TOO_LONG = "manifest_too_long"
    MANIFEST_MALFORMED = "manifest_malformed"
    MANIFEST_NOT_CANONICAL = "manifest_not_canonical"
    MANIFEST_VERSION = "manifest_version"
    TRUNCATED = "truncated"
    TRAILING_BYTES = "trailing_bytes"
    BAD_MAGIC = "bad_magic"
    RECORD_VERSION = "record_version"
    UNKNOWN_FLAGS = "unknown_flags"
    RESERVED_NOT_ZERO = "reserved_not_zero"
    TOO_MANY_ROWS = "too_many_rows"
    PAYLOAD_TOO_LONG = "payload_too_long"
    HEADER_LENGTH = "header_length"
    HEADER_CHECKSUM = "header_checksum"
    UNKNOWN_DIGEST = "unknown_digest"
    UNKNOWN_CLOCK = "unknown_clock"
    BAD_POSITIONS = "bad_positions"
    BAD_ROW = "bad_row"
    ROW_ORDER = "row_order"
    ROW_OFFSET = "row_offset"
    PADDING_NOT_ZERO = "padding_not_zero"
    ROW_DIGEST = "row_digest"
    # --- what the manifest says, against what the receiver holds
    ROLE = "role_not_accepted"
    WEIGHTS = "weights_mismatch"
    SOURCE_UNKNOWN = "source_weights_unknown"
    ADAPTER = "adapter_mismatch"
    TOKENIZER = "tokenizer_mismatch"
    COMPUTE = "compute_mismatch"
    EXACTNESS = "not_bit_exact"
    KV_HEADS = "kv_heads_mismatch"
    HEAD_DIM = "head_dim_mismatch"
    LAYERS = "layers_missing"
    HEADS = "heads_missing"
    ROPE = "rope_mismatch"
    ATTENTION = "attention_mismatch"
    OPAQUE = "opaque_packing"
    NUMERICS = "numerics_mismatch"
    DOUBLE_QUANTISATION = "double_quantisation"
    CANNOT_CONVERT = "cannot_convert"
    LINEAGE = "lineage_too_long"
    # --- what the record says, against the manifest and what was asked for
    MANIFEST_DIGEST = "manifest_digest_mismatch"
    TENANT = "tenant_mismatch"
    PREFIX_BLOCK = "prefix_block_mismatch"
    START = "start_mismatch"
    VALID_TOKENS = "valid_tokens_mismatch"
    PREFIX = "prefix_mismatch"
    TOKENS = "tokens_mismatch"
    EPOCH = "epoch_mismatch"
    GENERATION = "stale_generation"
    MISSING_DIGEST = "missing_digest"
    NO_LEASE = "no_lease"
    CLOCK = "foreign_clock"
    LEASE_EXPIRED = "lease_expired"
    ROW_BYTES = "row_bytes_mismatch"
    ROWS_OVERLAP = "rows_overlap"
    ROWS_INCOMPLETE = "rows_incomplete"


class Refused(ValueError):
    """Something was refused and nothing was changed. ``str()`` is one line that names the field and both values."""

    def __init__(self, code: Code, field: str, got: object, want: object) -> None:
        super().__init__(f"{code}: {field} is {_short(got)}, expected {_short(want)}")
        self.code = code
        self.field = field
        self.got = got
        self.want = want


def _short(value: object) -> str:
    text = (
        value.hex() if isinstance(value, bytes) else value if isinstance(value, str) and " " in value else repr(value)
    )
    return text if len(text) <= 80 else text[:77] + "..."
