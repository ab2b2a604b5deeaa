"""Which transport a pair of processes should use: pure, over what each says of itself."""

import os
from pathlib import Path

import msgspec

from hw.kv.transports.base import Kind, Unavailable

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What one process can do. Empty strings: not at all."""

    shared_memory: str = ""  # the same string means the same mounted /dev/shm of the same running machine
    user: int = -1  # arenas are private to their user
    ray: str = ""  # id of the Ray cluster the process is connected to
    zeromq: bool = False  # does it run a block server, or a client with keys?
    device: str = ""  # kind of device the cache lies on ("cuda"); "" for host memory
    device_lacks: tuple[str, ...] = ()  # what device-direct transfer misses here; see device.missing


class Choice(msgspec.Struct, frozen=True):
    """The transport, and why not each of those tried before it."""

    kind: Kind
    reasons: tuple[str, ...] = ()


def shared_memory_id(folder: Path = Path("/dev/shm")) -> str:  # noqa: S108
    """Names this machine's boot and the mount behind ``folder``: containers get equal ones only where they share it."""
    try:
        place = os.stat(folder)
        return f"{_BOOT_ID.read_text().strip()}:{place.st_dev}:{place.st_ino}"
    except OSError:
        return ""


def local_facts(*, zeromq: bool, ray: str = "", device: str = "", device_lacks: tuple[str, ...] = ()) -> Facts:
    """Facts of this process."""
    return Facts(
        shared_memory=shared_memory_id(),
        user=os.geteuid(),
        ray=ray,
        zeromq=zeromq,
        device=device,
        device_lacks=device_lacks,
    )


def choose_transport(local: Facts, peer: Facts) -> Choice:
    """The first that both ends can do: device to device, shared memory, ZeroMQ, Ray objects; raises ``Unavailable``.

    ZeroMQ goes before Ray objects because it is authenticated and encrypted end to end without any setup of the cluster.
    """
    reasons: list[str] = []
    if not local.device or not peer.device:
        reasons.append("device: the cache of one end lies in host memory")
    elif local.device != peer.device:
        reasons.append(f"device: {local.device} here, {peer.device} there")
    elif lacks := sorted({*local.device_lacks, *peer.device_lacks}):
        reasons.append(f"device: missing {', '.join(lacks)}")
    else:
        return Choice("device")
    if not local.shared_memory or local.shared_memory != peer.shared_memory:
        reasons.append("shared_memory: not the same /dev/shm")
    elif local.user != peer.user:
        reasons.append("shared_memory: two users")
    else:
        return Choice("shared_memory", tuple(reasons))
    if local.zeromq and peer.zeromq:
        return Choice("zeromq", tuple(reasons))
    reasons.append(f"zeromq: no keys {'there' if local.zeromq else 'here'}")
    if local.ray and local.ray == peer.ray:
        return Choice("ray_objects", tuple(reasons))
    reasons.append("ray_objects: not in one Ray cluster")
    raise Unavailable("no transport between the two: " + "; ".join(reasons))
