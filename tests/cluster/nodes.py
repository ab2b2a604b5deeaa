"""A cluster of several nodes for tests, in a process of its own: the tests' own process is connected to another Ray already."""

import contextlib
import copy
import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from cluster.local import free_port
from cluster.many_nodes import ManyNodes, NodeSpec, many_nodes
from cluster.namespaces import remove_left_behind
from deployments.config import AppConfig, load_args
from deployments.config.load import REPOSITORY
from deployments.config.serve_file import read
from deployments.demo.deploy import deploy, watch
from deployments.names import deployment_names, draft_name, target_name
from scripts.cluster_demo_lib.state import State, replicas, totals
from tests.models import model

APPLICATION = "chain"
START_S = 600.0
CALL_S = 660.0  # no call into the other process takes longer; starting the application on a busy machine is the longest
STOP_S = 90.0
ANSWER_S = 30.0  # for all replicas to say what they counted
PR_SET_PDEATHSIG = 1
HEAD = NodeSpec({"pool": "head"}, cpus=0, resources={"head": 1})


def node(pool: str, cpus: int = 1) -> NodeSpec:
    return NodeSpec({"pool": pool}, cpus=cpus)


def four_nodes(**target: Any) -> dict[str, Any]:
    """``cluster/configs/four_nodes.yaml`` with this machine's model folders and a free port; delays for the impatient."""
    content = copy.deepcopy(read(REPOSITORY / "cluster/configs/four_nodes.yaml"))
    content["http_options"]["port"] = free_port()
    args = content["applications"][0]["args"]
    args["target"] |= {"model": str(model("target")), **target}
    args["drafts"][0]["model"] = str(model("draft-int8"))
    here = os.sched_getaffinity(0)
    for part in (args["target"], args["drafts"][0]):
        if set(part["cores"]) - here:
            del part["cores"]
    scaling = args["autoscaling"]
    scaling["target"] |= {"upscale_delay_s": 1, "downscale_delay_s": 4, "look_back_period_s": 3}
    scaling["drafts"]["int8"] |= {
        "upscale_delay_s": 1,
        "downscale_delay_s": 3,
        "downscale_to_zero_delay_s": 4,
        "look_back_period_s": 3,
    }
    # drafts at work whatever they bring: what the controller makes of the load of this machine is tested elsewhere
    args["chain"]["adaptive"] = False
    # sessions of a target that was lost or cut off keep a draft from sleeping for so long
    args["faults"] = {"session_lease_s": 10.0}
    return content


# --- in the other process ---------------------------------------------------------------------------------------------

_stack = contextlib.ExitStack()
_nodes: list[ManyNodes] = []


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: (_stack.close(), os._exit(1)))


def _start(namespaces: bool) -> str:
    keep = bool(os.environ.get("CHAIN_TEST_KEEP_FOLDER"))  # with Ray's logs, to see what failed
    found = _stack.enter_context(many_nodes(REPOSITORY, HEAD, namespaces=namespaces, keep_folder=keep))
    _nodes.append(found)
    return found.why_not


def _call(name: str, *arguments: Any) -> Any:
    result = getattr(_nodes[0], name)
    return result(*arguments) if callable(result) else result


def _deploy(content: dict[str, Any]) -> None:
    deploy(content)
    names = deployment_names(load_args(content["applications"][0]["args"]))
    for _ in watch(APPLICATION, START_S, names, _nodes[0].logs):
        pass


def _kill_controller() -> None:
    import ray
    from ray.serve.context import _get_global_client

    ray.kill(_get_global_client()._controller, no_restart=False)


