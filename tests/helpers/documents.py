"""Documentation that runs: reads the blocks of a Markdown page, and runs its Python in a process forked with torch imported.

The rules, for writers of a page:

- A page has an empty folder of its own, one worker, and a limit of time. Its ```python blocks run there in order, as one script:
  a later block sees the names of an earlier one. An error names the line of the page.
- A block with a title, ```python title="train.py", or with `# train.py` as its first line, is also written into the folder as
  that file. So is a titled block of any other language (job.sh, job.yaml), which is then not run itself.
- After the Python, the commands: every line of a ```bash block is one command (a \\ at its end goes on), in the page's folder,
  with a script `train.py` in it if the page has written none. tests/helpers/pages.py has the table of those that are not
  executed as they stand, with what is done instead, and why.
- A ```text block directly after a block is what that block prints, or a part of it: `...` in a line stands for anything in that
  line, and `...` alone for any lines. A formula or a drawing is ```text after a paragraph, or a fence without a language.
- ```yaml and ```json are parsed; a ```diff is the real difference of the two files it names.

Run as a script, this file is the process that forks.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
MARKER = "\x1f"
PYTHON, COMMANDS = ("python",), ("bash", "sh", "shell", "console")
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<language>[\w+-]*)(?P<options>[^`]*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_NAMED = re.compile(r"# ([\w./-]+\.py)\n")
LAUNCHER_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(SLURM|OMPI|PMI|PMIX|TORCHELASTIC|PADDLE|FLEETX|PYTEST|RAY)_.*"
)


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    text: str
    line: int
    """Of the page, at which the text begins; the fence is in the line before."""
    output: str | None = None
    """What the page says that it prints."""


@dataclass(frozen=True)
class Ended:
    code: int
    output: str


def read_blocks(page: str) -> list[Block]:
    """The fenced blocks of a page in order; one that shows the output of another is part of that one."""
    blocks: list[Block] = []
    after = -1  # the line up to which a ```text block is still directly after the last block
    for block, end in _fenced(page.splitlines()):
        if block.language == "text" and block.title is None and blocks and block.line - 1 <= after:
            last = blocks.pop()
            block = Block(last.language, last.title, last.text, last.line, output=block.text)
        blocks.append(block)
        after = _next_text(page.splitlines(), end) if block.language in (*PYTHON, *COMMANDS) else -1
    return blocks


def _fenced(lines: Sequence[str]) -> Iterator[tuple[Block, int]]:
    """Each block, and the number of the line of its closing fence."""
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        number += 1
        if fence is None:
            continue
        begin = number
        while number < len(lines) and lines[number].strip() != fence["ticks"]:
            number += 1
        if number == len(lines):
            raise ValueError(f"the block of line {begin} is not closed")
        text = "".join(line.removeprefix(fence["indent"]) + "\n" for line in lines[begin:number])
        title = _TITLE.search(fence["options"]) or (_NAMED.match(text) if fence["language"] in PYTHON else None)
        number += 1
        yield Block(fence["language"], title and title[1], text, begin + 1), number


def _next_text(lines: Sequence[str], end: int) -> int:
    """The number, from 1, of the first line after `end` that is not empty."""
    return next((number for number in range(end + 1, len(lines) + 1) if lines[number - 1].strip()), -1)


def commands_of(block: Block) -> list[str]:
    """One for each line, without comments; lines that end in a backslash are joined with the next."""
    joined = re.sub(r"\\\n\s*", "", block.text)
    lines = (re.sub(r"(^|\s+)# .*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def script_of(blocks: Sequence[Block]) -> str:
    """All of them as one script in which each line has the number that it has on the page. A marker is printed before each."""
    lines: list[str] = []
    for index, block in enumerate(blocks):
        lines += [""] * (block.line - 2 - len(lines))
        lines.append(f"print({MARKER + str(index)!r}, flush=True)")
        lines += block.text.splitlines()
    return "\n".join(lines) + "\n"


def outputs_of(output: str, count: int) -> list[str]:
    """What each block of a script has printed."""
    parts = re.split(rf"^{MARKER}(\d+)\n", output, flags=re.MULTILINE)
    printed = dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))
    return [printed.get(index, "") for index in range(count)]


def shows(printed: str, said: str) -> bool:
    """Whether what a page says is printed is, as whole lines; `...` stands for anything."""
    pattern = "".join(
        r"(?:[^\n]*\n)*?" if line.strip() == "..." else r"[^\n]*".join(map(re.escape, line.rstrip().split("..."))) + r"[ ]*\n"
        for line in said.splitlines()
    )
    return re.search("^" + pattern, printed + "\n", flags=re.MULTILINE) is not None


def clean_environment(**variables: str) -> dict[str, str]:
    """As in a shell of a user: no launcher around, our programs first."""
    kept = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.fullmatch(name)}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return {**kept, "OMP_NUM_THREADS": "1", "PATH": path, **variables}


class Forker:
    """Runs scripts as `python script` would, one worker each, without the seconds that importing torch takes."""

    def __init__(self) -> None:
        environment = clean_environment(PYTHONPATH=str(SOURCE))
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True, env=environment)
        self._lock = threading.Lock()

    def run(self, script: Path | str, *arguments: str, folder: Path, limit_seconds: float) -> Ended:
        """Run a file, or, given as a string, a module: `python -m script` in the folder."""
        name = script.stem if isinstance(script, Path) else script
        output, code = folder.with_name(f"{folder.name}.{name}.out"), folder.with_name(f"{folder.name}.{name}.code")
        code.unlink(missing_ok=True)
        job = {
            "script": str(script),
            "is_module": isinstance(script, str),
            "arguments": arguments,
            "folder": str(folder),
            "output": str(output),
            "code": str(code),
            "limit_seconds": limit_seconds,
        }
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        last = time.monotonic() + limit_seconds + 30
        while not code.exists():
            assert time.monotonic() < last and self._process.poll() is None, f"no answer from {script}"
            time.sleep(0.02)
        return Ended(int(code.read_text()), output.read_text(errors="backslashreplace"))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def run_command(words: Sequence[str], *, folder: Path, environment: dict[str, str], limit_seconds: float) -> Ended:
    """To its end, or to that of the time, with all that it has started."""
    with subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return Ended(124, output + f"\n(ended after {limit_seconds:.0f} s)")
    return Ended(process.returncode, output)


def _become(job: dict[str, object]) -> None:
    """This process is now `python script arguments`."""
    os.setsid()
    script, folder = str(job["script"]), str(job["folder"])
    os.chdir(folder)
    target = os.open(str(job["output"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [script, *map(str, job["arguments"])]  # type: ignore[call-overload]
    sys.path[0] = folder if job["is_module"] or script.endswith(".md.py") else str(Path(script).parent)
    try:
        if job["is_module"]:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
    raise SystemExit(0)


def _keep(job: dict[str, object]) -> None:
    """Wait for the script, not for ever, and write its exit code down."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        _become(job)
    last = time.monotonic() + float(str(job["limit_seconds"]))
    code = None
    while code is None:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > last:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            code = 124
        else:
            time.sleep(0.01)
    part = Path(f"{job['code']}.part")
    part.write_text(str(code))
    part.rename(str(job["code"]))
    os._exit(0)


def serve() -> None:
    import torch
    import torch.utils.data

    import fleetx.applications
    import fleetx.fleet  # noqa: F401
    from fleetx.strategies import catalogue

    catalogue()
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer imports what takes longest
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that keep a script end by themselves
    for line in sys.stdin:
        if os.fork() == 0:
            _keep(json.loads(line))


if __name__ == "__main__":
    serve()
