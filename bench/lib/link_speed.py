"""How fast is a link really? Bytes over one TCP connection between two hosts, timed until the last one has arrived."""

from __future__ import annotations

import subprocess
import sys

from bench.lib.netns import Host
from fleetx.errors import LaunchError

PORT = 7009
LIMIT_SECONDS = 120.0
RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listener:
    print("listening", flush=True)
    connection, _ = listener.accept()
    buffer, left = bytearray(1 << 20), int(sys.argv[3])
    while left:
        left -= connection.recv_into(buffer, min(left, len(buffer))) or sys.exit("the sender is gone")
    connection.sendall(b"!")
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    began, piece, left = time.perf_counter(), bytes(1 << 20), int(sys.argv[3])
    while left:
        left -= connection.send(piece[:left])
    connection.recv(1) or sys.exit("the receiver is gone")
    print(time.perf_counter() - began)
"""


def transfer_seconds(sender: Host, receiver: Host, payload_bytes: int, *, port: int = PORT) -> float:
    """Transfers at the same time need ports of their own."""
    where = [receiver.address, str(port), str(payload_bytes)]
    python = [sys.executable, "-I", "-S", "-c"]
    with subprocess.Popen(receiver.command(*python, RECEIVE, *where), stdout=subprocess.PIPE, text=True) as receiving:
        assert receiving.stdout is not None
        try:
            receiving.stdout.readline()  # it listens
            sending = sender.command(*python, SEND, *where)
            done = subprocess.run(sending, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
        finally:
            receiving.kill()
    if done.returncode:
        raise LaunchError(f"{sender.address} could not send to {receiver.address}: {done.stderr.strip()}")
    return float(done.stdout)
