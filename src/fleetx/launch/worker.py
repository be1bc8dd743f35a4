"""First code of each worker: die with the launcher, redirect stdout and stderr to this rank's log, run the script.

Elastic would open stdout and stderr as two files with separate offsets, which loses the order of lines. Here both are one file,
opened with O_APPEND. This file is started by its path and imports only the standard library: the log is open and Ctrl-C is
handled before torch is imported, which takes seconds.

Logging never ends the run: on a full disk lines are dropped and counted, a log that was deleted is made again within a second of
the next line, with its folder, and one that is too long makes room for a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import faulthandler
import gc
import importlib.util
import io
import json
import os
import pkgutil
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, TracebackType
from typing import Any

FAILURE_FILE = "FLEETX_FAILURE_FILE"
IMPORTS_FILE = "FLEETX_IMPORTS_FILE"
LAUNCHER_PID = "FLEETX_LAUNCHER_PID"
LAUNCHER_GONE = 1
LOG_MODE = 0o640
LOOK_SECONDS = 1.0
STORAGE_FAILS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE))
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
CONFIG_ERROR, PEER_ERROR = "fleetx.errors.ConfigError", "fleetx.errors.PeerError"
BROKEN = re.compile(
    "Connection (closed|reset) by peer|Connection refused|Broken pipe|remote process exited or there was a network error"
)
"""What gloo and NCCL say when another rank has ended."""
NOTED = ("torch", "torch._dynamo", "fleetx")
"""Imports that take long. The first optimizer imports torch._dynamo."""
MESSAGE_LINES, LINE_LETTERS = 8, 400
FORKER = "FLEETX_FORKER"
"""Variable with the socket of the process from which ranks are forked (forker.py)."""
VERBOSE, WHOLE = "FLEETX_VERBOSE", "2"
PROFILERS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
"""Variables of profilers that write their results when a process ends."""
_exit_code: int | None = None
"""Code with which the script has ended; None while it runs."""
_rank_pid: int | None = None
"""This rank's process; None in the one from which ranks are forked."""


def die_with_launcher() -> None:
    """Make the kernel kill this process when its launcher ends, even by SIGKILL, so that it does not run unwatched."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # the launcher ended before the request
        os._exit(LAUNCHER_GONE)


class RankLog:
    """This rank's log, behind descriptors 1 and 2."""

    def __init__(self, path: str, most_bytes: int) -> None:
        """Open the log. `most_bytes`: size beyond which a new one is begun; 0: no limit."""
        self._path, self._most_bytes = path, most_bytes
        self._lost_bytes, self._lost_because = 0, ""
        self._next_look_seconds = 0.0
        self._guard = threading.Lock()
        log = self._open()
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)

    def write(self, descriptor: int, data: memoryview) -> None:
        """Write all of it, or drop what the disk does not take. A descriptor that the script has redirected is left alone."""
        if time.monotonic() >= self._next_look_seconds and self._guard.acquire(blocking=False):
            try:
                self._next_look_seconds = time.monotonic() + LOOK_SECONDS
                self._look()
            finally:
                self._guard.release()
        if self._lost_bytes and not self._write(descriptor, memoryview(self._loss())):
            self._lost_bytes = 0
        self._lost_bytes += self._write(descriptor, data)

    def _write(self, descriptor: int, data: memoryview) -> int:
        """Return how many bytes were not written."""
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            if error.errno not in STORAGE_FAILS:
                raise
            self._lost_because = error.strerror or str(error)
        return len(data)

    def _loss(self) -> bytes:
        return f"\n[fleetrun: here {self._lost_bytes:,} bytes of output were lost: {self._lost_because}]\n".encode()

    def _look(self) -> None:
        """Make the log again where it was deleted or moved away; begin a new one where it is too long."""
        with contextlib.suppress(OSError):
            try:
                now = os.stat(self._path, follow_symlinks=False)
                is_same = (now.st_dev, now.st_ino) == self._opened
            except OSError:
                is_same = False
            if is_same and not 0 < self._most_bytes < now.st_size:
                return
            if is_same:
                os.replace(self._path, f"{self._path}.1")
            self._move()

    def _move(self) -> None:
        """Open the log and put it behind the descriptors that lead to the former one."""
        former, log = self._opened, self._open()
        for stream in (1, 2):
            if _identity(stream) == former:
                os.dup2(log, stream)
        os.close(log)

    def _open(self) -> int:
        """Open the log, with its folder; nothing behind it where that fails, or where a link is in its place."""
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            log = os.open(self._path, flags, LOG_MODE)
        except OSError:
            log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._opened = _identity(log)
        return log


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


