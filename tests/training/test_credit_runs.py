"""Credit below the episode in whole runs on a real backend: what is given, recorded, trained, and learnt.

The team says itself what it asked and paid. Advantages and shares are worked out from that alone, call by call, by the
formulas of the documentation, and compared with what the run has written and sent.
"""

import json
from collections import Counter, defaultdict
from fractions import Fraction
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import duo_plugin
import pytest
import team_plugin
import yaml
from factories import read_lines
from marks import slow_after
from tiny_backend import Served

from insitu.runs.episodes import Selection
from insitu.runs.index_database import TrainingStatus
from insitu.schemas.finetuning import FinetuneRunConfig
from insitu.training.runtime import finetuning_main

ROWS, GENERATIONS = 5, 4
EVERYWHERE = ["<workflow>"]


class Case(NamedTuple):
    """How a run gives credit, and who is paid for what in it."""

    credit: str = "function"
    baseline: str = "mean"
    scale: str = "none"
    discount: float = 1.0
    pays: dict[str, str] = {}  # noqa: RUF012 (a NamedTuple's default, never changed)
    tip: float | None = None
    by_name: bool = False
    fails: float = 0.0
    on_failure: float | str = "exclude"
    targets: list[str] = EVERYWHERE


def project(write: Any, served: Served, case: Case, **finetuning: Any) -> Path:
    write([{"id": f"r{i}", "question": f"row {i}"} for i in range(ROWS)], "rows.jsonl")
    sampling = {"max_tokens": 4, "max_retries": 0}
    judge = {"_type": "openai", "base_url": f"{served.address}/v1", "api_key": served.token, "model_name": "policy"}
    adapter = {"_type": "keeping_adapter", "url": served.address, "api_key": served.token, "name": "policy"}
    roles = {n: {"_type": "member", "role": role, "llm": "player", "judge": "judge"} for n, role in ROLES.items()}
    for name, way in case.pays.items():
        roles[name] |= {"pays": way, "worth": 0.5 if name == "consult" else 1.0}
    roles["solve"] |= {"first": "consult", "tip": case.tip}
    team = {"_type": "team", "planner": "plan", "solver": "solve"}
    advantages = {"baseline": case.baseline, "scale": case.scale, "epsilon": EPSILON}
    return write(
        {
            "llms": {"player": {"_type": "policy", **sampling}, "judge": {**judge, **sampling}},
            "functions": roles,
            "workflow": {**team, "fails": case.fails, "pays": case.by_name},
            "eval": {
                "general": {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}},
                "evaluators": {"score": {"_type": "team_score"}},
            },
            "trajectory_builders": {"b": {"_type": "insitu_traj_builder", "num_generations": GENERATIONS}},
            "trainer_adapters": {"a": adapter},
            "trainers": {
                "t": {
                    "_type": "insitu_trainer",
                    "credit": case.credit,
                    "discount": case.discount,
                    "advantages": advantages,
                }
            },
            "finetuning": {
                "enabled": True,
                "trainer": "t",
                "trajectory_builder": "b",
                "trainer_adapter": "a",
                "reward_function": {"name": "score", "on_failure": case.on_failure},
                "target_functions": case.targets,
                "output_dir": str(write("", "run/x").parent),
                **finetuning,
            },
        }
    )


ROLES = {"plan": "planner", "solve": "solver", "consult": "expert"}
EPSILON = 0.125


async def train(path: Path) -> Path:
    duo_plugin.sent.clear()
    team_plugin.logs.clear()
    await finetuning_main(FinetuneRunConfig(config_file=path))
    return path.parent / "run"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# the reference


class Made(NamedTuple):
    """A trained call of the team: its episode, the function it is credited to, what it was asked and earned."""

    episode: str
    function: str
    text: str
    earned: float
    paid: bool


def credited(role: str, targets: list[str]) -> str:
    """By the innermost function; an expert is asked inside the solver."""
    name = next(name for name in ROLES if ROLES[name] == role)
    return name if targets == EVERYWHERE or name in targets else "solve"


def episodes_of(
    case: Case, records: list[dict[str, Any]], order: list[tuple[str, str]]
) -> dict[str, list[tuple[float, list[Made]]]]:
    """By row, the reward and trained calls of each episode that is worth something; parallel calls are in `order`."""
    groups: dict[str, list[tuple[float, list[Made]]]] = defaultdict(list)
    for record in records:
        name, failed = record["episode"], record["outcome"] == "failed"
        calls = [
            Made(name, credited(asked.role, case.targets), asked.text, asked.paid or 0.0, asked.paid is not None)
            for asked in team_plugin.logs.get(name, ())
            if asked.role != "judge" and (asked.role != "planner" or case.targets == EVERYWHERE)
        ]
        calls.sort(key=lambda made: order.index((made.episode, made.text)))
        if not calls or (failed and case.on_failure == "exclude"):
            continue
        if case.credit == "step" and not failed and not any(c.paid for c in calls):
            continue
        if failed:
            calls[-1] = calls[-1]._replace(earned=calls[-1].earned + float(case.on_failure))
        solved = [team_plugin.value(a.answer) for a in team_plugin.logs[name] if a.role == "solver"]
        reward = float(case.on_failure) if failed else sum(solved) / len(solved)
        groups[record["row_id"]].append((reward, calls))
    return groups


