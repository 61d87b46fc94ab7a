"""Pages of runs that are being written, and of servers that end or need a token."""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Open, save, view_server
from made_runs import MadeRun, short
from playwright.sync_api import expect

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv/bin/python"
"""With torch, which the browser's environment does not have."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def empty(folder: Path) -> Iterator[str]:
    """A server of a folder without runs."""
    folder.mkdir()
    with view_server(folder) as url:
        yield url


def add_group(run: MadeRun, epoch: int, row: str) -> None:
    run.group(epoch, row, [(short(run.chance, each), float(each % 2)) for each in range(4)])


def test_a_run_is_followed_from_its_beginning_to_its_end(empty: str, folder: Path, open_page: Open) -> None:
    listed = open_page("/runs", url=empty)
    expect(listed.get_by_text("There is no run in")).to_be_visible()
    expect(listed.locator("#live")).to_have_class("on")
    run = MadeRun(folder / "new", epochs=3)
    expect(listed.get_by_role("row").filter(has_text="new")).to_contain_text("running")

    page = open_page("/run", url=empty, run="new")
    note = page.locator(".table-note")
    expect(note).to_have_text("No group has been completed yet.")
    add_group(run, 1, "row-000")
    expect(note).to_have_text("1 row")
    run.end_epoch(1)
    expect(page.get_by_role("img", name=re.compile("^Loss"))).to_be_visible()
    run.validate(1, 0.4)
    expect(page.locator(".lead-fact .figure")).to_have_text("0.400")
    expect(listed.get_by_role("row").filter(has_text="new")).to_contain_text("1 / 3")
    for epoch in (2, 3):
        add_group(run, epoch, "row-000")
        run.end_epoch(epoch)
    expect(page.get_by_role("img", name=re.compile("^Loss. new: .* epoch 3"))).to_be_visible()
    run.end("failed", "BackendError: the disk is full", epoch=3)
    expect(page.get_by_role("alert")).to_contain_text("the disk is full")
    expect(page.get_by_role("heading", level=1)).to_contain_text("failed")
    expect(listed.get_by_role("row").filter(has_text="new")).to_contain_text("✕failed")


def test_a_line_is_shown_within_two_seconds(empty: str, folder: Path, open_page: Open) -> None:
    """The fastest of several: a machine that is busy with something else may be late."""
    run = MadeRun(folder / "new", epochs=8)
    page = open_page("/run", url=empty, run="new")
    note, seconds = page.locator(".table-note"), []
    for row in range(1, 9):
        add_group(run, 1, f"row-{row:03d}")
        written = time.monotonic()
        expect(note).to_have_text(f"{row} row{'s' * (row > 1)}")
        seconds.append(time.monotonic() - written)
    assert min(seconds) < 2, seconds
    run.end(epoch=0)


def test_the_row_of_a_group_is_followed_through_the_epochs(empty: str, folder: Path, open_page: Open) -> None:
    run = MadeRun(folder / "new", epochs=3)
    for epoch in (1, 2):
        add_group(run, epoch, "row-000")
        run.end_epoch(epoch)
    page = open_page("/group", url=empty, run="new", epoch=1, row="row-000")
    history = page.get_by_role("group", name="The rewards of this row through the epochs").get_by_role("link")
    expect(history).to_have_count(2)
    add_group(run, 3, "row-000")
    expect(history).to_have_count(3)
    run.end(epoch=3)


def test_what_is_open_stays_as_it_is_when_the_run_goes_on(empty: str, folder: Path, open_page: Open) -> None:
    run = MadeRun(folder / "new", epochs=3)
    for row in range(40):
        add_group(run, 1, f"row-{row:03d}")
    run.end_epoch(1)
    page = open_page("/run", url=empty, run="new")
    page.locator("#part-settings summary").click()
    page.locator(".scroller").evaluate("element => element.scrollTop = 300")
    add_group(run, 2, "row-000")
    run.end_epoch(2)
    expect(page.locator(".table-note")).to_have_text("41 rows")
    expect(page.get_by_role("img", name=re.compile("^Loss. new: .* epoch 2"))).to_be_visible()
    assert page.locator(".scroller").evaluate("element => element.scrollTop") == 300
    expect(page.locator("#part-settings")).to_have_attribute("open", "")
    run.end(epoch=2)


def test_a_server_that_ends_and_one_that_needs_a_token(open_page: Open, runs: Path) -> None:
    with view_server(runs, "--token", "secret-of-the-page") as link:
        page = open_page("/runs", url=link, refused=True)
        expect(page.get_by_role("heading", name="This server needs its token")).to_be_visible()
        page.get_by_label("Token").fill("secret-of-the-page")
        page.get_by_role("button", name="Open").click()
        expect(page.get_by_role("row").filter(has_text="learning")).to_be_visible()
        page.goto(link)
        expect(page.get_by_role("row").filter(has_text="learning")).to_be_visible()
        assert "secret" not in page.url
        page.get_by_role("link", name="learning").click()
        expect(page.get_by_role("heading", name="learning")).to_be_visible()
        expect(page.locator("#live")).to_have_class("on")
    expect(page.locator("#live")).to_have_text("reconnecting")
    expect(page.get_by_role("heading", name="learning")).to_be_visible()


def test_a_real_run_while_it_trains(folder: Path, open_page: Open) -> None:
    """Shows the run's episodes afterwards."""
    folder.mkdir()
    command = [PYTHON, "-m", "insitu", "finetune", "--config_file", ROOT / "examples/tic_tac_toe/grpo.yml"]
    changes = {
        "finetuning.num_epochs": 2,
        "finetuning.output_dir": folder / "game",
        "finetuning.validation.interval": 2,
    }
    options = [text for key, value in changes.items() for text in ("-o", key, str(value))]
    with view_server(folder, python=PYTHON) as url:
        page = open_page("/runs", url=url, refused=True)
        with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                expect(page.get_by_role("row").filter(has_text="game")).to_contain_text("running", timeout=60_000)
                page.get_by_role("link", name="game").click()
                expect(page.locator(".tbody .tr").first).to_be_visible(timeout=120_000)
                save(page, "run-running-1600-light")
                expect(page.get_by_role("img", name=re.compile("^Loss. .* epoch 2"))).to_be_visible(timeout=240_000)
                assert process.wait(timeout=120) == 0
            finally:
                process.terminate()
        expect(page.get_by_role("heading", level=1)).to_contain_text("completed")
        page.get_by_role("link", name=re.compile("^train-")).first.click()
        page.locator(".episodes tbody a").first.click()
        expect(page.locator(".message .t").filter(has_text="move").first).to_be_visible()
        page.get_by_role("button", name="probability").click()
        page.locator(".message .t").nth(1).hover()
        expect(page.get_by_role("tooltip")).to_contain_text("log-probability")
        save(page, "episode-probability-1600-light")
