"""Device-direct transfer refuses by name what is missing; which transport a pair of processes takes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hw.kv.transports.base import Late, Limits, Malformed, Missing, TooLarge, Unavailable
from hw.kv.transports.choose import Facts, choose_transport, local_facts, shared_memory_id
from hw.kv.transports.device import DeviceFacts, DeviceSlot, missing, probe

ABLE = DeviceFacts("cuda", nixl=True, tensor_transport=True, actor=True)


class RayError(Exception):
    pass


class GetTimeoutError(RayError):
    pass


class FakeRay:
    """Keeps what is put; ``get`` raises what a test wants."""

    exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)

    def __init__(self) -> None:
        self.transports: list[str] = []
        self.failure: Exception | None = None

    def put(self, value: Any, *, _tensor_transport: str) -> Any:
        self.transports.append(_tensor_transport)
        return (value,)

    def get(self, reference: Any, *, timeout: float) -> Any:
        if self.failure is not None:
            raise self.failure
        return reference[0]


def tensor(nbytes: int = 100, device: str = "cuda", contiguous: bool = True) -> Any:
    return SimpleNamespace(nbytes=nbytes, device=SimpleNamespace(type=device), is_contiguous=lambda: contiguous)


def test_this_process_lacks_what_it_lacks_and_says_so() -> None:
    lacks = missing(probe())
    assert any("actor" in lack for lack in lacks)  # a test runs in no Ray actor, whatever else there is
    with pytest.raises(Unavailable) as refused:
        DeviceSlot()
    for lack in lacks:
        assert lack in str(refused.value)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"accelerator": ""}, "accelerator"),
        ({"nixl": False}, "nixl"),
        ({"tensor_transport": False}, "tensor transports"),
        ({"actor": False}, "actor"),
    ],
)
def test_each_missing_part_is_named_alone(change: dict[str, Any], word: str) -> None:
    assert missing(ABLE) == ()
    (lack,) = missing(replace(ABLE, **change))
    assert word in lack
    with pytest.raises(Unavailable, match=word):
        DeviceSlot(facts=replace(ABLE, **change), ray_api=FakeRay())


def test_tensors_go_by_nixl_and_are_checked_at_both_ends() -> None:
    ray = FakeRay()
    slot = DeviceSlot(Limits(block_bytes=100), facts=ABLE, ray_api=ray)
    sent = tensor()
    reference = slot.offer(sent)
    assert ray.transports == ["nixl"]
    assert slot.fetch(reference, 100) is sent
    with pytest.raises(Malformed):
        slot.fetch(reference, 99)
    for wrong, failure in (
        (tensor(101), TooLarge),
        (tensor(device="cpu"), Malformed),
        (tensor(contiguous=False), Malformed),
    ):
        with pytest.raises(failure):
            slot.offer(wrong)
        with pytest.raises(failure):
            slot.fetch((wrong,), 100)
    for error, failure in ((GetTimeoutError(), Late), (RayError(), Missing)):
        ray.failure = error
        with pytest.raises(failure):
            slot.fetch(reference, 100)


EVERYTHING = Facts(shared_memory="boot:1:2", user=7, ray="cluster", zeromq=True, device="cuda")


@pytest.mark.parametrize(
    ("local", "peer", "kind", "reasons"),
    [
        ({}, {}, "device", 0),
        ({"device_lacks": ("nixl",)}, {}, "shared_memory", 1),
        ({}, {"device": ""}, "shared_memory", 1),
        ({"device": "xpu"}, {}, "shared_memory", 1),
        ({"device": ""}, {"shared_memory": "boot:1:3"}, "zeromq", 2),
        ({"device": "", "shared_memory": ""}, {"shared_memory": ""}, "zeromq", 2),  # nothing is not the same as nothing
        ({"device": ""}, {"user": 8}, "zeromq", 2),
        ({"device": "", "user": 8}, {"zeromq": False}, "ray_objects", 3),
    ],
)
def test_the_first_transport_that_both_can_do(local: Any, peer: Any, kind: str, reasons: int) -> None:
    here, there = (msgspec.structs.replace(EVERYTHING, **change) for change in (local, peer))
    choice = choose_transport(here, there)
    assert (choice.kind, len(choice.reasons)) == (kind, reasons)
    back = choose_transport(there, here)
    assert (back.kind, len(back.reasons)) == (kind, reasons)


@pytest.mark.parametrize("ray", ["", "another"])
def test_no_transport_at_all_says_why(ray: str) -> None:
    with pytest.raises(Unavailable) as refused:
        choose_transport(Facts(), Facts(ray=ray))
    for kind in ("device", "shared_memory", "zeromq", "ray_objects"):
        assert kind in str(refused.value)


def test_facts_of_two_processes_on_one_machine_agree() -> None:
    first, second = local_facts(zeromq=True), local_facts(zeromq=False)
    assert choose_transport(first, second).kind == "shared_memory"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(first), type=Facts) == first


def test_no_shared_memory_is_no_identity(tmp_path: Any) -> None:
    assert shared_memory_id(tmp_path / "absent") == ""
    assert shared_memory_id(tmp_path) != shared_memory_id()
