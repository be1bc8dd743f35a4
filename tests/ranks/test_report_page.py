"""The report's page in a real browser, opened from disk: numbers, controls, escaping, dark and narrow screens, no network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fleetx.report.page import make_page
from fleetx.report.read import read_run
from tests.helpers import run_folders

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
Open = Callable[..., Any]
BAD = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # of root chromium asks for it
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page for each kind of run; `both` compares two, `hostile` has markup in every text."""
    folder = tmp_path_factory.mktemp("pages")
    kinds = ("finished", "resumed", "killed", "failed", "localsgd", "lars", "several_pairs")
    runs = {kind: read_run(getattr(run_folders, kind)(folder / kind)) for kind in kinds}
    made = {kind: make_page([run]) for kind, run in runs.items()}
    made["both"] = make_page([runs["lars"], runs["localsgd"]])
    made["hostile"] = make_page([read_run(hostile(folder), BAD), runs["finished"]], BAD)
    places = {name: folder / f"{name}.html" for name in made}
    for name, place in places.items():
        place.write_text(made[name], encoding="utf-8")
    return places


def hostile(folder: Path) -> Path:
    ratios = {BAD: 1.0, "b": 2.0}
    lines = [
        run_folders.line(step, values={BAD: step}, trust_ratios=ratios, split={BAD: 0.01, "data": 0.1}) for step in (1, 2, 3)
    ]
    start = run_folders.start(command=[BAD], device=BAD, time=BAD, pairs=[{"model": BAD, "optimizer": BAD}])
    memory = {"kind": BAD, "curves": [{"step": 1, "seconds": [0, 1], "bytes": [1, 2], "marks": [[BAD, 0.5]]}]}
    return run_folders.write_run(
        folder / "hostile",
        lines,
        starts=[start],
        summary=run_folders.summary(lines, state="failed", error=BAD),
        strategy=f"'{BAD.replace(chr(39), chr(39) * 2)}': 1\n",
        memory=memory,
        logs={0: BAD},
    )


