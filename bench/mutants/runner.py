"""Runs tests for bench/mutants in a copy of the checkout, with a Python of its own: no process imports another fleetx."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from fleetx.errors import LaunchError

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
MARK = "FLEET_MUTANTS_CHECKOUT"
"""In the environment of all processes of the tests. tests/helpers/documents.py takes away names that begin with FLEETX_."""
QUIET_SECONDS = 300.0
"""A test that takes longer hangs. The ranks of tests/helpers/harness.py are given 120 s, most other processes 60."""
LEAST_LIMIT_SECONDS = 600.0
SLOWER = 4.0
"""How much longer than before a stage may take; no less than LEAST_LIMIT_SECONDS."""
_BEGUN = re.compile(r"^(tests/\S+?::.*?)\s*(?:(?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*)?$", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - (.*))?$", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """How a run of pytest ended."""

    code: int
    """Of pytest; negative for a signal, of which SIGABRT may be ours."""
    how: str
    """"passed", "failed", "crashed" or "timeout"."""
    by: str | None
    """The test that failed or was running; None if all passed."""
    why: str
    """What pytest says of it, in a line."""
    seconds: float


def limit_seconds(clean_seconds: float) -> float:
    """Return the limit of a stage that takes `clean_seconds` without a mutant."""
    return max(LEAST_LIMIT_SECONDS, SLOWER * clean_seconds)


def read_ending(output: str, code: int, *, late: bool, seconds: float) -> Ended:
    """Tell from the verbose output of `pytest -x` how it ended, and by which test."""
    if code == 0:
        return Ended(code, "passed", None, "", seconds)
    begun, failed = _BEGUN.findall(output), _FAILED.findall(output)
    if late:
        return Ended(code, "timeout", begun[-1] if begun else "collection", "no test began or ended in time", seconds)
    if code < 0:
        return Ended(code, "crashed", begun[-1] if begun else "collection", f"signal {-code}", seconds)
    last = output.strip().splitlines()[-1] if output.strip() else ""
    by, why = failed[0] if failed else ("collection", last)
    return Ended(code, "failed", by, why[:300], seconds)


class Checkout:
    """A copy of the working tree under `folder`, in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tree = folder, folder / "tree"
        shutil.copytree(ROOT, self.tree, ignore=LEFT_OUT, symlinks=True)
        self._programs = _make_python(self.tree)
        self._environment = {
            **os.environ,
            MARK: str(folder),
            "PYTHONPATH": str(self.tree / "src"),
            "PATH": os.pathsep.join([str(self._programs), os.environ.get("PATH", os.defpath)]),
            "TMPDIR": str(folder / "tmp"),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "tmp" / "hypothesis"),
        }
        self._closed = False
        self._require_own_source()

    def _require_own_source(self) -> None:
        """Raise unless Python imports the copy, also without PYTHONPATH: some tests start processes with another one."""
        ask = "import importlib.util; print(importlib.util.find_spec('fleetx').origin)"
        done = subprocess.run([self._programs / "python", "-I", "-c", ask], capture_output=True, text=True, check=False)
        if done.stdout.strip() != str(self.tree / "src" / "fleetx" / "__init__.py"):
            raise LaunchError(f"the copy in {self.tree} imports fleetx from {done.stdout.strip() or done.stderr}.")

    @contextlib.contextmanager
    def changed(self, path: str, content: bytes) -> Iterator[None]:
        """Give a file of the tree this content inside, and its own afterwards."""
        file = self.tree / path
        before = file.read_bytes()
        _write(file, content)
        try:
            yield
        finally:
            _write(file, before)

    def run_tests(self, words: Sequence[str], *, limit_seconds: float) -> Ended:
        """Run `pytest -x` with these words, and end all processes that it leaves behind."""
        temporary, output = self.folder / "tmp", self.folder / "output.txt"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        # -vvv less the -q of pyproject.toml: the last line names the test under way. In the given order: small files first.
        command = [self._programs / "python", "-m", "pytest", "-x", "-vvv", "-p", "no:cacheprovider", "-p", "no:randomly", *words]
        begin = time.monotonic()
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=self.tree,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            late = not self._closed and not _ends_in_time(process, output, limit_seconds)
        finally:
            self.end_processes()
            process.wait()
        if self._closed:
            raise LaunchError("the tests were interrupted: how they ended says nothing of the mutant.")
        text = output.read_text(errors="backslashreplace")
        return read_ending(text, process.returncode, late=late, seconds=round(time.monotonic() - begin, 1))

    def close(self) -> None:
        """End what runs, from another thread; it is no result."""
        self._closed = True
        self.end_processes()

    def end_processes(self) -> None:
        """Kill all that tests of this copy have started, found by the mark in their environment."""
        while found := [process for process in psutil.process_iter() if _mark_of(process) == str(self.folder)]:
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(found, timeout=10)


def _ends_in_time(process: subprocess.Popen[bytes], output: Path, limit_seconds: float) -> bool:
    """Wait; a process that is late is asked by SIGABRT for its traceback (pytest's faulthandler), which ends it."""
    last, size, heard = time.monotonic() + limit_seconds, -1, time.monotonic()
    while time.monotonic() < min(last, heard + QUIET_SECONDS):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
            return True
        if output.stat().st_size != size:
            size, heard = output.stat().st_size, time.monotonic()
    process.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    return False


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else process.environ().get(MARK)
    except (psutil.Error, OSError):
        return None


def _write(file: Path, content: bytes) -> None:
    """Write it, and remove what Python has compiled of it: that counts as new if second and size are the same."""
    file.write_bytes(content)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def _make_python(tree: Path) -> Path:
    """Make a virtual environment that has this one's packages and the fleetx of `tree`; return its folder of programs.

    An editable install is a line in a .pth file of site-packages. In a folder that is named in one, such files are not read."""
    venv.create(tree / ".venv", symlinks=True)
    (packages,) = (tree / ".venv" / "lib").glob("python*/site-packages")
    (packages / "mutants.pth").write_text("\n".join([str(tree / "src"), *site.getsitepackages()]) + "\n")
    programs, ours = tree / ".venv" / "bin", Path(sys.executable).parent
    for program in ours.iterdir():
        copy = programs / program.name
        if copy.exists() or not program.is_file():
            continue
        content = program.read_bytes()
        if content.startswith(f"#!{ours}/python".encode()):
            copy.write_bytes(content.replace(f"#!{ours}/".encode(), f"#!{programs}/".encode(), 1))
            copy.chmod(0o755)
        else:
            copy.symlink_to(program)
    return programs
