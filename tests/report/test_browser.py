"""The page in a real browser."""

import json

import pytest
from report.chromium import Browser, needs_chromium
from report.making import HOSTILE, add_analysis, every_kind, make_run

from fedbasin.report.page import write_page
from fedbasin.report.runs import find_runs, read_runs

pytestmark = needs_chromium
METHODS = ("fedavg", "ima", "wima(window=5)")
LINES = "document.querySelectorAll('#curve-chart [aria-label=line] path').length"
PATHS = (
    "[...document.querySelectorAll('#curve-chart [aria-label=line] path')].map(p => p.outerHTML)"
)


@pytest.fixture(scope="module")
def browser():
    started = Browser()
    yield started
    started.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    for method in METHODS:
        for seed in (0, 1):
            made = make_run(out / method[:4] / str(seed), method, seed, rounds=30)
    add_analysis(made, every_kind())
    write_page(read_runs(find_runs([out])), out / "report.html", target=0.5)
    return out


@pytest.fixture
def page(browser, folder):
    found = browser.page()
    found.look()
    found.open(folder / "report.html")
    return found


def set_value(page, name, value):
    page.evaluate(
        f"(() => {{ const e = document.getElementById('{name}'); e.value = '{value}';"
        " e.dispatchEvent(new Event('input')); })()"
    )


def test_it_opens_without_a_word_and_fetches_nothing(page):
    charts = page.evaluate("document.querySelectorAll('.chart svg').length")
    assert charts >= 2 + 4  # curves, clients, and the four panels that are drawn
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    assert sum(url.startswith("file:") for url in page.requests) == 1


