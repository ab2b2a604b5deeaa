"""Prompts read by one vLLM engine and continued by another: the same text as one engine's, whatever goes wrong between."""

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.target.kv_connector.prompts import HandOff, Place
from deployments.target.kv_connector.settings import ConnectorSettings, Keys, transfer_config
from hw.kv.prefix import Subject
from tests.models import ROOT
from tests.unit.kv.connector_samples import Crafted, changed, fetch_record, resealed, subject

pytestmark = pytest.mark.engine

MIB = 1 << 20
EXPORT = {"do_remote_decode": True, "do_remote_prefill": False}
FETCH_S = 0.5
PATIENT = ConnectorSettings(memory_mib=64, tenant_share=1.0, fetch_s=60.0)  # of crafted producers
NEAR_TIE = 0.25  # see test_bfloat16
BLOCK = 32

Prompt = dict[str, Any]


class Replica:
    """An engine in a process of its own."""

    def __init__(self, **arguments: Any) -> None:
        defaults = {
            "kv_cache_memory_bytes": 96 * MIB,
            "block_size": BLOCK,
            "max_num_batched_tokens": 64,
            "max_model_len": 256,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.kv_connector_main", json.dumps({**defaults, **arguments})],
            cwd=ROOT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",  # two engines that wait for each other's threads at barriers take minutes
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "TORCHDYNAMO_DISABLE": "1",  # or vLLM compiles its ranking of logprobs, which takes longer than all the rest
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, method: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("RESULT"):
                return json.loads(line.removeprefix("RESULT"))
        raise AssertionError(f"the engine ended during {method}")

    def generate(self, prompts: list[Prompt], tokens: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("generate", prompts=prompts, tokens=tokens)
        return found

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def ended(self) -> int:
        """Its exit code; killed where it does not end by itself."""
        try:
            return self._process.wait(60)
        finally:
            self._process.kill()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Replica, Replica]]:
    """One that reads prompts, with vLLM's own worker, and one that continues them, with ours and its proposer."""
    consumer = transfer_config("kv_consumer", fetch_s=FETCH_S, pause_s=FETCH_S)
    made = (
        Replica(stock=True, kv_transfer_config=transfer_config("kv_producer", hand_off_s=60)),
        Replica(stock=False, kv_transfer_config=consumer),
    )
    manifests = {replica.ask("ready")["manifest"] for replica in made}
    assert len(manifests) == 1
    yield made
    for replica in made:
        replica.stop()
    assert [replica.ended() for replica in made] == [0, 0]


@pytest.fixture
def a(pair: tuple[Replica, Replica]) -> Iterator[Replica]:
    yield from _clean(pair[0])


@pytest.fixture
def b(pair: tuple[Replica, Replica]) -> Iterator[Replica]:
    yield from _clean(pair[1])


def _clean(replica: Replica) -> Iterator[Replica]:
    """Nothing cached before, and every block free again after."""
    assert replica.ask("forget")
    replica.ask("take_counts")
    free = replica.ask("ready")["free"]
    yield replica
    assert replica.ask("ready")["free"] == free


def prompt(tokens: int, seed: int, salt: str = "") -> Prompt:
    chosen = random.Random(seed)
    return {"tokens": [chosen.randrange(100, 40000) for _ in range(tokens)], "salt": salt}


def handed_over(producer: Replica, prompts: list[Prompt]) -> list[Prompt]:
    """The prompts read by ``producer``, as the requests that continue them."""
    outputs = producer.generate([{**item, "params": EXPORT} for item in prompts], 1)
    return [{**item, "params": output["params"]} for item, output in zip(prompts, outputs, strict=True)]


def texts(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"] for output in outputs]


def place(replica: Replica) -> Place:
    return Place(*replica.ask("ready")["place"])


def test_prefill_there_and_decode_here_equals_one_replica(a: Replica, b: Replica) -> None:
    lengths = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 90]  # the longer ones in chunks
    prompts = [prompt(n, n, salt="tenant" if n % 2 else "") for n in lengths]
    one = a.generate(prompts, 6)
    a.ask("forget")
    requests = handed_over(a, prompts)
    two = b.generate(requests, 6)  # all eight at the same time
    assert texts(two) == texts(one)
    assert [output["cached"] for output in two] == [0, *lengths[1:]]  # a single token has to be computed anyway
    assert a.ask("take_counts")["exports"] == len(prompts)
    counts = b.ask("take_counts")
    assert (counts["imports"], counts["import_tokens"]) == (len(prompts) - 1, sum(lengths) - 1)
    assert not [event for event in counts if event.startswith("import_refused")]
    assert a.ask("integrity")["staged"] == 0


