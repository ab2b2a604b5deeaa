"""Execution-provider profiles: how a draft runs on one kind of hardware, and what it cannot do there."""

from hw.providers.detection import Device, Listing, ProviderMissing, Verdict, detect, find
from hw.providers.profile import ProviderProfile, Wheel
from hw.providers.registry import UnknownProvider, get_profile, known_profiles
from hw.providers.tuning import Tuning

__all__ = [
    "Device",
    "Listing",
    "ProviderMissing",
    "ProviderProfile",
    "Tuning",
    "UnknownProvider",
    "Verdict",
    "Wheel",
    "detect",
    "find",
    "get_profile",
    "known_profiles",
]
