"""How the pages of `insitu view` are used: addresses and Back, the focus, long texts, search, copies, preferences."""

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import Open, view_server
from made_runs import SIZE, Conversation, MadeRun, short
from playwright.sync_api import Page, expect


def note(page: Page) -> str:
    return page.locator(".table-note").inner_text()


def test_the_list_its_order_and_its_filters_are_steps_of_the_address(open_page: Open) -> None:
    page = open_page("/run", run="learning")
    expect(page.locator(".table-note")).to_have_text("60 rows")
    page.keyboard.press("e")
    expect(page.locator(".table-note")).to_have_text("240 rows")
    page.get_by_role("button", name="Calls").click()
    page.get_by_role("combobox", name="Epoch").select_option("3")
    expect(page.locator(".table-note")).to_have_text("16 rows")
    assert all(part in page.url for part in ("list=episodes", "sort=calls", "epoch=3"))
    page.reload()
    expect(page.locator(".table-note")).to_have_text("16 rows")
    expect(page.get_by_role("columnheader", name="Calls")).to_have_attribute("aria-sort", "descending")
    page.go_back()
    expect(page.locator(".table-note")).to_have_text("240 rows")
    expect(page.get_by_role("columnheader", name="Calls")).to_have_attribute("aria-sort", "descending")
    page.go_back()
    expect(page.get_by_role("columnheader", name="Calls")).not_to_have_attribute("aria-sort", "descending")
    page.go_back()
    expect(page.locator(".table-note")).to_have_text("60 rows")


def test_back_leads_to_the_row_that_was_left(open_page: Open) -> None:
    page = open_page("/run", run="learning", list="episodes")
    expect(page.locator(".table-note")).to_have_text("240 rows")
    page.locator(".scroller").evaluate("element => element.scrollTop = 3000")
    row = page.locator("[aria-rowindex='110'] a")
    row.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="row-00")).to_be_visible()
    expect(page.locator("main")).to_be_focused()
    page.go_back()
    expect(page.locator("[aria-rowindex='110'] a")).to_be_focused()
    assert page.locator(".scroller").evaluate("element => element.scrollTop") == 3000


def test_the_focus_stays_while_runs_write(tmp_path: Path, open_page: Open) -> None:
    runs = [MadeRun(tmp_path / name, epochs=3) for name in ("one", "two")]

    def write(epoch: int) -> None:
        for run in runs:
            run.group(epoch, "row-000", [(short(run.chance, each), float(each % 2)) for each in range(4)])
            run.end_epoch(epoch)

    write(1)
    with view_server(tmp_path) as url:
        listed = open_page("/runs", url=url, refused=True)
        page = open_page("/run", url=url, refused=True, run="one")
        link = listed.get_by_role("link", name="one", exact=True)
        link.focus()
        summary = page.locator("#part-settings summary")
        summary.focus()
        write(2)
        expect(listed.get_by_role("row").filter(has_text="one")).to_contain_text("2 / 3")
        expect(page.get_by_role("img", name=re.compile("^Loss. one: .* epoch 2"))).to_be_visible()
        expect(link).to_be_focused()
        expect(summary).to_be_focused()
    for run in runs:
        run.end(epoch=2)


def test_running_and_new_runs_come_first(tmp_path: Path, open_page: Open) -> None:
    started = [MadeRun(tmp_path / name) for name in ("b", "c", "a")]
    for run in (started[0], started[2]):
        run.end(epoch=0)
    with view_server(tmp_path) as url:
        page = open_page("/runs", url=url, refused=True)
        expect(page.locator("tbody th a")).to_have_text(["c", "a", "b"])
    started[1].end(epoch=0)


def test_an_address_of_no_page(open_page: Open) -> None:
    page = open_page("/nothing/at/all", refused=True)
    expect(page.get_by_role("heading", name="There is no such page")).to_be_visible()
    page.get_by_role("link", name="All runs").click()
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()


def test_a_message_of_ten_megabytes_is_loaded_in_parts(open_page: Open) -> None:
    sizes: list[int] = []
    page = open_page("/runs")
    page.on("response", lambda answer: sizes.append(len(answer.body())) if "/api/episode?" in answer.url else None)
    page.get_by_role("link", name="huge").click()
    page.get_by_role("link", name="row-000").click()
    page.locator(".episodes tbody a").first.click()
    result = page.locator(".message .tool-result")
    expect(result).to_contain_text("10,000,000 characters")
    assert 0 < sizes[-1] < 200_000
    result.locator("summary").click()
    result.get_by_role("button", name="Show the first 20,000").click()
    more, labels = result.locator("button.more"), []
    while (label := more.inner_text()).startswith("Show more"):
        labels.append(label)
        more.click()
        expect(more).not_to_have_text(label)
    assert len(labels) >= 10
    assert labels[0] == "Show more: 20,000 of 10,000,000 characters are shown"
    text = result.locator(".code").text_content() or ""
    assert (len(text), text.endswith("THE END")) == (SIZE, True)


