"""What a provider profile says about one kind of hardware.

A profile is data: which execution provider to ask for and where it comes from, which options make it behave, what model it
needs, and what the caller must not try with it. Adding hardware is adding a profile to :mod:`hw.providers.registry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CPU = "CPUExecutionProvider"


@dataclass(frozen=True, slots=True)
class Wheel:
    """The Python package that brings a provider.

    ``package``: its name on the package index. ``module``: of a plug-in library that the plain ``onnxruntime`` loads, the module
    that knows its path (``get_library_path()``). Without one the package is another build of ONNX Runtime, which takes the
    plain one's place: two builds cannot share a process.
    """

    package: str
    module: str = ""


@dataclass(frozen=True, slots=True)
class ProviderProfile:
    """One kind of hardware.

    ``execution_provider``: ONNX Runtime's name. ``devices``: of a plug-in, kinds of device to take, the best first.
    ``options``: of the provider; ``thread_option`` names the one that takes a number of threads. ``entries``: session config
    entries. ``memory_arena``, ``memory_pattern``: let ONNX Runtime keep freed memory, plan it ahead.

    ``shapes``, ``weights``: the model it needs; ``weights`` as ONNX operators. ``kv_dtype``, ``kv_layout``: of KV as a KV
    descriptor (:mod:`hw.kv.manifest`) has it. ``shared_kv``: attention stays with the CPU provider or works on host memory, so
    that one buffer can be bound as past and present and KV grows in place. ``copies_inputs``: what is bound is copied to the
    device then, so that inputs must be bound again before each step.

    ``cannot``: limits, in words, for error messages and documents. ``proof``: what ``scripts/hw`` runs on it, the whole draft
    or nothing yet.
    """

    name: str
    title: str
    execution_provider: str
    wheel: Wheel
    devices: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    thread_option: str = ""
    entries: Mapping[str, str] = field(default_factory=dict)
    memory_arena: bool = True
    memory_pattern: bool = True
    shapes: Literal["dynamic", "static"] = "dynamic"
    weights: tuple[str, ...] = ("MatMulNBits",)
    kv_dtype: Literal["float32", "float16"] = "float32"
    kv_layout: Literal["HND"] = "HND"
    shared_kv: bool = True
    copies_inputs: bool = True
    cannot: tuple[str, ...] = ()
    proof: Literal["draft", "none"] = "none"

    @property
    def obstacle(self) -> str:
        """Why a prepared draft cannot be served on it, provider or not; empty where nothing stands against it."""
        if self.shapes == "static":
            return f"provider {self.name} needs a model of fixed shapes; drafts are prepared with open ones"
        if not self.shared_kv:
            return f"provider {self.name} computes attention in its own memory, where a draft's KV cannot grow in place"
        return ""
