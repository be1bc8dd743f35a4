"""The faults of bench/soak. Each does its harm, undoes what a machine's keeper would undo, and returns what it did in words."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.lib.link_cut import DIRECTIONS, cut
from bench.lib.netns import Host
from bench.lib.nodes_job import NodesJob

BLOCK = bytes(1 << 16)
START_SECONDS = 60.0
CLOCK_SECONDS = (-86_400.0, -3_600.0, 3_600.0, 86_400.0)


@dataclass(frozen=True)
class Scene:
    """What faults act on."""

    job: NodesJob
    disk: Path
    clocks: Sequence[Path]
    """The file with the offset of each host's wall clock."""
    chance: random.Random
    longest_seconds: float

    def seconds(self, least: float = 0.5) -> float:
        return self.chance.uniform(least, max(least, self.longest_seconds))

    def node(self) -> int:
        return self.chance.randrange(len(self.job.places))


def strike(scene: Scene, rank: int, signum: signal.Signals) -> bool:
    """Send a signal to a rank, once it is there: it may just be starting again."""
    return scene.job.wait_for(lambda: scene.job.signal_rank(rank, signum), START_SECONDS)


def kill_rank(scene: Scene) -> str:
    rank = scene.node()
    was_there = strike(scene, rank, signal.SIGKILL)
    return f"rank {rank} killed" if was_there else f"rank {rank} was not there to be killed"


def kill_launcher(scene: Scene) -> str:
    node, seconds = scene.node(), scene.seconds(0.0)
    scene.job.kill_node(node)
    time.sleep(seconds)
    scene.job.start_node(node)
    return f"launcher {node} killed, started again after {seconds:.1f} s"


def stop_rank(scene: Scene) -> str:
    # Longer, the launcher would end it: a stopped rank is named after 3 s.
    rank, seconds = scene.node(), min(scene.seconds(), 2.0)
    if not strike(scene, rank, signal.SIGSTOP):
        return f"rank {rank} was not there to be stopped"
    time.sleep(seconds)
    scene.job.signal_rank(rank, signal.SIGCONT)
    return f"rank {rank} stopped for {seconds:.1f} s"


def stop_launcher(scene: Scene) -> str:
    node, seconds = scene.node(), scene.seconds()
    scene.job.signal_node(node, signal.SIGSTOP)
    time.sleep(seconds)
    scene.job.signal_node(node, signal.SIGCONT)
    return f"launcher {node} stopped for {seconds:.1f} s"


def cut_link(scene: Scene) -> str:
    node, seconds, direction = scene.node(), scene.seconds(), scene.chance.choice(DIRECTIONS)
    host = scene.job.places[node]
    assert isinstance(host, Host)
    with cut(host, direction):
        time.sleep(seconds)
    return f"link of node {node} cut ({direction}) for {seconds:.1f} s"


def fill_disk(scene: Scene) -> str:
    seconds, ballast = scene.seconds(), scene.disk / "ballast"
    until = time.monotonic() + seconds
    with ballast.open("ab", buffering=0) as file:
        while time.monotonic() < until:  # again and again: what is deleted meanwhile leaves room
            with contextlib.suppress(OSError):
                while time.monotonic() < until:
                    file.write(BLOCK)
            time.sleep(0.02)
    ballast.unlink()
    return f"disk full for {seconds:.1f} s"


def delete_logs(scene: Scene) -> str:
    shutil.rmtree(scene.disk / "log", ignore_errors=True)
    return "folder of logs deleted"


def delete_run_folder(scene: Scene) -> str:
    shutil.rmtree(scene.disk / "run", ignore_errors=True)
    return "folder of the monitor deleted"


def jump_clock(scene: Scene) -> str:
    node, seconds = scene.node(), scene.chance.choice(CLOCK_SECONDS)
    scene.clocks[node].write_text(str(seconds), encoding="ascii")
    return f"clock of node {node} jumped by {seconds:.0f} s"


FAULTS: dict[str, Callable[[Scene], str]] = {
    "kill_rank": kill_rank,
    "kill_launcher": kill_launcher,
    "stop_rank": stop_rank,
    "stop_launcher": stop_launcher,
    "cut_link": cut_link,
    "fill_disk": fill_disk,
    "delete_logs": delete_logs,
    "delete_run_folder": delete_run_folder,
    "jump_clock": jump_clock,
}
NEEDS_HOSTS = frozenset(("cut_link",))
NEEDS_A_SMALL_DISK = frozenset(("fill_disk",))