def talk() -> Conversation:
    return Conversation(random.Random(0))


@contextmanager
def episode_page(folder: Path, open_page: Open, episode: Conversation, **fields: Any) -> Iterator[Page]:
    """The page of the only episode of a run."""
    run = MadeRun(folder / "run")
    run.group(1, "3", [(episode, 1.0)], **fields)
    run.end_epoch(1)
    run.end()
    with view_server(folder) as url:
        yield open_page("/episode", url=url, refused=True, run="run", episode="insitu_run_run/1/3/0/0")


def test_long_texts_are_whole_whatever_is_in_them(tmp_path: Path, open_page: Open) -> None:
    """Offsets of their parts count characters, emoji too."""
    text = "".join(f"{number:06d}😀" for number in range(20_000))
    with episode_page(tmp_path, open_page, talk().add("user", text).call("It ends.")) as page:
        message = page.locator(".message.role-user")
        message.get_by_role("button", name="Show the first 20,000 of 140,000").click()
        message.get_by_role("button", name="Show more: 20,000 of 140,000").click()
        message.get_by_role("button", name="Show less").wait_for()
        assert message.locator(".text").text_content() == text


def test_a_long_text_of_an_answer_that_is_an_object_is_whole(tmp_path: Path, open_page: Open) -> None:
    report = "".join(f"{number:06d} " for number in range(20_000))
    asked = talk().add("user", "Write.").call("It ends.")
    with episode_page(tmp_path, open_page, asked, output={"report": report, "score": 1}) as page:
        answer = page.get_by_role("region", name="Answer")
        expect(answer).to_contain_text('{ "report": "(140,000 characters, below)", "score": 1 }')
        answer.get_by_role("button", name="Show the first 20,000 of 140,000").click()
        answer.get_by_role("button", name="Show more: 20,000 of 140,000").click()
        expect(answer.locator(".code").last).to_have_text(report)


def test_long_messages_that_differ_at_their_ends_are_not_the_same(tmp_path: Path, open_page: Open) -> None:
    run, text = MadeRun(tmp_path / "run"), "0123456789" * 12_000
    ends = [talk().add("user", text).add("user", text + end).call("It ends.") for end in ("one", "two")]
    run.group(1, "3", [(each, reward) for reward, each in enumerate(ends)])
    run.end_epoch(1)
    run.end()
    with view_server(tmp_path) as url:
        page = open_page("/group", url=url, refused=True, run="run", epoch=1, row="3")
        expect(page.get_by_text("1 message at the start, the same in these 2 episodes")).to_be_visible()


def test_a_long_part_of_a_tool_message_is_whole(tmp_path: Path, open_page: Open) -> None:
    """Only whole messages can be copied."""
    text = "".join(f"{number:06d} " for number in range(20_000))
    result = talk().call("").add("tool", [{"type": "text", "text": text}], tool_call_id="c").call("It ends.")
    with episode_page(tmp_path, open_page, result) as page:
        message = page.locator(".message.role-tool")
        message.get_by_role("button", name="Show the first 20,000 of 140,000").click()
        message.get_by_role("button", name="Show more: 20,000 of 140,000").click()
        expect(message.locator(".text")).to_have_text(text)
        expect(message.get_by_role("button", name="Copy JSON")).to_have_count(0)
        expect(page.get_by_role("button", name="Copy JSON")).to_have_count(2)


def test_episodes_are_found_by_what_they_say(open_page: Open) -> None:
    page = open_page("/run", run="every_kind", list="episodes")
    expect(page.locator(".table-note")).to_have_text("77 rows")
    page.get_by_label("Search").fill("NO SUCH hotel")
    expect(page.locator(".table-note")).to_have_text("1 row")
    expect(page.locator(".tbody .tr").first).to_contain_text("tools, episode 1")
    assert "text=NO+SUCH+hotel" in page.url
    page.get_by_role("button", name="Groups").click()
    expect(page.locator(".table-note")).to_have_text("1 row")


