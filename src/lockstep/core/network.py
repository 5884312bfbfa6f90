"""This machine in the network: its identity, its addresses, and the interface that reaches another machine.

Imports no torch.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from contextlib import closing, suppress
from pathlib import Path

from lockstep.core import safe_read
from lockstep.core.errors import InputError

SIOCGIFCONF = 0x8912  # ioctl of Linux: all interfaces with their IPv4 addresses
# One entry is a `struct ifreq`: its size, the size of the name, and the position of the address.
ENTRY_BYTES, NAME_BYTES, ADDRESS = 40, 16, slice(20, 24)
MOST_ENTRIES = 1024
# An address that no machine has (RFC 5737), so that its route is the default route.
ELSEWHERE = "198.51.100.1"


def machine() -> str:
    """A text that identifies this machine, even among machines with the same host name.

    It has the host name, the number of the boot and the network namespace. Containers on one machine have separate
    namespaces, and cannot reach one another over the loopback interface.
    """
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    words = [socket.gethostname()]
    with suppress(safe_read.UnreadableFile):
        words.append(safe_read.read_text(boot).strip())
    with suppress(OSError):
        words.append(str(network.readlink()))
    return " ".join(words)


def addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses of a host, as family and text.

    Raises:
        InputError: the name cannot be resolved.
    """
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(
            f"the host {host!r} is not known on this machine ({error.strerror}); use its address, such as 10.0.0.1"
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
    """The network interface by which this machine reaches `host`; None if the system does not tell.

    Nothing is sent: connecting a datagram socket only asks the kernel for the route.
    """
    for family, address in addresses(host, port):
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
    """The interfaces of this machine with their addresses."""
    pairs: list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]] = []
    room = array.array("B", bytes(ENTRY_BYTES * MOST_ENTRIES))
    request = struct.pack("iL", len(room), room.buffer_info()[0])
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe, suppress(OSError):
        length, _ = struct.unpack("iL", fcntl.ioctl(probe, SIOCGIFCONF, request))
        for start in range(0, length, ENTRY_BYTES):
            entry = room[start : start + ENTRY_BYTES].tobytes()
            name = entry[:NAME_BYTES].partition(b"\0")[0].decode()
            pairs.append((name.partition(":")[0], ipaddress.IPv4Address(entry[ADDRESS])))
    with suppress(safe_read.UnreadableFile):  # without IPv6
        for line in safe_read.read_text(Path("/proc/net/if_inet6")).splitlines():
            digits, *_, name = line.split()
            pairs.append((name, ipaddress.IPv6Address(int(digits, 16))))
    return pairs
