"""Pages of the documentation and how they are run: the Python of each, its commands, and what stands in for what is not here.

The rules for pages are in tests/helpers/documents.py. tests/ranks/test_docs.py runs one page of each kind,
tests/campaigns/test_docs.py all of them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.documents import (
    COMMANDS,
    PYTHON,
    ROOT,
    Block,
    Ended,
    Forker,
    clean_environment,
    commands_of,
    outputs_of,
    read_blocks,
    run_command,
    script_of,
    shows,
)
from tests.helpers.stand_ins import PROGRAMS

DOCS = ROOT / "docs"
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *DOCS.rglob("*.md")]}
PAGES = {name: read_blocks(text) for name, text in sorted(TEXTS.items())}
WITH_PYTHON = [page for page, blocks in PAGES.items() if any(block.language in PYTHON for block in blocks)]
WITH_COMMANDS = [
    page for page, blocks in PAGES.items() if any(block.language in COMMANDS and not block.title for block in blocks)
]
NEEDS = {
    "docs/integrations/accelerate.md": ("accelerate",),
    "docs/integrations/transformers.md": ("accelerate", "transformers"),
    "docs/integrations/lightning.md": ("lightning",),
    "docs/integrations/ray.md": ("ray",),
    "docs/hosts/ray.md": ("ray",),
}
"""Libraries without which a page is skipped."""
STAND_INS = f'env PYTHONPATH="{ROOT}${{PYTHONPATH:+:$PYTHONPATH}}" {sys.executable} -m tests.helpers.stand_ins'
"""In a shell, from any folder."""
AT_ONCE = 2
PAGE_LIMIT_SECONDS, COMMAND_LIMIT_SECONDS = 240.0, 240.0
BENCHES = re.compile(r"^python -m (bench\.\w+\.run)(.*)$")

TRAIN = '''
"""What a reader's own train.py might be: three updates, on however many workers there are."""
import argparse
import torch
from fleetx import fleet

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
for _ in range(parser.parse_args().epochs):
    fleet.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in range(3):
    report = optimizer.minimize(model(torch.full((2, 4), float(fleet.worker_index()))).square().mean())
