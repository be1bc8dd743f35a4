"""Read the limits of control groups, version 1 and 2, on cores and memory: of this process's group and all above it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NO_LIMIT_BYTES = 1 << 60
"""Version 1 reports a very large number if there is no limit."""


def parse_quota(text: str) -> float | None:
    """Return the cores allowed by "QUOTA PERIOD" in microseconds; None for "max" or -1, which mean no limit."""
    quota, _, period = text.strip().partition(" ")
    if not quota.isdigit() or not period.strip().isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def parse_bytes(text: str) -> int | None:
    digits = text.strip()
    return int(digits) if digits.isdigit() and int(digits) < NO_LIMIT_BYTES else None


def folders(membership: str, controller: str, root: Path = ROOT) -> list[Path]:
    """List the folders of the group in /proc/self/cgroup and of those above it; in a container that group is often the root."""
    places: list[Path] = []
    for line in membership.splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        above = PurePosixPath("/", group.lstrip("/"))
        places += [base / str(one).lstrip("/") for one in (above, *above.parents)]
        if controllers:
            places.append(root / controller)
    return list(dict.fromkeys(places))


def read_all(paths: Iterable[Path]) -> str:
    """Join the contents of the files with blanks; return "" unless all can be read."""
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
    """Return the bytes left until the first of the groups is full; None without a limit."""
    return min((max(limit - used, 0) for limit, used in _memories(root, membership)), default=None)


def host_memory() -> int:
    """Return the bytes of memory that this process may use: those of the machine, or the tightest limit of its groups."""
    import psutil  # late: `import fleetx` must be quick

    total = int(psutil.virtual_memory().total)
    return min(memory_limit() or total, total)


def _memories(root: Path, membership: str | None) -> list[tuple[int, int]]:
    """Return limit and usage of each group that has a limit."""
    places = folders(_membership() if membership is None else membership, "memory", root)
    files = [(place / limit, place / used) for place in places for limit, used in LIMITS_AND_USES]
    pairs = [(parse_bytes(read_all([limit])), parse_bytes(read_all([used])) or 0) for limit, used in files]
    return [(limit, used) for limit, used in pairs if limit is not None]
