"""Two hosts out of one, joined by a wire that loses frames: network namespaces with a TAP device each, and a thread that
carries the frames between them. Needs root and /dev/net/tun.

    with lossy_hosts() as (hosts, wire):
        wire.loss = 0.01  # of the frames; 1.0 is a partition, in which neither host learns that the other one is gone
        outputs = hosts.run("script.py", per_host=1)
"""

from __future__ import annotations

import fcntl
import os
import random
import secrets
import select
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from netns import Hosts, Unable, check_tools, enter, network_of, run_tool

TUN, SET_INTERFACE, TAP_WITHOUT_HEADER = "/dev/net/tun", 0x400454CA, 0x1002
LONGEST = 65536
"""Bytes of a frame, at most."""


@dataclass
class Wire:
    """Impairments of the frames on the link."""

    loss: float = 0.0
    """The part of the frames that is lost."""
    lost: int = 0
    carried: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def carry(self, ends: tuple[int, int]) -> None:
        """Thread: pass each frame to the other end, or lose it, in an order of its own that repeats."""
        chance = random.Random(0)
        while not self.ended.is_set():
            for end in select.select(ends, (), (), 0.1)[0]:
                frame = os.read(end, LONGEST)
                if chance.random() < self.loss:
                    self.lost += 1
                else:
                    self.carried += 1
                    os.write(ends[1 - ends.index(end)], frame)


def _open_tap(name: str, interface: str, opened: list[int]) -> None:
    """Thread: make an interface in a namespace; what is written to the file arrives there."""
    enter(name)
    device = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(device, SET_INTERFACE, struct.pack("16sH", interface.encode(), TAP_WITHOUT_HEADER))
    opened.append(device)


@contextmanager
def lossy_hosts() -> Iterator[tuple[Hosts, Wire]]:
    """Make both hosts and the wire, and remove them whatever happens."""
    check_tools()
    if not os.path.exists(TUN):
        raise Unable(f"there is no {TUN}")
    token = secrets.token_hex(3)
    names, net = (f"drumline-{token}-a", f"drumline-{token}-b"), network_of(token)
    devices: list[int] = []
    wire = Wire()
    carrier: threading.Thread | None = None
    try:
        for i, name in enumerate(names):
            run_tool("ip", "netns", "add", name)
            opener = threading.Thread(target=_open_tap, args=(name, "tap0", devices))
            opener.start()
            opener.join()
            if len(devices) != i + 1:
                raise Unable("no TAP device")
            run_tool("ip", "-n", name, "addr", "add", f"{net}.{i + 1}/24", "dev", "tap0")
            run_tool("ip", "-n", name, "link", "set", "tap0", "up")
            run_tool("ip", "-n", name, "link", "set", "lo", "up")
        carrier = threading.Thread(target=wire.carry, args=((devices[0], devices[1]),), daemon=True)
        carrier.start()
        yield Hosts(names, ("tap0", "tap0"), f"{net}.1"), wire
    finally:
        wire.ended.set()
        if carrier is not None:
            carrier.join()
        for device in devices:
            os.close(device)  # the interface goes with it
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
