"""What goes wrong with a file, and what to do about it."""

from hw.kv.codecs import CodecError
from hw.kv.codes import Code, Refused
from hw.kv.layouts import LayoutError
from hw.kv.payload import ConvertError
from hw.kv.prefix import PrefixError

_DAMAGED = "the file was damaged or cut on its way here: copy it again, or make it again"
_ADVICE = {
    Code.BAD_MAGIC: "this is no KV file: scripts/kv capture --out FILE makes one",
    Code.RECORD_VERSION: "it was made by another version of this project: read it with that one",
    Code.MANIFEST_VERSION: "it was made by another version of this project: read it with that one",
    Code.UNKNOWN_FLAGS: "it was made by a newer version of this project: read it with that one",
    Code.TENANT: "these keys and values belong to another tenant: name the right one with --tenant or --salt",
    Code.PREFIX: "these tokens are not the ones it was computed from",
    Code.TOKENS: "these tokens are not the ones it was computed from",
    Code.DOUBLE_QUANTISATION: "quantise the file it was made from instead",
    Code.OPAQUE: "only an engine with this packing knows what is inside; layers can be selected, nothing else",
    Code.LAYERS: "scripts/kv inspect FILE says which layers there are",
    Code.HEADS: "scripts/kv inspect FILE says which heads there are",
    Code.MISSING_DIGEST: "it was written without digests, so nobody can tell whether it is whole: make it again",
    Code.PAYLOAD_TOO_LONG: "this is more than is read at once: make smaller records",
}


class Problem(Exception):
    """The command cannot do what was asked; the text says why and what to do."""


def explain(error: Exception) -> str:
    """One line on what was refused, and where something can be done about it, what."""
    if isinstance(error, Refused):
        damaged = error.code in (Code.ROW_DIGEST, Code.HEADER_CHECKSUM, Code.TRUNCATED, Code.TRAILING_BYTES)
        advice = _ADVICE.get(error.code, _DAMAGED if damaged else "")
        return f"{error}; {advice}" if advice else str(error)
    if isinstance(error, FileNotFoundError):
        return f"{error.filename} is not there"
    if isinstance(error, OSError):
        return f"{error.filename or 'the file'}: {error.strerror}"
    return str(error)


EXPECTED = (Problem, Refused, ConvertError, CodecError, LayoutError, PrefixError, OSError)
"""What a command may raise for its input; anything else is a bug and shows its traceback."""
