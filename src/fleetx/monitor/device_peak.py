"""Know what a GPU can compute at most: dense products in 16 bits, as its maker states."""

from __future__ import annotations

import torch

PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
}
"""FLOP/s by the words of a device's name."""


def peak_of(name: str) -> float | None:
    """Return the FLOP/s of a device by its name, as `torch.cuda.get_device_name` gives it; None where it is not known."""
    words = name.replace("-", " ").split()
    fitting = [known for known in PEAKS if all(word in words for word in known.split())]
    return PEAKS[max(fitting, key=len)] if fitting else None


def peak_here(device: torch.device) -> float | None:
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
