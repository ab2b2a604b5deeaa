"""Machines on one machine (Linux, root): each has a network namespace with an address of its own, and memory of its own.

What starts inside one reaches the others over the network only: neither shared memory nor the Unix sockets in its folder for
temporary files are theirs. The link between two can be cut without either noticing it but by silence, as a broken switch does.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

NOBODY = "02:00:00:00:00:01"  # a hardware address that none has: what is sent there is lost
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
SHARED_MEMORY = "/dev/shm"  # noqa: S108
PREFIX = "cod"
COMMAND_S = 20.0


class NoNamespacesError(Exception):
    """Namespaces cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One namespace."""

    name: str
    address: str
    temporary: Path  # TMPDIR inside, empty for everybody else


class Network:
    """A switch that this machine and any number of made-up ones are connected to."""

    def __init__(self, folder: Path) -> None:
        """``folder``: for what machines keep. Raises :class:`NoNamespacesError`, having left nothing behind."""
        self._folder = folder
        self._bridge = f"{PREFIX}{os.getpid()}"  # at most 15 characters
        self._machines: dict[str, Machine] = {}
        self._made = 0
        if os.geteuid() != 0:
            raise NoNamespacesError("only root may make network namespaces")
        try:
            self._subnet = _free_subnet()
            _ip("link", "add", "name", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            self._try()
        except NoNamespacesError:
            self.close()
            raise

    @property
    def address(self) -> str:
        """This machine's."""
        return f"{self._subnet}.1"

    def add(self, name: str) -> Machine:
        """A new machine, connected to all others."""
        self._made += 1
        number = self._made
        space, outside = f"{self._bridge}-{number}", f"{self._bridge}v{number}"
        machine = Machine(name, f"{self._subnet}.{number + 1}", self._folder / f"m{number}")
        machine.temporary.mkdir()
        self._machines[name] = machine
        _ip("netns", "add", space)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", outside, "master", self._bridge, "up")
        for command in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{machine.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", self.address),  # some programs ask the routes for their own address
        ):
            _ip("-n", space, *command)
        return machine

    def end(self, machine: Machine) -> None:
        """Kill every process inside, as when its power fails."""
        _end(self._space(machine))

    def remove(self, machine: Machine) -> None:
        """Kill every process inside, and take its network away."""
        del self._machines[machine.name]
        _remove(self._space(machine), f"{self._bridge}v{_number(machine)}")

    def cut(self, one: Machine, other: Machine) -> None:
        """Whatever these two send each other is lost from now on."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", self._space(here), "neigh", "replace", there.address, "lladdr", NOBODY, "dev", "eth0",
                "nud", "permanent")  # fmt: skip

    def heal(self, one: Machine, other: Machine) -> None:
        """The opposite of :meth:`cut`."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", self._space(here), "neigh", "del", there.address, "dev", "eth0")

    def run(self, machine: Machine, function: Callable[[], T]) -> T:
        """Call ``function`` in a thread that is inside; processes it starts stay there for good."""
        found: list[T] = []
        failed: list[BaseException] = []

        def inside() -> None:
            try:
                self._enter(machine)
                found.append(function())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=inside, name=f"inside {machine.name}")
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return found[0]

    def close(self) -> None:
        """Remove everything that was made."""
        for machine in list(self._machines.values()):
            self.remove(machine)
        with contextlib.suppress(NoNamespacesError):
            _ip("link", "del", self._bridge)

    def _space(self, machine: Machine) -> str:
        return f"{self._bridge}-{_number(machine)}"

    def _enter(self, machine: Machine) -> None:
        """Move the calling thread, and none but it."""
        _call("unshare", ctypes.c_int(CLONE_NEWNS))
        _call("mount", b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
        for folder in (SHARED_MEMORY, str(machine.temporary)):
            _call("mount", b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(0), b"mode=1777")
        with open(f"/run/netns/{self._space(machine)}", "rb") as space:
            _call("setns", ctypes.c_int(space.fileno()), ctypes.c_int(CLONE_NEWNET))

    def _try(self) -> None:
        """Can a machine be entered, and can it reach this one? Packets may be filtered where nobody would expect it."""
        machine = self.add("trial")
        try:
            self.run(machine, lambda: None)
            _ip("netns", "exec", self._space(machine), "true")
            with _listener(self.address) as port:
                self.run(machine, lambda: _reach(self.address, port))
        except OSError as error:
            raise NoNamespacesError(f"a namespace cannot be used: {error}") from None
        finally:
            self.remove(machine)


def remove_left_behind(pid: int) -> None:
    """What a process that was killed has left of its network, with all that runs inside."""
    bridge = f"{PREFIX}{pid}"
    with contextlib.suppress(NoNamespacesError):
        for line in _ip("netns", "list").splitlines():
            space = line.split()[0] if line.split() else ""
            if space.startswith(f"{bridge}-"):
                _remove(space, f"{bridge}v{space.removeprefix(f'{bridge}-')}")
        _ip("link", "del", bridge)


def _end(space: str) -> None:
    for pid in _ip("netns", "pids", space).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _remove(space: str, link: str) -> None:
    for remove in (
        lambda: _end(space),
        lambda: _ip("link", "del", link),
        lambda: _ip("netns", "del", space),
    ):
        with contextlib.suppress(NoNamespacesError):
            remove()


def _number(machine: Machine) -> int:
    return int(machine.address.rsplit(".", 1)[1]) - 1


def _ip(*arguments: str) -> str:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNamespacesError(f"ip cannot be run: {error}") from None
    if done.returncode:
        raise NoNamespacesError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _free_subnet() -> str:
    """One of the range that is set aside for testing networks (RFC 2544)."""
    used = _ip("-o", "addr", "show") + _ip("route", "show", "table", "all")
    start = os.getpid() % 250
    for offset in range(250):
        subnet = f"198.18.{(start + offset) % 250}"
        if f"{subnet}." not in used:
            return subnet
    raise NoNamespacesError("all of 198.18.0.0/16 is in use")


@contextlib.contextmanager
def _listener(address: str) -> Iterator[int]:
    with socket.create_server((address, 0)) as server:
        yield int(server.getsockname()[1])


def _reach(address: str, port: int) -> None:
    with socket.create_connection((address, port), timeout=5):
        pass