@pytest.fixture
def opened(browser: Any, pages: dict[str, Path]) -> Iterator[Open]:
    """Opens a page; afterwards nothing may have gone wrong in it, and nothing may have been asked of a network."""
    contexts, seen = [], []

    def open_page(name: str, *, width: int = 1280, scheme: str = "light", scripts: bool = True) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=scripts, offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: seen.append(("request", request.url)))
        page.on("console", lambda message: seen.append(("console", message.text)))
        page.on("pageerror", lambda error: seen.append(("error", str(error))))
        page.goto(pages[name].as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    unwanted = [(kind, text) for kind, text in seen if kind != "request" or not text.startswith(("file://", "data:image/png;"))]
    assert unwanted == []


def shoot(page: Any, name: str) -> None:
    """To be looked at, where a folder for it is named."""
    folder = os.environ.get("FLEETX_SHOTS")
    if folder:
        page.screenshot(path=f"{folder}/{name}.png", full_page=True)


def line_of(page: Any, chart: str, track: int = 0) -> Any:
    return page.locator(f"#chart-{chart} path.l[data-track='{track}']").first


def read_out(page: Any, chart: str, share: float, down: float = 0.5) -> str:
    """What the pointer finds at this share of the plot's width."""
    plot = page.locator(f"#chart-{chart} .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    inside = min(box["width"] - 1, max(1, share * box["width"]))  # on the very edge the pointer is outside
    page.mouse.move(box["x"] + inside, box["y"] + down * box["height"])
    return str(page.locator(".tip").inner_text())


# --- numbers ----------------------------------------------------------------------------------------------------------------


def test_the_cards_show_the_numbers_of_the_run(opened: Open) -> None:
    page = opened("finished")
    cards = {card.locator("dt").inner_text(): card.locator("strong").inner_text() for card in page.locator(".card").all()}
    assert cards == {
        "state": "finished",
        "steps": "100",
        "time": "5 s",
        "loss": "0.2",
        "best loss": "0.2",
        "best acc": "0.99",
        "acc": "0.99",
        "throughput": "5,120",
        "peak memory": "1.12 GiB",
        "sent by worker 0": "163 MB",
    }


def test_several_runs_stand_side_by_side(opened: Open) -> None:
    page = opened("both")
    rows = [row.inner_text() for row in page.locator("table.runs tbody tr").all()]
    assert "lars" in rows[0] and "654 MB" in rows[0] and "as much as dense" in rows[0]
    assert "localsgd" in rows[1] and "163 MB" in rows[1] and "75 % less than dense" in rows[1]
    assert page.locator("#chart-loss path.l:not(.mean)").count() == 2


def test_every_part_of_a_run_has_its_section(opened: Open) -> None:
    page = opened("lars")
    assert [one.inner_text() for one in page.locator("h2").all()] == [
        "Learning", "Speed", "On the wire", "Gradients", "Memory", "Strategy", "Environment",
    ]  # fmt: skip
    assert page.locator(".finding").inner_text().startswith("Worker 2 kept the others waiting 12.")
    assert "period of Local SGD" in [one.inner_text() for one in opened("localsgd").locator("h3").all()]


def test_a_run_that_failed_shows_what_the_workers_wrote_last(opened: Open) -> None:
    page = opened("failed")
    first = page.locator("#failures details").first
    assert first.locator("summary").inner_text() == "worker 1"
    assert first.locator("pre").inner_text().endswith("ValueError: the loss is <script>alert(1)</script>")
    assert page.locator(".card").first.inner_text().splitlines()[:2] == ["state", "failed"]


def test_a_killed_run_says_that_its_last_line_was_cut(opened: Open) -> None:
    assert "line 41 of metrics.jsonl was cut off" in opened("killed").locator(".warnings").inner_text()


def test_a_resumed_run_shows_where(opened: Open) -> None:
    page = opened("resumed")
    assert "10 updates were done again" in page.locator(".warnings").inner_text()
    mark = page.locator("#chart-loss .mark")
    assert mark.inner_text() == "resumed" and mark.get_attribute("data-at") == "51"


# --- controls ---------------------------------------------------------------------------------------------------------------


def test_the_pointer_reads_a_chart_out(opened: Open) -> None:
    page = opened("finished")
    assert read_out(page, "loss", 0.0).splitlines() == ["step 1", "finished: 2"]
    assert read_out(page, "loss", 1.0).splitlines() == ["step 100", "finished: 0.2"]
    assert read_out(page, "split-0", 1.0).splitlines()[1:3] == ["data: 4 ms", "forward: 11 ms"]
    page.mouse.move(5, 5)
    assert page.locator(".tip").is_hidden()


def test_the_pointer_reads_a_strip_out(opened: Open) -> None:
    page = opened("lars")
    lines = read_out(page, "strip-0", 0.001, down=0.98).splitlines()
    assert lines[0] == "fc.bias, step 10"
    assert float(lines[1]) == pytest.approx(
        read_run(Path(page.url[7:]).parent / "lars").updates[1][9].trust_ratios["fc.bias"], rel=0.01
    )


def test_arrow_keys_read_a_chart_out(opened: Open) -> None:
    page = opened("finished")
    page.locator("#chart-loss .plot").focus()
    for key, spoken in (
        ("End", "step 100, finished 0.2"),
        ("ArrowLeft", "step 99, "),
        ("Home", "step 1, finished 2"),
        ("ArrowRight", "step 2, "),
    ):
        page.keyboard.press(key)
        assert page.locator(".spoken").inner_text().startswith(spoken)
    page.keyboard.press("Escape")
    assert page.locator(".tip").is_hidden()


def test_a_log_scale_moves_the_line_and_its_ticks(opened: Open) -> None:
    page = opened("finished")
    before = line_of(page, "loss").get_attribute("d")
    button = page.locator("#chart-loss button.log")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert line_of(page, "loss").get_attribute("d") != before
    assert page.locator("#chart-loss .yt[data-y=log]").is_visible() and page.locator("#chart-loss .yt[data-y=lin]").is_hidden()
    button.click()
    assert line_of(page, "loss").get_attribute("d") == before  # the script draws as Python did


def test_a_run_can_be_hidden_in_all_charts_and_shown_again(opened: Open) -> None:
    page = opened("both")
    chip = page.locator(".chip input").first
    chip.uncheck()
    assert line_of(page, "loss", 0).is_hidden() and not line_of(page, "loss", 1).is_hidden()
    assert line_of(page, "throughput", 0).is_hidden()
    assert len(read_out(page, "loss", 0.5).splitlines()) == 2
    chip.check()
    assert not line_of(page, "loss", 0).is_hidden()


def test_smoothing_adds_a_calmer_line_over_a_faint_one(opened: Open) -> None:
    page = opened("lars")
    raw = line_of(page, "loss")
    assert "faint" in raw.get_attribute("class") and page.locator("#chart-loss path.mean").count() == 1  # as the page opens
    set_slider = "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); }"
    page.locator("#smooth").evaluate(set_slider, "0")
    assert "faint" not in raw.get_attribute("class") and page.locator("#chart-loss path.mean").count() == 0
    page.locator("#smooth").evaluate(set_slider, "60")
    assert "faint" in raw.get_attribute("class") and page.locator("#chart-loss path.mean").count() == 1

    def roughness(path: Any) -> float:
        heights = [float(piece.split()[1]) for piece in path.get_attribute("d")[1:].split("L")]
        return sum(abs(later - earlier) for earlier, later in pairwise(heights))

    assert roughness(page.locator("#chart-loss path.mean")) < 0.7 * roughness(raw)


def test_charts_can_be_laid_out_by_time_and_by_bytes(opened: Open) -> None:
    page = opened("both")
    page.select_option("#across", "seconds")
    assert page.locator("#chart-loss .xt:visible em").inner_text() == "time (s)"
    assert read_out(page, "loss", 1.0).splitlines()[0] == "22 s" and ", step 400" in read_out(page, "loss", 1.0)
    ends = [line_of(page, "loss", track).get_attribute("d").split("L")[-1].split()[0] for track in (0, 1)]
    assert ends[0] == "2000" and int(ends[1]) == pytest.approx(2000 * 16.2 / 22, abs=5)
    page.select_option("#across", "bytes")
    assert page.locator("#chart-loss .xt:visible em").inner_text() == "sent by worker 0 (MB)"


def test_without_scripts_the_charts_are_there_and_no_dead_controls(opened: Open) -> None:
    page = opened("lars", scripts=False)
    assert line_of(page, "loss").is_visible() and page.locator("#chart-strip-0 image").is_visible()
    assert page.locator(".controls").is_hidden() and page.locator("button.log").first.is_hidden()


# --- safety and looks -------------------------------------------------------------------------------------------------------


def test_no_text_of_a_run_becomes_markup(opened: Open) -> None:
    page = opened("hostile")
    assert page.title() == BAD
    assert page.locator("h1").inner_text() == BAD
    assert page.locator("img").count() == 0 and page.locator("body script:not([type])").count() == 1
    assert BAD in read_out(page, "loss", 0.0) and BAD in read_out(page, "strip-0", 0.5, down=0.1)
    assert BAD in page.locator("#failures pre").text_content()
    assert page.title() == BAD


def test_even_a_script_that_got_in_would_not_run(browser: Any, pages: dict[str, Path]) -> None:
    broken = pages["finished"].with_name("broken.html")
    broken.write_text(pages["finished"].read_text().replace("<footer>", "<script>document.title = 'taken'</script><footer>"))
    messages: list[str] = []
    page = browser.new_page()
    page.on("console", lambda message: messages.append(message.text))
    page.goto(broken.as_uri())
    title, has_controls = page.title(), page.locator(".controls").is_visible()
    page.close()
    assert (title, has_controls) == ("finished", True) and "Content Security Policy" in messages[0]


@pytest.mark.parametrize("name", ["lars", "both", "failed", "several_pairs", "hostile"])
def test_nothing_sticks_out_to_the_right(opened: Open, name: str) -> None:
    page = opened(name)
    for width, scheme in ((1280, "light"), (800, "dark"), (400, "dark"), (400, "light")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        shoot(page, f"{name}_{scheme}_{width}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_lines_stand_out_from_their_ground(opened: Open, scheme: str) -> None:
    page = opened("both", scheme=scheme)
    sheet = colour(page, ".chart", "backgroundColor")
    assert contrast(colour(page, ".chart h3", "color"), sheet) > 7
    assert contrast(colour(page, ".chart small", "color"), sheet) > 4.5
    for place in range(8):
        shade = page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--c{place}').trim()")
        assert contrast(tuple(int(shade[i : i + 2], 16) for i in (1, 3, 5)), sheet) > 2.5, f"--c{place}"


def colour(page: Any, selector: str, what: str) -> tuple[int, ...]:
    value = page.locator(selector).first.evaluate(f"(one) => getComputedStyle(one).{what}")
    return tuple(int(piece) for piece in value[value.index("(") + 1 : -1].split(",")[:3])


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """As accessibility guidelines define it: 1 is the same, 21 black on white."""

    def light(colour: tuple[int, ...]) -> float:
        shares = [part / 255 for part in colour]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_chart_says_what_it_shows_and_is_reached_by_the_keyboard(opened: Open) -> None:
    page = opened("lars")
    plots = page.locator(".plot").all()
    assert len(plots) > 8
    for plot in plots:
        assert plot.get_attribute("tabindex") == "0" and len(plot.get_attribute("aria-label")) > 20


def test_on_paper_the_controls_are_gone_and_the_ground_is_white(opened: Open) -> None:
    page = opened("both", scheme="dark")
    page.emulate_media(media="print")
    assert page.locator(".controls").is_hidden()
    assert colour(page, "html", "backgroundColor") == (255, 255, 255)
    assert contrast(colour(page, ".chart h3", "color"), (255, 255, 255)) > 7
