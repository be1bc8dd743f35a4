"""The random number generators that everybody shares: Python's, NumPy's, torch's on the CPU and on this rank's device."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def seed_anew(step: int, rank: int) -> None:
    """For a rank that did not exist when the checkpoint was saved: a stream of its own, the same in every try."""
    seed = int.from_bytes(hashlib.sha256(f"fleetx {step} {rank}".encode()).digest()[:4], "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