def test_only_what_is_not_cached_here_is_fetched(a: Replica, b: Replica) -> None:
    whole = prompt(90, 7)
    one = a.generate([whole], 6)
    a.ask("forget")
    (request,) = handed_over(a, [whole])
    b.generate([{"tokens": whole["tokens"][: BLOCK + 9]}], 1)
    b.ask("take_counts")
    two = b.generate([request], 6)
    assert texts(two) == texts(one)
    assert b.ask("take_counts")["import_tokens"] == 90 - BLOCK


def test_what_cannot_be_taken_is_computed_and_counted(a: Replica, b: Replica) -> None:
    codes = [
        "row_digest", "header_checksum", "tenant_mismatch", "adapter_mismatch", "compute_mismatch", "stale_generation",
        "lease_expired", "epoch_mismatch", "missing", "unreachable", "prefix_mismatch",
    ]  # fmt: skip
    prompts = {code: prompt(24, seed) for seed, code in enumerate(codes)}
    one = a.generate(list(prompts.values()), 3)
    a.ask("forget")
    requests = dict(zip(codes, handed_over(a, list(prompts.values())), strict=True))
    keys = Keys.read("")
    crafted = Crafted(keys, settings=PATIENT)
    for number, code in enumerate(codes[:8], start=1):
        craft(crafted, code, number, prompts[code]["tokens"], fetch_record(keys, place(a), wanted(prompts[code])))
        requests[code]["params"] = offer(wanted(prompts[code]), crafted.place)
    epoch = Place("f" * 32, crafted.place.address)
    requests["epoch_mismatch"]["params"] = offer(wanted(prompts["epoch_mismatch"]), epoch)
    missing = requests["missing"]["params"]["chain_kv"]
    missing["tokens"] = 16  # a name under which nothing was ever exported
    missing["prefix"] = subject(prompts["missing"]["tokens"][:16]).prefix_hash.hex()
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts and never says a word
        gone = Place("0" * 32, f"tcp://127.0.0.1:{mute.getsockname()[1]}")
        requests["unreachable"]["params"] = offer(wanted(prompts["unreachable"]), gone)
        requests["prefix_mismatch"]["salt"] = "another tenant"
        two = b.generate(list(requests.values()), 3)
    crafted.close()
    assert texts(two) == texts(one)
    assert [output["cached"] for output in two] == [0] * len(codes)
    assert b.ask("take_counts") == {f"import_refused:{code}": 1 for code in codes}


def test_a_drafts_kv_is_refused_and_no_page_changes(a: Replica, b: Replica) -> None:
    asked = prompt(BLOCK + 12, 99)
    one = a.generate([asked], 4)
    a.ask("forget")
    handed_over(a, [asked])
    keys = Keys.read("")
    crafted = Crafted(keys, settings=PATIENT)
    of, record = fetch_record(keys, place(a), wanted(asked))
    drafts = changed(of, role="draft_to_target", exactness="approximate", identity__compute="d" * 64)
    crafted.put(wanted(asked).prefix_hash, drafts, resealed(drafts, record, 1, epoch=bytes(range(16))))
    found = b.ask("refuse", prompt={**asked, "params": offer(wanted(asked), crafted.place)})
    crafted.close()
    assert found == {"same": True, "tokens": one[0]["tokens"]}
    assert b.ask("take_counts") == {"import_refused:compute_mismatch": 1}


