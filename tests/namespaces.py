"""Two machines in one: network namespaces with a link between them, which a test can cut."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Machine:
    """One of the two.

    Fields:
        name: of its namespace.
        address: at which the other reaches it.
        device: its end of the link.
    """

    name: str
    address: str
    device: str

    @property
    def shell(self) -> tuple[str, ...]:
        """The words before a command that runs on it."""
        return ("ip", "netns", "exec", self.name)

    @property
    def python(self) -> tuple[str, ...]:
        return (*self.shell, sys.executable)

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
    """Two namespaces that reach each other; their processes see one file system."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (iproute2), to make network namespaces")
    number = os.getpid() % 2**14  # two runs of the tests at a time have a network each
    network = f"10.{64 + number // 256}.{number % 256}"
    one, two = (Machine(f"lockstep{number}-{end}", f"{network}.{end}", f"ls{number}-{end}") for end in (1, 2))
    made: list[Machine] = []
    try:
        try:
            for machine in (one, two):
                _ip("netns", "add", machine.name)
                made.append(machine)
            _ip("link", "add", one.device, "netns", one.name, "type", "veth", "peer", two.device, "netns", two.name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs to make network namespaces, which this machine refuses: {error.stderr.strip()}")
        for machine in made:
            # Neither has a name server, and torch asks for the name of each machine that connects.
            files = Path("/etc/netns", machine.name)
            files.mkdir(parents=True)
            hosts = "".join(f"{name.address} {name.name}\n" for name in (one, two))
            (files / "hosts").write_text(
                f"127.0.0.1 localhost\n{machine.address} {socket.gethostname()}\n{hosts}"  # torchrun asks for itself
            )
            (files / "resolv.conf").write_text("options timeout:1 attempts:1\n")
            _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", machine.device)
            _ip("-n", machine.name, "link", "set", "lo", "up")
            _ip("-n", machine.name, "link", "set", machine.device, "up")
        yield one, two
    finally:
        for machine in made:
            _ip("netns", "del", machine.name)
            shutil.rmtree(Path("/etc/netns", machine.name), ignore_errors=True)