def _replicas() -> State:
    """While the controller is away, what it says when it is back."""
    from ray.exceptions import RayError

    deadline = time.monotonic() + START_S
    while True:
        try:
            return replicas(APPLICATION)
        except RayError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _totals(deployment: str, method: str) -> dict[str, float]:
    deadline = time.monotonic() + ANSWER_S
    while not (found := totals(APPLICATION, deployment, method)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def _metric(name: str, labels: dict[str, str]) -> float:
    """Sum of a metric's samples on all nodes' pages."""
    import ray

    total = 0.0
    for item in ray.nodes():
        if not item["Alive"]:
            continue
        try:
            page = httpx.get(f"http://{item['NodeManagerAddress']}:{item['MetricsExportPort']}/metrics", timeout=30)
        except httpx.HTTPError:
            continue  # it has just been lost
        for family in text_string_to_metric_families(page.text):
            total += sum(s.value for s in family.samples if s.name == name and labels.items() <= s.labels.items())
    return total


def _stop() -> None:
    _stack.close()


# --- for tests --------------------------------------------------------------------------------------------------------


class Nodes:
    """The cluster and its application, from the tests' side."""

    def __init__(self, pool: ProcessPoolExecutor, why_not: str) -> None:
        self._pool = pool
        self.why_not = why_not  # there are no namespaces; empty: there are
        self.content: dict[str, Any] = {}

    def _do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._pool.submit(function, *arguments).result(timeout=CALL_S)

    def add(self, name: str, spec: NodeSpec) -> str:
        return str(self._do(_call, "add", name, spec))

    def lose(self, name: str) -> None:
        self._do(_call, "lose", name)

    def cut(self, one: str, other: str) -> None:
        self._do(_call, "cut", one, other)

    def heal(self, one: str, other: str) -> None:
        self._do(_call, "heal", one, other)

    @property
    def addresses(self) -> dict[str, str]:
        return dict(self._do(_call, "nodes"))

    @property
    def ray_address(self) -> str:
        return str(self._do(_call, "address"))

    def deploy(self, content: dict[str, Any]) -> None:
        self._do(_deploy, content)
        self.content = content

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.content['http_options']['port']}"

    @property
    def config(self) -> AppConfig:
        return load_args(self.content["applications"][0]["args"])

    @property
    def target(self) -> str:
        return target_name(self.config.target.name)

    @property
    def draft(self) -> str:
        return draft_name(self.config.drafts[0].name)

    def state(self) -> State:
        found: State = self._do(_replicas)
        return found

    def metric(self, name: str, **labels: str) -> float:
        """As Prometheus would see it, of all nodes together."""
        return float(self._do(_metric, name, labels))

    def count(self, deployment: str) -> int:
        """Running replicas."""
        return len(self.state().running(deployment))

    def none(self, deployment: str) -> bool:
        """No replica, not even one that starts or ends."""
        return not any(replica.deployment == deployment for replica in self.state().replicas)

    def where(self, deployment: str) -> list[str]:
        """Names of the nodes its running replicas are on."""
        names = {address: name for name, address in self.addresses.items()}
        return sorted(names.get(replica.node, replica.node) for replica in self.state().running(deployment))

    def target_totals(self) -> dict[str, float]:
        """Counters of all targets together, once all have answered."""
        return dict(self._do(_totals, self.target, "draft_stats"))

    def draft_totals(self) -> dict[str, float]:
        return dict(self._do(_totals, self.draft, "stats"))

    def kill_controller(self) -> None:
        self._do(_kill_controller)

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Poll until it holds; returns to how long that took, or fails saying how things are."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < timeout_s, f"{what}: not within {timeout_s} s; {self.describe()}"
            time.sleep(0.25)
        return time.monotonic() - began

    def describe(self) -> str:
        state = self.state()
        return f"{[(r.deployment, r.state, r.node) for r in state.replicas]} {state.statuses} {self.target_totals()}"


@contextlib.contextmanager
def nodes_of_their_own(*, namespaces: bool = True) -> Iterator[Nodes]:
    """A cluster of the head alone, to add nodes to."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    pid = pool.submit(os.getpid).result(timeout=CALL_S)
    try:
        yield Nodes(pool, str(pool.submit(_start, namespaces).result(timeout=CALL_S)))
    finally:
        try:
            pool.submit(_stop).result(timeout=STOP_S)
        except Exception:  # it hangs in a call to a cluster that is broken: then everything below it is killed
            _kill(pid)
        pool.shutdown()


def _kill(pid: int) -> None:
    process = psutil.Process(pid)
    for each in (*process.children(recursive=True), process):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    remove_left_behind(pid)
