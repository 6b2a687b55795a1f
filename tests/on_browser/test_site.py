"""The documentation site in Chromium, as a reader sees it (``make test-browser``).

The pictures of pages are in build/screenshots, for a person to look at.
"""

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

playwright = pytest.importorskip("playwright.sync_api")
# Classes of playwright, which is installed only where these tests run.
Browser: TypeAlias = Any
Page: TypeAlias = Any

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
PICTURES = ROOT / "build" / "screenshots"
PAGES = ("", "get-started/", "hook-reference/", "settings/", "performance/", "gallery/")
WIDTHS = (1280, 390)
# Each element that is wider than the page, unless it can be scrolled by itself.
TOO_WIDE = """
() => {
  const width = document.documentElement.clientWidth;
  const scrolls = element => {
    for (let above = element; above; above = above.parentElement) {
      if (["auto", "scroll", "hidden"].includes(getComputedStyle(above).overflowX)) return true;
    }
    return false;
  };
  return [...document.querySelectorAll(".md-content *")]
    .filter(element => element.getBoundingClientRect().right > width + 1 && !scrolls(element))
    .map(element => element.outerHTML.slice(0, 100));
}
"""
# Each cell of a table with a sentence that has room for fewer than about ten letters a line.
SQUEEZED = """
() => [...document.querySelectorAll(".md-content td")]
  .filter(cell => cell.innerText.trim().length > 40)
  .filter(cell => cell.getBoundingClientRect().width < 100)
  .map(cell => cell.innerText.slice(0, 60))
"""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each request."""

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serves the site on this machine."""
    assert (SITE / "index.html").exists(), "make docs"
    handler = functools.partial(QuietHandler, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium, "apt-get install chromium"
    flags = ["--no-sandbox"] if os.getuid() == 0 else []
    with playwright.sync_playwright() as starter:
        started = starter.chromium.launch(executable_path=chromium, args=flags)
        yield started
        started.close()


def open_page(browser: Browser, url: str, width: int, scheme: str = "light") -> Page:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(url, wait_until="networkidle")
    return page


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_pages_are_read_without_scrolling_sideways(
    browser: Browser, address: str, name: str, width: int
) -> None:
    page = open_page(browser, f"{address}{name}", width)
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name.strip('/') or 'home'}-{width}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(TOO_WIDE) == []
    assert page.evaluate(SQUEEZED) == []
    page.close()


def test_pictures_can_be_read_in_dark_mode(browser: Browser, address: str) -> None:
    """A person has to look at the picture; here, only that the page is dark."""
    page = open_page(browser, f"{address}performance/", 1280, scheme="dark")
    page.screenshot(path=PICTURES / "performance-dark.png")
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    red, green, blue = (int(value) for value in color.strip("rgba()").split(",")[:3])
    assert max(red, green, blue) < 80
    page.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_search_leads_to_a_page_about_it(browser: Browser, address: str, width: int) -> None:
    page = open_page(browser, address, width)
    if width < 1000:
        page.locator("label[for=__search].md-header__button").click()
    query = page.locator("input[name=query]")
    query.focus()
    playwright.expect(query).to_be_focused()
    query.press_sequentially("resume")
    result = page.locator(".md-search-result__link").first
    result.wait_for()
    page.screenshot(path=PICTURES / f"search-{width}.png")
    result.click()
    page.wait_for_url("**/runs/**")
    assert "resume" in page.locator(".md-content").inner_text().lower()
    page.close()
