"""Provider profiles: which are found in what ONNX Runtime lists, and what is said of those that are not."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hw.onnx.build import PROVIDERS
from hw.onnx.session import OnnxModel, UnsupportedModel
from hw.providers import (
    Device,
    Listing,
    ProviderMissing,
    ProviderProfile,
    detect,
    find,
    get_profile,
    known_profiles,
)
from hw.providers.profile import CPU
from hw.providers.runtime import Placement, open_session, read_listing
from hw.providers.tuning import Tuning

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
PLAIN = Listing("1.32.0", ("AzureExecutionProvider", CPU))
PROFILES = [get_profile(name) for name in known_profiles()]
PLUGINS = [profile for profile in PROFILES if profile.wheel.module]


def with_plugin(name: str, *kinds: str) -> Listing:
    """A plain ONNX Runtime that has loaded one plug-in, which offers devices of these kinds."""
    profile = get_profile(name)
    devices = [Device(CPU, "CPU", "Microsoft")]
    devices += [Device(profile.execution_provider, kind, "someone", f"{kind} of a test") for kind in kinds]
    return replace(PLAIN, devices=tuple(devices), plugins={profile.wheel.module: "9.8.7"})


def test_what_is_known() -> None:
    assert set(known_profiles()) == {
        "cann", "coreml", "cpu", "cuda", "dml", "migraphx", "openvino", "qnn", "tensorrt", "tensorrt-rtx", "webgpu",
    }  # fmt: skip
    assert len({profile.execution_provider for profile in PROFILES}) == len(PROFILES)
    assert set(PROVIDERS) <= set(known_profiles())  # a draft that can be prepared for a provider can name it


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
class TestEach:
    def test_is_found_where_it_is_built_in(self, profile: ProviderProfile) -> None:
        listing = replace(PLAIN, providers=(profile.execution_provider, CPU))
        verdict = find(profile, listing)
        assert verdict.here
        assert verdict.version == "1.32.0"
        assert verdict.device is None
        others = {name for name, found in detect(listing).items() if found.here}
        assert others == {profile.name, "cpu"}

    def test_is_refused_on_the_plain_build_with_what_brings_it(self, profile: ProviderProfile) -> None:
        verdict = find(profile, PLAIN)
        if profile.name == "cpu":
            assert verdict.here
            return
        assert not verdict.here
        if profile.wheel.module:
            assert f"pip install {profile.wheel.package}" in verdict.reason
        else:
            assert f"has no {profile.execution_provider}" in verdict.reason
            assert profile.wheel.package in verdict.reason

    def test_says_what_it_cannot(self, profile: ProviderProfile) -> None:
        assert profile.cannot
        assert all(isinstance(value, str) for value in {**profile.options, **profile.entries}.values())
        assert profile.wheel.module == "" or profile.devices
        assert profile.proof == "none" or not profile.obstacle

    def test_a_draft_is_refused_or_its_provider_is_missing(self, profile: ProviderProfile, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").write_bytes(b"")
        if profile.obstacle:
            with pytest.raises(UnsupportedModel, match=f"provider {profile.name} "):
                OnnxModel(tmp_path, provider=profile.name)
        elif not find(profile, read_listing([profile])).here:
            with pytest.raises(ProviderMissing, match=f"provider {profile.name}: .*{profile.wheel.package}"):
                OnnxModel(tmp_path, provider=profile.name)


@pytest.mark.parametrize("profile", PLUGINS, ids=lambda profile: profile.name)
class TestPlugin:
    def test_takes_the_best_device(self, profile: ProviderProfile) -> None:
        verdict = find(profile, with_plugin(profile.name, "CPU", "GPU", "NPU"))
        assert verdict.here
        assert verdict.version == "9.8.7"
        assert verdict.device is not None
        assert verdict.device.kind == profile.devices[0]
        assert verdict.device.provider == profile.execution_provider

    def test_without_a_device(self, profile: ProviderProfile) -> None:
        verdict = find(profile, with_plugin(profile.name))
        assert not verdict.here
        assert "finds no device" in verdict.reason
        assert "found none" in verdict.reason
        unfit = ({"CPU", "GPU", "NPU"} - set(profile.devices)).pop()
        assert f"found {unfit}" in find(profile, with_plugin(profile.name, unfit)).reason

    def test_that_does_not_load(self, profile: ProviderProfile) -> None:
        listing = replace(PLAIN, failures={profile.wheel.module: "OSError: no libfoo.so"})
        verdict = find(profile, listing)
        assert not verdict.here
        assert "OSError: no libfoo.so" in verdict.reason


@pytest.mark.parametrize("name", ["openvino", "qnn", "webgpu"])  # what scripts/hw --install takes
def test_lock_file_names_one_version(name: str) -> None:
    package, pinned = (REQUIREMENTS / f"provider-{name}.lock").read_text().split("#")[0].strip().split("==")
    assert package == get_profile(name).wheel.package
    assert pinned.count(".") == 2
    assert f"{package}=={pinned}" in (REQUIREMENTS / f"provider-{name}.in").read_text()


def test_a_session_on_a_provider_that_is_not_here_is_refused(tmp_path: Path) -> None:
    """ONNX Runtime itself warns and runs everything on the CPU."""
    with pytest.raises(ProviderMissing, match="onnxruntime-gpu"):
        open_session(str(tmp_path / "model.onnx"), get_profile("cuda"), Tuning())


def test_the_cpu_is_here() -> None:
    listing = read_listing([get_profile("cpu")])
    assert CPU in listing.providers
    assert find(get_profile("cpu"), listing).here


words = st.text(max_size=8)
names = st.sampled_from([profile.execution_provider for profile in PROFILES]) | words
modules = st.sampled_from([profile.wheel.module for profile in PLUGINS]) | words


@given(
    st.builds(
        Listing,
        words,
        st.lists(names, max_size=3).map(tuple),
        st.lists(st.builds(Device, names, st.sampled_from(["CPU", "GPU", "NPU"]) | words), max_size=4).map(tuple),
        st.dictionaries(modules, words, max_size=3),
        st.dictionaries(modules, words, max_size=3),
    )
)
def test_detection_never_raises_and_gives_a_reason(listing: Listing) -> None:
    for name, verdict in detect(listing).items():
        assert verdict.name == name
        assert verdict.here != bool(verdict.reason)
        assert verdict.device is None or verdict.device in listing.devices


def test_placement_shares() -> None:
    placement = Placement({("A", "MatMul"): 3, ("B", "MatMul"): 1, ("B", "Add"): 4})
    assert placement.share("A") == 3 / 8
    assert placement.share("C") == 0
    assert placement.providers_of("MatMul") == {"A", "B"}
    assert Placement({}).share("A") == 0
