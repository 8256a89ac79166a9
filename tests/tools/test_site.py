"""The built site in a real browser, from the disk: every page, in light and dark, and the search."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, browser
from tools.links import site_problems
from tools.mdbook import build

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium", "mdbook", "websocket")]

# What is drawn with no size, or not at all, or ends beyond the page's right edge.
MISSING_PICTURES = """
[...document.querySelectorAll('main img')].filter(it => !it.naturalWidth).map(it => it.alt || it.src).concat(
[...document.querySelectorAll('main figure, main math')].filter(it => {
    const box = it.getBoundingClientRect();
    return box.width < 5 || box.height < 5 || box.right > innerWidth;
}).map(it => it.outerHTML.slice(0, 100)))
"""
# Listings and outputs that need sideways scrolling.
SCROLLED = """
[...document.querySelectorAll('main pre > code, main .output')]
.filter(it => it.scrollWidth > it.clientWidth + 1).map(it => it.innerText.slice(0, 100))
"""
# Markdown that its place, such as a line of HTML, has left as it was written.
UNRENDERED = """
[...document.querySelectorAll('main :is(p, summary, li, td, th, h1, h2, h3, figcaption)')]
.map(it => it.cloneNode(true))
.map(it => (it.querySelectorAll('code, pre').forEach(code => code.remove()), it.textContent))
.filter(it => it.includes('`') || it.includes('](')).map(it => it.slice(0, 100))
"""
# Text that is not on the card of its drawing.
CUT_OFF = """
[...document.querySelectorAll('main svg.viz text')].filter(it => {
    const box = it.getBBox(), card = it.ownerSVGElement.viewBox.baseVal;
    return it.getScreenCTM() && (box.x < 0 || box.x + box.width > card.width);
}).map(it => it.textContent)
"""
SMALL_CONTROLS = """
[...document.querySelectorAll('main .minisgl-stepper :is(button, input), main summary')]
.map(it => [it.tagName, it.getBoundingClientRect()])
.filter(([_, box]) => box.height > 0 && (box.height < 40 || box.width < 44)).map(([name]) => name)
"""
# Text that is dark although its drawing is; text on a colour brings its own.
DARK_TEXT = """
[...document.querySelectorAll('main svg.viz text:not([style])')]
.filter(it => getComputedStyle(it).fill.match(/\\d+/g).every(part => part < 100)).map(it => it.textContent)
"""
# Cells of a table that hold a sentence and have hardly room for a word of it.
NARROW_CELLS = """
[...document.querySelectorAll('main td')].filter(it => it.innerText.trim().length > 20 && it.clientWidth < 70)
.map(it => it.innerText.slice(0, 100))
"""
# Text whose contrast to what is behind it is below WCAG's 4.5, and how many texts were looked at. Behind the text of a
# drawing is the last shape before it that its middle lies in.
FAINT = """
(() => {
    const parts = color => (color.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
    const over = ([r, g, b, alpha = 1], under) => [r, g, b].map((part, i) => part * alpha + under[i] * (1 - alpha));
    const linear = part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const luminance = rgb => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => sum + w * linear(rgb[i] / 255), 0.05);
    const painted = it => parts(getComputedStyle(it).backgroundColor);
    const behind = it => it ? over(painted(it), behind(it.parentElement)) : [255, 255, 255];
    const filled = (style, under) => {
        const [r, g, b, alpha = 1] = parts(style.fill);
        return over([r, g, b, alpha * style.fillOpacity * style.opacity], under);
    };
    const faint = [];
    let count = 0;
    const look = (color, ground, text) => {
        const [less, more] = [luminance(color), luminance(ground)].sort((a, b) => a - b);
        count += 1;
        if (more / less < 4.5) faint.push(`${text.slice(0, 40)}: ${(more / less).toFixed(2)}`);
    };
    const kinds = 'p, li, td, th, h1, h2, h3, a, strong, em, summary, code, pre span, figcaption';
    for (const it of document.querySelectorAll(`main :is(${kinds})`)) {
        const words = [...it.childNodes].filter(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
        if (!words.length || !it.checkVisibility()) continue;
        const ground = behind(it);
        look(over(parts(getComputedStyle(it).color), ground), ground, words[0].data.trim());
    }
    for (const text of document.querySelectorAll('main svg.viz text')) {
        const box = text.getBBox(), svg = text.ownerSVGElement;
        if (!box.width || !svg.checkVisibility()) continue;
        const middle = new DOMPoint(box.x + box.width / 2, box.y + box.height / 2).matrixTransform(text.getScreenCTM());
        let ground = behind(svg);
        for (const shape of svg.querySelectorAll('rect, path, circle, ellipse, polygon')) {
            const style = getComputedStyle(shape);
            const before = shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING;
            if (!before || !style.fill.startsWith('rgb')) continue;
            const inside = shape.isPointInFill(middle.matrixTransform(shape.getScreenCTM().inverse()));
            if (inside) ground = filled(style, ground);
        }
        look(filled(getComputedStyle(text), ground), ground, text.textContent);
    }
    return {faint, count};
})()
"""
TEXT_SIZES = "[...document.querySelectorAll('svg.viz .viz-small')].map(it => it.getScreenCTM().a * 12)"
# How far a page scrolls sideways, in pixels: the document does not, but what holds its text may.
OVERHANG = """
Math.max(...[document.scrollingElement, ...document.querySelectorAll('#mdbook-content, main')]
.map(it => it.scrollWidth - it.clientWidth))
"""
UNFOLD = "document.querySelectorAll('main details').forEach(it => { it.open = true })"
WIDTHS, SCHEMES = (1280, 390), ("light", "dark")
# Prose, players, lanes and bars, coloured bits and formulas, tables and definitions.
REPRESENTATIVE = ("preface", "06-the-radix-tree", "11-cuda-graphs", "19-quantised-weights", "glossary")
PARTS = [f"part-{number}" for number in range(1, 6)]
LINKS = "getComputedStyle(document.querySelector('main a[href^=http]')).color"
CARDS = "[...new Set([...document.querySelectorAll('.viz-card')].map(it => getComputedStyle(it).fill))]"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of this book. Whether it is sound is another test's question, `make book`'s."""
    made = tmp_path_factory.mktemp("book") / "site"
    build(ROOT, made)
    return made


@pytest.fixture(scope="module")
def page(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium"), width=1280) as opened:
        yield opened


def chapters(site: Path) -> list[Path]:
    pages = sorted(site.glob("[0-9][0-9]-*.html"))
    listed = (ROOT / "chapters" / "SUMMARY.md").read_text()
    assert len(pages) == len(re.findall(r"\(\d\d-.*\.md\)", listed))
    return [*pages, *(site / f"{name}.html" for name in ("preface", *PARTS, "glossary"))]


Seen = dict[str, dict[str, Any]]
"""What looks at a page have found, by the name of the page and by the look. Opening takes longer than looking."""


@pytest.fixture(scope="module")
def wide(site: Path, page: Browser) -> Seen:
    """Every page in light, at 1,280 pixels."""
    seen: Seen = {}
    for path in [site / "index.html", *chapters(site), site / "print.html"]:
        page.open(path.as_uri())
        page.wait_for("document.querySelector('main h1')")
        looks = (MISSING_PICTURES, UNRENDERED, SCROLLED, CUT_OFF)
        seen[path.name] = {look: page.evaluate(look) for look in looks} | {"problems": list(page.problems)}
    seen["print.html"]["drawings"] = page.evaluate("document.querySelectorAll('main figure svg').length")
    return seen


@contextmanager
def shown_as(page: Browser, scheme: str, width: int) -> Iterator[None]:
    """The page in light or dark, and at a width at which it is a phone's or not."""
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    page.call("Emulation.setDeviceMetricsOverride", **size)
    try:
        yield
    finally:
        page.call("Emulation.clearDeviceMetricsOverride")
        page.call("Emulation.setEmulatedMedia", features=[])


@pytest.fixture(scope="module")
def phone(site: Path, page: Browser) -> Seen:
    """Every page in dark, at 390 pixels, with all that was folded."""
    seen: Seen = {}
    with shown_as(page, "dark", 390):
        for path in [*chapters(site), site / "differences.html", site / "adding-a-model.html"]:
            page.open(path.as_uri())
            page.evaluate(UNFOLD)
            looks = (TEXT_SIZES, OVERHANG, SMALL_CONTROLS, NARROW_CELLS, DARK_TEXT)
            seen[path.name] = {look: page.evaluate(look) for look in looks}
    return seen


def test_every_page_opens_without_an_error_or_a_missing_picture(wide: Seen) -> None:
    for name, seen in wide.items():
        assert seen[MISSING_PICTURES] == [], name
        assert seen[UNRENDERED] == [], name
        assert seen["problems"] == [], name
    assert wide["print.html"]["drawings"] > 20, "print.html holds all chapters"


def test_lines_fit(wide: Seen) -> None:
    assert {name: seen[SCROLLED] for name, seen in wide.items() if seen[SCROLLED]} == {}


def test_nothing_comes_from_a_network(site: Path, page: Browser, wide: Seen) -> None:
    assert [url for url in page.requested if not url.startswith(("file:", "data:"))] == []
    assert len(page.requested) > len(wide)
    assert not [problem for problem in site_problems(site) if "network" in problem]


def test_search_finds_the_radix_tree(site: Path, page: Browser) -> None:
    page.open((site / "index.html").as_uri())
    page.wait_for("window.elasticlunr")
    page.click("#mdbook-search-toggle")
    page.wait_for("document.activeElement.id === 'mdbook-searchbar'")
    page.call("Input.insertText", text="radix")
    page.wait_for("document.querySelectorAll('#mdbook-searchresults a').length > 1")
    first = page.evaluate("document.querySelector('#mdbook-searchresults a').innerText")
    assert "radix tree" in first.lower()
    excerpts = page.evaluate("document.querySelector('#mdbook-searchresults').innerText")
    assert "evictable, no." not in excerpts, "no picture's text"
    page.click("#mdbook-searchresults a")
    page.wait_for("document.querySelector('main mark')")
    assert page.problems == []


@pytest.mark.parametrize(
    ("words", "title"),
    [("paged kv", "Paged KV"), ("continuous batching", "Continuous batching"), ("TTFT", "TTFT"), ("slot", "slot")],
)
def test_search_finds_titles_and_terms_of_the_glossary(site: Path, page: Browser, words: str, title: str) -> None:
    page.open((site / "preface.html").as_uri())
    page.wait_for("window.elasticlunr")
    page.click("#mdbook-search-toggle")
    page.wait_for("document.activeElement.id === 'mdbook-searchbar'")
    page.call("Input.insertText", text=words)
    page.wait_for("document.querySelectorAll('#mdbook-searchresults a').length > 0")
    found = page.evaluate(
        "[...document.querySelectorAll('#mdbook-searchresults a')].slice(0, 3).map(it => it.innerText)"
    )
    assert [each for each in found if title in each.split(" » ")], found


def test_no_text_of_a_drawing_ends_beyond_its_card(wide: Seen) -> None:
    assert {name: seen[CUT_OFF] for name, seen in wide.items() if seen[CUT_OFF]} == {}


def test_on_a_phone_drawings_scroll_and_pages_do_not(phone: Seen) -> None:
    for name, seen in phone.items():
        assert min(seen[TEXT_SIZES], default=12) >= 11, name
        assert seen[OVERHANG] <= 0, f"{name} scrolls sideways"
        assert seen[SMALL_CONTROLS] == [], name
        assert seen[NARROW_CELLS] == [], name
    assert sum(len(seen[TEXT_SIZES]) for seen in phone.values()) > 1000


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_pages_can_be_read_in_light_and_dark_on_a_screen_and_a_phone(
    site: Path, page: Browser, scheme: str, width: int
) -> None:
    with shown_as(page, scheme, width):
        for name in REPRESENTATIVE:
            page.open((site / f"{name}.html").as_uri())
            page.evaluate(UNFOLD)
            contrast = page.evaluate(FAINT)
            assert contrast["faint"] == [], name
            assert contrast["count"] > 100, name
            assert page.evaluate(OVERHANG) <= 0, f"{name} scrolls sideways"
            assert min(page.evaluate(TEXT_SIZES), default=12) >= 11, name
            assert page.evaluate(CUT_OFF) == [], name


@pytest.mark.parametrize("style", ["main p { color: #999 }", "main svg.viz :is(rect, path) { fill: #555 !important }"])
def test_faint_text_is_noticed(site: Path, page: Browser, style: str) -> None:
    page.open((site / "06-the-radix-tree.html").as_uri())
    page.evaluate(f"document.head.append(Object.assign(document.createElement('style'), {{textContent: `{style}`}}))")
    assert len(page.evaluate(FAINT)["faint"]) > 10


def test_formulas_scroll_sideways_at_most(site: Path, page: Browser) -> None:
    page.open((site / "02-the-transformer-inference-only.html").as_uri())
    overhangs = "[...document.querySelectorAll('math[display=block]')].map(it => it.scrollHeight - it.clientHeight)"
    found = page.evaluate(overhangs)
    assert len(found) > 5
    assert max(found) <= 0


def test_pictures_follow_the_theme(site: Path, page: Browser, phone: Seen) -> None:
    cards = {}
    for preference in ("light", "dark"):
        preferred = {"name": "prefers-color-scheme", "value": preference}
        page.call("Emulation.setEmulatedMedia", features=[preferred])
        page.open((site / "06-the-radix-tree.html").as_uri())
        cards[preference] = page.evaluate(CARDS)
    assert page.evaluate(LINKS) == "rgb(95, 176, 229)", "mdBook's own blue is too dark"
    page.call("Emulation.setEmulatedMedia", features=[])
    assert cards == {"light": ["rgb(251, 250, 247)"], "dark": ["rgb(27, 32, 48)"]}
    assert {name: seen[DARK_TEXT] for name, seen in phone.items() if seen[DARK_TEXT]} == {}


def test_a_player_steps(site: Path, page: Browser) -> None:
    page.open((site / "06-the-radix-tree.html").as_uri())
    counter = "document.querySelector('.minisgl-stepper output').innerText"
    height = "document.querySelector('.minisgl-stepper').getBoundingClientRect().height"
    first, tall = page.evaluate(counter), page.evaluate(height)
    page.evaluate("document.querySelector('.minisgl-stepper').scrollIntoView({block: 'center', behavior: 'instant'})")
    page.click(".minisgl-stepper button[aria-label='next picture']")
    assert (first, page.evaluate(counter)) == (f"1 of {first.split()[-1]}", f"2 of {first.split()[-1]}")
    assert page.evaluate(height) == tall


def test_answers_are_folded(site: Path, page: Browser) -> None:
    page.open((site / "06-the-radix-tree.html").as_uri())
    height = "document.querySelector('main details').getBoundingClientRect().height"
    folded = page.evaluate(height)
    page.evaluate("document.querySelector('main details').scrollIntoView({block: 'center', behavior: 'instant'})")
    page.click("main details summary")
    page.wait_for(f"{height} > {folded} + 20")
