"""The report's page in a real browser, at the widths of a phone and of a desktop, light and dark.

Needs selenium (``pip install -e '.[browser]'``), Chromium and its driver; skips where one of them is missing.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_plots import GPU, failed, ratio, synthetic
from test_report import EVIL, SVG

from harness.report import data, html
from harness.report.figures import Figure
from plots import rows as table

webdriver = pytest.importorskip("selenium.webdriver")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="Chromium or its driver is not installed")

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
OTHER = "NVIDIA Imaginary 200"
WIDTHS = {"phone": 390, "desktop": 1280}
#: Milliseconds whose order as text is another one.
TIMES = (9.0, 10.0, 100.0, 0.5, 21.0)


def page_rows() -> list[dict[str, Any]]:
    rows = []
    for index in range(420):
        ms = TIMES[index % len(TIMES)] + index / 1000
        times = {"median": ms, "ci95": [ms * 0.99, ms * 1.01], "samples": 9}
        row = synthetic(
            ("sonicmoe_official", "scattermoe")[index % 3 == 0],
            f"512,256,{64 * (1 + index)},16,4",
            environment={"gpu": (GPU, OTHER)[index % 4 == 3]},
        )
        rows.append({**row, "device_ms": {**times, "basis": "graph"}, "latency_ms": {**times, "mode": "burst"}})
    rows += [failed("crashed", f"{EVIL} number {n}", shape=f"64,64,64,{n},1") for n in (8, 16, 32)]
    rows.append(synthetic(operation="dense_bound", variant="gemm", implementation="cublas_bound"))
    rows += [
        ratio("scattermoe", "sonicmoe_official", table.HEADLINE_SHAPE, 2.0, **{"pass": pass_})
        for pass_ in ("forward", "backward", "forward_backward")
    ]
    return rows


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    results = folder / "results" / "gpu"
    results.mkdir(parents=True)
    (results / "sweep.jsonl").write_text("".join(json.dumps(row) + "\n" for row in page_rows()))
    (folder / "x.svg").write_text(SVG)
    made = data.build(folder / "results", folder)
    drawn = tuple(Figure(name, "gpu", "A figure", folder / "x.svg") for name in ("one", "two"))
    path = folder / "report.html"
    path.write_text(html.render(data.Report(**{**vars(made), "figures": drawn})), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


Show = Callable[..., Any]


@pytest.fixture
def show(browser: Any, page: Path) -> Iterator[Show]:
    """Opens the page; at the end nothing may stand in the console."""

    def open_page(width: int = 1280, scheme: str = "light", anchor: str = "") -> Any:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get("about:blank")
        browser.get(page.as_uri() + anchor)
        return browser

    browser.get_log("browser")
    yield open_page
    assert browser.get_log("browser") == []


def run(browser: Any, script: str, *arguments: Any) -> Any:
    """A script with ``host``, the element of the table of measurements, and a few helpers."""
    return browser.execute_script(
        """
        const host = document.querySelector('[data-table="measurements"]');
        const heads = [...host.querySelectorAll("thead th")].map((head) => head.textContent);
        const lines = () => [...host.querySelectorAll("tbody tr")];
        const cells = (title) => lines().map((line) => line.cells[heads.indexOf(title)].textContent);
        const head = (title) => host.querySelectorAll("thead th")[heads.indexOf(title)];
        const label = (title) => [...host.querySelectorAll(".controls label")].find(
          (one) => one.firstChild.textContent === title);
        const choose = (title, text) => {
          const select = label(title).querySelector("select");
          select.value = [...select.options].find((option) => option.text.startsWith(text)).value;
          select.dispatchEvent(new Event("change"));
        };
        const count = () => host.querySelector(".count").textContent;
        """
        + script,
        *arguments,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_and_is_quiet(width: str, scheme: str, show: Show) -> None:
    browser = show(WIDTHS[width], scheme)
    assert browser.title == data.TITLE
    across = "const root = document.documentElement; return [root.scrollWidth, innerWidth]"
    content, window = browser.execute_script(across)
    assert content <= window == WIDTHS[width], "the page itself scrolls sideways"
    cut = "return [...document.querySelectorAll('.claims tbody')].filter(e => e.scrollWidth > e.clientWidth).length"
    assert browser.execute_script(cut) == 0, "a claim's text is cut off"
    wide = run(browser, "const box = host.querySelector('.scroll'); return box.scrollWidth - box.clientWidth")
    assert wide > 0, "a wide table scrolls in its own box"
    colour = "return getComputedStyle(arguments[0]).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    back = browser.execute_script(colour, browser.find_element("css selector", "body"))
    card = browser.execute_script(colour, browser.find_element("css selector", ".paper-card"))
    assert (max(back) < 60) == (scheme == "dark")
    assert min(card) > 240, "figures stand on light cards"
    assert browser.execute_script("return document.querySelectorAll('.paper-card svg path').length") == 4


def test_sorting_goes_by_value_both_ways(show: Show) -> None:
    browser = show()
    assert run(browser, "return [lines().length, count()]") == [200, "the first 200 of 424 rows"]
    run(browser, "[...host.querySelectorAll('.more button')].at(-1).click()")
    script = """head("device ms").querySelector("button").click();
        return [head("device ms").getAttribute("aria-sort"), count(), cells("device ms")]"""
    state, count, _ = run(browser, script)
    assert (state, count) == ("ascending", "the first 200 of 424 rows")
    run(browser, "[...host.querySelectorAll('.more button')].at(-1).click()")
    texts = run(browser, 'return cells("device ms")')
    assert len(texts) == 424
    values = [float(text.split()[0]) for text in texts if text != "–"]
    assert len(values) == 421 and values == sorted(values) and texts[-3:] == ["–"] * 3
    state, _, texts = run(browser, script)
    values = [float(text.split()[0]) for text in texts]
    assert state == "descending" and values == sorted(values, reverse=True) and values[0] > 100
    # Sizes inside a text by their value as well; and one column at a time.
    shapes = run(browser, 'head("shape T,d,n,E,K").querySelector("button").click(); return cells("shape T,d,n,E,K")')
    parsed = [[int(size) for size in shape.split(",")] for shape in shapes]
    assert parsed == sorted(parsed)
    assert run(browser, 'return head("device ms").getAttribute("aria-sort")') == "none"


def test_sorting_by_keyboard(show: Show) -> None:
    browser = show()
    button = run(browser, 'const button = head("TFLOPS").querySelector("button"); button.focus(); return button')
    button.send_keys("\ue007")
    assert run(browser, 'return head("TFLOPS").getAttribute("aria-sort")') == "ascending"


@pytest.mark.parametrize(
    ("title", "value", "expected"),
    [
        ("GPU", OTHER, 105),
        ("implementation", "scattermoe", 140),
        ("status", "crashed", 3),
        ("operation", "dense_bound", 1),
    ],
)
def test_each_filter(title: str, value: str, expected: int, show: Show) -> None:
    browser = show()
    found, count = run(
        browser, "choose(arguments[0], arguments[1]); return [cells(arguments[0]), count()]", title, value
    )
    assert found == [value] * expected
    assert count == f"{expected} {'row' if expected == 1 else 'rows'} (424 without filters)"


def test_filters_work_together_with_words(show: Show) -> None:
    browser = show()
    run(browser, 'choose("GPU", arguments[0]); choose("implementation", "scattermoe")', GPU)
    before = run(browser, "return count()")
    search = run(browser, 'return label("search").querySelector("input")')
    search.send_keys("256,64, FORWARD")
    shapes = run(browser, 'return cells("shape T,d,n,E,K")')
    assert before == "105 rows (424 without filters)" and shapes == ["512,256,64,16,4"]
    search.send_keys(" nothing-like-it")
    assert run(browser, "return count()") == "0 rows (424 without filters)"
    run(browser, 'host.querySelector(".controls button").click()')
    assert run(browser, "return count()") == "the first 200 of 424 rows"


def test_text_of_rows_stays_text(show: Show) -> None:
    browser = show()
    reasons = run(browser, 'choose("status", "crashed"); return cells("reason")')
    assert reasons == [f"{EVIL} number {n}" for n in (8, 16, 32)]
    assert browser.execute_script("return document.querySelectorAll('img, main script').length") == 0


def test_a_claim_leads_to_its_row(show: Show) -> None:
    browser = show()
    script = """const link = document.querySelector("a.to-row"); link.closest("details").open = true; link.click();
        return decodeURIComponent(link.hash.slice(5))"""
    place = browser.execute_script(script)
    end = time.monotonic() + 5
    while not (found := browser.execute_script("return [...document.querySelectorAll('tr.target')].map((r) => r.id)")):
        assert time.monotonic() < end
    assert found == [f"row-{place}"]
    assert browser.execute_script("return document.activeElement.id") == f"row-{place}"


def test_an_address_leads_to_a_row_that_is_not_drawn_yet(show: Show) -> None:
    browser = show(anchor="#row-gpu/sweep.jsonl%3A400")
    assert browser.execute_script("return document.querySelector('tr.target').id") == "row-gpu/sweep.jsonl:400"
    show(anchor="#row-gpu/sweep.jsonl%3A9999")
    show(anchor="#row-%")
