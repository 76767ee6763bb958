"""A name server for tests: answers A queries from a file, which it reads again for each query.

    dns.py ADDRESS TABLE

Each line of TABLE is NAME ANSWER; ANSWER is an IPv4 address, NXDOMAIN, SERVFAIL or SILENCE. ANSWER/SECONDS comes so
much later. A name that is not in the table does not exist. Prints "ready" when it listens at port 53 of ADDRESS.
"""

import socket
import struct
import sys
import threading

CODES = {"SERVFAIL": 2, "NXDOMAIN": 3}


def question(message):
    """Returns the name and type of the question, and its bytes."""
    labels, at = [], 12
    while message[at]:
        labels.append(message[at + 1 : at + 1 + message[at]].decode())
        at += 1 + message[at]
    (kind,) = struct.unpack_from(">H", message, at + 1)
    return ".".join(labels).lower(), kind, message[12 : at + 5]


def reply(message, table):
    """Returns the reply and the seconds until it is due; no reply means silence."""
    name, kind, asked = question(message)
    answer, _, delay = table.get(name, "NXDOMAIN").partition("/")
    if answer == "SILENCE":
        return None, 0
    records = b""
    if answer not in CODES and kind == 1:
        records = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) + socket.inet_aton(answer)
    flags = 0x8180 | CODES.get(answer, 0)
    text = message[:2] + struct.pack(">HHHHH", flags, 1, 1 if records else 0, 0, 0) + asked + records
    return text, float(delay or 0)


def main():
    address, path = sys.argv[1:]
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, 53))
    print("ready", flush=True)
    while True:
        message, client = server.recvfrom(512)
        with open(path) as file:
            table = dict(line.split() for line in file if line.strip())
        text, delay = reply(message, table)
        if text:
            threading.Timer(delay, server.sendto, (text, client)).start()


main()
