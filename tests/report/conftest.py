"""Pages in headless Chromium. Without a browser these tests fail: nothing else looks at the page as readers do."""

import contextlib
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from hpcfsdp.cli.main import main

SCREENSHOTS = Path(__file__).parent / "screenshots"
"""Pictures of the last run of the tests, for people; not in the repository."""
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser():
    """A browser without a window. CI runs as root, where Chromium refuses its sandbox; the pages are our own."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    assert program, f"none of {', '.join(PROGRAMS)} is installed: apt-get install chromium"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


class Opened:
    """A page in a window, with what it has asked for and complained about."""

    def __init__(self, page, path):
        self.page, self.requests, self.complaints = page, [], []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(path.as_uri())

    def text(self):
        """The text that a reader sees."""
        return self.page.inner_text("body")

    def boxes(self, selector):
        """Boxes of all elements in pixels: left, top, right, bottom, and their text. Those of no size are left out."""
        return self.page.eval_on_selector_all(
            selector,
            """elements => elements.map(element => {
                const box = element.getBoundingClientRect();
                return [box.left, box.top + scrollY, box.right, box.bottom + scrollY, element.textContent.trim()];
            }).filter(box => box[2] > box[0] && box[3] > box[1])""",
        )

    def save(self, name):
        """Keep a picture of the whole page."""
        SCREENSHOTS.mkdir(exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


@pytest.fixture
def opened(browser):
    """Open a page in a window of some size; ``scheme`` is light or dark."""
    with contextlib.ExitStack() as stack:

        def open_page(path, width, height, *, scheme="light", scale=1):
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=scale
            )
            stack.callback(context.close)
            return Opened(context.new_page(), path)

        yield open_page


@pytest.fixture(scope="session")
def reported(tmp_path_factory):
    """Write the report of a folder, with the command; its path."""

    def report(folder):
        page = tmp_path_factory.mktemp("page") / "report.html"
        assert main(["report", str(folder), "--out", str(page)]) == 0
        return page

    return report