def test_the_list_has_prompts_and_answers(open_page: Open) -> None:
    page = open_page("/run", run="every_kind", list="episodes", row="many")
    expect(page.locator(".tbody .tr").first).to_contain_text("What is 17 * 3?")
    expect(page.locator(".tbody .tr").nth(1)).to_contain_text("because")


def test_what_is_listed_is_downloaded(open_page: Open) -> None:
    page = open_page("/run", run="learning", list="episodes", epoch=3, sort="reward")
    expect(page.locator(".table-note")).to_have_text("16 rows")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    lines = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
    rewards = [line["reward"] for line in lines]
    assert (len(lines), {line["epoch"] for line in lines}) == (16, {3})
    assert rewards == sorted(rewards, reverse=True)


def test_a_message_and_a_request_are_copied(open_page: Open) -> None:
    page = open_page("/episode", run="learning", episode="insitu_run_learning/3/row-001/0/0")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    clipboard: Callable[[], str] = lambda: page.evaluate("navigator.clipboard.readText()")  # noqa: E731
    page.locator(".message.role-user").get_by_role("button", name="Copy JSON").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert json.loads(clipboard()) == {"role": "user", "content": "What is 17 * 3?"}
    expect(page.get_by_role("button", name="Copied")).to_have_count(0)
    page.locator(".call-details summary").click()
    page.get_by_role("button", name="Copy the request as JSON").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    request = json.loads(clipboard())
    assert (request["model"], request["temperature"]) == ("policy", 1.0)
    assert request["messages"] == [{"role": "user", "content": "What is 17 * 3?"}]
    expect(page.get_by_role("button", name="Copied")).to_have_count(0)
    page.get_by_role("button", name="Copy the request as curl").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert clipboard().startswith('curl "$OPENAI_BASE_URL/chat/completions"')


def test_pairs_are_shown_side_by_side(open_page: Open) -> None:
    page = open_page("/run", run="preferences", list="episodes")
    expect(page.locator(".tbody .tr").first).to_contain_text("chosen")
    page = open_page("/group", run="preferences", epoch=1, row="row-000")
    pairs = page.get_by_role("region", name="Preference pairs")
    expect(pairs.get_by_role("article")).to_have_count(5)
    first = pairs.get_by_role("article", name="pair 0")
    expect(first).to_contain_text("difference in reward +1.000")
    expect(first.locator(".cell.chosen")).to_contain_text("reward 1.000")
    expect(first.locator(".cell.chosen")).to_contain_text("51, because")
    expect(first.locator(".cell.rejected")).to_contain_text("53, because")
    first.locator(".cell.rejected").get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("row-000, episode 2")
    expect(page.locator(".message.sampled header")).to_contain_text("rejected")
    expect(page.locator(".message.sampled header")).not_to_contain_text("not trained")
    expect(page.get_by_role("region", name="Preference pairs").get_by_role("article")).to_have_count(3)


def test_the_lowest_advantage_is_the_worst(tmp_path: Path, open_page: Open) -> None:
    """Also if its reward is not the lowest, as with step rewards."""
    run = MadeRun(tmp_path / "run")
    run.group(1, "row", [(short(run.chance, n), reward) for n, reward in enumerate((0.0, 1.0, 0.5))])
    for (_, advantages), value in zip(run.with_advantages, (0.5, 1.0, -2.0), strict=True):
        advantages.update(dict.fromkeys(advantages, value))
    run.end_epoch(1)
    run.end()
    with view_server(tmp_path / "run") as url:
        page = open_page("/group", url=url, refused=True, run=".", epoch=1, row="row")
        expect(page.locator(".episodes tbody tr").last).to_contain_text("episode 2 worst")
        expect(page.locator(".column-head").last).to_contain_text("episode 2")


def test_row_and_expected_answer_are_at_the_head(open_page: Open) -> None:
    query: dict[str, dict[str, str | int]] = {
        "/group": {"run": "learning", "epoch": 3, "row": "row-001"},
        "/episode": {"run": "learning", "episode": "insitu_run_learning/3/row-001/0/0"},
    }
    for path, asked in query.items():
        about = open_page(path, **asked).locator(".about-row")
        expect(about).to_contain_text("What is 17 * 3?")
        expect(about).to_contain_text("the answer to row-001")


