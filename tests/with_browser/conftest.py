"""A browser, the made-up runs, and `insitu view` on them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
from made_runs import write_runs
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

SCREENSHOTS = Path(os.environ.get("SCREENSHOTS", "build/screenshots"))
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"

Open = Callable[..., Page]

expect.set_options(timeout=30_000)  # what never comes ends the test; a busy machine does not


@contextmanager
def view_server(folder: Path, *options: str, python: str | Path = sys.executable) -> Iterator[str]:
    """`insitu view` of a folder: the link that it prints."""
    command = [python, "-m", "insitu", "view", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("insitu view ready at http"), line
            yield line.split()[-1]
        finally:
            process.terminate()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def server(runs: Path) -> Iterator[str]:
    with view_server(runs) as url:
        yield url


@pytest.fixture
def open_page(browser: Browser, server: str) -> Iterator[Open]:
    """Opens a page and waits until it is shown: `open_page("/run", run="learning", width=400, scheme="dark")`.

    `refused` says that the server may refuse what the page asks for. Afterwards, no page may have asked another server,
    broken the policy of its content, written an error to the console, or run what a text of a run contains.
    """
    problems: list[str] = []
    pages: list[tuple[Page, str]] = []

    def opened(
        path: str,
        width: int = 1600,
        scheme: str = "light",
        url: str = server,
        refused: bool = False,
        **query: str | int,
    ) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        page = context.new_page()
        expected = "Failed to load resource" if refused else None
        page.on("console", lambda message: _check_message(message, expected, problems))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: _check_host(request.url, url, problems))
        page.on("dialog", lambda dialog: problems.append(f"a dialogue: {dialog.message}"))
        pages.append((page, url))
        page.goto(f"{urlsplit(url).scheme}://{urlsplit(url).netloc}{path}" + (f"?{urlencode(query)}" if query else ""))
        page.wait_for_selector("main .page, main .problem")
        return page

    yield opened
    for page, _ in pages:
        assert page.evaluate("window.hacked") is None
        page.context.close()
    assert problems == []


def _check_host(requested: str, url: str, problems: list[str]) -> None:
    if urlsplit(requested).netloc != urlsplit(url).netloc and not requested.startswith("data:"):
        problems.append(f"a request to {requested}")


def _check_message(message: ConsoleMessage, expected: str | None, problems: list[str]) -> None:
    if message.type == "error" and not (expected and message.text.startswith(expected)):
        problems.append(f"{message.text} ({message.location.get('url')})")


def save(page: Page, name: str) -> Path:
    """A screenshot of what is in view, to be looked at."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"{name}.png"
    page.evaluate("document.fonts.ready")
    page.screenshot(path=path)
    return path
