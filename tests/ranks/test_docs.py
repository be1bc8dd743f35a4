"""Guards the documentation: links, tables and the site of all pages, and one page of each kind run as it stands."""

from __future__ import annotations

import difflib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from tests.helpers.documents import COMMANDS, PYTHON, ROOT, clean_environment, outputs_of, read_blocks, script_of, shows
from tests.helpers.pages import (
    COMMAND_LIMIT_SECONDS,
    DOCS,
    PAGES,
    TEXTS,
    Runner,
    require_true_commands,
    require_true_python,
    running_pages,
    way_of,
)

QUICK_PYTHON = ["docs/loop.md", "docs/strategies/gradient_merge.md"]
QUICK_COMMANDS = ["docs/hosts/kubernetes.md", "docs/index.md", "docs/report.md"]
"""A page of Python, a script with a command, a job on two hosts, and an installation; tests/campaigns/test_docs.py has all."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    yield from running_pages(sorted({*QUICK_PYTHON, *QUICK_COMMANDS}), tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("page", QUICK_PYTHON)
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(page: str, runner: Runner) -> None:
    require_true_python(page, runner)


@pytest.mark.parametrize("page", QUICK_COMMANDS)
def test_the_commands_of_a_page_run(page: str, runner: Runner) -> None:
    require_true_commands(page, runner)


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
    """A block of another language would not be checked."""
    known = {"", "text", "diff", "yaml", "json", "formula", *PYTHON, *COMMANDS}  # formulas: tests/unit/test_formulas.py
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
    assert sorted(named) == sorted(catalogue())


def test_every_result_of_a_bench_is_on_the_page_of_benchmarks() -> None:
    linked = set(re.findall(r"\(\.\./bench/results/(\w+\.json)\)", TEXTS["docs/benchmarks.md"]))
    assert linked == {path.name for path in (ROOT / "bench" / "results").glob("*.json")}


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
        for name in ("index.html", "tour.html", "step.html", "choosing.html", "strategies/auto.html", "strategies/lars.html"):
            page.goto((site / name).as_uri())
            assert page.locator("h1").count() == 1
            broken = page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)")
            assert broken == []
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, f"{name} is wider than a telephone"
        page.set_viewport_size({"width": 1280, "height": 800})
        assert _finds(page, "noise scale"), "search from disk finds nothing"
        browser.close()
    assert asked and all(url.startswith(("file:", "data:", "blob:")) for url in asked), asked
