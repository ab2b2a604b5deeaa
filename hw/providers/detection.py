"""Which providers are here: a pure reading of what ONNX Runtime lists, with a reason for each one that is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hw.providers.profile import ProviderProfile
from hw.providers.registry import get_profile, known_profiles


class ProviderMissing(RuntimeError):
    """A provider is not on this machine; the message says what is missing and what brings it."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device that a plug-in offers. ``provider``: its execution provider; ``kind``: CPU, GPU or NPU."""

    provider: str
    kind: str
    vendor: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """What one ONNX Runtime has.

    ``version``: its own. ``providers``: names of those built in. ``devices``: of its plug-ins, in its order. ``plugins``:
    module of an installed plug-in to its version. ``failures``: module to what loading it said.
    """

    version: str
    providers: tuple[str, ...]
    devices: tuple[Device, ...] = ()
    plugins: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a provider is here. ``device``: the one a plug-in will use; ``version``: of the plug-in or of ONNX Runtime."""

    name: str
    here: bool
    reason: str = ""
    device: Device | None = None
    version: str = ""


def find(profile: ProviderProfile, listing: Listing) -> Verdict:
    """Whether ``profile`` can be used by the ONNX Runtime that gave ``listing``. Never raises."""
    if profile.execution_provider in listing.providers:
        return Verdict(profile.name, True, version=listing.version)
    module = profile.wheel.module
    if not module:
        return Verdict(profile.name, False, _no_build(profile, listing))
    if module in listing.failures:
        return Verdict(
            profile.name, False, f"the plug-in {profile.wheel.package} does not load: {listing.failures[module]}"
        )
    if module not in listing.plugins:
        return Verdict(
            profile.name,
            False,
            f"the plug-in {profile.wheel.package} is not installed; pip install {profile.wheel.package} adds it to this "
            f"ONNX Runtime {listing.version}",
        )
    version = listing.plugins[module]
    offered = [device for device in listing.devices if device.provider == profile.execution_provider]
    for kind in profile.devices:
        for device in offered:
            if device.kind == kind:
                return Verdict(profile.name, True, device=device, version=version)
    kinds = ", ".join(sorted({device.kind for device in offered})) or "none"
    return Verdict(
        profile.name,
        False,
        f"the plug-in {profile.wheel.package} {version} finds no device it can use here: wanted "
        f"{' or '.join(profile.devices)}, found {kinds}",
        version=version,
    )


def _no_build(profile: ProviderProfile, listing: Listing) -> str:
    have = f"this ONNX Runtime {listing.version} has no {profile.execution_provider}"
    if profile.wheel.package == "onnxruntime":
        return f"{have}; the onnxruntime wheel of another system has it ({profile.title})"
    return (
        f"{have}; the wheel {profile.wheel.package} does, in an environment without onnxruntime: two builds cannot share a "
        "process"
    )


def detect(listing: Listing) -> dict[str, Verdict]:
    """A verdict on every known profile, by name. Never raises."""
    return {name: find(get_profile(name), listing) for name in known_profiles()}