def test_a_producer_that_ended_is_done_without(a: Replica, b: Replica) -> None:
    """Its sockets and its memory are gone, as after a crash; what it exported is computed here."""
    asked = prompt(40, 11)
    keys = Keys.read("")
    gone = Crafted(keys)
    gone.close()
    assert texts(b.generate([{**asked, "params": offer(wanted(asked), gone.place)}], 3)) == texts(
        a.generate([asked], 3)
    )
    assert b.ask("take_counts") == {"import_refused:unreachable": 1}


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_aborted_while_the_prompt_is_on_its_way(b: Replica, steps: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        gone = Place("0" * 32, f"tcp://127.0.0.1:{mute.getsockname()[1]}")
        asked = prompt(70, steps)
        found = b.ask("abort", prompt={**asked, "params": offer(wanted(asked), gone)}, steps=steps)
    assert found == {"states": ["WAITING_FOR_REMOTE_KVS" if steps else "WAITING"], "left": 0, "pending": 0}
    assert b.ask("take_counts") == ({"import_refused:aborted": 1} if steps else {})


def test_aborted_after_the_prompt_came(a: Replica, b: Replica) -> None:
    (request,) = handed_over(a, [prompt(70, 21)])
    found = b.ask("abort", prompt=request, steps=None)
    assert found == {"states": ["RUNNING"], "left": 0, "pending": 0}
    assert b.ask("take_counts")["imports"] == 1


def test_preempted_on_either_side(a: Replica, b: Replica) -> None:
    asked = prompt(90, 31)
    one = a.generate([asked], 6)
    a.ask("forget")
    first = a.ask("preempt", prompt={**asked, "params": EXPORT}, tokens=1, computed=BLOCK)  # between two chunks
    second = b.ask("preempt", prompt={**asked, "params": first["params"]}, tokens=6, computed=92)  # while decoding
    assert second["tokens"] == one[0]["tokens"]
    assert a.ask("take_counts")["exports"] == 1
    assert b.ask("take_counts")["imports"] == 1  # then it was computed here


def test_bfloat16() -> None:
    """From an engine with our worker, where vLLM saves after drafting, back to itself, its own cache forgotten.

    Only near-ties may fall otherwise, as in any other batch.
    """
    both = transfer_config("kv_both", hand_off_s=60)
    engine = Replica(stock=False, dtype="bfloat16", kv_transfer_config=both)
    assert engine.ask("ready")["movable"]
    lengths = [5, BLOCK - 1, BLOCK, BLOCK + 1, 90]
    prompts = [prompt(n, 1000 + n) for n in lengths]
    engine.ask("forget")
    free = engine.ask("ready")["free"]
    one = engine.generate(prompts, 6)
    engine.ask("forget")
    requests = handed_over(engine, prompts)
    engine.ask("forget")
    two = engine.generate(requests, 6)
    counts = engine.ask("take_counts")
    assert (counts["exports"], counts["imports"], counts["import_tokens"]) == (5, 5, sum(lengths))
    assert engine.ask("ready")["free"] == free
    engine.stop()
    assert engine.ended() == 0
    for left, right in zip(one, two, strict=True):
        differ = [at for at, pair in enumerate(zip(left["tokens"], right["tokens"], strict=True)) if pair[0] != pair[1]]
        assert not differ or left["gaps"][differ[0]] <= NEAR_TIE


# --- crafted producers ----------------------------------------------------------------------------------------------------


def wanted(item: Prompt) -> Subject:
    return subject(item["tokens"], item["salt"])


def offer(of: Subject, at: Place) -> dict[str, Any]:
    return HandOff(1, of.prefix_hash.hex(), of.valid_tokens, (at,)).params()


def craft(crafted: Crafted, code: str, generation: int, tokens: list[int], genuine: Any) -> None:
    """Make the producer answer with something that is refused with ``code``."""
    of, record = genuine
    asked = subject(tokens).prefix_hash
    more: dict[str, Any] = {"epoch": bytes.fromhex(crafted.place.epoch)}
    match code:
        case "tenant_mismatch":
            more["subject"] = subject(tokens, "another tenant")
        case "adapter_mismatch":
            of = changed(of, identity__adapter="a" * 64)
        case "compute_mismatch":
            of = changed(of, identity__compute="c" * 64)
        case "lease_expired":
            more["lease_deadline_ns"] = 1
    data = resealed(of, record, generation, **more)
    if code == "row_digest":
        data[-1000] ^= 1
    if code == "header_checksum":
        data[100] ^= 1
    ref = crafted.put(asked, of, data)
    if code == "stale_generation":
        crafted.store.release(ref.lease)
        (key,) = [held for held in crafted.store._visible if held.prefix == asked]
        crafted.store.drop(key)
