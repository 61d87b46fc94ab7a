"""`insitu promote`: what replaces what, and by which evidence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import disk_space, recorded_run
from processes import run

from insitu.backend.model import load_model
from insitu.errors import InsituError
from insitu.release import promotion

WEAK, MIXED, STRONG = [0.0] * 12, [1.0, 0.0] * 6, [1.0] * 12


def promote(*arguments: Any) -> tuple[int, str]:
    """The exit code, and what was printed."""
    done = run("promote", *arguments)
    return done.returncode, (done.stdout + done.stderr).strip()


def token(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_model(str(folder), "cpu").module(input_ids=torch.tensor([[1, 2, 3]])).logits


@pytest.fixture(scope="module")
def middling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_run(tmp_path_factory.mktemp("middling") / "run", WEAK, MIXED)


@pytest.fixture(scope="module")
def strong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_run(tmp_path_factory.mktemp("strong") / "run", WEAK, STRONG, MIXED, lora=True)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_run(tmp_path_factory.mktemp("elsewhere") / "run", WEAK, STRONG, dataset="f" * 64)


def test_a_better_version_replaces_the_one_in_use(
    middling: Path, strong: Path, elsewhere: Path, tmp_path: Path
) -> None:
    agent, versions = tmp_path / "agent", tmp_path / "agent.versions"
    code, text = promote(middling, agent)
    assert (code, text) == (
        0,
        f"promoted step_000001 of {middling} to {agent}: 0.5 against 0 on 12 held-out rows, a difference of +0.5 "
        "(95 % interval +0.1667 to +0.8333, p = 0.0312)",
    )
    assert agent.is_symlink()
    assert torch.equal(token(agent), token(middling / "backend/checkpoints/step_000001"))

    code, text = promote(middling, agent)  # again: it is what is in use
    assert code == 1
    assert text == (
        f"failed: step_000001 of {middling} does not beat what is in use at {agent}: 0.5 against 0.5 on 12 held-out "
        "rows, a difference of +0 (95 % interval +0 to +0, p = 1)"
    )
    assert [path.name for path in versions.iterdir()] == ["000001"]

    code, text = promote(strong, agent, "--confidence", "0.9")
    assert code == 0, text
    assert "1 against 0.5 on 12 held-out rows" in text
    assert "adjusted for the choice among 2 versions" in text
    assert text.endswith(f"the previous version is {versions}/000001")
    assert torch.equal(token(agent), token(strong / "backend/checkpoints/step_000001"))
    record = json.loads((agent / "promotion.json").read_text())
    assert record["scores"] == dict.fromkeys(map(str, range(12)), 1.0)
    assert record["checkpoint"] == "step_000001"

    code, text = promote(elsewhere, agent)  # scored on other rows than what is in use
    assert code == 0, text
    assert "1 against 0 on 12 held-out rows" in text
    assert (
        "000002 was scored on other rows, or by another evaluator; comparing with the weights before training" in text
    )
    assert sorted(path.name for path in versions.iterdir()) == ["000002", "000003"]


def test_a_promotion_that_was_killed_leaves_nothing_behind(middling: Path, strong: Path, tmp_path: Path) -> None:
    """While it wrote the version, or before it switched the link."""
    agent, versions = tmp_path / "agent", tmp_path / "agent.versions"
    agent.mkdir()  # an empty folder may be there
    assert promote(middling, agent)[0] == 0
    shutil.copytree(versions / "000001", versions / "000002")
    (versions / ".000003.draft").mkdir()
    (tmp_path / ".agent.draft").symlink_to("agent.versions/000002")
    code, text = promote(strong, agent, "--confidence", "0.9")
    assert code == 0, text
    assert agent.readlink() == Path("agent.versions/000003")
    assert sorted(path.name for path in versions.iterdir()) == ["000001", "000003"]
    assert not (tmp_path / ".agent.draft").is_symlink()


def test_a_damaged_record_of_the_version_in_use_is_named(middling: Path, strong: Path, tmp_path: Path) -> None:
    assert promote(middling, tmp_path / "agent")[0] == 0
    file = tmp_path / "agent.versions/000001/promotion.json"
    record = json.loads(file.read_text())
    for scores, problem in ((None, "scores is None"), ({"0": "x"}, "scores.0 is 'x'")):
        file.write_text(json.dumps({**record, "scores": scores}))
        code, text = promote(strong, tmp_path / "agent")
        assert code == 1
        assert text.startswith(f"failed: {file} is damaged: {problem}: Input should be a ")


def test_a_version_that_is_not_significantly_better_is_not_promoted(tmp_path: Path) -> None:
    slightly = recorded_run(tmp_path / "run", [0.0] * 16, [1.0] * 5 + [0.0] * 11)
    code, text = promote(slightly, tmp_path / "agent")
    assert (code, text) == (
        1,
        f"failed: step_000001 of {slightly} does not beat the weights before training: 0.3125 against 0 on 16 held-out "
        "rows, a difference of +0.3125 (95 % interval +0 to +0.5714, p = 0.0625); the same difference would take about "
        "20 held-out rows",
    )
    assert [path.name for path in tmp_path.glob("agent*")] == []
    code, text = promote(slightly, tmp_path / "agent", "--confidence", "0.9")
    assert code == 0, text


def test_what_is_no_evidence_is_said_in_a_sentence(strong: Path, tmp_path: Path) -> None:
    worse = recorded_run(tmp_path / "worse", STRONG, WEAK)
    few = recorded_run(tmp_path / "few", [0.0] * 3, [1.0] * 3)
    never = recorded_run(tmp_path / "never", WEAK, STRONG)
    (never / "validation_scores.jsonl").unlink()
    unscored = recorded_run(tmp_path / "unscored", WEAK, STRONG, STRONG)
    lines = (unscored / "validation_scores.jsonl").read_text().splitlines(keepends=True)
    (unscored / "validation_scores.jsonl").write_text("".join(lines[:-1]))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").touch()
    (tmp_path / "link").symlink_to("mine")
    agent = tmp_path / "agent"
    cases: list[tuple[tuple[Any, ...], int, str]] = [
        (
            (worse, agent),
            1,
            f"failed: nothing was promoted: the best weights of {worse} are those it started from, 1.0",
        ),
        (
            (worse, agent, "--checkpoint", "latest"),
            1,
            "does not beat the weights before training: 0 against 1 on 12 held-out rows, a difference of -1 ",
        ),
        (
            (few, agent),
            1,
            f"failed: step_000001 of {few} cannot be promoted: 3 rows were scored for it and for the weights before "
            "training, but a confidence of 0.95 needs at least 6",
        ),
        ((never, agent), 2, f"error: RUN_DIR: {never} has no scores by row of a validation before training"),
        (
            (unscored, agent, "--checkpoint", "latest"),
            2,
            "error: --checkpoint: step_000002 was not validated; validated epochs: 0, 1",
        ),
        ((strong, tmp_path / "mine"), 2, "mine was not made by insitu promote; move it, or name another path"),
        ((strong, tmp_path / "link"), 2, "link is a link that insitu promote did not make; name another path"),
    ]
    for arguments, code, says in cases:
        done, text = promote(*arguments)
        assert done == code, text
        assert says in text
    assert not agent.exists()
    assert not list(tmp_path.glob("agent.versions/0*"))
    (tmp_path / "file").touch()
    place = tmp_path / "file/agent"
    assert promote(strong, place) == (1, f"failed: {place}.versions cannot be written: Not a directory")


def test_a_full_disk_leaves_nothing(strong: Path, tmp_path: Path) -> None:
    full = pytest.raises(InsituError, match=rf"^{tmp_path}/a.versions/000001/\S+ cannot be written: File too large$")
    with disk_space(2_000), full:
        promotion.promote(strong, tmp_path / "a")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("key", ["evaluator", "scoring", "dataset"])
def test_scores_of_other_evaluators_or_rows_are_not_compared(tmp_path: Path, key: str) -> None:
    source = recorded_run(tmp_path / "run", WEAK, STRONG)
    path = source / "validation_scores.jsonl"
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1][key] = "another"
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)))
    code, text = promote(source, tmp_path / "models/agent")
    assert code == 2
    assert "step_000001 was scored on other held-out rows, or by an evaluator with other settings or code, than" in text
    assert not (tmp_path / "models").exists()


def test_rows_that_were_scored_only_once_are_left_out(tmp_path: Path) -> None:
    source = recorded_run(tmp_path / "run", WEAK, STRONG)
    path = source / "validation_scores.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[1]["scores"]["3"]
    lines[2]["scores"]["4"] = [1.0, 0.0]  # two repetitions
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, text = promote(source, tmp_path / "agent")
    assert code == 0, text
    assert "on 11 held-out rows, a difference of +0.9545 " in text
    assert "; rows that were scored for only one of them: 1)" in text
