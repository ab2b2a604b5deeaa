"""Four nodes of one cluster: pools that scale with the load, and nodes, replicas, links and the controller that fail under it.

One cluster for all, in this order: each test begins with what the one before has left.
"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from deployments.config.load import REPOSITORY
from scripts.cluster_demo_lib.load import Answer, Load, plain_answers, steady, throughput
from tests.cluster.nodes import Nodes, four_nodes, node, nodes_of_their_own

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

TOKENS = 12
START_S = 420.0  # an engine starts, on a busy machine
NOTICE_S = 240.0  # something is noticed, and acted upon without an engine having to start
WINDOW_S = 6.0  # of a measurement
# Of two measurements on the same machine within a minute. Drafting or not is not what makes them differ by more: stalls of
# 0.25 s, the deadline of a round, would cost nine tenths at ten milliseconds a step.
NOISE = 0.4


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A head, two nodes for targets and one for drafts; the application with one target, and a draft that is not needed yet."""
    with nodes_of_their_own(namespaces=not os.environ.get("CHAIN_TEST_NO_NAMESPACES")) as found:
        if found.why_not:
            warnings.warn(f"nodes share one network: {found.why_not}", stacklevel=1)
        for name, pool, cpus in (("target-1", "target", 1), ("target-2", "target", 1), ("draft-1", "draft", 2)):
            found.add(name, node(pool, cpus))
        yield found


@pytest.fixture(scope="module")
def running(nodes: Nodes) -> Nodes:
    nodes.deploy(four_nodes())
    return nodes


@pytest.fixture(scope="module")
def plain(running: Nodes) -> list[str]:
    """What the target says without drafts."""
    return plain_answers(running.url, running.config.target.name, TOKENS)


@pytest.fixture
def load(running: Nodes) -> Iterator[Load]:
    with Load(running.url, running.config.target.name, TOKENS) as found:
        yield found
        found.abandon()  # tests wait for them; one that failed does not


def assert_all_whole(answers: list[Answer], plain: list[str]) -> None:
    """Nothing lost, nothing truncated, nothing but what the target says."""
    assert answers
    assert [answer for answer in answers if not answer.whole or answer.text != plain[answer.prompt]] == []


def accepted(nodes: Nodes) -> float:
    return nodes.target_totals().get("accepted_tokens", 0.0)


def wait_for_drafting(nodes: Nodes, what: str) -> float:
    """Until more draft tokens are accepted; a target that ends takes its count with it."""
    lowest = math.inf

    def more() -> bool:
        nonlocal lowest
        now = accepted(nodes)
        lowest = min(lowest, now)
        return now > lowest

    return nodes.wait(more, START_S, what)


def answered(load: Load, nodes: Nodes, count: int, what: str) -> list[Answer]:
    """So many answers from now on."""
    began = time.monotonic()
    nodes.wait(lambda: len(load.since(began)) >= count, START_S, what)
    return load.since(began)


def test_a_pool_that_the_cluster_lacks_fails_preflight_by_name(nodes: Nodes, tmp_path: Path) -> None:
    content = four_nodes()
    args = content["applications"][0]["args"]
    args["drafts"][0]["pool"] = "npu"
    args["pools"] = {"target": args["pools"]["target"], "npu": {"cpus": 1, "resources": {"NPU": 1}}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "deployments.validate", str(file), "--address", nodes.ray_address]
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=NOTICE_S)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    worked = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"preflight took {time.monotonic() - began:.1f} s, {worked:.1f} s of a core")
    assert done.returncode == 1
    assert "error: pool 'npu' wants CPU 1, NPU 1" in done.stderr
    assert "missing: " in done.stderr
    assert done.stderr.count("error:") == 1


def test_pools_grow_with_the_load(running: Nodes, plain: list[str], load: Load) -> None:
    running.wait(lambda: running.none(running.draft), NOTICE_S, "the draft pool has nothing to do")
    assert running.where(running.target) in (["target-1"], ["target-2"])
    load.clients(1)
    answered(load, running, 1, "the first answer")
    assert running.target_totals().get("miss:no_draft_replica", 0) > 0  # it did not wait for a draft
    running.wait(lambda: running.count(running.draft) == 1, NOTICE_S, "a sequence wakes the draft pool")
    wait_for_drafting(running, "its tokens are accepted")
    load.clients(64)
    running.wait(lambda: running.count(running.draft) == 2, NOTICE_S, "the draft pool grows")
    running.wait(lambda: running.count(running.target) == 2, START_S, "the target pool grows")
    assert running.where(running.target) == ["target-1", "target-2"]
    assert running.where(running.draft) == ["draft-1", "draft-1"]
    answered(load, running, 48, "answers of both")
    # every pair of target and draft is on two machines: nothing but the network connects them
    running.wait(lambda: running.draft_totals().get("connected:unix") == 0, NOTICE_S, "no Unix sockets")
    load.clients(0)
    running.wait(lambda: not load.open, NOTICE_S, "the load ends")
    assert_all_whole(load.answers, plain)