class LogStream(io.FileIO):
    """What Python writes on one of the descriptors."""

    def __init__(self, descriptor: int, log: RankLog, name: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.name = name
        self._log = log

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._log.write(self.fileno(), view)
        return len(view)


def redirect_streams(path: str, most_bytes: int) -> None:
    """Redirect output to this rank's log. Only rank 0 keeps stdin: several ranks would each read a part of it."""
    log = RankLog(path, most_bytes)
    sys.stdout = sys.__stdout__ = _through(log, sys.stdout, 1)  # type: ignore[misc]  # Python's own copies as well
    sys.stderr = sys.__stderr__ = _through(log, sys.stderr, 2)  # type: ignore[misc]
    if os.environ.get("RANK") != "0":
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)


def write_printed(printed: bytes) -> None:
    """Write what imports have printed into the log, where they would have written it."""
    if printed:
        sys.stderr.buffer.write(printed)
        sys.stderr.flush()


def _through(log: RankLog, stream: Any, descriptor: int) -> io.TextIOWrapper:
    """Return a stream like this one that writes through the log."""
    raw, is_direct = LogStream(descriptor, log, stream.name), stream.write_through
    return io.TextIOWrapper(
        raw if is_direct else io.BufferedWriter(raw),  # the first as Python itself makes it under PYTHONUNBUFFERED
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=is_direct,
    )


class ImportNotes:
    """A finder of modules that finds none: it notes what a restart should have imported, and how (forker.py)."""

    def __init__(self, path: str, names: Sequence[str]) -> None:
        self._path, self._names, self._pid = path, list(names), os.getpid()
        self._environment = dict(os.environ)
        self._imports: list[str] = []
        self._noted: dict[str, object] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name not in self._names or os.getpid() != self._pid:  # a data loader's worker notes nothing
            return
        self._names.remove(name)
        self._imports.append(name)
        if name == "torch":  # it reads its variables now; what is set later cannot reach it
            self._noted = {"path": [str(entry) for entry in sys.path], "environment": self._changes()}
        if self._noted:
            self._write({"imports": self._imports, **self._noted})

    def _changes(self) -> dict[str, str | None]:
        """Return the variables that the script has set, and those it has removed as None."""
        before = self._environment
        return {name: os.environ.get(name) for name in {**before, **os.environ} if os.environ.get(name) != before.get(name)}

    def _write(self, note: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # without the note a restart imports again
            aside = f"{self._path}.part"
            with open(aside, "w", encoding="utf-8") as file:
                json.dump(note, file)
            os.replace(aside, self._path)


def note_imports() -> None:
    """Note what the script will import, if the launcher asks for it."""
    path = os.environ.pop(IMPORTS_FILE, None)
    if path is not None:
        notes: Any = ImportNotes(path, NOTED)
        sys.meta_path.insert(0, notes)


def run_target(kind: str, target: str, arguments: list[str]) -> None:
    """Run the target like `python target` or `python -m target`: with the same __main__, sys.argv and sys.path."""
    sys.argv = [target, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(target))
    # The module stays after the script's last line: threads and exit handlers that pickle look for its classes there. The public
    # functions of runpy would restore this file instead.
    sys.modules["__main__"] = ModuleType("__main__")
    if kind == "module":
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what `python -m` calls
    else:
        run_script(os.path.abspath(target), sys.modules["__main__"])


def run_script(path: str, main: ModuleType) -> None:
    with open(path, "rb") as file:
        source = file.read()
    if source[:4] == importlib.util.MAGIC_NUMBER or pkgutil.get_importer(path) is not None:
        runpy.run_path(path, run_name="__main__")  # compiled already, or an archive
        return
    main.__file__ = path
    exec(compile(source, path, "exec", dont_inherit=True), vars(main))  # noqa: S102  # runs the user's script


def user_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback from the user's first frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return frames


def is_installed(path: str) -> bool:
    """Return whether a source file lies in Python's, pip's or FleetX's folders: it is not the user's."""
    import sysconfig

    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # outside pip's folders if installed with `-e`
    return path.startswith((*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), ours, "<frozen"))


