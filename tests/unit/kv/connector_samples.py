"""Pages, prompts and producers that the tests of the KV connector start from."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

from deployments.kv import salt_of
from deployments.target.kv_connector.hand_off import HandOffClient, HandOffServer
from deployments.target.kv_connector.prompts import Export, Load, Place
from deployments.target.kv_connector.settings import MIB, ConnectorSettings, Keys
from hw.kv.manifest import Manifest
from hw.kv.prefix import Subject
from hw.kv.record import Record, header_nbytes, parse, seal_into
from hw.kv.store import Store
from hw.kv.transports.base import BlockKey, Ref
from hw.kv.transports.choose import Facts, local_facts
from hw.kv.transports.shared_memory import Arena, ArenaReader
from hw.kv.vllm_cache import PagedCache
from tests.unit.kv.samples import manifest

LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, DIM = 4, 9, 2, 32, 32
EPOCH = bytes(range(16))
SETTINGS = ConnectorSettings(memory_mib=8, tenant_share=1.0, fetch_s=2.0, pause_s=0.2)
PROMPT = list(range(100, 170))  # two whole blocks and a part


def own_manifest(dtype: str = "float32", **changes: Any) -> Manifest:
    """Of an engine with the pages below."""
    return manifest(
        **{"role": "migrate", "geometry__layers": LAYERS, "numerics__k": dtype, "numerics__v": dtype, **changes}
    )


def pages(seed: int | None = None, dtype: torch.dtype = torch.float32) -> PagedCache:
    """Pages as a CPU engine has them, random or zero."""
    flat = torch.zeros(LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, 2 * DIM, dtype=dtype)
    if seed is not None:
        flat.copy_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(seed)))
    return PagedCache([flat[layer] for layer in range(LAYERS)], packing="k_transposed")


def everything(cache: PagedCache) -> bytes:
    return cache.read_raw(range(cache.blocks)).tobytes()


def subject(tokens: list[int] = PROMPT, tenant: str = "", adapter: str = "") -> Subject:
    return Subject.of(tokens, salt=salt_of(tenant), adapter=adapter)


def export(tokens: list[int] = PROMPT, blocks: tuple[int, ...] = (5, 2, 7), tenant: str = "") -> Export:
    return Export("producer-1", subject(tokens, tenant), salt_of(tenant), blocks)


def load(place: Place, tokens: list[int] = PROMPT, start: int = 0, tenant: str = "", name: str = "request-1") -> Load:
    return Load(name, subject(tokens, tenant), salt_of(tenant), (3, 1, 6), start, (place,))


class Crafted:
    """A producer that gives out what a test put there, whatever it was asked for."""

    def __init__(self, keys: Keys, epoch: bytes = EPOCH, settings: ConnectorSettings = SETTINGS) -> None:
        self.arena = Arena(int(settings.memory_mib * MIB))
        self.store = Store(self.arena, settings.limits())
        self.answers: dict[bytes, tuple[bytes, Ref, str]] = {}  # by prefix hash
        self.ended: list[int] = []
        self.server = HandOffServer(self, keys, "127.0.0.1", epoch, settings.limits())

    @property
    def place(self) -> Place:
        return self.server.place

    def find(self, salt: bytes, prefix: bytes, facts: Facts) -> tuple[bytes, Ref, str]:
        return self.answers[prefix]

    def done(self, salt: bytes, prefix: bytes, lease: int) -> None:
        self.ended.append(lease)

    def put(self, asked: bytes, of: Manifest, record: bytes | bytearray) -> Ref:
        """Answer a question for prefix ``asked`` with a record, as it is."""
        key = BlockKey(of.digest(), asked, b"")
        self.store.put(key, np.frombuffer(record, np.uint8))
        ref = self.store.lease(key).ref("shared_memory", self.arena.name)
        self.answers[asked] = of.encode(), ref, ""
        return ref

    def close(self) -> None:
        self.server.stop()
        self.store.close()


def fetch_record(keys: Keys, place: Place, wanted: Subject, tenant: str = "") -> tuple[Manifest, bytes]:
    """A copy of what a producer on this machine has."""
    limits = SETTINGS.limits()
    client = HandOffClient(keys, local_facts(zeromq=True), limits, 1.0)
    encoded, ref, _ = client.find(place, salt_of(tenant), wanted.prefix_hash)
    with ArenaReader(limits).fetch(ref) as fetched:
        record = bytes(fetched.view)
    client.close()
    return Manifest.decode(encoded), record


def resealed(
    of: Manifest, record: bytes, ref_generation: int, *, subject: Subject | None = None, **changes: Any
) -> bytearray:
    """The record of another manifest, subject or header, with everything else as it should be."""
    found: Record = parse(record)
    header = replace(
        found.header,
        manifest_digest=of.digest(),
        generation=ref_generation,
        subject=subject or found.header.subject,
        **changes,
    )
    buffer = bytearray(record)
    seal_into(buffer, header, tuple(replace(row, digest=bytes(16)) for row in found.rows))
    assert len(buffer) == header_nbytes(len(found.rows)) + len(found.payload)
    return buffer


def changed(of: Manifest, **fields: Any) -> Manifest:
    """``identity__adapter=...`` and the like."""
    for name, value in fields.items():
        part, _, field = name.partition("__")
        new = msgspec.structs.replace(getattr(of, part), **{field: value}) if field else value
        of = msgspec.structs.replace(of, **{part: new})
    return of
