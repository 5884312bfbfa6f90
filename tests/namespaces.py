"""Two machines in one: network namespaces with a link between them, which can be cut, and host names of their own."""

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

# Of Linux's sched.h and mount.h.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


class Unavailable(Exception):
    """There can be no network namespaces here, and why."""


@dataclass(frozen=True)
class Machine:
    """One of the two.

    Fields:
        name: of its namespace, and its host name.
        address: at which the other reaches it.
        device: its end of the link.
    """

    name: str
    address: str
    device: str

    @property
    def shell(self) -> tuple[str, ...]:
        """The words before a command that runs on it."""
        return (
            "ip",
            "netns",
            "exec",
            self.name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0" && exec "$@"',
            self.name,
        )

    @property
    def copy(self) -> tuple[str, ...]:
        """The same before what `forks.Forks.start` takes: a copy of an interpreter becomes a process of it."""
        return ("namespaces:run_on", self.name)

    def pids(self) -> list[int]:
        """The processes that run on it."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def cut(self) -> None:
        """Cut its link to the other one."""
        _ip("-n", self.name, "link", "set", self.device, "down")

    def mend(self) -> None:
        _ip("-n", self.name, "link", "set", self.device, "up")


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two namespaces that reach each other; their processes see one file system.

    Raises:
        Unavailable: they cannot be made.
    """
    if shutil.which("ip") is None:
        raise Unavailable("needs the command ip (iproute2), to make network namespaces")
    number = os.getpid() % 2**14  # two runs of the tests at a time have a network each
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
            # Neither has a name server, and torch asks for the name of each machine that connects.
            files = Path("/etc/netns", machine.name)
            files.mkdir(parents=True)
            # As Debian has it: a machine knows its own name as an address of its loopback interface.
            hosts = (f"{'127.0.1.1' if end is machine else end.address} {end.name}\n" for end in (one, two))
            (files / "hosts").write_text("".join(["127.0.0.1 localhost\n", *hosts]))
            (files / "resolv.conf").write_text("options timeout:1 attempts:1\n")
            first, second = f"{network}.1{machine.address[-1]}/24", f"{machine.address}/24"
            for address in (first, second):  # as some machines have two; the second is the one that is used
                _ip("-n", machine.name, "addr", "add", address, "dev", machine.device)
            _ip("-n", machine.name, "link", "set", "lo", "up")
            _ip("-n", machine.name, "link", "set", machine.device, "up")
        yield one, two
    finally:
        for machine in created:
            _ip("netns", "del", machine.name)
            shutil.rmtree(Path("/etc/netns", machine.name), ignore_errors=True)


def run_on(name: str, program: str, *words: str) -> None:
    """Become a process of the machine `name`, as `ip netns exec` makes one, and run what `forks.run` takes there."""
    _linux("unshare", CLONE_NEWNS | CLONE_NEWUTS)
    with Path("/run/netns", name).open() as namespace:
        _linux("setns", namespace.fileno(), CLONE_NEWNET)
    _linux("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    for file in Path("/etc/netns", name).iterdir():
        _linux("mount", str(file).encode(), f"/etc/{file.name}".encode(), None, MS_BIND, None)
    _linux("sethostname", name.encode(), len(name.encode()))
    forks.run(sys.path, program, *words)


def _linux(function: str, *arguments: int | bytes | None) -> None:
    """Call a function of the C library, which says by -1 that it failed."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*arguments) == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{function}: {os.strerror(error)}")
