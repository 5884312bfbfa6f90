"""This machine in the network: its identity, its addresses, the interface to another one. Imports no torch."""

import ipaddress
import os
import socket
from contextlib import closing, suppress
from pathlib import Path

import psutil

from lockstep.core import safe_read
from lockstep.core.errors import InputError
from lockstep.core.launch_env import store_address

# An address that no machine has (RFC 5737), so that its route is the default route.
ELSEWHERE = "198.51.100.1"
LOOPBACK = "127.0.0.1"  # other machines cannot reach it


def loopback_server(port: int = 0) -> socket.socket:
    """A socket that listens on this machine only, at any free port for port 0.

    Raises OSError if the port cannot be had; InputError: this machine has no loopback interface that works.
    """
    try:
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            probe.bind((LOOPBACK, 0))
            probe.connect((LOOPBACK, 1))  # sends nothing; without the interface, `bind` alone works
    except OSError as error:
        raise InputError(
            f"this machine cannot reach itself at {LOOPBACK} ({error.strerror}); set up its loopback interface: "
            f"ip addr replace {LOOPBACK}/8 dev lo && ip link set lo up"
        ) from error
    return socket.create_server((LOOPBACK, port), backlog=1024)


def machine() -> str:
    """What identifies a machine or container: its host name, its boot and its network namespace."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    words = [socket.gethostname()]
    with suppress(safe_read.UnreadableFile):
        words.append(safe_read.read_text(boot).strip())
    with suppress(OSError):
        words.append(str(network.readlink()))
    return " ".join(words)


def resolve_host(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses of a host, as family and text. Raises InputError if the name cannot be resolved."""
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a label of over 63 characters is a UnicodeError
        reason = error.strerror if isinstance(error, OSError) else "no host has such a name"
        raise InputError(
            f"the host {host!r} is not known on this machine ({reason}); use its address, such as 10.0.0.1"
        ) from error
    return [(family, str(address[0])) for family, _, _, _, address in known]


def is_own_address(host: str, port: int) -> bool:
    """Whether an address of `host` belongs to this machine, so that it can listen there."""
    for family, address in resolve_host(host, port):
        with suppress(OSError), closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.bind((address, 0))
            return True
    return False


def interface_to(host: str, port: int) -> str | None:
    """The interface by which this machine reaches `host`, from the kernel's routes; None if it does not tell."""
    for family, address in resolve_host(host, port):
        with suppress(OSError), closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect((address, port))
            return interface_of(probe.getsockname()[0])
    return None


def interface_elsewhere() -> str | None:
    """The interface of the default route, or else the only interface besides loopback; None if there are several."""
    names = {name for name, address in _interfaces() if not address.is_loopback and not address.is_link_local}
    return interface_to(ELSEWHERE, 1) or (names.pop() if len(names) == 1 else None)


def interface_of(address: str) -> str | None:
    """The interface that has `address`, IPv4 or IPv6; None if no interface has it, or the system does not tell."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return next((name for name, its_address in _interfaces() if its_address == parsed), None)


def _interfaces() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    return [
        (name.partition(":")[0], ipaddress.ip_address(entry.address.partition("%")[0]))  # `eth0:1` is an alias
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]


def choose_interface(*, one_machine: bool) -> None:
    """Have the ranks of one machine listen on the loopback interface, others on the one that reaches main's machine.

    By default gloo takes the address of this machine's own name, which can be a loopback address, or unknown (on
    macOS). On main's machine, MASTER_ADDR can be a loopback address too.
    """
    loopback = interface_of(LOOPBACK) or "lo"
    name = loopback if one_machine else interface_to(*store_address())
    if name == loopback and not one_machine:
        name = interface_elsewhere()
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if one_machine:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
