"""Two machines in one: two network namespaces, each with a host name, and a link between them that can be cut."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import forks

# Constants of Linux's sched.h and mount.h.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


class Unavailable(Exception):
    """Network namespaces cannot be created here; the message says why."""


@dataclass(frozen=True)
class Machine:
    """One of the two machines.

    Fields:
        name: the name of its namespace, and its host name.
        address: the address at which the other machine reaches it.
        device: the network device at its end of the link.
    """

    name: str
    address: str
    device: str

    @property
    def shell(self) -> tuple[str, ...]:
        """The words that, put before a command, run it on this machine."""
        renamed = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name)
        return ("ip", "netns", "exec", self.name, *renamed)

    @property
    def copy(self) -> tuple[str, ...]:
        """The words that, put before those for `forks.Forks.start`, make the fork a process of this machine."""
        return ("namespaces:run_on", self.name, "processes:agent")

    def pids(self) -> list[int]:
        """The processes that run on this machine."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def cut(self) -> None:
        """Cut the link to the other machine."""
        _ip("-n", self.name, "link", "set", self.device, "down")

    def mend(self) -> None:
        _ip("-n", self.name, "link", "set", self.device, "up")


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two namespaces that reach each other; their processes see one file system.

    Raises:
        Unavailable: namespaces cannot be created here.
    """
    if shutil.which("ip") is None:
        raise Unavailable("needs the command ip (iproute2), to make network namespaces")
    number = os.getpid() % 2**14  # so that two runs of the tests at the same time have different networks
    network = f"10.{64 + number // 256}.{number % 256}"
    one, two = (Machine(f"lockstep{number}-{end}", f"{network}.{end}", f"ls{number}-{end}") for end in (1, 2))
    created: list[Machine] = []
    try:
        try:
            for machine in (one, two):
                _ip("netns", "add", machine.name)
                created.append(machine)
            _ip("link", "add", one.device, "netns", one.name, "type", "veth", "peer", two.device, "netns", two.name)
        except subprocess.CalledProcessError as error:
            raise Unavailable(
                f"needs to make network namespaces, which this machine refuses: {error.stderr.strip()}"
            ) from error
        for machine in created:
            # The machines have no name server, and torch looks up the name of each machine that connects.
            files = Path("/etc/netns", machine.name)
            files.mkdir(parents=True)
            # As on Debian: a machine resolves its own name to an address of its loopback interface.
            hosts = (f"{'127.0.1.1' if end is machine else end.address} {end.name}\n" for end in (one, two))
            (files / "hosts").write_text("".join(["127.0.0.1 localhost\n", *hosts]))
            (files / "resolv.conf").write_text("options timeout:1 attempts:1\n")
            first, second = f"{network}.1{machine.address[-1]}/24", f"{machine.address}/24"
            for address in (first, second):  # two addresses, as on some real machines; the second one is used
                _ip("-n", machine.name, "addr", "add", address, "dev", machine.device)
            _ip("-n", machine.name, "link", "set", "lo", "up")
            _ip("-n", machine.name, "link", "set", machine.device, "up")
        yield one, two
    finally:
        for machine in created:
            _ip("netns", "del", machine.name)
            shutil.rmtree(Path("/etc/netns", machine.name), ignore_errors=True)


def run_on(name: str, program: str, *words: str) -> None:
    """Become a process of the machine `name`, as `ip netns exec` does, and call `forks.run` there."""
    _linux("unshare", CLONE_NEWNS | CLONE_NEWUTS)
    with Path("/run/netns", name).open() as namespace:
        _linux("setns", namespace.fileno(), CLONE_NEWNET)
    _linux("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    for file in Path("/etc/netns", name).iterdir():
        _linux("mount", str(file).encode(), f"/etc/{file.name}".encode(), None, MS_BIND, None)
    _linux("sethostname", name.encode(), len(name.encode()))
    forks.run(sys.path, program, *words)


def _linux(function: str, *arguments: int | bytes | None) -> None:
    """Call a function of the C library that returns -1 on failure."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*arguments) == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{function}: {os.strerror(error)}")
