"""What a replica is told about handing prompts over, and the keys by which replicas know each other."""

import hashlib
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

import zmq

from deployments.channel.endpoint import KeyPair, text_key
from hw.kv.transports.base import Limits

MODULE = "deployments.target.kv_connector.connector"
CLASS = "ChainConnector"
MIB = 1 << 20

_SECRET_BYTES = 32
_FOLDER = Path("/dev/shm")  # noqa: S108 - the file is private to its user, which is checked


class SettingsError(ValueError):
    """A setting that does not exist or does not work; says what to write instead."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """vLLM's ``kv_connector_extra_config``; every field may be left out. Times in seconds."""

    memory_mib: int = 256  # exported prompts that wait to be taken
    tenant_share: float = 0.5  # of it, for one cache_salt
    hand_off_s: float = 10.0  # an exported prompt is promised so long to whoever was sent its place
    fetch_s: float = 1.0  # asking for a prompt and fetching it, each; then it is computed here
    pause_s: float = 5.0  # a producer that did not answer is not asked again for so long
    secret_file: str = (
        ""  # at least 32 bytes that all replicas share; "": what this user's replicas on this machine share
    )
    hosts: tuple[str, ...] = ()  # machines that prompts may be fetched from, beside this one and kv_ip

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> Self:
        """Read them. Raises SettingsError for an unknown one or one out of range."""
        known = {item.name for item in fields(cls)}
        for name in extra_config:
            if name not in known:
                raise SettingsError(
                    f"kv_connector_extra_config has no setting {name}; there are: {', '.join(sorted(known))}"
                )
        given = dict(extra_config)
        if isinstance(given.get("hosts", ()), str) or not all(isinstance(host, str) for host in given.get("hosts", ())):
            raise SettingsError("hosts must be a list of names or addresses")
        made = cls(**{**given, "hosts": tuple(given.get("hosts", ()))})
        for name in ("memory_mib", "tenant_share", "hand_off_s", "fetch_s", "pause_s"):
            value = getattr(made, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise SettingsError(f"{name} must be a number above 0, not {value!r}")
        if made.tenant_share > 1:
            raise SettingsError(f"tenant_share is a share, at most 1, not {made.tenant_share}")
        return made

    def limits(self) -> Limits:
        """The same as bounds of the store and its transports."""
        memory = int(self.memory_mib * MIB)
        return Limits(
            block_bytes=memory,
            tenant_share=self.tenant_share,
            lease_s=self.fetch_s,
            lease_max_s=max(self.hand_off_s, self.fetch_s),
            fetch_s=self.fetch_s,
        )


@dataclass(frozen=True, slots=True)
class Keys:
    """CURVE keys of both ends, made of what the replicas share: whoever knows it may offer prompts and take them."""

    server: KeyPair
    client: KeyPair

    @classmethod
    def read(cls, secret_file: str) -> Self:
        """Of a file, or of what the replicas of this user on this machine share. Raises SettingsError."""
        secret = _read(Path(secret_file)) if secret_file else _machine_secret()
        return cls(*(_pair(end, secret) for end in (b"server", b"client")))


def transfer_config(
    role: Literal["kv_producer", "kv_consumer", "kv_both"], *, kv_ip: str = "127.0.0.1", **settings: Any
) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` for a replica; ``settings`` are fields of :class:`ConnectorSettings`.

    ``kv_ip`` is where other replicas reach this one. Raises SettingsError.
    """
    made = ConnectorSettings.of(settings)
    defaults = asdict(ConnectorSettings())
    extra = {name: value for name, value in asdict(made).items() if value != defaults[name]}
    return {
        "kv_connector": CLASS,
        "kv_connector_module_path": MODULE,
        "kv_role": role,
        "kv_ip": kv_ip,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**extra, **({"hosts": list(made.hosts)} if made.hosts else {})},
    }


def _pair(end: bytes, secret: bytes) -> KeyPair:
    raw = hashlib.sha256(b"chain-of-draft/kv/hand-off/" + end + b"/" + secret).digest()
    text = text_key(raw)
    return KeyPair(public=zmq.curve_public(text.encode()).decode(), secret=text)


def _read(path: Path) -> bytes:
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"secret_file {path}: {error.strerror}") from None
    if len(secret) < _SECRET_BYTES:
        raise SettingsError(f"secret_file {path} has {len(secret)} bytes; write at least {_SECRET_BYTES} random ones")
    return secret


def _machine_secret(folder: Path = _FOLDER) -> bytes:
    """A file that the first replica makes and that nobody but its user can read."""
    path = folder / f"chain-kv-secret-{os.geteuid()}"
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    if not path.exists():
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(_SECRET_BYTES))
            os.link(fresh, path)  # whole or not at all, and only the first
        except FileExistsError:
            pass
        finally:
            os.close(descriptor)
            fresh.unlink()
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise SettingsError(f"{path} is not private to this user: remove it, or set secret_file")
        return os.read(descriptor, _SECRET_BYTES)
    finally:
        os.close(descriptor)
