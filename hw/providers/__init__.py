"""Execution-provider profiles: how a draft runs on one kind of hardware, and what it cannot do there."""

from hw.providers.profile import ProviderProfile, Tuning, UnknownProvider, get_profile, known_profiles

__all__ = ["ProviderProfile", "Tuning", "UnknownProvider", "get_profile", "known_profiles"]
