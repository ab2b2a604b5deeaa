"""A Ray cluster of several nodes on this machine, each as separate from the others as can be made here.

Where network namespaces can be made, every node but the head is a machine of its own (:mod:`cluster.namespaces`). Elsewhere
nodes get loopback addresses of their own; then links cannot be cut, and drafts are kept off Unix sockets, which all could reach,
by a folder for temporary files whose path is too long for one.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from cluster.local import PREFIX, SETTINGS, STOP_GRACE_S
from cluster.namespaces import Machine, Network, NoNamespacesError
from cluster.processes import adopt_orphans, descendants, end_descendants

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 100 * 1024 * 1024  # of each node; no large objects are made here
UNIX_PATH_BYTES = 107
NODE_SETTINGS = {
    # a node whose processes are gone is missed after five seconds, not fifteen; one that is only slow has as long as ever
    "RAY_health_check_period_ms": "1000",
    # each node sees the memory of the whole machine, and would kill its own workers for what others use
    "RAY_memory_monitor_refresh_ms": "0",
    # each node would start as many idle Python processes as it has CPUs, all on the same few cores
    "RAY_enable_worker_prestart": "0",
}


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What a node offers."""

    labels: Mapping[str, str]
    cpus: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Node:
    handle: Any  # ray._private.node.Node
    address: str
    machine: Machine | None


class ManyNodes:
    """The running cluster; this process is connected to its head."""

    def __init__(self, folder: Path, network: Network | None, why_not: str) -> None:
        """``why_not``: why there are no namespaces, where ``network`` is None."""
        from ray.cluster_utils import Cluster

        self.folder = folder
        self.network = network
        self.why_not = why_not
        self._cluster = Cluster(shutdown_at_exit=False)
        self._nodes: dict[str, _Node] = {}
        self._made = 0

    @property
    def address(self) -> str:
        """Of Ray's head, for ``ray.init``."""
        return str(self._cluster.address)

    @property
    def logs(self) -> Path:
        """Of all nodes."""
        return self.folder / "session_latest" / "logs"

    @property
    def nodes(self) -> dict[str, str]:
        """Address by name, the head included."""
        return {name: node.address for name, node in self._nodes.items()}

    def start(self, spec: NodeSpec) -> None:
        """The head, on this machine itself; and connect to it."""
        import ray

        address = self.network.address if self.network is not None else "127.0.1.254"
        with _private():
            handle = self._cluster.add_node(
                **_parameters(spec), node_ip_address=address, temp_dir=str(self.folder), include_dashboard=False
            )
        self._nodes["head"] = _Node(handle, address, None)
        ray.init(address=self.address, _node_ip_address=address, log_to_driver=False, logging_level="ERROR")

    def add(self, name: str, spec: NodeSpec) -> str:
        """Start a node; returns to its address once Ray counts it."""
        if name in self._nodes:
            raise ValueError(f"there is a node {name!r} already")
        self._made += 1
        if self.network is None:
            address = f"127.0.1.{self._made}"
            variables = {"TMPDIR": str(self._far_folder(name)), "VLLM_RPC_BASE_PATH": str(self.folder)}
            handle = self._cluster.add_node(**_parameters(spec), node_ip_address=address, env_vars=variables)
            self._nodes[name] = _Node(handle, address, None)
            return address
        machine = self.network.add(name)
        variables = {"TMPDIR": str(machine.temporary)}
        parameters = {**_parameters(spec), "node_ip_address": machine.address, "env_vars": variables}
        handle = self.network.run(machine, lambda: self._cluster.add_node(**parameters))
        self._nodes[name] = _Node(handle, machine.address, machine)
        return machine.address

    def lose(self, name: str) -> None:
        """A node fails: all its processes end at once, with nothing said to anybody."""
        node = self._nodes.pop(name)
        if self.network is not None and node.machine is not None:
            self.network.end(node.machine)
        for process in _tree(node.handle):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(node.handle, allow_graceful=False)

    def cut(self, one: str, other: str) -> None:
        """Nothing these two nodes send each other arrives any more; they still reach the head and all others."""
        self._network().cut(*self._machines(one, other))

    def heal(self, one: str, other: str) -> None:
        """The opposite of :meth:`cut`."""
        self._network().heal(*self._machines(one, other))

    def _network(self) -> Network:
        if self.network is None:
            raise NoNamespacesError(self.why_not)
        return self.network

    def _machines(self, one: str, other: str) -> tuple[Machine, Machine]:
        here, there = self._nodes[one].machine, self._nodes[other].machine
        if here is None or there is None:
            raise ValueError("the head is this machine itself and cannot be cut off")
        return here, there

    def _far_folder(self, name: str) -> Path:
        folder = self.folder / name / ("x" * UNIX_PATH_BYTES)
        folder.mkdir(parents=True)
        return folder


@contextlib.contextmanager
def many_nodes(
    pythonpath: Path, head: NodeSpec, *, namespaces: bool = True, keep_folder: bool = False
) -> Iterator[ManyNodes]:
    """A cluster of the head alone; ends every process and takes all networks down however the block ends.

    ``pythonpath`` is put first on the import path of every worker. ``namespaces``: use them where they can be had.
    """
    before = {process.pid for process in descendants()}
    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    saved = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(pythonpath), saved.get("PYTHONPATH")]))
    os.environ.update({name: value for name, value in (SETTINGS | NODE_SETTINGS).items() if name not in saved})
    os.environ.pop("RAY_ADDRESS", None)
    network, why_not = _network(folder) if namespaces else (None, "namespaces were not asked for")
    try:
        nodes = ManyNodes(folder, network, why_not)
        nodes.start(head)
        yield nodes
    finally:
        _stop(before)
        os.environ.clear()
        os.environ.update(saved)
        if network is not None:
            network.close()
        if not keep_folder:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """``Cluster`` makes its head the one that every ``ray.init()`` of this machine connects to: not this one."""
    import ray

    write = ray._private.utils.write_ray_address
    ray._private.utils.write_ray_address = lambda *_, **__: None
    try:
        yield
    finally:
        ray._private.utils.write_ray_address = write


def _network(folder: Path) -> tuple[Network | None, str]:
    try:
        return Network(folder), ""
    except NoNamespacesError as error:
        logger.warning("nodes share this machine's network: %s", error)
        return None, str(error)


def _parameters(spec: NodeSpec) -> dict[str, Any]:
    return {
        "num_cpus": spec.cpus,
        "labels": dict(spec.labels),
        "resources": dict(spec.resources),
        "object_store_memory": OBJECT_STORE_BYTES,
    }


def _tree(handle: Any) -> list[psutil.Process]:
    """All processes of a node: what Ray started for it, and their children."""
    found: dict[int, psutil.Process] = {}
    for started in handle.all_processes.values():
        for info in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(info.process.pid)
                found.update({process.pid: process for process in (parent, *parent.children(recursive=True))})
    return list(found.values())


def _stop(before: set[int]) -> None:
    import ray
    from ray import serve

    with contextlib.suppress(Exception):
        if ray.is_initialized():
            serve.shutdown()
    with contextlib.suppress(Exception):
        ray.shutdown()
    end_descendants(before, STOP_GRACE_S)
