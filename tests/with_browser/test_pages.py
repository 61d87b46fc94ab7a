"""What each page of `insitu view` shows, on runs that are finished, failed, not begun, and damaged."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import Open, save, view_server
from made_runs import HOSTILE, HOSTILE_ROW, MadeRun, short
from playwright.sync_api import expect

EVERY = "insitu_run_every_kind/1"


def episode(row: str, generation: int = 0) -> dict[str, str]:
    return {"run": "every_kind", "episode": f"{EVERY}/{row}/{generation}/0"}


PAGES: dict[str, tuple[str, dict[str, str | int]]] = {
    "runs": ("/runs", {}),
    "run": ("/run", {"run": "learning"}),
    "run-of-one-epoch": ("/run", {"run": "every_kind"}),
    "run-not-begun": ("/run", {"run": "not_begun"}),
    "run-failed": ("/run", {"run": "failed"}),
    "run-corrupted": ("/run", {"run": "corrupted"}),
    "run-of-preferences": ("/run", {"run": "preferences", "list": "episodes"}),
    "run-bad": ("/run", {"run": "bad"}),
    "no-page": ("/nothing", {}),
    "comparison": ("/run", {"run": "learning", "compare": "failed"}),
    "group": ("/group", {"run": "learning", "epoch": 3, "row": "row-001"}),
    "group-of-two": ("/group", {"run": "every_kind", "epoch": 1, "row": "tools"}),
    "group-of-pairs": ("/group", {"run": "preferences", "epoch": 1, "row": "row-000"}),
    "group-of-64": ("/group", {"run": "every_kind", "epoch": 1, "row": "many"}),
    "group-failed": ("/group", {"run": "every_kind", "epoch": 1, "row": "failed"}),
    "group-corrupted": ("/group", {"run": "corrupted", "epoch": 3, "row": "row-001"}),
    "episode": ("/episode", {"run": "learning", "episode": "insitu_run_learning/3/row-001/0/0"}),
    "episode-of-pairs": ("/episode", {"run": "preferences", "episode": "insitu_run_preferences/1/row-000/1/0"}),
    "episode-tools": ("/episode", episode("tools")),
    "episode-parts": ("/episode", episode("parts")),
    "episode-hostile": ("/episode", episode(HOSTILE_ROW)),
    "episode-team": ("/episode", episode("team")),
    "episode-long": ("/episode", episode("long")),
    "episode-without-calls": ("/episode", episode("failed")),
    "episode-failed-call": ("/episode", episode("failed", 1)),
}


@pytest.mark.parametrize(("width", "scheme"), [(1600, "light"), (1600, "dark"), (400, "light"), (400, "dark")])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_its_width(open_page: Open, name: str, width: int, scheme: str) -> None:
    path, query = PAGES[name]
    page = open_page(path, width=width, scheme=scheme, refused=name == "no-page", **query)
    expect(page.locator("#live")).to_have_class("on")
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    assert [(each["id"], [node["html"][:200] for node in each["nodes"]][:5]) for each in found] == []
    save(page, f"{name}-{width}-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.title().endswith("insitu")


def test_the_runs_of_a_folder(open_page: Open) -> None:
    page = open_page("/runs")
    row = page.get_by_role("row").filter(has_text="learning")
    expect(row).to_contain_text("✓completed")
    expect(row).to_contain_text("0.310 → 0.810")
    expect(row).to_contain_text("15 / 15")
    expect(page.get_by_role("row").filter(has_text="failed")).to_contain_text("CUDA out of memory")
    expect(page.get_by_role("row").filter(has_text="not_begun")).to_contain_text("†died")


def test_the_list_of_runs_is_read_on_a_phone(tmp_path: Path, open_page: Open) -> None:
    """Each figure is beside its name, and a long name of a run leaves its state readable."""
    run = MadeRun(tmp_path / "tic_tac_toe_with_a_judge_and_curriculum_learning_of_rows_2026_11_27", epochs=3)
    for epoch, score in enumerate((0.31, 0.9, 0.8)):
        run.validate(epoch, score)
    run.end("failed", f"BackendError: {'the disk is full, ' * 20}", epoch=2)
    with view_server(tmp_path) as url:
        page = open_page("/runs", width=390, url=url, refused=True)
        row = page.locator(".runs tbody tr")
        expect(row.locator(".c-score")).to_contain_text("best, epoch 1")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        name, state = row.locator(".c-name a").bounding_box(), row.locator(".c-state").bounding_box()
        assert name is not None
        assert state is not None
        assert name["x"] + name["width"] <= state["x"]
        lefts = [row.locator(f"{cell} .num").bounding_box()["x"] for cell in (".c-score", ".c-reward", ".c-epochs")]  # type: ignore[index]
        assert len({*lefts}) == 1, "the figures are in a column"
        save(page, "runs-390-long")
        MadeRun(tmp_path / "other").end(epoch=0)
        page = open_page("/run", width=390, url=url, refused=True, run="other")
        expect(page.get_by_label("Compare with")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_runs_are_sorted_and_filtered_in_the_address(open_page: Open) -> None:
    page = open_page("/runs")
    names = page.locator("tbody th a")
    page.get_by_role("button", name="Held-out score").click()
    assert names.first.inner_text() == "learning"
    page.get_by_role("searchbox", name="Filter").fill("fail")
    expect(names).to_have_text(["failed"])
    page.reload()
    expect(names).to_have_text(["failed"])


def test_several_runs_are_compared(open_page: Open) -> None:
    page = open_page("/runs")
    page.get_by_label("Compare learning").check()
    page.get_by_label("Compare failed").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    expect(page.get_by_role("heading", name="2 runs compared")).to_be_visible()
    expect(page.locator(".compared").first).to_contain_text("0.310 → 0.810")
    expect(page.get_by_role("region", name="Settings that differ")).to_contain_text("finetuning.num_epochs")
    expect(page.get_by_role("img", name=re.compile("^Loss. learning: .* epoch 15; failed: "))).to_be_visible()
    page.get_by_role("link", name="Remove failed").click()
    expect(page.get_by_role("heading", name="learning")).to_be_visible()


def test_settings_that_are_the_same_by_default_do_not_differ(tmp_path: Path, open_page: Open) -> None:
    """Of two runs, of which one states what is the default of the other."""
    given: dict[str, dict[str, Any]] = {"one": {"validation": {"reps": 1}}, "two": {"curriculum": {"share": 0.5}}}
    for name, stated in given.items():
        epochs = {"one": 2, "two": 3}[name]
        folder = MadeRun(tmp_path / name, epochs=epochs).end(epoch=0)
        record = json.loads((folder / "run.json").read_text())
        config = record["config"]["finetuning"] | {"validation": {"reps": 1, "interval": 1}} | stated
        settings = {"given": {"finetuning": {"num_epochs": epochs} | stated}, "config": {"finetuning": config}}
        (folder / "run.json").write_text(json.dumps(record | settings))
    with view_server(tmp_path) as url:
        page = open_page("/run", url=url, refused=True, run="one", compare="two")
        rows = page.get_by_role("region", name="Settings that differ").locator("tbody tr")
        expect(rows).to_have_text(["finetuning.num_epochs23", "finetuning.curriculum.share–0.5"])


def test_a_run_says_how_it_does(open_page: Open) -> None:
    page = open_page("/run", run="learning")
    expect(page.locator(".lead-fact")).to_contain_text("best, epoch 15 · +0.500 since epoch 0")
    expect(page.locator(".lead-fact")).to_contain_text("95 %: 0.770 to 0.850")
    score = page.get_by_role("img", name=re.compile("^Held-out score and training reward"))
    expect(score).to_have_attribute("aria-label", re.compile("held-out score: 0.310 at epoch 0, 0.810 at epoch 15"))
    expect(page.get_by_role("region", name="Left out")).to_contain_text("timeout")
    page.get_by_text("Settings of the file").click()
    expect(page.locator("#part-settings")).to_contain_text("Qwen/Qwen2.5-0.5B-Instruct")


def test_scores_of_other_rows_are_not_compared(tmp_path: Path, open_page: Open) -> None:
    """As after `--resume` with other held-out rows."""
    run = MadeRun(tmp_path / "run", epochs=3)
    for epoch, (score, rows) in enumerate(((0.9, "1111"), (0.3, "2222"), (0.5, "2222"))):
        run.validate(epoch, score, scored_by=f"score, rows {rows}")
    run.end("failed", "the disk is full", epoch=2)
    with view_server(tmp_path) as url:
        page = open_page("/run", url=url, refused=True, run="run")
        expect(page.locator(".lead-fact")).to_contain_text("0.300 → 0.500best, epoch 2 · +0.200 since epoch 1")
        curves = "other rows or evaluator: 0.900 at epoch 0.* held-out score: 0.300 at epoch 1, 0.500 at epoch 2"
        expect(page.get_by_role("img", name=re.compile("^Held-out"))).to_have_attribute(
            "aria-label", re.compile(curves)
        )


def test_a_run_that_has_not_begun_has_no_numbers(open_page: Open) -> None:
    page = open_page("/run", run="not_begun")
    expect(page.locator(".facts")).to_contain_text("no validation")
    expect(page.locator(".facts")).to_contain_text("0 / 15")
    expect(page.locator(".chart").filter(visible=True)).to_have_count(0)
    expect(page.get_by_text("No group has been completed yet.")).to_be_visible()


def test_the_rewards_of_pairs_and_of_episodes_have_names_of_their_own(open_page: Open, runs: Path) -> None:
    page = open_page("/run", run="preferences")
    titles = page.locator(".chart .title").all_inner_texts()
    assert len({*titles}) == len(titles)
    assert [title for title in titles if "eward" in title] == [
        *("Training reward", "Implicit reward, margin", "Implicit reward, accuracy"),
        *("Implicit reward, chosen", "Implicit reward, rejected", "Reward deviation within a group"),
        "Episodes with a reward",
    ]
    expect(page.locator(".fact").filter(has_text="Training reward")).to_contain_text("0.500")
    with gzip.open(runs / "preferences/episodes.jsonl.gz", "rt") as file:
        played = [line for line in map(json.loads, file) if line.get("epoch") == 1]
    collected = len([line for line in played if line["reward"] is not None])
    speed = f"Episodes collected per second. preferences: {collected / 31:.3f}/s at epoch 1"
    expect(page.get_by_role("img", name=speed)).to_have_count(1)
    episode = open_page("/episode", run="preferences", episode="insitu_run_preferences/1/row-000/0/0")
    expect(episode.locator(".fact").filter(has_text="Reward")).to_contain_text("1.000")
    expect(episode.locator(".pair .cell.chosen").first).to_contain_text("reward 1.000")


def test_a_failed_run_says_why(open_page: Open) -> None:
    page = open_page("/run", run="failed")
    expect(page.get_by_role("alert")).to_contain_text("the training job of epoch 2 failed: CUDA out of memory")
    expect(page.locator("main")).not_to_contain_text(".py")


def test_a_row_whose_episodes_teach_nothing_says_why(tmp_path: Path, open_page: Open) -> None:
    run = MadeRun(tmp_path / "run")
    run.group(1, "row-000", [(short(run.chance, each), 1.0) for each in range(4)])
    reason = {"metadata": {"dropped": "no_variance"}}
    run.with_advantages = [(each.model_copy(update=reason), {}) for each, _ in run.with_advantages]
    run.group(1, "row-001", [(short(run.chance, each), float(each % 2)) for each in range(4)])
    run.end_epoch(1, dropped={"no_variance": 4})
    run.end()
    with view_server(tmp_path) as url:
        page = open_page("/run", url=url, refused=True, run="run")
        rows = page.get_by_role("row")
        expect(rows.filter(has_text="row-000").get_by_role("cell").last).to_have_text("4 no_variance")
        expect(rows.filter(has_text="row-001").get_by_role("cell").last).not_to_contain_text("no_variance")


def test_a_run_that_collected_nothing_has_no_empty_chart(tmp_path: Path, open_page: Open) -> None:
    """Nor one whose validation failed."""
    run = MadeRun(tmp_path / "run", epochs=3)
    failed = {"epoch": 0, "policy_version": 0, "error": "no example could be scored", "seconds": 1.0}
    run.store.write("validation_history.json", [failed])
    run.end("failed", "TrajectoryError: epoch 1: no episode can be trained on", epoch=0)
    with view_server(tmp_path) as url:
        page = open_page("/run", url=url, refused=True, run="run")
        expect(page.get_by_role("alert")).to_contain_text("no episode can be trained on")
        expect(page.locator(".chart").filter(visible=True)).to_have_count(0)


def test_a_damaged_run_shows_the_rest(open_page: Open) -> None:
    page = open_page("/run", run="corrupted")
    expect(page.get_by_role("alert")).to_contain_text("training_metrics.jsonl, line 3 is not JSON")
    expect(page.get_by_role("img", name=re.compile("^Loss"))).to_be_visible()
    page.get_by_role("group", name="List").get_by_role("button", name="Episodes").click()
    page.get_by_role("link", name="row-000, episode").first.click()
    expect(page.get_by_role("heading", name="row-000")).to_be_visible()


def test_groups_lead_to_their_episodes(open_page: Open) -> None:
    page = open_page("/run", run="learning")
    page.get_by_role("combobox", name="Epoch").select_option("3")
    expect(page.locator(".table-note")).to_have_text("4 rows")
    page.get_by_role("link", name="row-001").click()
    expect(page.get_by_role("heading", name="row-001, epoch 3")).to_be_visible()
    expect(
        page.get_by_role("group", name="The rewards of this row through the epochs").get_by_role("link")
    ).to_have_count(15)
    page.locator(".episodes tbody a").first.click()
    expect(page.get_by_role("heading", name="row-001, episode")).to_be_visible()


@pytest.mark.parametrize(("run", "newest"), [("learning", 15), ("failed", 1), ("bad", 2), ("not_begun", 0)])
def test_the_epochs_to_choose_are_those_with_episodes(open_page: Open, run: str, newest: int) -> None:
    options = open_page("/run", run=run).get_by_role("combobox", name="Epoch").get_by_role("option")
    expect(options).to_have_text(["all", *map(str, range(1, newest + 1))])


def test_episodes_are_filtered_by_outcome_and_reward(open_page: Open) -> None:
    page = open_page("/run", run="every_kind", list="episodes")
    note = page.locator(".table-note")
    expect(note).to_have_text("77 rows")
    page.get_by_role("combobox", name="Outcome").select_option("timeout")
    expect(note).to_have_text("10 rows")
    page.get_by_role("combobox", name="Outcome").select_option("")
    page.get_by_label("Reward from").fill("0.9")
    page.get_by_label("Reward from").press("Tab")
    expect(note).to_have_text(re.compile(r"^\d rows|1\d rows"))
    assert "min_reward=0.9" in page.url


def test_a_long_list_is_read_as_it_scrolls(open_page: Open) -> None:
    page = open_page("/run", run="learning", list="episodes")
    table = page.get_by_role("table", name="Episodes")
    expect(table).to_have_attribute("aria-rowcount", "241")
    assert table.locator(".tbody .tr").count() < 60
    page.locator(".scroller").evaluate("element => element.scrollTop = element.scrollHeight")
    expect(table.locator("[aria-rowindex='241']")).to_contain_text("row-000, episode 0")


def test_titles_and_labels_read_as_a_person_would_write_them(tmp_path: Path, open_page: Open) -> None:
    run = MadeRun(tmp_path / "run")
    run.group(1, "3", [(short(run.chance, each), float(each)) for each in range(2)])
    run.end_epoch(1)
    run.end()
    with view_server(tmp_path) as url:
        page = open_page("/run", url=url, refused=True, run="run", list="episodes")
        heads = page.get_by_role("table", name="Episodes").get_by_role("columnheader").all_inner_texts()
        assert heads[:5] == ["Row", "Epoch", "Question", "Answer", "Reward"]
        assert heads[5:] == ["Outcome", "Calls", "Prompt tokens", "Sampled tokens", "Time"]
        cut = "cells => cells.filter(each => each.scrollWidth > each.clientWidth).map(each => each.textContent)"
        assert page.locator(".th .td, .tbody .td.n").evaluate_all(cut) == []
        page.get_by_role("link", name="3, episode 1").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Row 3, episode 1")
        expect(page.get_by_role("navigation").first).to_contain_text("row 3")
        expect(page.locator(".about-row dt")).to_have_text(["Question", "Expected"])
        page.get_by_role("link", name="row 3").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Row 3, epoch 1")
        expect(page.locator(".column-head a")).to_have_text(["episode 1", "episode 0"])


def test_what_differs_between_the_episodes_of_a_group(open_page: Open) -> None:
    page = open_page("/group", run="every_kind", epoch=1, row="tools")
    expect(page.get_by_text("2 messages at the start, the same in these 2 episodes")).to_be_visible()
    beside = page.get_by_role("region", name="Dialogues side by side")
    marks = beside.locator("mark")
    expect(marks.filter(has_text="error")).to_be_visible()
    colours = marks.evaluate_all("marks => marks.map(mark => getComputedStyle(mark).backgroundColor)")
    assert len({*colours}) == 1, "what differs is marked alike on both sides"
    expect(page.locator(".episodes")).to_contain_text("+0.71")


def test_a_large_group_compares_those_that_are_chosen(open_page: Open) -> None:
    page = open_page("/group", run="every_kind", epoch=1, row="many")
    expect(page.locator(".episodes tbody tr")).to_have_count(64)
    expect(page.locator(".column-head")).to_have_count(2)
    page.get_by_label("Show episode 5 side by side").check()
    expect(page.locator(".column-head")).to_have_count(3)
    assert "show=5" in page.url


def test_tokens_in_colour_with_their_numbers(open_page: Open) -> None:
    page = open_page("/episode", **episode("tools"))
    token = page.locator("#call-1 .t").first
    expect(token).to_have_class("t up4")
    token.hover()
    tip = page.get_by_role("tooltip")
    expect(tip).to_contain_text('"L')
    expect(tip).to_contain_text("advantage+0.7071")
    page.get_by_role("button", name="probability").click()
    expect(token).to_have_class(re.compile(r"t q\d"))
    assert "colour=logprob" in page.url
    page.reload()
    expect(page.locator("#call-1 .t").first).to_have_class(re.compile(r"t q\d"))


def test_tokens_are_read_with_the_arrow_keys(open_page: Open) -> None:
    page = open_page("/episode", **episode("team"))
    page.locator("#call-0 .tokens").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tooltip")).to_contain_text('"1')


def test_tools_are_folded_and_can_be_unfolded(open_page: Open) -> None:
    page = open_page("/episode", **episode("tools"))
    result = page.locator(".tool-result").first
    expect(result).to_contain_text("characters")
    expect(result.get_by_text('"city": "city 79"')).to_be_hidden()
    result.locator("summary").click()
    expect(result.get_by_text('"city": "city 79"')).to_be_visible()


def test_conversations_of_several_agents(open_page: Open) -> None:
    page = open_page("/episode", **episode("team"))
    expect(page.get_by_role("heading", name="Conversation 5 of 5")).to_be_visible()
    expect(page.locator(".lanes")).to_have_css("--lanes", "3")
    page.get_by_role("link", name=re.compile("^call 4")).first.click()
    expect(page.locator("#call-4")).to_have_class(re.compile(r"\bat\b"))
    assert "call=4" in page.url


def test_a_link_opens_at_its_call(open_page: Open) -> None:
    page = open_page("/episode", **episode("long"), call=150)
    expect(page.locator("#call-150")).to_be_in_viewport()


def test_tokens_of_a_call_without_token_ids_are_those_of_its_usage(tmp_path: Path, open_page: Open) -> None:
    run = MadeRun(tmp_path / "run")
    talk = short(run.chance)
    usage = {"prompt_tokens": 12, "completion_tokens": 57}
    talk.calls = [replace(each, prompt_token_ids=None, token_ids=None, usage=usage) for each in talk.calls]
    run.group(1, "3", [(talk, 1.0)])
    run.end_epoch(1)
    run.end()
    with view_server(tmp_path) as url:
        page = open_page("/episode", url=url, refused=True, run="run", episode="insitu_run_run/1/3/0/0")
        expect(page.locator(".call-details")).to_contain_text("12 prompt + 57 sampled tokens")


def test_images_of_the_message_are_shown_and_others_not_loaded(open_page: Open) -> None:
    page = open_page("/episode", **episode("parts"))
    images = page.locator(".message img")
    expect(images).to_have_count(1)
    assert images.first.evaluate("image => image.naturalWidth") > 0
    expect(page.get_by_text("http://images.example.com/elsewhere.png")).to_be_visible()


def test_texts_are_shown_and_never_run(open_page: Open) -> None:
    page = open_page("/episode", **episode(HOSTILE_ROW))
    expect(page.get_by_role("heading", name=HOSTILE_ROW)).to_be_visible()
    user = page.locator(".message.role-user .text")
    assert user.inner_text() == HOSTILE
    assert page.locator("main script, main img, main b").count() == 0
    page.get_by_role("link", name="Compare with its group").click()
    expect(page.get_by_role("heading", name=HOSTILE_ROW)).to_be_visible()
    assert page.locator("main script, main img, main b").count() == 0


def test_failures_say_why_and_are_no_zero(open_page: Open) -> None:
    page = open_page("/episode", **episode("failed"))
    expect(page.get_by_role("alert")).to_contain_text("EpisodeTimeout: no answer within 60 s")
    expect(page.get_by_text("This episode made no model call.")).to_be_visible()
    expect(page.locator(".fact").filter(has_text="Reward")).to_contain_text("–")
    page.keyboard.press("j")
    expect(page.get_by_role("region", name="Calls without an answer")).to_contain_text("ReadTimeout: the model server")


def test_an_address_that_does_not_exist_lists_what_does(open_page: Open) -> None:
    page = open_page("/run", run="learing", refused=True)
    expect(page.get_by_role("alert")).to_contain_text("learning")
    page.get_by_role("link", name="All runs").click()
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()


@pytest.mark.parametrize(
    ("key", "heading"),
    [
        ("j", "row-001, episode 2"),
        ("k", "row-001, episode 0"),
        ("]", "row-001, episode 1"),
        ("J", "row-002, episode 1"),
        ("u", "row-001, epoch 3"),
    ],
)
def test_keys_lead_to_neighbours(open_page: Open, key: str, heading: str) -> None:
    page = open_page("/episode", run="learning", episode="insitu_run_learning/3/row-001/1/0")
    page.keyboard.press(key)
    expect(page.get_by_role("heading", level=1, name=heading)).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", level=1, name="row-001, episode 1")).to_be_visible()


def test_the_keys_are_listed(open_page: Open) -> None:
    page = open_page("/episode", **episode("team"))
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_contain_text("next episode")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_have_count(0)


def test_a_long_episode_is_drawn_as_it_is_scrolled(open_page: Open) -> None:
    """76,000 tokens in 200 calls: those near the view are elements, all others text."""
    page = open_page("/episode", **episode("long"))
    expect(page.locator("#call-0 .t").first).to_be_visible()
    assert page.locator(".t").count() < 8000
    last = page.locator("#call-199")
    assert len(last.locator(".tokens").text_content() or "") > 300
    last.evaluate("element => element.scrollIntoView()")
    expect(last.locator(".t").first).to_be_visible()