def is_torchs_or_ours(path: str) -> bool:
    """Return whether a source file is one of torch, FleetX or Python, whose frames are left out of a traceback."""
    torch = sys.modules.get("torch")
    folder = os.path.dirname(torch.__file__) + os.sep if torch is not None and torch.__file__ else os.sep * 2
    is_of_pip = f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path
    return path.startswith(folder) or (is_installed(path) and not (is_of_pip and f"{os.sep}fleetx{os.sep}" not in path))


def innermost_user_frame(error: BaseException) -> str | None:
    """Return the deepest frame of the user's own files, as "train.py:12, in main"."""
    frames = traceback.extract_tb(user_traceback(error))
    own = [frame for frame in frames if not is_installed(frame.filename)] or frames
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}, in {own[-1].name}" if own else None


def kinds_of(error: BaseException) -> list[str]:
    """Return the names of an error's classes. They are compared by name: FleetX may not be imported in this process."""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]


def entries_of(frames: TracebackType | None) -> Iterator[TracebackType]:
    while frames is not None:
        yield frames
        frames = frames.tb_next


def keep_entries(error: BaseException, keeps: Callable[[list[str]], list[bool]]) -> int:
    """Leave entries out of an error's traceback by their files; return how many."""
    entries = list(entries_of(user_traceback(error)))
    kept = [one for one, keep in zip(entries, keeps([one.tb_frame.f_code.co_filename for one in entries]), strict=True) if keep]
    joined: TracebackType | None = None
    for one in reversed(kept):
        joined = TracebackType(joined, one.tb_frame, one.tb_lasti, one.tb_lineno)
    error.__traceback__ = joined
    return len(entries) - len(kept)


def users_line(files: list[str]) -> list[bool]:
    """Keep the innermost line of the user's files alone; without one, the innermost line."""
    own = [index for index, file in enumerate(files) if not is_installed(file)] or [len(files) - 1]
    return [index == own[-1] for index in range(len(files))]


def without_libraries(files: list[str]) -> list[bool]:
    """Leave out lines of torch, FleetX and Python, but for the innermost, where the error was raised."""
    return [index == len(files) - 1 or not is_torchs_or_ours(file) for index, file in enumerate(files)]


def fold(error: BaseException) -> None:
    """Shorten the traceback of an error and of its causes to what the user can act on. FLEETX_VERBOSE=2 leaves all in."""
    if os.environ.get(VERBOSE) == WHOLE:
        error.__traceback__ = user_traceback(error)
        return
    left_out, one, seen = 0, error, set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        is_of_settings = CONFIG_ERROR in kinds_of(one)
        count = keep_entries(one, users_line if is_of_settings else without_libraries)
        left_out += 0 if is_of_settings else count
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)  # type: ignore[assignment]
    if left_out:
        lines = "line of a library is" if left_out == 1 else "lines of libraries are"
        error.add_note(f"  ({left_out} {lines} left out; {VERBOSE}={WHOLE} shows all)")


def advise(error: BaseException) -> str | None:
    """Note on an error for want of memory what would fit; return that in one line. None for other errors, and without FleetX."""
    advisor = sys.modules.get("fleetx.engine.memory_advice")
    if advisor is None:
        return None
    with contextlib.suppress(Exception):  # the device may be in no state to be asked: the error itself must be told
        return " ".join(line.strip() for line in advisor.advise(error)) or None
    return None


def print_error(error: BaseException) -> None:
    """Print the traceback, by the script's own excepthook if it has set one."""
    hook = sys.excepthook
    if hook is sys.__excepthook__ or getattr(hook, "__module__", "").startswith("torch.distributed"):
        fold(error)
    else:
        error.__traceback__ = user_traceback(error)
    sys.last_value = error  # as Python itself: exit handlers may ask why the script has ended
    hook(type(error), error, error.__traceback__)


