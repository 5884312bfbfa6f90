"""The connection between the launchers of two machines: messages, and noticing that the other machine is gone."""

from __future__ import annotations

import json
import selectors
import socket
import struct
from collections.abc import Iterator
from typing import Any

# In Linux's `struct tcp_info`: the offset of the milliseconds since the last acknowledgement, and the bytes to read.
LAST_ACK, TCP_INFO_BYTES = 56, 60
PROBE_S = 1  # seconds between two probes of the other machine's kernel
PROBES = 127  # the largest number that Linux allows, because this module decides when the silence is too long
LONGEST_MESSAGE = 2**20
SEND_S = 5.0


class ConnectionGone(Exception):
    """The other launcher has ended, or its machine does not answer any more."""


class Connection:
    """Messages, one line of JSON each, to and from the launcher on another machine.

    The kernel of each machine probes the other kernel every second. The answer does not depend on the processes: a
    machine whose launcher computes or is suspended does not count as gone.

    Args:
        connected: the connected socket.
        timeout: seconds of silence after which the other machine counts as gone.
    """

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        self.socket = connected
        self.timeout = timeout
        self.buffer = b""
        connected.settimeout(SEND_S)
        options = {
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
            (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): PROBE_S,
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): PROBE_S,
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): PROBES,
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): round(timeout * 1000),
        }
        for (level, option), value in options.items():
            connected.setsockopt(level, option, value)
        self.selector = selectors.DefaultSelector()
        self.selector.register(connected, selectors.EVENT_READ)

    @property
    def own_address(self) -> str:
        """The address of this machine by which the other one reaches it."""
        return str(self.socket.getsockname()[0])

    @property
    def peer_address(self) -> str:
        return str(self.socket.getpeername()[0])

    def send(self, **message: Any) -> None:
        """Send a message.

        Raises:
            ConnectionGone: the message cannot be sent.
        """
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ConnectionGone(str(error.strerror or error)) from error

    def receive(self, wait: float = 0.0) -> Iterator[dict[str, Any]]:
        """The messages that have arrived, or that arrive within `wait` seconds.

        Raises:
            ConnectionGone: no more messages can arrive.
        """
        try:
            while self.selector.select(wait):
                wait = 0.0
                received = self.socket.recv(65_536)
                if not received:
                    raise ConnectionGone("its launcher has ended")
                self.buffer += received
                *lines, self.buffer = self.buffer.split(b"\n")
                if len(self.buffer) > LONGEST_MESSAGE:
                    raise ConnectionGone("it is no launcher of ours")
                for line in lines:
                    yield _parsed(line)
        except OSError as error:
            raise ConnectionGone(str(error.strerror or error)) from error
        if self.silence > self.timeout:
            raise ConnectionGone(f"no answer for {self.timeout:g} s")

    @property
    def silence(self) -> float:
        """The seconds since the last answer of the other machine's kernel."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        return float(struct.unpack_from("I", info, LAST_ACK)[0]) / 1000

    def close(self) -> None:
        self.selector.close()
        self.socket.close()


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConnectionGone("it is no launcher of ours") from error
    if not isinstance(message, dict):
        raise ConnectionGone("it is no launcher of ours")
    return message
