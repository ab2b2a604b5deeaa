"""Names of token prefixes: the same everywhere, and never the same for different things."""

import hashlib
import itertools
import json
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hw.kv.digests import tagged
from hw.kv.prefix import PrefixChain, PrefixError, Subject, block_hashes, prefix_hash, tenant_digest, token_digest

ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def test_golden() -> None:
    """The worked example of docs/kv_block_format.md."""
    tokens = list(range(1, 19))
    assert [name.hex() for name in block_hashes(tokens, salt=b"tenant-a", adapter="")] == [GOLDEN_BLOCK]
    assert prefix_hash(tokens, salt=b"tenant-a", adapter="").hex() == GOLDEN_TAIL
    assert token_digest(tokens, salt=b"tenant-a").hex() == GOLDEN_TOKENS
    assert tenant_digest(b"tenant-a").hex() == GOLDEN_TENANT


GOLDEN_BLOCK = "29744131ef512ff0cc544e34c7484d1d52ad63896c11e43dda5bc40c150afb09"
GOLDEN_TAIL = "7da99a63ed3e81c331b23267a97af0d3090ae7e2c9f479d87df33d650f66e803"
GOLDEN_TOKENS = "42804d74f2f9024fbde0fa40e270db60"
GOLDEN_TENANT = "2aa5057213212ec5ae0b78eddb839cda"


def test_golden_by_hand() -> None:
    """The same names from the specification's words alone."""

    def h(*parts: bytes) -> bytes:
        return hashlib.sha256(b"".join(struct.pack("<I", len(part)) + part for part in parts)).digest()

    root = h(b"prefix.root", b"chain-of-draft/kv/prefix/1", b"tenant-a", b"", struct.pack("<I", 16))
    block = h(b"prefix.block", root, struct.pack("<16i", *range(1, 17)))
    assert block.hex() == GOLDEN_BLOCK
    assert h(b"prefix.tail", block, struct.pack("<2i", 17, 18)).hex() == GOLDEN_TAIL
    assert h(b"tokens", b"tenant-a", struct.pack("<18i", *range(1, 19)))[:16].hex() == GOLDEN_TOKENS
    assert h(b"tenant", b"tenant-a")[:16].hex() == GOLDEN_TENANT


def test_equal_in_every_process() -> None:
    script = (
        "import json, sys; from hw.kv.prefix import block_hashes, prefix_hash; t = list(range(0, 9000, 7)); "
        "print(json.dumps([hash('a'), [h.hex() for h in block_hashes(t, salt=b's', adapter='ab')], "
        "prefix_hash(t, salt=b's', adapter='').hex()]))"
    )
    answers = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        answers.append(json.loads(done.stdout))
    assert answers[0][0] != answers[1][0]  # the seeds did take effect
    assert answers[0][1:] == answers[1][1:]
    here = block_hashes(list(range(0, 9000, 7)), salt=b"s", adapter="ab")
    assert answers[0][1] == [name.hex() for name in here]


@given(ids, st.lists(st.integers(0, 40), max_size=4), st.integers(1, 9))
def test_piece_by_piece_is_at_once(tokens: list[int], cuts: list[int], block: int) -> None:
    chain = PrefixChain(block, salt=b"s", adapter="")
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, end in itertools.pairwise(edges):
        chain.extend(tokens[start:end])
    assert chain.hashes == block_hashes(tokens, block, salt=b"s", adapter="")
    assert chain.hash() == prefix_hash(tokens, block, salt=b"s", adapter="")
    assert len(chain) == len(tokens)
    assert chain.hash() == prefix_hash(np.array(tokens, dtype=np.int32), block, salt=b"s", adapter="")


@given(ids, ids, st.integers(1, 9))
def test_a_name_is_a_prefix(left: list[int], right: list[int], block: int) -> None:
    first, second = (block_hashes(tokens, block, salt=b"s", adapter="") for tokens in (left, right))
    for place, (one, other) in enumerate(zip(first, second, strict=False), start=1):
        assert (one == other) == (left[: place * block] == right[: place * block])
    names = [prefix_hash(tokens, block, salt=b"s", adapter="") for tokens in (left, right)]
    assert (names[0] == names[1]) == (left == right)


@given(st.binary(max_size=8), st.binary(max_size=8), st.text("ab0", max_size=8), st.text("ab0", max_size=8), ids)
def test_domains_are_apart(salt: bytes, other: bytes, adapter: str, second: str, tokens: list[int]) -> None:
    """A salt never stands for an adapter, nor two parts for one: equal names only for equal facts."""
    assume((salt, adapter) != (other, second))
    assert prefix_hash(tokens, salt=salt, adapter=adapter) != prefix_hash(tokens, salt=other, adapter=second)


@given(st.text("ab", min_size=1, max_size=4), ids)
def test_salt_equal_to_adapter(name: str, tokens: list[int]) -> None:
    names = {
        prefix_hash(tokens, salt=name.encode(), adapter=""),
        prefix_hash(tokens, salt=b"", adapter=name),
        prefix_hash(tokens, salt=name.encode(), adapter=name),
        prefix_hash(tokens, salt=b"", adapter=""),
    }
    assert len(names) == 4


def test_partial_block_is_not_a_block() -> None:
    # the same tokens and the same parent, once as a whole block of 4 and once as the beginning of one of 8
    names = {
        prefix_hash([1, 2, 3, 4], 4, salt=b"", adapter=""),
        prefix_hash([1, 2, 3, 4], 8, salt=b"", adapter=""),
        prefix_hash([1, 2, 3], 4, salt=b"", adapter=""),
        prefix_hash([], 4, salt=b"", adapter=""),
    }
    assert len(names) == 4
    parent = bytes(32)
    assert tagged(b"prefix.block", parent, b"abcd") != tagged(b"prefix.tail", parent, b"abcd")


@given(st.lists(st.binary(max_size=5), max_size=4), st.lists(st.binary(max_size=5), max_size=4))
def test_parts_are_unambiguous(left: list[bytes], right: list[bytes]) -> None:
    assert (tagged(b"t", *left) == tagged(b"t", *right)) == (left == right)


@pytest.mark.parametrize("bad", [[-1], [2**31], [2**70], ["a"], [[1, 2]], [None]])
def test_bad_tokens_change_nothing(bad: list[object]) -> None:
    chain = PrefixChain(4, salt=b"", adapter="")
    chain.extend([1, 2, 3, 4, 5])
    before = chain.hash()
    with pytest.raises(PrefixError):
        chain.extend(bad)  # type: ignore[arg-type]
    assert chain.hash() == before


def test_subject() -> None:
    subject = Subject.of([1, 2, 3, 4], 2, salt=b"s", adapter="")
    assert (subject.start, subject.valid_tokens) == (2, 2)
    assert subject.token_digest == token_digest([3, 4], salt=b"s") != token_digest([3, 4], salt=b"other")
    assert subject.prefix_hash == prefix_hash([1, 2, 3, 4], salt=b"s", adapter="")
    for start in (-1, 4, 5):
        with pytest.raises(PrefixError):
            Subject.of([1, 2, 3, 4], start, salt=b"s", adapter="")
    with pytest.raises(PrefixError):
        PrefixChain(0, salt=b"", adapter="")
