"""All provider profiles by name."""

from __future__ import annotations

from hw.providers import cann, coreml, cpu, cuda, directml, migraphx, openvino, qnn, tensorrt, webgpu
from hw.providers.profile import ProviderProfile


class UnknownProvider(ValueError):
    """No profile has this name; the message lists those that exist."""


_PROFILES = {
    profile.name: profile
    for profile in (
        cpu.PROFILE,
        cuda.PROFILE,
        tensorrt.TENSORRT,
        tensorrt.RTX,
        openvino.PROFILE,
        qnn.PROFILE,
        webgpu.PROFILE,
        cann.PROFILE,
        migraphx.PROFILE,
        directml.PROFILE,
        coreml.PROFILE,
    )
}


def known_profiles() -> tuple[str, ...]:
    """Names of all profiles, sorted."""
    return tuple(sorted(_PROFILES))


def get_profile(name: str) -> ProviderProfile:
    """Return the profile called ``name``; raises :class:`UnknownProvider` naming those that exist."""
    try:
        return _PROFILES[name]
    except KeyError:
        raise UnknownProvider(f"no provider profile {name!r}; known: {', '.join(known_profiles())}") from None