def is_retryable(error: BaseException) -> bool:
    """Return whether a restart could succeed."""
    return not isinstance(error, SyntaxError | ImportError) and CONFIG_ERROR not in kinds_of(error)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code with which Python ends after this exception."""
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def is_consequence(error: BaseException) -> bool:
    """Return whether a connection to another rank broke: the cause is then likely there."""
    return PEER_ERROR in kinds_of(error) or (isinstance(error, RuntimeError) and BROKEN.search(str(error)) is not None)


def record_request() -> None:
    """Record for the launcher that this rank left because `fleet.should_stop()` told it to: exit code 0 is then no success."""
    signals = sys.modules.get("fleetx.dist.stop_signal")
    if signals is not None and signals.was_told():
        _write_record({"left_by_request": True})


def record_failure(error: BaseException) -> None:
    """Record for the launcher what ended this rank and when: of several failing ranks the first is the cause."""
    message = "\n".join(line[:LINE_LETTERS] for line in str(error).strip().splitlines()[:MESSAGE_LINES])
    name = type(error).__qualname__
    record = {
        "time_ns": time.time_ns(),
        "error": f"{name}: {message}" if message else name,
        "where": innermost_user_frame(error),
        "is_retryable": is_retryable(error),
        "is_consequence": is_consequence(error),
        "exit_code": exit_code_of(error),
        "advice": advise(error),
    }
    _write_record(record)


def _write_record(record: dict[str, object]) -> None:
    with contextlib.suppress(OSError, KeyError), open(os.environ[FAILURE_FILE], "w", encoding="utf-8") as file:
        json.dump(record, file)


def flush_files() -> None:
    """Flush what is open, of Python and of C: Python guarantees no more for objects alive at exit."""
    kinds: dict[type, bool] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in kinds:
            kinds[kind] = issubclass(kind, io.IOBase)
        if kinds[kind]:
            with contextlib.suppress(Exception):  # closed or broken: Python would not report it at exit either
                thing.flush()
    ctypes.CDLL(None).fflush(None)


def leave_quickly() -> None:
    """End the process without the garbage collection at exit, which takes seconds in everything that torch loaded, and makes
    libraries that bind C++ report all that is still alive. The last exit handler.

    The script's own names are dropped, as Python would; a profiler that is waiting for the end of the process gets the usual
    one."""
    if os.getpid() != _rank_pid or _exit_code is None:
        return  # a forked child must not flush inherited files
    flush_files()
    if any(name in os.environ for name in PROFILERS):
        gc.freeze()
        return
    with contextlib.suppress(Exception):
        vars(sys.modules["__main__"]).clear()
    flush_files()
    os._exit(_exit_code)


def ending(code: int) -> int:
    """Keep the exit code for `leave_quickly`, and return it."""
    global _exit_code
    _exit_code = code
    return code


def main(kind: str, target: str, *arguments: str, printed: bytes = b"") -> int:
    """Run the target as this rank. `printed`: what imports have said before the rank was forked."""
    global _rank_pid
    _rank_pid = os.getpid()
    try:
        die_with_launcher()
        redirect_streams(os.environ["FLEETX_WORKER_LOG"], int(os.environ.get("FLEETX_WORKER_LOG_MB", "0")) << 20)
        write_printed(printed)
        note_imports()
        faulthandler.register(signal.SIGQUIT, file=2)  # writes all threads' stacks, even while blocked in a collective
        run_target(kind, target, list(arguments))
    except KeyboardInterrupt as error:  # no traceback: the launcher prints one line that says where rank 0 was
        record_failure(error)
        return ending(130)
    except SystemExit as error:
        if error.code not in (None, 0):
            record_failure(error)
        else:
            record_request()
        ending(exit_code_of(error))
        raise
    except BaseException as error:
        record_failure(error)
        print_error(error)
        return ending(1)
    record_request()
    return ending(0)


def wait_for_restart() -> bytes:
    """Become the process that forks ranks, if the launcher wants it; return in a rank, with what the imports have printed."""
    descriptor = os.environ.pop(FORKER, None)
    if descriptor is None:
        return b""
    # By its path, and with no name among the modules: fleetx may not be found from here, and "forker" may be the script's own.
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "forker.py")
    spec: Any = importlib.util.spec_from_file_location("fleetx.launch.forker", path)
    forker: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(forker)
    printed: bytes = forker.serve(int(descriptor), die_with_launcher)
    return printed


if __name__ == "__main__":
    atexit.register(leave_quickly)  # registered first, so called last
    sys.exit(main(*sys.argv[1:], printed=wait_for_restart()))