def test_bad_figures_are_marked(open_page: Open) -> None:
    page = open_page("/run", run="bad")
    marked = page.locator(".fact.is-bad")
    expect(marked).to_have_count(2)
    expect(marked.first).to_contain_text("14 %")
    expect(marked.last).to_contain_text("100 %")
    warned = page.locator(".callout.warn")
    expect(warned.get_by_role("listitem")).to_have_text(
        ["epochs 1 and 2: 3 x timeout: EpisodeTimeout: no answer within 60 s"]  # and not what is marked
    )
    top = [each.bounding_box() for each in (page.locator(".facts"), warned, page.locator(".lead"))]
    heights = [box["y"] for box in top if box is not None]
    assert heights == sorted(heights)
    row = open_page("/runs").get_by_role("row").filter(has_text="bad")
    expect(row).to_contain_text("epoch 2: 14 % of the episodes with a reward were trained")


def test_what_the_settings_leave_out_is_not_marked(tmp_path: Path, open_page: Open) -> None:
    run = MadeRun(tmp_path / "best")
    run.group(1, "row-000", [(short(run.chance, each), float(each == 0)) for each in range(4)])
    run.end_epoch(1, filtered_trajectories=1, num_trajectories=4, dropped={"not_best": 3}, frac_reward_zero_std=0.0)
    run.end()
    with view_server(tmp_path) as url:
        page = open_page("/run", url=url, refused=True, run="best")
        expect(page.locator(".fact").filter(has_text="Trained episodes")).to_contain_text("25 %")
        expect(page.locator(".fact.is-bad").filter(has_text="Trained episodes")).to_have_count(0)


def test_an_epoch_is_warned_of_once(tmp_path: Path, open_page: Open) -> None:
    """Groups with equal rewards and how much was trained are one fact; an epoch without training says why itself."""
    nothing = "nothing to train on; every group was dropped: 4 no_variance"
    for name, metrics in (("few", {}), ("none", {"filtered_trajectories": 0, "warnings": [nothing]})):
        run = MadeRun(tmp_path / name)
        run.group(1, "row-000", [(short(run.chance, each), float(each == 0)) for each in range(4)])
        run.end_epoch(1, **({"filtered_trajectories": 1, "frac_reward_zero_std": 0.9, "greedy_groups": 0} | metrics))
        run.end()
    with view_server(tmp_path) as url:
        for name, text in (("few", "90 % of the groups have equal rewards, which teach nothing"), ("none", nothing)):
            page = open_page("/run", url=url, refused=True, run=name)
            expect(page.locator(".callout.warn").get_by_role("listitem")).to_have_text([f"epoch 1: {text}"])


def test_progress_within_an_epoch_and_the_planned_epochs(tmp_path: Path, open_page: Open) -> None:
    run = MadeRun(tmp_path / "run", epochs=12)
    run.group(1, "row-000", [(short(run.chance, each), float(each % 2)) for each in range(16)])
    run.end_epoch(1)
    run.group(2, "row-000", [(short(run.chance, each), float(each % 2)) for each in range(4)])
    with view_server(tmp_path / "run") as url:
        page = open_page("/run", url=url, refused=True, run=".")
        expect(page.locator(".facts")).to_contain_text("epoch 2: 4 of 16 episodes")
        expect(page.get_by_role("img", name=re.compile("^Loss. .*Planned: epochs 1 to 12"))).to_be_visible()
    run.end(epoch=1)


def test_episodes_come_before_the_secondary_charts(open_page: Open) -> None:
    page = open_page("/run", run="learning")
    top = [page.locator(each).bounding_box() for each in (".lead", "#episodes", ".chart-group >> nth=0")]
    heights = [box["y"] for box in top if box is not None]
    assert heights == sorted(heights)
    assert len(heights) == 3


def test_curves_are_smoothed(open_page: Open) -> None:
    page = open_page("/run", run="learning")
    page.get_by_role("button", name="much").click()
    expect(page.get_by_role("img", name=re.compile("^Loss. learning, smoothed:"))).to_be_visible()
    assert "smooth=0.9" in page.url
    page.reload()
    expect(page.get_by_role("img", name=re.compile("^Loss. learning, smoothed:"))).to_be_visible()


def test_the_comparison_fits_a_phone(open_page: Open) -> None:
    page = open_page("/run", width=400, run="learning", compare="failed")
    table = page.locator(".compared").first
    expect(table).to_contain_text("0.310 → 0.810")
    assert table.evaluate("table => table.scrollWidth <= table.parentElement.clientWidth")
    assert page.get_by_role("link", name="failed").first.bounding_box()["x"] < 400  # type: ignore[index]
