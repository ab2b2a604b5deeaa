"""Arenas: the contract, torn reads looked for with a second process, producers that die, files that are not ours."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hw.kv.memory import GRANULE, PrivateMemory
from hw.kv.store import Store
from hw.kv.transports.base import BlockError, Expired, Limits, Malformed, Missing, Ref, Stale, Unavailable, Unreachable
from hw.kv.transports.offers import StoreProducer
from hw.kv.transports.shared_memory import FOLDER, PREFIX, Arena, ArenaReader, clean_stale
from tests.unit.kv.transport_contract import BLOCK_BYTES, CAPACITY, Ends, TransportContract, data, key

REPOSITORY = Path(__file__).resolve().parents[3]
LIMITS = Limits(tenant_share=1.0, block_bytes=BLOCK_BYTES, lease_s=20.0)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of our own in shared memory: arenas of other tests and programs stay out of it."""
    place = FOLDER / f"kv-test-{os.getpid()}-{tmp_path.name}"
    place.mkdir(mode=0o700)
    yield place
    left = list(place.iterdir())
    for path in left:
        path.unlink()
    place.rmdir()


def make(folder: Path, limits: Limits = LIMITS) -> tuple[StoreProducer, ArenaReader]:
    arena = Arena(CAPACITY, folder)
    return StoreProducer(Store(arena, limits), "shared_memory", arena.name), ArenaReader(limits, folder)


@contextlib.contextmanager
def child(folder: Path, body: str) -> Iterator["subprocess.Popen[str]"]:
    """A producer in another process: ``body`` with ``store``, ``producer`` and the helpers of the contract at hand."""
    program = f"""
import sys, time
import numpy as np
from pathlib import Path
from hw.kv.store import Store
from hw.kv.transports.base import Limits
from hw.kv.transports.offers import StoreProducer
from hw.kv.transports.shared_memory import Arena
from tests.unit.kv.transport_contract import data, key
arena = Arena({CAPACITY}, Path({str(folder)!r}))
store = Store(arena, Limits(tenant_share=1.0))
producer = StoreProducer(store, "shared_memory", arena.name)
def say(ref):
    print(ref.encode().hex(), flush=True)
{body}
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stdin):
            if stream is not None:
                stream.close()


def heard(process: "subprocess.Popen[str]") -> Ref:
    assert process.stdout is not None
    return Ref.decode(bytes.fromhex(process.stdout.readline()))


class TestContract(TransportContract):
    @pytest.fixture
    def ends(self, folder: Path) -> Iterator[Ends]:
        producer, reader = make(folder)
        yield Ends(producer, reader)
        producer.close()
        reader.close()


def test_references_are_decoded_strictly() -> None:
    ref = Ref("zeromq", "name", 0, 10, 1, 2, 3, b"m" * 32, b"p" * 32)
    encoded = ref.encode()
    assert Ref.decode(encoded) == ref
    bad = [encoded[:cut] for cut in range(len(encoded))] + [encoded + b"\x00", b"\x00" * 5000]
    fields = [msgspec.to_builtins(ref, builtin_types=(bytes,))]
    for index, value in (
        (0, "carrier_pigeon"),
        (1, "x" * 2000),
        (3, -1),
        (5, 2**64 - 1),
        (7, b"m" * 31),
        (8, b"p" * 33),
        (2, 1.5),
    ):
        fields.append([*fields[0][:index], value, *fields[0][index + 1 :]])
    fields.append([*fields[0], 1])
    bad += [msgspec.msgpack.encode(changed) for changed in fields[1:]]
    for wrong in bad:
        with pytest.raises(Malformed):
            Ref.decode(wrong)


def test_blocks_written_in_place_are_read_in_place(folder: Path) -> None:
    producer, reader = make(folder)
    staged = producer.store.stage(8000)
    staged.array[:] = 5
    producer.store.publish(staged, key(1))
    block = reader.fetch(producer.refer(key(1)))
    assert block.array.tolist() == [5] * 8000
    assert not block.array.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        block.array[0] = 1
    producer.close()


def test_the_file_is_private_and_goes_with_its_arena(folder: Path) -> None:
    arena = Arena(GRANULE, folder)
    (path,) = folder.iterdir()
    assert path == arena.path
    assert path.stat().st_mode & 0o777 == 0o600
    arena.close()
    arena.close()
    assert not list(folder.iterdir())
    forgotten = Arena(GRANULE, folder)
    del forgotten
    gc.collect()
    assert not list(folder.iterdir())


def test_a_forked_child_takes_nothing_with_it(folder: Path) -> None:
    with child(
        folder,
        "import os\nif os.fork() == 0: sys.exit()\nos.wait()\nsay(producer.offer(key(1), data(1, 100).data))\nsys.stdin.read()",
    ) as process:
        ref = heard(process)
        with ArenaReader(LIMITS, folder).fetch(ref) as block:
            assert (block.array == data(1, 100)).all()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0
    assert not list(folder.iterdir())  # it ended well and took the file along


def test_no_room_in_shared_memory_is_an_error_at_the_start(folder: Path) -> None:
    with pytest.raises(Unavailable, match="are free"):
        Arena(1 << 50, folder)
    assert not list(folder.iterdir())
    with pytest.raises(Unavailable):
        Arena(GRANULE, folder / "absent")


def test_a_killed_producer_leaves_readers_whole_and_its_file_to_the_next(folder: Path) -> None:
    reader = ArenaReader(LIMITS, folder)
    with child(folder, f"say(producer.offer(key(1), data(1, {BLOCK_BYTES}).data))\ntime.sleep(60)") as process:
        ref = heard(process)
        block = reader.fetch(ref)
        half = block.array[: BLOCK_BYTES // 2].copy()
        assert clean_stale(folder) == 0  # alive: nobody else's to remove
        assert reader.forget_abandoned() == 0
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert clean_stale(folder) == 1
    assert not list(folder.iterdir())
    block.check()
    assert (np.concatenate([half, block.array[BLOCK_BYTES // 2 :]]) == data(1, BLOCK_BYTES)).all()
    block.release()
    assert reader.forget_abandoned() == 1
    with pytest.raises(Unreachable):
        reader.fetch(ref)


def test_a_writer_in_another_process_never_shows_torn_bytes(folder: Path) -> None:
    """Leases of no length: the writer overwrites what is being read, all the time."""
    blocks, nbytes = 3, 1 << 20
    body = f"""
