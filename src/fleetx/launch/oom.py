"""How many processes the kernel has killed for want of memory, in the control group that this process shares with its workers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def parse_kills(events: str) -> int | None:
    """The counter of a memory.events file, or of version 1's memory.oom_control."""
    match = re.search(r"^oom_kill (\d+)$", events, flags=re.MULTILINE)
    return int(match[1]) if match else None


def counter_files(membership: str, root: Path = ROOT) -> list[Path]:
    """Where the counter may be, for a /proc/self/cgroup that reads so; in a container the own group is often at the root."""
    files = []
    for line in membership.splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            files += [root / group.lstrip("/") / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            base = root / "memory"
            files += [base / group.lstrip("/") / "memory.oom_control", base / "memory.oom_control"]
    return files


def count_kills(files: Iterable[Path] | None = None) -> int | None:
    """None where there is no such counter."""
    try:
        candidates = counter_files(OWN.read_text()) if files is None else files
    except (OSError, ValueError):
        return None
    for path in candidates:
        try:
            kills = parse_kills(path.read_text())
        except (OSError, ValueError):
            continue
        if kills is not None:
            return kills
    return None