def returns_of(paid: list[float], discount: float) -> list[float]:
    return [sum(discount ** (j - k) * paid[j] for j in range(k, len(paid))) for k in range(len(paid))]


def compared(members: list[list[tuple[str, str, float]]], asked: list[str], case: Case) -> dict[tuple[str, str], float]:
    """The advantages of (episode, text) for each member's returns: the formulas of docs/concepts.md, summed naively."""
    there = [k for k, member in enumerate(members) if member]
    worth = {k: sum(Fraction(g) for _, _, g in members[k]) / len(members[k]) for k in there}
    if len(there) < 2 or len({g for k in there for _, _, g in members[k]}) == 1:
        return {(episode, text): 0.0 for member in members for episode, text, _ in member}
    centre = sum(worth.values()) / len(there)
    squares = sum(sum((Fraction(g) - centre) ** 2 for _, _, g in members[k]) / len(members[k]) for k in there)
    freedom = len(there) - (case.scale == "sample_std")
    divisor = 1.0 if case.scale == "none" else sqrt(squares / freedom) + EPSILON
    found = {}
    for k in there:
        others = [j for j in there if j != k]
        alike = [j for j in others if asked[j] == asked[k]] if case.baseline == "leave_one_function_out" else []
        baseline = centre if case.baseline == "mean" else sum(worth[j] for j in alike or others) / len(alike or others)
        found |= {(episode, text): float(Fraction(g) - baseline) / divisor for episode, text, g in members[k]}
    return found


def reference(group: list[tuple[float, list[Made]]], case: Case) -> dict[tuple[str, str], float]:
    """The advantage of each trained call of a group, by its episode and text."""
    if case.credit == "episode":
        members = [[(c.episode, c.text, reward) for c in calls] for reward, calls in group]
        return compared(members, [""] * len(group), case)
    if case.credit == "step":
        returns = [returns_of([c.earned for c in calls], case.discount) for _, calls in group]
        each = [
            [(c.episode, c.text, g)]
            for (_, calls), of in zip(group, returns, strict=True)
            for c, g in zip(calls, of, strict=True)
        ]
        return compared(each, [""] * len(each), case)
    found: dict[tuple[str, str], float] = {}
    for name in {c.function for _, calls in group for c in calls}:
        paid = any(c.paid for _, calls in group for c in calls if c.function == name)
        members, asked = [], []
        for reward, calls in group:
            own = [c for c in calls if c.function == name]
            returns = returns_of([c.earned for c in own], case.discount) if paid else [reward] * len(own)
            members.append([(c.episode, c.text, g) for c, g in zip(own, returns, strict=True)])
            asked.append(own[0].text if own else "")
        found |= compared(members, asked, case)
    return found


CASES = {
    "episode": Case("episode", "leave_one_out", fails=0.4, on_failure=-0.5),
    "step": Case("step", "mean", "sample_std", 0.5, {"solve": "reward", "plan": "step"}),
    "function, by the episode": Case("function", "leave_one_function_out", fails=0.4, on_failure=-0.5),
    "function, by its reward": Case(
        *("function", "mean", "population_std", 0.5, {"solve": "reward"}), fails=0.4, on_failure=-1.0
    ),
    "function, by steps": Case(
        *("function", "leave_one_out", "sample_std", 0.25, {"solve": "step", "consult": "reward"}, 0.5), fails=0.6
    ),
    "function, by its name": Case("function", "leave_one_function_out", by_name=True, fails=0.3),
    "function, with a target": Case(
        *("function", "leave_one_function_out", "sample_std", 0.5), tip=0.25, targets=["solve"]
    ),
}


FILES = ("episodes.jsonl.gz", "calls.jsonl.gz", "advantages.jsonl")


