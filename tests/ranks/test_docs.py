"""The documentation is true: its pages build, every block and command in them runs, and prints what the page says.

The rules for pages are in tests/documents.py.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest
import yaml
from safetensors.torch import load_file

from documents import (
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
from stand_ins import PROGRAMS

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
AT_ONCE = 2
PAGE_LIMIT_SECONDS, COMMAND_LIMIT_SECONDS = 240.0, 240.0
BENCHES = re.compile(r"^python (bench/\w+\.py)(.*)$")

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
    stand_in = shlex.join([sys.executable, str(ROOT / "tests" / "stand_ins.py"), "hosts", line.text])
    return as_it_stands(line._replace(text=stand_in))


def by_a_stand_in(line: Line) -> Ended:
    """srun, sbatch and kubectl are on PATH, from tests/stand_ins.py."""
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
    ended = line.forker.run(ROOT / match[1], "--help", folder=line.folder, limit_seconds=PAGE_LIMIT_SECONDS)
    unknown = [flag for flag in re.findall(r"--[\w-]+", match[2]) if flag not in ended.output]
    return Ended(1, f"no such flag: {unknown} in {ended.output}") if unknown else ended


WAYS = [
    Way(r"sudo .*bench/cluster\.py .*", as_root, "the tests are root, or it is skipped; sudo may not be there"),
    Way(r"fleetrun (.* )?(--ips|--master) .*", on_two_hosts, "the line is run on two network namespaces with these addresses"),
    Way(r"(srun|sbatch|kubectl) .*", by_a_stand_in, "there is no Slurm and no Kubernetes; tests/stand_ins.py plays them"),
    Way(r"fleetrun (.* )?--gpus .*", on_gpus_if_any, "on a machine without GPUs it must be refused for that reason"),
    Way(
        r"make (demo|test)",
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
    Way(r"(python|fleetrun|fleetx|torchrun|mkdocs|accelerate|ls|cat|cd) .*", as_it_stands, ""),
]


def way_of(command: str) -> Way:
    for way in WAYS:
        if re.fullmatch(way.pattern, command):
            return way
    pytest.fail(
        f"no entry of WAYS (tests/ranks/test_docs.py) says how `{command}` is run. If it can be run as it stands, add:\n"
        f'    Way(r"{command.split()[0]} .*", as_it_stands, ""),'
    )


def _has_libraries(page: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in NEEDS.get(page, ()))


def _need_libraries(page: str) -> None:
    if not _has_libraries(page):
        pytest.skip(f"not all of {', '.join(NEEDS[page])} are installed")


def _need_hosts() -> None:
    from netns import why_not

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
        except BaseException as error:  # a skip, or a command that nobody knows how to run
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
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT / "tests" / "stand_ins.py"} {name} "$@"\n')
        path.chmod(0o755)
    return programs


def _furnish(folder: Path) -> None:
    """What a reader has beside the page: a script of their own, and the checkout."""
    (folder / "package").mkdir(exist_ok=True)
    for name in ("train.py", "package/train.py"):
        if not (folder / name).exists():
            (folder / name).write_text(TRAIN)
    for name in ("examples", "bench"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(Path(sys.prefix))


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    made = Runner(tmp_path_factory.mktemp("pages"))
    pages = [getattr(item, "callspec", None) for item in request.session.items if item.fspath == request.fspath]
    for call in pages:
        if call is not None and call.params.get("page") in PAGES and _has_libraries(call.params["page"]):
            made.start(call.params["page"])
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(page: str, runner: Runner) -> None:
    _need_libraries(page)
    ran = runner.start(page).result()
    assert ran.script is not None
    assert ran.script.code == 0, ran.script.output
    runnable = [block for block in PAGES[page] if block.language in PYTHON]
    for block, printed in zip(runnable, ran.outputs, strict=True):
        if block.output is not None:
            assert shows(printed, block.output), f"line {block.line}: it says\n{block.output}\nand prints\n{printed}"


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page_run(page: str, runner: Runner) -> None:
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


def test_a_page_that_is_wrong_is_noticed(tmp_path: Path, runner: Runner) -> None:
    fence = "```"
    page = f'{fence}python\nx = 1\nprint("one", x)\n{fence}\n\n{fence}text\none ...\n{fence}\n\nText.\n\n'
    page += f"{fence}python\nx / 0\n{fence}\n"
    blocks = read_blocks(page)
    assert [(block.language, block.line, block.output) for block in blocks] == [("python", 2, "one ...\n"), ("python", 13, None)]
    folder, script = tmp_path / "page", tmp_path / "page.md.py"
    folder.mkdir()
    script.write_text(script_of(blocks))
    ended = runner.forker.run(script, folder=folder, limit_seconds=60)
    assert ended.code == 1 and f'File "{script}", line 13' in ended.output and "ZeroDivisionError" in ended.output
    assert outputs_of(ended.output, 2)[0] == "one 1\n"
    assert shows("one 1\n", "one ...\n") and shows("a\none 1\nb\n", "a\n...\nb\n") and not shows("one 1\n", "two ...\n")
    with pytest.raises(pytest.fail.Exception, match="Way"):
        way_of("rm -rf /")


# --- blocks that are not run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if any(b.language in ("yaml", "json") for b in blocks)])
def test_yaml_and_json_can_be_read(page: str) -> None:
    for block in PAGES[page]:
        if block.language == "yaml":
            assert list(yaml.safe_load_all(block.text))
        elif block.language == "json":
            json.loads(block.text)


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if any(b.language == "diff" for b in blocks)])
def test_a_diff_is_the_real_difference_of_two_files(page: str) -> None:
    for block in PAGES[page]:
        if block.language == "diff":
            before, after = (line.split()[1] for line in block.text.splitlines()[:2])
            texts = [(ROOT / name).read_text(encoding="utf-8").splitlines() for name in (before, after)]
            real = list(difflib.unified_diff(*texts, before, after, n=1, lineterm=""))
            assert block.text == "\n".join(real) + "\n"
            assert sum(line.startswith("+") for line in real[2:]) <= 13 and len(texts[1]) < 80


def test_languages_are_those_that_are_checked() -> None:
    """A block of another language would be looked at by nobody."""
    known = {"", "text", "diff", "yaml", "json", *PYTHON, *COMMANDS}
    for page, blocks in PAGES.items():
        for block in blocks:
            assert block.language in known, f"{page}, line {block.line}: ```{block.language}"
            if not block.language:
                first = {line.split()[0] for line in block.text.splitlines() if line.strip()}
                assert not first & {"fleetrun", "fleetx", "python", "pip", "make", "srun"}, f"{page}, line {block.line}: ```bash"


# --- what pages say ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md"])
def test_a_table_of_strategies_names_each_once(page: str) -> None:
    from fleetx.strategies import catalogue

    named = re.findall(r"^\| \[?`(\w+)`\]?(?:\(\S+\))? \|", TEXTS[page], flags=re.MULTILINE)
    assert sorted(named) == sorted(name for name, part in catalogue().items() if part.available) == sorted(catalogue())


def test_every_result_of_a_bench_is_on_the_page_of_benchmarks() -> None:
    linked = set(re.findall(r"\(\.\./bench/results/(\w+\.json)\)", TEXTS["docs/benchmarks.md"]))
    assert linked == {path.name for path in (ROOT / "bench" / "results").glob("*.json")}


def test_every_bench_of_the_page_of_benchmarks_can_be_asked_for_help(tmp_path: Path, runner: Runner) -> None:
    scripts = sorted(set(re.findall(r"`python (bench/\w+\.py)", TEXTS["docs/benchmarks.md"])))
    assert len(scripts) > 20

    def asked(script: str) -> Ended:
        folder = tmp_path / Path(script).stem
        folder.mkdir()
        return runner.forker.run(ROOT / script, "--help", folder=folder, limit_seconds=PAGE_LIMIT_SECONDS)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for script, ended in zip(scripts, pool.map(asked, scripts), strict=True):
            assert ended.code == 0 and "usage:" in ended.output, f"{script}: {ended.output}"


def test_local_sgd_and_dgc_run_on_two_workers_as_their_pages_have_them(tmp_path: Path, runner: Runner) -> None:
    for name in ("localsgd", "dgc"):
        block = next(block for block in PAGES[f"docs/strategies/{name}.md"] if block.language in PYTHON)
        (tmp_path / f"{name}.py").write_text(block.text, encoding="utf-8")
    environment = clean_environment()

    def run(name: str) -> Ended:
        words = [sys.executable, "-m", "fleetx.launch", "--nproc_per_node", "2", "--log_dir", f"log-{name}", f"{name}.py"]
        return run_command(words, folder=tmp_path, environment=environment, limit_seconds=COMMAND_LIMIT_SECONDS)

    averaged, compressed = run("localsgd"), run("dgc")
    assert averaged.code == 0, averaged.output
    # Update 40 is two after the round of 38; both workers' waits are told.
    assert re.search(r"^4 True \{0: [\d.e-]+, 1: [\d.e-]+\}$", averaged.output, flags=re.MULTILINE), averaged.output
    assert load_file(tmp_path / "model.safetensors")["3.weight"].shape == (4, 32)
    assert compressed.code == 0, compressed.output
    assert "dgc: 0.001 of the entries of each large tensor are sent, 8 bytes each" in compressed.output
    figures = re.search(r"^(\d+) (0\.\d+) (\d+\.\d+)$", compressed.output, flags=re.MULTILINE)
    assert figures is not None, compressed.output
    # Of two matrices of 32,768 entries 32 each, 8 bytes of each of them; 576 biases, and what all updates carry.
    assert 64 * 8 + 576 * 4 < int(figures[1]) < 3000 and (64 + 576) / 66112 < float(figures[2]) < 0.0105 and float(figures[3]) > 0


def test_recompute_prints_the_very_number_that_is_printed_without_it(tmp_path: Path, runner: Runner) -> None:
    block = next(block for block in PAGES["docs/strategies/recompute.md"] if block.language in PYTHON)
    without = block.text.replace("lr=0.001), strategy)", "lr=0.001))")
    assert without != block.text
    printed = []
    for name, text in (("with", block.text), ("without", without)):
        script = tmp_path / f"{name}.py"
        script.write_text(text, encoding="utf-8")
        ended = runner.forker.run(script, folder=tmp_path, limit_seconds=PAGE_LIMIT_SECONDS)
        assert ended.code == 0, ended.output
        printed.append(ended.output.splitlines()[-1])
    assert float(printed[0]) > 0 and printed[0] == printed[1]


def test_the_applications_script_refuses_a_misspelt_flag_and_scores_on_two_workers(tmp_path: Path, runner: Runner) -> None:
    page = "docs/applications.md"
    (script,) = (block.text for block in PAGES[page] if block.title == "train.py")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    misspelt = runner.forker.run(tmp_path / "train.py", "--batchsize", "48", folder=tmp_path, limit_seconds=PAGE_LIMIT_SECONDS)
    assert "ConfigError: unknown argument '--batchsize'. Did you mean `batch_size`?" in misspelt.output
    trained = next(ended for _, text, ended in runner.start(page).result().commands if "gradient_merge.k_steps 2" in text)
    assert isinstance(trained, Ended)
    scores = ast.literal_eval(trained.output.splitlines()[-1])
    assert scores["count"] == 360 and 0 <= scores["acc1"] <= scores["acc5"] <= 1


# --- links, and the site ----------------------------------------------------------------------------------------------


def _anchors(text: str) -> set[str]:
    """Of headings, as code hosts and mkdocs make them."""
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", outside, flags=re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_that_are_there(page: str) -> None:
    """On a code host too, where a page is plain Markdown."""
    text = re.sub(r"^```.*?^```$", "", TEXTS[page], flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        assert not link.startswith(("http:", "https:", "//", "/")), f"{link} leaves the repository"
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / unquote(path) if path else ROOT / page
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in _anchors(target.read_text(encoding="utf-8")), f"{link}: no such heading"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("site") / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=clean_environment(NO_MKDOCS_2_WARNING="1"),
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_SECONDS,
    )
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stdout + built.stderr
    return folder


def test_the_site_builds_without_a_warning_and_has_every_page(site: Path) -> None:
    pages = {str(path.relative_to(DOCS).with_suffix(".html")) for path in DOCS.rglob("*.md")}
    assert pages <= {str(path.relative_to(site)) for path in site.rglob("*.html")}
    navigation = (site / "index.html").read_text(encoding="utf-8")
    for page in pages - {"index.html"}:
        assert f'href="{page}"' in navigation, f"{page} is not in the navigation"


def test_the_site_asks_no_other_host_for_anything(site: Path) -> None:
    assert list(site.rglob("*.css")) and list(site.rglob("*.html"))
    for path in site.rglob("*.html"):
        html = path.read_text(encoding="utf-8")
        outside = re.findall(r"<(?!a )[^>]+\b(?:src|href|srcset|action|content)=\"?((?:https?:)?//[^\s\">]+)", html)
        links = re.findall(r"<a [^>]*href=\"?((?:https?:)?//[^\s\">]+)", html)
        assert not outside and not links, f"{path.relative_to(site)}: {outside + links}"
        assert 'class="mermaid"' not in html  # its script would be fetched from elsewhere
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//", path.read_text(encoding="utf-8")), path


def _finds(page: Any, words: str) -> bool:
    """Search finds pages, without a server. What is typed before the index is read may be lost: then it is typed again."""
    for _ in range(10):
        page.locator(".md-search__input").fill("")
        page.locator(".md-search__input").press_sequentially(words)
        page.wait_for_timeout(1000)
        if page.locator(".md-search-result__link").count():
            return True
    return False


def test_a_browser_shows_the_site_from_disk_and_reaches_for_nothing_else(site: Path) -> None:
    chromium = shutil.which("chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if chromium is None:
        pytest.skip("no chromium on PATH")
    asked: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 400, "height": 800})
        page.on("request", lambda request: asked.append(request.url))
        for name in ("index.html", "tour.html", "step.html", "choosing.html", "auto.html", "strategies/lars.html"):
            page.goto((site / name).as_uri())
            assert page.locator("h1").count() == 1
            broken = page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)")
            assert broken == []
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, f"{name} is wider than a telephone"
        page.set_viewport_size({"width": 1280, "height": 800})
        assert _finds(page, "noise scale"), "search from disk finds nothing"
        browser.close()
    assert asked and all(url.startswith(("file:", "data:", "blob:")) for url in asked), asked
