"""A cable that delays and loses frames: ``tc netem`` for kernels without it, as a process between two TAPs.

python slow_link.py <namespace> <device> <namespace> <device> <seconds of delay each way> <share that is lost>
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
FRAME = 65536


def device(space: str, name: str) -> int:
    """The descriptor of a new TAP device in a network namespace."""
    with open(f"/var/run/netns/{space}") as entered:
        assert ctypes.CDLL(None, use_errno=True).setns(entered.fileno(), CLONE_NEWNET) == 0
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def carry(ends: list[int], delay: float, loss: float) -> None:
    """For ever, frames from each end to the other."""
    draw, waiting, lost, number = random.Random(1), [], 0, 0
    while True:
        until = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(ends, [], [], until)
        for end in ready:
            frame, number = os.read(end, FRAME), number + 1
            if draw.random() < loss:
                lost += 1
                print(f"lost {lost} of {number}", flush=True)
                continue
            other = ends[1 - ends.index(end)]
            heapq.heappush(waiting, (time.monotonic() + delay, number, other, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(waiting)
            try:
                os.write(end, frame)
            except OSError:  # the device is down, or its queue is full: a cable loses what comes then, too
                lost += 1


if __name__ == "__main__":
    taps = [device(*sys.argv[1:3]), device(*sys.argv[3:5])]
    print("ready", flush=True)
    carry(taps, float(sys.argv[5]), float(sys.argv[6]))
