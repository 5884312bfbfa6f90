"""Addresses of this machine: which are its own, and which network interface reaches another. Imports no torch."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import closing, suppress
from pathlib import Path

from lockstep.core import safe_read
from lockstep.core.errors import InputError

SIOCGIFADDR = 0x8915  # ioctl of Linux: the IPv4 address of an interface
NAME_BYTES = 16  # of an interface in that call


def addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses of a host, as family and text.

    Raises:
        InputError: nobody knows the name.
    """
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(
            f"the host {host!r} is not known on this machine ({error.strerror}); use its address: "
            "launcher.rendezvous=10.0.0.1:29500"
        ) from error
    return [(family, str(address[0])) for family, _, _, _, address in known]


def is_own(host: str, port: int) -> bool:
    """Whether an address of `host` belongs to this machine, so that it can listen there."""
    for family, address in addresses(host, port):
        with suppress(OSError), closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.bind((address, 0))
            return True
    return False


def interface_to(host: str, port: int) -> str | None:
    """The network interface by which this machine reaches `host`; None where Linux does not tell.

    Nothing is sent: connecting a datagram socket only asks the kernel for the route.
    """
    for family, address in addresses(host, port):
        with suppress(OSError), closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect((address, port))
            return interface_of(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """The interface that has `address`, IPv4 or IPv6; None if there is none, or its system does not tell."""
    here = ipaddress.ip_address(address.partition("%")[0])
    for name, its_address in _interfaces():
        if its_address == here:
            return name
    return None


def _interfaces() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """The interfaces of this machine with their addresses."""
    pairs: list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]] = []
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none of IPv4
                packed = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[: NAME_BYTES - 1]))
                pairs.append((name, ipaddress.IPv4Address(packed[20:24])))
    with suppress(safe_read.UnreadableFile):  # without IPv6
        for line in safe_read.read_text(Path("/proc/net/if_inet6")).splitlines():
            digits, *_, name = line.split()
            pairs.append((name, ipaddress.IPv6Address(int(digits, 16))))
    return pairs