assert report.updated
print(f"worker {fleet.worker_index()} of {fleet.worker_num()} on {fleet.node_num()} node(s): done", flush=True)
'''


# --- how commands are run ---------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One command of a page."""

    text: str
    folder: Path
    environment: dict[str, str]
    forker: Forker


class Way(NamedTuple):
    pattern: str
    run: Callable[[Line], Ended]
    reason: str
    """Why it is not executed as it stands."""


def as_it_stands(line: Line) -> Ended:
    words = ["bash", "-euo", "pipefail", "-c", line.text]
    return run_command(words, folder=line.folder, environment=line.environment, limit_seconds=COMMAND_LIMIT_SECONDS)


def finds_no_fault_in_the_page(line: Line) -> Ended:
    ended = as_it_stands(line)
    return Ended(0, ended.output) if ended.code == 1 and "Traceback" not in ended.output else ended


def as_root(line: Line) -> Ended:
    _need_hosts()
    return as_it_stands(line._replace(text=line.text.removeprefix("sudo ")))


def on_two_hosts(line: Line) -> Ended:
    _need_hosts()
    return as_it_stands(line._replace(text=f"{STAND_INS} hosts {shlex.quote(line.text)}"))


def by_a_stand_in(line: Line) -> Ended:
    """srun, sbatch and kubectl are on PATH, from tests/helpers/stand_ins.py."""
    _need_hosts()
    return as_it_stands(line)


def on_gpus_if_any(line: Line) -> Ended:
    import torch

    if torch.cuda.is_available():
        return as_it_stands(line)
    ended = as_it_stands(line)
    refused = ended.code == 2 and "--gpus was given, but torch sees no GPU here." in ended.output
    return Ended(0, ended.output) if refused else Ended(1, f"it was not refused for want of GPUs: {ended.output}")


def by_what_make_would_do(line: Line) -> Ended:
    return as_it_stands(line._replace(text=line.text.replace("make ", f"make --dry-run -C {shlex.quote(str(ROOT))} ", 1)))


def by_its_requirements(line: Line) -> Ended:
    """Each requirement is this project with extras that it has, or a package that one of its extras names."""
    words = shlex.split(line.text)[2:]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    known = {re.split(r"[\[<>=]", entry)[0] for entries in [project["dependencies"], *extras.values()] for entry in entries}
    wrong = []
    while words:
        word = words.pop(0)
        if word == "-c":
            wrong += [] if (ROOT / (name := words.pop(0))).is_file() else [name]
        elif word != "-e":
            match = re.fullmatch(r"(\.|[\w-]+)(?:\[([\w,]+)\])?", word)
            asked = set((match[2] or "").split(",")) - {""} if match else set()
            if match is None or not asked <= set(extras) or match[1] not in {".", "fleetx", *known}:
                wrong.append(word)
    return Ended(len(wrong), f"not in pyproject.toml: {wrong}")


def by_help(line: Line) -> Ended:
    """The script's --help knows every flag of the command."""
    match = BENCHES.match(line.text)
    assert match is not None
    ended = line.forker.run(match[1], "--help", folder=line.folder, limit_seconds=PAGE_LIMIT_SECONDS)
    unknown = [flag for flag in re.findall(r"--[\w-]+", match[2]) if flag not in ended.output]
    return Ended(1, f"no such flag: {unknown} in {ended.output}") if unknown else ended


WAYS = [
    Way(r"sudo .* -m bench\.cluster\.run .*", as_root, "the tests are root, or it is skipped; sudo may not be there"),
    Way(r"fleetrun (.* )?(--ips|--master) .*", on_two_hosts, "the line is run on two network namespaces with these addresses"),
    Way(r"(srun|sbatch|kubectl) .*", by_a_stand_in, "there is no Slurm and no Kubernetes; tests/helpers/stand_ins.py plays them"),
    Way(r"fleetrun (.* )?--gpus .*", on_gpus_if_any, "on a machine without GPUs it must be refused for that reason"),
    Way(
        r"make (demo|test|test-all)",
        by_what_make_would_do,
        "it makes an environment; the demo has a test of its own, and this is the test",
    ),
    Way(
        r"pip install .*",
        by_its_requirements,
        "nothing is installed by a test; test_wheel.py does it in an environment of its own",
    ),
    Way(BENCHES.pattern, by_help, "a bench takes minutes to hours, and would overwrite its published figures"),
    Way(r"fleetx doctor .*", finds_no_fault_in_the_page, "where a machine has a problem it ends with 1"),
    Way(r"(python|fleetrun|fleetx|torchrun|mkdocs|accelerate|ls|cat|cd|head) .*", as_it_stands, ""),
]


def way_of(command: str) -> Way:
    for way in WAYS:
        if re.fullmatch(way.pattern, command):
            return way
    pytest.fail(
        f"no entry of WAYS (tests/helpers/pages.py) says how `{command}` is run. If it can be run as it stands, add:\n"
        f'    Way(r"{command.split()[0]} .*", as_it_stands, ""),'
    )


def _has_libraries(page: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in NEEDS.get(page, ()))


def _need_libraries(page: str) -> None:
    if not _has_libraries(page):
        pytest.skip(f"not all of {', '.join(NEEDS[page])} are installed")


def _need_hosts() -> None:
    from bench.lib.netns import why_not

    if (reason := why_not()) is not None:
        pytest.skip(reason)


# --- running pages ----------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """What became of a page."""

    script: Ended | None = None
    outputs: list[str] = field(default_factory=list)
    commands: list[tuple[Block, str, Ended | BaseException]] = field(default_factory=list)
    folder: Path = Path()


class Runner:
    """Pages, some at once, each in a folder of its own; the same command on the same script is run once for all pages."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.forker = folder, Forker()
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._pages: dict[str, Future[Ran]] = {}
        self._known: dict[str, Ended | BaseException] = {}
        self._lock = threading.Lock()
        self._environment = clean_environment()
        self._environment["PATH"] = os.pathsep.join([str(_make_programs(folder)), self._environment["PATH"]])

    def start(self, page: str) -> Future[Ran]:
        if page not in self._pages:
            self._pages[page] = self._pool.submit(self._run, page)
        return self._pages[page]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self.forker.close()

    def _run(self, page: str) -> Ran:
        folder = self._folder / page.replace("/", "-").removesuffix(".md")
        folder.mkdir()
        ran, blocks = Ran(folder=folder), PAGES[page]
        for block in blocks:
            if block.title is not None:
                (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.title).write_text(block.text, encoding="utf-8")
        runnable = [block for block in blocks if block.language in PYTHON]
        if runnable:
            script = self._folder / f"{folder.name}.md.py"
            script.write_text(script_of(runnable), encoding="utf-8")
            ran.script = self.forker.run(script, folder=folder, limit_seconds=PAGE_LIMIT_SECONDS)
            ran.outputs = outputs_of(ran.script.output, len(runnable))
        if page in WITH_COMMANDS:
            _furnish(folder)
        for block in blocks:
            if block.language in COMMANDS and block.title is None:
                ran.commands += [(block, text, self._command(text, folder)) for text in commands_of(block)]
        return ran

    def _command(self, text: str, folder: Path) -> Ended | BaseException:
        is_usual = (folder / "train.py").read_text() == TRAIN
        with self._lock:
            if is_usual and text in self._known:
                return self._known[text]
        try:
            ended: Ended | BaseException = way_of(text).run(Line(text, folder, self._environment, self.forker))
        except BaseException as error:  # a skip, or a command that this file cannot run
            ended = error
        if is_usual:
            self._known[text] = ended
        return ended


def _make_programs(folder: Path) -> Path:
    """srun, sbatch and kubectl."""
    programs = folder / "bin"
    programs.mkdir()
    for name in PROGRAMS:
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {STAND_INS} {name} "$@"\n')
        path.chmod(0o755)
    return programs


def _furnish(folder: Path) -> None:
    """What a reader has beside the page: a script of their own, and the checkout."""
    (folder / "package").mkdir(exist_ok=True)
    for name in ("train.py", "package/train.py"):
        if not (folder / name).exists():
            (folder / name).write_text(TRAIN)
    for name in ("examples", "bench", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(Path(sys.prefix))


def running_pages(pages: Iterable[str], folder: Path) -> Iterator[Runner]:
    """Start these pages, some at once; for a fixture of a test file."""
    made = Runner(folder)
    for page in pages:
        if _has_libraries(page):
            made.start(page)
    try:
        yield made
    finally:
        made.close()


def require_true_python(page: str, runner: Runner) -> None:
    """Run the Python of a page; it must print what the page says."""
    _need_libraries(page)
    ran = runner.start(page).result()
    assert ran.script is not None
    assert ran.script.code == 0, ran.script.output
    runnable = [block for block in PAGES[page] if block.language in PYTHON]
    for block, printed in zip(runnable, ran.outputs, strict=True):
        if block.output is not None:
            assert shows(printed, block.output), f"line {block.line}: it says\n{block.output}\nand prints\n{printed}"


def require_true_commands(page: str, runner: Runner) -> None:
    """Run the commands of a page; each must succeed, and print what the page says."""
    _need_libraries(page)
    skips = []
    for block, command, ended in runner.start(page).result().commands:
        if isinstance(ended, pytest.skip.Exception):
            skips.append(str(ended))
            continue
        if isinstance(ended, BaseException):
            raise ended
        assert ended.code == 0, f"`{command}` ended with {ended.code}:\n{ended.output}"
        if block.output is not None and command == commands_of(block)[-1]:
            assert shows(ended.output, block.output), f"`{command}` should print\n{block.output}\nand prints\n{ended.output}"
    if skips:
        pytest.skip(f"the others ran; {skips[0]}")