@pytest.mark.parametrize("case", slow_after(1, CASES.values()), ids=CASES)
async def test_advantages_are_those_of_the_reference(write: Any, served: Served, case: Case) -> None:
    before = len(served.samples())
    run = await train(project(write, served, case))
    assert len(served.samples()) - before == sum(map(len, team_plugin.logs.values()))
    episodes, calls, weighed = (read_lines(run / name)[1:] for name in FILES)
    assert len(episodes) == ROWS * GENERATIONS
    calls = [call for call in calls if call["llm"] == "player"]
    texts = {(call["episode"], call["index"]): call["messages"][-1]["content"] for call in calls}
    groups = episodes_of(case, episodes, [(episode, text) for (episode, _), text in texts.items()])
    expected = {row: reference(group, case) for row, group in groups.items()}
    flat = {row for row, group in groups.items() if len(group) == 1 or not any(expected[row].values())}

    tokens = {(call["episode"], texts[call["episode"], call["index"]]): len(call["token_ids"]) for call in calls}
    left_out = {row: "single_member" if len(groups[row]) == 1 else "no_variance" for row in flat}
    dropped = {c[0].episode: left_out.get(row) for row, group in groups.items() for _, c in group}
    assert {r["episode"]: r["dropped"] for r in weighed if r["dropped"] != "no_step_rewards"} == dropped
    if case.fails > 0.5:
        assert {"single_member", None} <= set(dropped.values())
    found = {(r["episode"], texts[r["episode"], int(k)]): a for r in weighed for k, a in r["advantages"].items()}
    assert found == pytest.approx({k: a for row in expected.keys() - flat for k, a in expected[row].items()}, abs=1e-9)
    assert any(abs(a) > 0.01 for a in found.values())

    selection = Selection(run)
    shown = {read.record["episode"]: read for read in map(selection.read, selection.find())}
    assert {(n, texts[n, k]): a for n, read in shown.items() for k, a in read.advantages.items()} == found
    for name, read in shown.items():
        assert (read.status is TrainingStatus.TRAINED) == any(name == episode for episode, _ in found)
        assert (read.reason is not None) == (
            read.status is TrainingStatus.DROPPED or read.record["outcome"] == "failed"
        )
        trained = [row for row in duo_plugin.sent if row.episode == name]
        assert read.status is TrainingStatus.DROPPED or read.rows == trained

    for row in duo_plugin.sent:  # each sampled token has the advantage of its call
        (index,) = row.calls
        key = row.episode, texts[row.episode, index]
        assert isinstance(row.advantages, list)
        assert [a for a, trained in zip(row.advantages, row.loss_mask, strict=True) if trained] == pytest.approx(
            [found.pop(key)] * tokens[key]
        )
    assert found == {}

    (metrics,) = lines(run / "training_metrics.jsonl")
    spread: dict[str, Counter[str]] = defaultdict(Counter)
    for made in (c for row in groups.keys() - flat for _, calls in groups[row] for c in calls):
        n, a = tokens[made.episode, made.text], expected[made.episode.split("/")[2]][made.episode, made.text]
        spread[made.function].update(calls=1, tokens=n, weight=abs(a) * n)  # type: ignore[call-arg]
    total = sum(of["weight"] for of in spread.values())
    assert metrics["credit_by_function"].keys() == spread.keys()
    for name, of in metrics["credit_by_function"].items():
        assert (of["calls"], of["tokens"]) == (spread[name]["calls"], spread[name]["tokens"])
        assert of["mean_abs_advantage"] == pytest.approx(spread[name]["weight"] / of["tokens"])
        assert of["share"] == pytest.approx(spread[name]["weight"] / total)
    assert metrics["tokens"] == sum(of["tokens"] for of in spread.values())


async def gained(write: Any, served: Served, credit: str) -> float:
    """What ten epochs have added to the value of the solver's answers, and a look at who was trained in them.

    The solver is paid for even characters, the planner 0, and the episode is the better the fewer there are.
    """
    case = Case(credit, "leave_one_out", "sample_std", pays={"plan": "reward", "solve": "step"})
    file = yaml.safe_load(project(write, served, case, num_epochs=10).read_text())
    file["trainer_adapters"]["a"]["training"] = {"learning_rate": 1e-2, "mini_batch_size": 16}
    file["functions"]["plan"]["worth"], file["eval"]["evaluators"]["score"]["worth"] = 0.0, -1.0
    metrics = lines(await train(write(file)) / "training_metrics.jsonl")
    versions = [m["policy_version"] for m in metrics]
    assert versions == [*range(versions[0], versions[0] + 10)]
    assert all((m["credit_by_function"]["plan"]["share"] == 0) == (credit == "function") for m in metrics)
    worth: dict[int, list[float]] = defaultdict(list)
    for name, made in ((name, made) for name, log in team_plugin.logs.items() for made in log if made.role == "solver"):
        worth[int(name.split("/")[1])].append(team_plugin.value(made.answer))
    first, last = ([w for epoch in epochs for w in worth[epoch]] for epochs in ((1, 2, 3), (8, 9, 10)))
    return sum(last) / len(last) - sum(first) / len(first)


@pytest.mark.slow
async def test_a_function_learns_what_it_is_paid_for(write: Any, served: Served) -> None:
    """With eight seeds: 0.18 to 0.31, and -0.28 to -0.50."""
    assert await gained(write, served, "function") > 0.1
    assert await gained(write, served, "episode") < -0.15
