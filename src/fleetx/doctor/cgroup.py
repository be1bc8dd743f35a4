"""What control groups allow this process: cores and memory, of version 1 and 2, through all groups above its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from fleetx.launch.oom import OWN, ROOT

NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes a very large number where there is no limit."""


def parse_quota(text: str) -> float | None:
    """Cores by "QUOTA PERIOD", in microseconds; "max" or -1 is no limit."""
    quota, _, period = text.strip().partition(" ")
    if not quota.isdigit() or not period.strip().isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def parse_bytes(text: str) -> int | None:
    word = text.strip()
    return int(word) if word.isdigit() and int(word) < NO_LIMIT_BYTES else None


def folders(membership: str, controller: str, root: Path = ROOT) -> list[Path]:
    """The own group and those above it, for a /proc/self/cgroup that reads so; in a container the own one is often the root."""
    found: list[Path] = []
    for line in membership.splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        above = PurePosixPath("/", group.lstrip("/"))
        found += [base / str(one).lstrip("/") for one in (above, *above.parents)]
        if controllers:
            found.append(root / controller)
    return list(dict.fromkeys(found))


def read_all(paths: Iterable[Path]) -> str:
    """The texts of the files, with a blank between them; "" unless all can be read."""
    try:
        return " ".join(path.read_text().strip() for path in paths)
    except (OSError, UnicodeDecodeError):
        return ""


def _membership() -> str:
    return read_all([OWN])


def cpu_quota(root: Path = ROOT, membership: str | None = None) -> float | None:
    places = folders(_membership() if membership is None else membership, "cpu", root)
    quotas = [parse_quota(read_all([place / "cpu.max"])) for place in places]
    quotas += [parse_quota(read_all([place / "cpu.cfs_quota_us", place / "cpu.cfs_period_us"])) for place in places]
    return min((quota for quota in quotas if quota is not None), default=None)


LIMITS_AND_USES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def memory_limit(root: Path = ROOT, membership: str | None = None) -> int | None:
    return min((limit for limit, _ in _memories(root, membership)), default=None)


def memory_left(root: Path = ROOT, membership: str | None = None) -> int | None:
    """Until the first of the groups is full."""
    return min((max(limit - used, 0) for limit, used in _memories(root, membership)), default=None)


def _memories(root: Path, membership: str | None) -> list[tuple[int, int]]:
    """Limit and use of each group that has a limit."""
    places = folders(_membership() if membership is None else membership, "memory", root)
    files = [(place / limit, place / used) for place in places for limit, used in LIMITS_AND_USES]
    found = [(parse_bytes(read_all([limit])), parse_bytes(read_all([used])) or 0) for limit, used in files]
    return [(limit, used) for limit, used in found if limit is not None]
