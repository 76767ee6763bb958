#!/usr/bin/env python3
"""A delaying, lossy link between a network device and a new tap device.

usage: link.py DEVICE TAP DELAY_MS LOSS_PERCENT

SIGUSR1 cuts the way from DEVICE, SIGUSR2 the way to it, SIGHUP heals both.
Used by hosts.sh where the kernel has no netem. Frames are carried with their
virtio header, so segmentation offload keeps working through the link.
"""
import collections
import fcntl
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
FRAME = 10 + 14 + 65536 + 64


def main():
    device, tap_name, delay_ms, loss = sys.argv[1:]
    delay, loss = float(delay_ms) / 1000, float(loss) / 100
    cut = set()  # ends from which nothing is carried
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGUSR1, lambda *_: cut.add(veth_fd))
    signal.signal(signal.SIGUSR2, lambda *_: cut.add(tap_fd))
    signal.signal(signal.SIGHUP, lambda *_: cut.clear())

    tap = open("/dev/net/tun", "r+b", buffering=0)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", tap_name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tap, TUNSETOFFLOAD, 0x01 | 0x02 | 0x04)  # checksums, TSO4, TSO6
    veth = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    veth.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    veth.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    veth.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    veth.bind((device, 0x0003))
    for args in (["promisc", "on"], ["up"]):
        subprocess.run(["ip", "link", "set", "dev", device, *args], check=True)
    subprocess.run(["ip", "link", "set", "dev", tap_name, "txqueuelen", "5000", "up"], check=True)

    tap_fd, veth_fd = tap.fileno(), veth.fileno()
    ends = {tap_fd: (tap.read, veth.send), veth_fd: (veth.recv, tap.write)}
    tap_nonblocking = fcntl.fcntl(tap_fd, fcntl.F_GETFL) | 0x800
    fcntl.fcntl(tap_fd, fcntl.F_SETFL, tap_nonblocking)
    veth.setblocking(False)

    queue = collections.deque()  # (due, send, frame), in order of due
    poll = select.epoll()
    for fd in ends:
        poll.register(fd, select.EPOLLIN)
    if os.environ.get("TESTBED_LEASH"):
        poll.register(0, 0)  # only tells that whoever had the other end is gone
    while True:
        timeout = max(0.0, queue[0][0] - time.monotonic()) if queue else -1
        ready = poll.poll(timeout)
        now = time.monotonic()
        for fd, _ in ready:
            if fd == 0:
                sys.exit(0)
            read, send = ends[fd]
            for _ in range(64):
                try:
                    frame = read(FRAME)
                except OSError:
                    break
                if not frame:
                    break
                if fd not in cut and random.random() >= loss:
                    queue.append((now + delay, send, frame))
        now = time.monotonic()
        while queue and queue[0][0] <= now:
            _, send, frame = queue.popleft()
            try:
                send(frame)
            except OSError:
                pass  # a full queue or a device that went down: the frame is lost


main()