def test_its_numbers_are_those_of_the_summaries(page, folder):
    rows = page.evaluate(
        "[...document.querySelectorAll('#runs tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    shown = {(row[0], int(row[1])): row for row in rows}
    for path in folder.rglob("summary.json"):
        summary = json.loads(path.read_text())
        row = shown[summary["method"], summary["seed"]]
        assert row[2] == f"{100 * summary['accuracy_mean_last10']:.2f}"
        assert row[6] == f"{summary['seconds']:.1f}"


def test_methods_are_shown_and_hidden(page):
    assert page.evaluate(LINES) == 3
    page.evaluate("document.querySelectorAll('#legend input')[1].click()")
    assert page.evaluate(LINES) == 2
    page.evaluate("document.getElementById('none').click()")
    assert page.evaluate(LINES) == 0
    page.evaluate("document.getElementById('all').click()")
    assert page.evaluate(LINES) == 3
    page.evaluate("document.getElementById('each').click()")
    assert page.evaluate(LINES) == 6
    assert page.complaints == []


def test_axis_measure_and_smoothing_change_the_curves(page):
    label = "document.querySelector('#curve-chart [aria-label=\"x-axis label\"]').textContent"
    rough = page.evaluate(PATHS)
    assert "round" in page.evaluate(label)
    set_value(page, "smoothing", 5)
    assert page.evaluate("document.getElementById('smoothed').textContent") == "over 5 rounds"
    assert page.evaluate(PATHS) != rough
    set_value(page, "smoothing", 1)
    assert page.evaluate(PATHS) == rough
    ticks = "document.querySelector('#curve-chart [aria-label=\"x-axis tick label\"]').textContent"
    assert page.evaluate(ticks).endswith("30")
    for axis, word, last in (("seconds", "seconds", "7"), ("bytes", "bytes", "45kB")):
        set_value(page, "axis", axis)
        assert word in page.evaluate(label) and page.evaluate(ticks).endswith(last)
    for measure in page.evaluate(
        "[...document.getElementById('measure').options].map(o => o.value)"
    ):
        set_value(page, "measure", measure)
        assert page.evaluate(LINES) == 3, measure
    assert page.complaints == []


def test_pointing_at_the_chart_reads_the_means(page, folder):
    place = page.evaluate(
        "(() => { scrollTo(0, 0); document.getElementById('curve-chart').scrollIntoView();"
        " const b = document.querySelector('#curve-chart svg').getBoundingClientRect();"
        " return [b.left, b.top, b.width, b.height]; })()"
    )
    x, y = place[0] + place[2] - 21, place[1] + 60  # the last round, where the curves are highest
    page.hover(x - 5, y)
    page.hover(x, y)
    values = "[...document.querySelectorAll('#legend output')].map(o => o.value)"
    page.wait_for(f"{values}[0] !== ''")
    runs = read_runs(find_runs([folder]))
    for method, shown in zip(METHODS, page.evaluate(values), strict=True):
        last = [run.records[-1].metric("accuracy") for run in runs if run.method == method]
        assert float(shown) == pytest.approx(100 * sum(last) / 2, abs=0.01)
    assert "round 30" in page.evaluate("document.querySelector('#curve-chart').textContent")
    assert page.complaints == []


def test_the_mean_ends_where_the_first_seed_broke_off(browser, tmp_path):
    make_run(tmp_path / "a", seed=0, rounds=30)
    make_run(tmp_path / "b", seed=1, rounds=12, planned=30)
    page = browser.page()
    page.open(write_page(read_runs(find_runs([tmp_path])), tmp_path / "report.html"))
    assert page.evaluate(f"{PATHS}.map(path => path.split('L').length)") == [12]
    page.evaluate("document.getElementById('each').click()")
    assert page.evaluate(f"{PATHS}.map(path => path.split('L').length)") == [30, 12]
    assert page.complaints == []


def test_bars_follow_their_controls(page):
    bars = "document.querySelectorAll('#holdings-chart [aria-label=bar] rect').length"
    tops = "document.querySelector('#holdings-chart [aria-label=bar]').innerHTML"
    assert page.evaluate(bars) > 4
    before = page.evaluate(tops)
    page.evaluate("document.getElementById('shares').click()")
    assert page.evaluate(tops) != before
    page.evaluate("document.getElementById('shares').click()")
    set_value(page, "split", 1)
    assert page.evaluate(tops) != before
    set_value(page, "split", 0)
    assert page.evaluate(tops) == before
    assert page.complaints == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_it_fits_the_window_and_its_text_stands_out(browser, folder, width, dark):
    page = browser.page()
    page.look(width=width, dark=dark)
    page.open(folder / "report.html")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    widths = page.evaluate(
        "['#curve-chart svg', '#curve-chart']"
        ".map(name => document.querySelector(name).getBoundingClientRect().width)"
    )
    assert widths[0] == pytest.approx(widths[1], abs=1) and widths[0] > 0.84 * width
    colours = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    light = [sum(map(int, c[4:-1].split(","))) / 765 for c in colours]
    assert light[0] - light[1] > 0.7 if dark else light[1] - light[0] > 0.7
    assert page.complaints == []


def test_its_text_can_be_selected_and_printed(page):
    page.evaluate("getSelection().selectAllChildren(document.body)")
    selected = page.evaluate("getSelection().toString()")
    for words in ("wima(window=5)", "fedbasin compare", "test accuracy, %", "Loss around three"):
        assert words in selected
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("[...document.querySelectorAll('details')].every(d => d.open)")
    printed = page.call("Page.printToPDF")
    assert len(printed["data"]) > 30_000 and page.complaints == []


def test_hostile_text_is_shown_and_not_obeyed(browser, tmp_path):
    folder = make_run(tmp_path / "a", HOSTILE, notes={HOSTILE: 0.5}, model=HOSTILE)
    add_analysis(folder, every_kind(HOSTILE))
    folder.partition.write_text('client,rows,"<img src=x onerror=alert(5)>"\n0,3,3\n')
    page = browser.page()
    page.open(write_page(read_runs([folder.path]), tmp_path / "report.html"))
    assert page.complaints == [] and page.evaluate("document.images.length") == 0
    assert page.evaluate("document.querySelectorAll('body script').length") == 4
    assert page.evaluate("document.querySelector('#methods tbody th').innerText.trim()") == HOSTILE
    legend = page.evaluate("document.getElementById('holdings-legend').textContent")
    assert legend == "<img src=x onerror=alert(5)>"


@pytest.mark.parametrize("width", [390, 768])
def test_on_a_narrow_page_score_and_difference_are_visible_without_scrolling(
    browser, folder, width
):
    page = browser.page()
    page.look(width=width)
    page.open(folder / "report.html")
    shown = page.evaluate(
        "[...document.querySelectorAll('#methods td')].filter(td => td.textContent).map(td => {"
        " const r = document.createRange(); r.selectNodeContents(td);"
        " const box = r.getBoundingClientRect(); return [td.dataset.column, box.left, box.right];"
        "})"
    )
    columns = {name for name, _, _ in shown}
    assert {"accuracy, %", "difference to fedavg", "p", "seeds"} <= columns
    assert all(0 <= left < right <= width for _, left, right in shown)
    assert page.evaluate("document.querySelector('#methods').scrollWidth") <= width


def test_rounds_have_whole_numbers(browser, tmp_path):
    make_run(tmp_path / "a", rounds=3)
    page = browser.page()
    page.open(write_page(read_runs(find_runs([tmp_path])), tmp_path / "report.html"))
    ticks = page.evaluate(
        "[...document.querySelectorAll('#curve-chart [aria-label=\"x-axis tick label\"] text')]"
        ".map(tick => tick.textContent)"
    )
    assert ticks == ["1", "2", "3"]
