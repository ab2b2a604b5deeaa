"""Settings of the connector, the keys made of a shared secret, and what travels in kv_transfer_params."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.target.kv_connector import settings
from deployments.target.kv_connector.prompts import HandOff, Place
from deployments.target.kv_connector.settings import ConnectorSettings, Keys, SettingsError, transfer_config


def test_the_helper_gives_what_vllm_takes_and_only_what_differs() -> None:
    from vllm.config import KVTransferConfig

    given_settings = transfer_config("kv_both", kv_ip="10.0.0.1", hosts=["10.0.0.2"], memory_mib=64)
    made = KVTransferConfig(**given_settings)
    assert made.kv_load_failure_policy == "recompute"
    assert made.kv_connector_extra_config == {"hosts": ["10.0.0.2"], "memory_mib": 64}
    read = ConnectorSettings.of(made.kv_connector_extra_config)
    assert (read.hosts, read.memory_mib) == (("10.0.0.2",), 64)
    assert read.limits().lease_max_s >= read.hand_off_s


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"memory": 1}, "memory_mib"),
        ({"memory_mib": 0}, "memory_mib"),
        ({"memory_mib": "256"}, "memory_mib"),
        ({"fetch_s": True}, "fetch_s"),
        ({"tenant_share": 1.5}, "tenant_share"),
        ({"hosts": "10.0.0.1"}, "hosts"),
        ({"hosts": [1]}, "hosts"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        transfer_config("kv_producer", **wrong)


def test_who_shares_a_secret_has_the_same_keys(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"a" * 32)
    keys = Keys.read(str(path))
    assert keys == Keys.read(str(path))
    assert len({keys.server.secret, keys.client.secret, keys.server.public, keys.client.public}) == 4
    path.write_bytes(b"b" * 32)
    assert Keys.read(str(path)).server != keys.server
    path.write_bytes(b"b" * 31)
    with pytest.raises(SettingsError, match="31 bytes"):
        Keys.read(str(path))
    with pytest.raises(SettingsError, match="No such file"):
        Keys.read(str(tmp_path / "none"))


def test_the_machines_secret_is_made_once_and_must_be_private(tmp_path: Path) -> None:
    first = settings._machine_secret(tmp_path)
    assert settings._machine_secret(tmp_path) == first
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    os.chmod(path, 0o644)
    with pytest.raises(SettingsError, match="not private"):
        settings._machine_secret(tmp_path)


places = st.builds(
    Place,
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    st.sampled_from(["tcp://127.0.0.1:1", "tcp://[::1]:65535", "tcp://node-7.example:5000"]),
)
offers = st.builds(
    HandOff,
    st.just(1),
    st.binary(min_size=32, max_size=32).map(bytes.hex),
    st.integers(1, 2**31 - 1),
    st.lists(places, min_size=1, max_size=4).map(tuple),
)


@given(offers)
def test_an_offer_survives_json(offer: HandOff) -> None:
    assert HandOff.of(msgspec.json.decode(msgspec.json.encode(offer.params()))) == offer


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        HandOff.of({"chain_kv": value})


def test_the_host_of_a_place() -> None:
    assert Place("0" * 32, "tcp://[::1]:5").host == "::1"
    assert Place("0" * 32, "tcp://10.0.0.1:5").host == "10.0.0.1"