def test_a_target_node_is_lost(running: Nodes, plain: list[str], load: Load) -> None:
    load.stream_every = 2
    load.clients(24)
    running.wait(lambda: running.count(running.target) == 2, START_S, "two targets")
    answered(load, running, 24, "both answer")
    lost_at = time.monotonic()
    running.lose("target-2")
    running.wait(lambda: running.where(running.target) == ["target-1"], NOTICE_S, "the loss is noticed")
    seen = answered(load, running, 48, "the other one goes on")
    load.clients(0)
    running.wait(lambda: not load.open, NOTICE_S, "nothing hangs")
    cut = [answer for answer in load.answers if not answer.whole]
    # whatever had not said anything yet was asked again: only streams that had begun end early, and say so
    for answer in cut:
        assert answer.streamed
        assert answer.status == 200
        assert json.loads(answer.error)["code"] == 503
        assert plain[answer.prompt].startswith(answer.text)
    assert_all_whole([answer for answer in load.answers if answer.whole], plain)
    assert any(answer.whole and answer.started > lost_at for answer in seen)

    def counted(outcome: str) -> float:
        return running.metric("ray_chain_target_lost_total", outcome=outcome)

    running.wait(lambda: counted("cut_off") == len(cut), NOTICE_S, "streams that were cut off are counted")
    running.wait(lambda: counted("asked_again") + len(cut) > 0, NOTICE_S, "so is what was asked again")
    assert counted("given_up") == 0


def test_the_controller_is_killed(running: Nodes, plain: list[str], load: Load) -> None:
    load.clients(4)
    wait_for_drafting(running, "drafts before")
    running.kill_controller()
    answered(load, running, 12, "requests go on")
    running.wait(lambda: running.where(running.target) == ["target-1"], NOTICE_S, "it finds its replicas again")
    wait_for_drafting(running, "drafts after")
    load.clients(0)
    running.wait(lambda: not load.open, NOTICE_S, "the load ends")
    assert_all_whole(load.answers, plain)


def test_a_draft_node_is_lost_and_another_joins(running: Nodes, plain: list[str], load: Load) -> None:
    windows = {}

    def measure(name: str, seconds: float) -> None:
        began = time.monotonic()
        time.sleep(seconds)
        windows[name] = began, time.monotonic()

    load.clients(4)
    wait_for_drafting(running, "drafts before")
    measure("with drafts", WINDOW_S)
    running.lose("draft-1")
    measure("when they were lost", 2 * WINDOW_S)  # from the very moment on
    load.chain = {"enabled": False}
    answered(load, running, 8, "plain requests only")
    measure("plain", WINDOW_S)
    load.chain = {}
    running.wait(lambda: running.count(running.draft) == 0, NOTICE_S, "the loss is noticed")
    running.add("draft-2", node("draft", 2))
    running.wait(lambda: "draft-2" in running.where(running.draft), NOTICE_S, "a draft starts on the new node")
    wait_for_drafting(running, "drafts after")
    load.clients(0)
    running.wait(lambda: not load.open, NOTICE_S, "the load ends")
    assert_all_whole(load.answers, plain)
    speeds = {name: throughput(load.answers, *window) for name, window in windows.items()}
    print("tokens/s:", {name: round(speed, 1) for name, speed in speeds.items()})
    assert speeds["when they were lost"] > NOISE * speeds["plain"]


def test_a_link_between_draft_and_target_is_cut_and_healed(running: Nodes, plain: list[str], load: Load) -> None:
    if running.why_not:
        pytest.skip(f"links cannot be cut here: {running.why_not}")
    load.clients(4)
    wait_for_drafting(running, "drafts before")
    running.cut("target-1", "draft-2")
    running.wait(lambda: running.target_totals().get("drafts_usable") == 0, NOTICE_S, "the circuit opens")
    stopped = accepted(running)
    answered(load, running, 12, "requests go on")
    assert accepted(running) == stopped
    running.heal("target-1", "draft-2")
    print(f"drafting again {wait_for_drafting(running, 'drafts after'):.1f} s after the link was healed")
    load.clients(0)
    running.wait(lambda: not load.open, NOTICE_S, "the load ends")
    assert_all_whole(load.answers, plain)


def test_pools_shrink_and_the_next_request_is_answered_at_once(running: Nodes, plain: list[str], load: Load) -> None:
    running.wait(lambda: running.none(running.draft), NOTICE_S, "no drafts without work")
    running.wait(lambda: running.where(running.target) == ["target-1"], NOTICE_S, "one target")
    with steady(load, 1):
        assert_all_whole(answered(load, running, 2, "answers without a draft"), plain)
        running.wait(lambda: running.count(running.draft) == 1, NOTICE_S, "the draft pool wakes again")
    running.wait(lambda: running.none(running.draft), NOTICE_S, "and sleeps again")
    assert_all_whole(load.answers, plain)


def test_a_target_leaves_with_its_engine(running: Nodes, plain: list[str], load: Load) -> None:
    """The last test: no target is left for the others."""
    load.stream_every, load.tokens = 1, 400
    (replica,) = running.state().running(running.target)
    process = psutil.Process(replica.pid)
    load.clients(2)
    running.wait(lambda: len([a for a in load.open if a.text]) == 2, NOTICE_S, "two streams have begun")
    load.clients(0)
    for child in process.children(recursive=True):
        if "EngineCore" in child.name() or "VLLM" in " ".join(child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)
    running.wait(lambda: not load.open, NOTICE_S, "the streams end")
    for answer in load.answers:
        assert not answer.whole
        assert json.loads(answer.error)["code"] >= 500
    running.wait(lambda: not _alive(process), NOTICE_S, "the replica has left")


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
