"""All checks of facts, in the order in which they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from . import hardware, network, software, variables
from .facts import Facts
from .finding import Finding

CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    software.check,
    software.check_triton,
    software.check_extras,
    hardware.check_gpus,
    hardware.check_cpu,
    hardware.check_memory,
    hardware.check_backends,
    network.check_name,
    network.check_addresses,
    network.check_peers,
    hardware.check_shared_memory,
    hardware.check_limits,
    hardware.check_log_folder,
    hardware.check_clock,
    variables.check,
)


def judged(facts: Facts) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(facts)]
