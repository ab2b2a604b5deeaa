"""Providers and the ONNX Runtime of this process: load plug-ins, list what is there, set up a session's provider."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import onnxruntime as ort

from hw.providers.detection import Device, Listing, ProviderMissing, find
from hw.providers.profile import CPU, ProviderProfile
from hw.providers.tuning import Tuning

# Read before any plug-in is loaded: ONNX Runtime then lists its provider here too, with a device or without.
_BUILT_IN = tuple(ort.get_available_providers())
_RECORD = "session.record_ep_graph_assignment_info"


@functools.cache
def _register(module: str, name: str) -> str:
    """Register a plug-in's library once a process; the text of what went wrong, or nothing.

    ModuleNotFoundError is the caller's: not installed is no failure.
    """
    found = importlib.import_module(module)
    try:
        ort.register_execution_provider_library(name, found.get_library_path())
    except Exception as error:  # whatever a plug-in's loader raises, the draft can say why it does not start
        return f"{type(error).__name__}: {error}"
    return ""


def read_listing(profiles: Iterable[ProviderProfile]) -> Listing:
    """What this process's ONNX Runtime has, with the plug-ins of ``profiles`` loaded.

    Loading a plug-in runs its code: one that crashes takes the process along.
    """
    plugins: dict[str, str] = {}
    failures: dict[str, str] = {}
    for profile in profiles:
        module = profile.wheel.module
        if not module or profile.execution_provider in _BUILT_IN:
            continue
        try:
            failed = _register(module, profile.execution_provider)
        except ModuleNotFoundError:
            continue
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        if failed:
            failures[module] = failed
            continue
        try:
            plugins[module] = version(profile.wheel.package)
        except PackageNotFoundError:
            plugins[module] = "of unknown version"
    devices = tuple(_device(found) for found in ort.get_ep_devices()) if plugins else ()
    return Listing(ort.__version__, _BUILT_IN, devices, plugins, failures)


def _device(found: Any) -> Device:
    return Device(
        found.ep_name, found.device.type.name, found.device.vendor, dict(found.ep_metadata).get("FULL_DEVICE_NAME", "")
    )


def open_session(path: str, profile: ProviderProfile, tuning: Tuning) -> ort.InferenceSession:
    """A session over the model file ``path`` on ``profile``, with the CPU provider for what that does not take.

    Raises :class:`~hw.providers.detection.ProviderMissing` when the provider is not here: ONNX Runtime would run everything on
    the CPU without a word.
    """
    verdict = find(profile, read_listing([profile]))
    if not verdict.here:
        raise ProviderMissing(f"provider {profile.name}: {verdict.reason}")
    options = ort.SessionOptions()
    options.intra_op_num_threads = tuning.threads
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = profile.memory_arena
    options.enable_mem_pattern = profile.memory_pattern
    options.log_severity_level = 3
    entries = {**tuning.session_entries(), **profile.entries}
    if profile.execution_provider != CPU:
        entries[_RECORD] = "1"
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    given = dict(profile.options)
    if profile.thread_option:
        given[profile.thread_option] = str(tuning.threads)
    if verdict.device is not None:
        kind = verdict.device.kind
        devices = [
            found
            for found in ort.get_ep_devices()
            if found.ep_name == profile.execution_provider and found.device.type.name == kind
        ]
        options.add_provider_for_devices(devices[:1], given)
        return ort.InferenceSession(path, options)
    if profile.execution_provider == CPU:
        return ort.InferenceSession(path, options, providers=[(CPU, given)])
    return ort.InferenceSession(path, options, providers=[(profile.execution_provider, given), (CPU, {})])


@dataclass(frozen=True, slots=True)
class Placement:
    """Which provider computes what. ``nodes``: (provider, operator) to how many nodes of the optimised graph."""

    nodes: Mapping[tuple[str, str], int]

    def share(self, provider: str) -> float:
        """Of all nodes, the share that ``provider`` computes."""
        total = sum(self.nodes.values())
        return sum(count for (name, _), count in self.nodes.items() if name == provider) / total if total else 0.0

    def providers_of(self, operator: str) -> set[str]:
        """Providers that compute nodes of this operator."""
        return {name for name, kind in self.nodes if kind == operator}


def read_placement(session: ort.InferenceSession) -> Placement | None:
    """Where the nodes of a session are that :func:`open_session` put on another provider than the CPU's.

    None from an ONNX Runtime that is too old to tell.
    """
    ask = getattr(session, "get_provider_graph_assignment_info", None)
    if ask is None:
        return None
    nodes: Counter[tuple[str, str]] = Counter()
    for part in ask():
        for node in part.get_nodes():
            nodes[part.ep_name, node.op_type] += 1
    return Placement(dict(nodes))
