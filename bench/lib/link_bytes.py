"""What a host has sent, by the counters of its network interface, less the headers of Ethernet, IP and TCP."""

from __future__ import annotations

from pathlib import Path

HEADER_BYTES = 66
"""Of a packet: Ethernet 14, IP 20, TCP with a timestamp 32."""


def payload_bytes(interface: str) -> int:
    """What this host has sent through an interface, less headers."""
    counters = Path("/sys/class/net", interface, "statistics")
    sent_bytes, sent_packets = (int((counters / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    return sent_bytes - HEADER_BYTES * sent_packets