turn = 0
while True:
    turn += 1
    store.put(key(turn % {blocks}), np.full({nbytes}, turn % 251, np.uint8))
    lease = store.lease(key(turn % {blocks}), 0.0)
    say(lease.ref("shared_memory", arena.name))
"""
    whole, stale = 0, 0
    reader = ArenaReader(LIMITS, folder, clock_ns=lambda: 0)  # goes by generations alone
    out = np.empty(nbytes, np.uint8)
    with child(folder, body) as process:
        for _ in range(1500):
            ref = heard(process)
            try:
                with reader.fetch(ref) as block:
                    block.copy_into(out)
            except Stale:
                stale += 1
                continue
            whole += 1
            assert (out == out[0]).all()
    assert whole
    assert stale == reader.counts["stale_generation"]


def test_overwriting_during_a_read_is_noticed(folder: Path) -> None:
    limits = Limits(tenant_share=1.0, block_bytes=CAPACITY, lease_s=0.0)
    producer, reader = make(folder, limits)
    producer.store.put(key(1), data(1, CAPACITY))
    ref = producer.store.lease(key(1), 0.0).ref("shared_memory", producer.handle)
    block = ArenaReader(limits, folder, clock_ns=lambda: 0).fetch(ref)
    before = block.array[:100].copy()
    staged = producer.store.stage(CAPACITY)  # nothing was written yet: already too late for the reader
    with pytest.raises(Stale):
        block.check()
    staged.array[:] = 0
    out = np.ones(CAPACITY, np.uint8)
    with pytest.raises(Stale):
        block.copy_into(out)
    assert not out.any()
    assert (before == data(1, CAPACITY)[:100]).all()
    with pytest.raises(Expired):
        reader.fetch(ref)
    producer.store.discard(staged)
    producer.close()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset=st.integers(0, 2 * CAPACITY), nbytes=st.integers(0, 2 * CAPACITY), generation=st.integers(0, 20))
def test_forged_places_never_give_bytes(folder: Path, offset: int, nbytes: int, generation: int) -> None:
    producer, reader = make(folder)
    refs = [producer.offer(key(number), data(number, 5000 + number).data) for number in range(5)]
    true = {(ref.offset, ref.nbytes, ref.generation) for ref in refs}
    for place in (
        (offset, nbytes, generation),
        (offset // GRANULE * GRANULE, nbytes, generation),
        (refs[2].offset, nbytes, 3),
    ):
        if place not in true:
            forged = msgspec.structs.replace(refs[0], offset=place[0], nbytes=place[1], generation=place[2])
            with pytest.raises((Malformed, Stale)):
                reader.fetch(forged)
    reader.close()
    producer.close()


def test_files_that_are_not_arenas_are_refused(folder: Path) -> None:
    producer, reader = make(folder)
    ref = producer.offer(key(1), data(1, 100).data)
    content = (folder / ref.handle).read_bytes()
    other_granules = content[:8] + b"\0\0" + content[10:]
    contents = [b"", b"x" * GRANULE * 4, content[:-1], content + b"\0", other_granules, content]
    for number, (wrong, mode) in enumerate(zip(contents, [0o600] * 5 + [0o644], strict=True)):
        name = f"{PREFIX}{number:032x}"
        (folder / name).write_bytes(wrong)
        (folder / name).chmod(mode)
        with pytest.raises(Malformed):
            reader.fetch(msgspec.structs.replace(ref, handle=name))
    link = f"{PREFIX}{'f' * 32}"
    (folder / link).symlink_to(folder / ref.handle)
    with pytest.raises(Unreachable):
        reader.fetch(msgspec.structs.replace(ref, handle=link))
    with pytest.raises(Malformed):
        reader.attach("../" + ref.handle)
    reader.attach(ref.handle)
    assert clean_stale(folder) == 6  # nobody holds those copies; the arena itself and the link stay
    reader.fetch(ref)
    producer.close()


def test_mappings_are_bounded(folder: Path) -> None:
    limits = Limits(tenant_share=1.0, arenas=2)
    producers = [make(folder)[0] for _ in range(4)]
    reader = ArenaReader(limits, folder)
    for turn in range(8):
        producer = producers[turn % 4]
        with reader.fetch(producer.offer(key(1), data(turn, 100).data)) as block:
            assert (block.array == data(turn, 100)).all()
        assert len(reader._mappings) <= 2
    for producer in producers:
        producer.close()
    assert reader.forget_abandoned() == 2


def _resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def test_ten_thousand_blocks_later_memory_is_where_it_was(folder: Path) -> None:
    producer, reader = make(folder)
    free = producer.store.stats()["free_bytes"]
    content = data(0, 20_000)

    def cycle(count: int) -> None:
        for number in range(count):
            ref = producer.offer(key(number % 300), content[: 1 + number % 20_000].data)
            with reader.fetch(ref) as block:
                assert block.view[-1] == content[number % 20_000]
            producer.release(ref)

    cycle(1000)
    gc.collect()
    before, descriptors = _resident_kib(), len(os.listdir("/proc/self/fd"))
    cycle(10_000)
    gc.collect()
    assert _resident_kib() - before < 4096
    assert len(os.listdir("/proc/self/fd")) == descriptors
    for number in range(300):
        producer.store.drop(key(number))
    assert producer.store.stats()["free_bytes"] == free
    assert producer.store.stats()["leases"] == 0
    producer.store.check_integrity()
    producer.close()


def test_leases_of_a_reader_that_died_end_by_themselves(folder: Path) -> None:
    producer, _ = make(folder, Limits(tenant_share=1.0, block_bytes=CAPACITY, lease_s=0.05))
    producer.offer(key(1), data(1, CAPACITY).data)  # leased to somebody who never comes back
    with pytest.raises(BlockError):
        producer.offer(key(2), data(2, CAPACITY).data)
    time.sleep(0.06)
    producer.offer(key(2), data(2, CAPACITY).data)
    with pytest.raises(Missing):
        producer.refer(key(1))
    producer.close()


def test_a_private_store_offers_the_same_blocks_without_a_file(folder: Path) -> None:
    store = Store(PrivateMemory(CAPACITY), LIMITS)
    ref = StoreProducer(store, "zeromq", "here").offer(key(1), data(1, 100).data)
    with pytest.raises(Malformed):
        ArenaReader(LIMITS, folder).fetch(ref)
