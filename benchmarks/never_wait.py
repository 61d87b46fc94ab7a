"""Epochs of an agent whose tools take their time: synchronous, streamed, and collected ahead of training, in turn.

    python benchmarks/never_wait.py             the tables
    python benchmarks/run.py never_wait         the same into RESULTS.md

Each run is a process of its own: this script with a case as JSON. All runs of a seed wait for their tools equally long.
"""

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import never_wait_agent as agent
import one_device
import torch
from learner import SCALE
from models import Scale

HERE = Path(__file__).parent
HELP_DESK = HERE.parent / "examples/help_desk/model"
GENERATIONS, CONCURRENCY = 8, 128
REPETITIONS = 2
"""Of each held-out row, of which there are as many as groups."""
CORRECTED = {"old_logprobs": "recomputed", "truncated_importance": 2.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "K = 0": {},
    "streamed": {"trainer": {"stream": True}},
    "K = 1": {"trainer": {"staleness": 1}, "training": CORRECTED},
    "K = 2": {"trainer": {"staleness": 2}, "training": CORRECTED},
}
"""What each changes in the sections of the trainer and of `training`."""
FIRST = "K = 0"
SHORT = 0.02
"""A factor of the seconds that tools take in runs whose time is not measured."""
QUESTIONS = {
    "orders": ("Where is my {}?", "When does my {} arrive?", "Has my {} been sent?"),
    "manual": ("How do I clean my {}?", "What removes dirt from my {}?", "My {} is dirty, what do I use?"),
}


class Size(NamedTuple):
    """How much is measured; `one_device` are the arguments of that module's report."""

    epochs: int
    seeds: int
    groups: int
    pause: float
    large_epochs: int
    hidden: int
    layers: int
    one_device: tuple[int, int, Scale]
    variants: tuple[str, ...] = tuple(VARIANTS)


WHOLE = Size(10, 3, 64, 1.0, large_epochs=2, hidden=320, layers=4, one_device=(8, 1, SCALE))


@dataclass(frozen=True)
class Case:
    """A run. `pause` is a factor of the seconds that tools take; `score` names one of the agent's module."""

    model: str
    trainer: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    epochs: int = 10
    groups: int = 64
    concurrency: int = CONCURRENCY
    pause: float = 1.0
    score: str = "share_right"
    max_tokens: int = 16


def rows(case: Case) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on, and others that are held out, for which the tools take no time."""
    rng = random.Random(0)
    single = [
        (text.format(item), f"{item}: {agent.TOOLS[tool][item]}")
        for tool, texts in QUESTIONS.items()
        for text in texts
        for item in agent.ITEMS
    ]
    pairs = rng.sample([(first, second) for first in single for second in single], 2 * case.groups)
    table = [
        {"id": number, "question": "|".join(question), "answer": "|".join(answer), "pause": case.pause}
        for number, (question, answer) in enumerate(zip(*pair, strict=True) for pair in pairs)
    ]
    return table[: case.groups], [row | {"pause": 0} for row in table[case.groups :]]


def settings(case: Case, folder: Path) -> dict[str, Any]:
    training = {"learning_rate": 1e-3, "schedule": "linear"} | case.training
    return {
        "general": {"seed": case.seed},
        "llms": {"student": {"_type": "policy", "temperature": 1.0, "max_tokens": case.max_tokens}},
        "workflow": {"_type": "python", "function": "never_wait_agent:answer", "model": "student"},
        "eval": {
            "general": {"max_concurrency": case.concurrency, "episode_timeout": 300},
            "evaluators": {"score": {"_type": "python", "function": f"never_wait_agent:{case.score}"}},
        },
        "trajectory_builders": {"episodes": {"_type": "insitu_traj_builder", "num_generations": GENERATIONS}},
        "trainer_adapters": {
            "backend": {
                "_type": "insitu_trainer_adapter",
                "model": case.model,
                "training": training,
                "keep": {"last": 4},
            }
        },
        "trainers": {"grpo": {"_type": "insitu_trainer", **case.trainer}},
        "finetuning": {
            "enabled": True,
            "trainer": "grpo",
            "trajectory_builder": "episodes",
            "trainer_adapter": "backend",
            "reward_function": {"name": "score"},
            "num_epochs": case.epochs,
            "output_dir": str(folder / "run"),
            "validation": {"interval": case.epochs, "reps": REPETITIONS},
        },
    }


def child(case: Case) -> dict[str, Any]:
    """Trains in this process, with the backend in another, and returns the figures."""
    from rich.console import Console

    import insitu

    train, held_out = rows(case)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            insitu.finetune(config=settings(case, folder), train=train, held_out=held_out, console=Console(quiet=True))
        except insitu.ConfigError as error:
            return {"refused": str(error)}
        return figures(folder / "run")


def figures(run: Path) -> dict[str, Any]:
    """Of all epochs, from the first call of an agent to the end of the run, without validations."""
    from insitu.runs import files
    from insitu.runs.reader import RunReader

    reader = RunReader(run)
    calls = sorted(
        (call.started, call.ended)
        for group in reader.groups()
        for of_episode in reader.calls(group).values()
        for call in of_episode
    )
    (completed,) = (event["time"] for event in reader.records(files.EVENTS) if event.get("event") == "completed")
    ended, began = datetime.fromisoformat(completed).timestamp(), calls[0][0]
    metrics = [line for line in reader.records(files.METRICS) if "seconds" in line]
    phases = {name: sum(line["seconds"][name] for line in metrics) for name in ("collect", "train", "validate")}
    used, backends = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    last = reader.validations()[-1]
    return {
        **phases,
        "wall": ended - began - phases["validate"],
        "sampling": covered(calls),
        "score": last["avg_reward"],
        "ci95": last["ci95"],
        "cpu": used.ru_utime + used.ru_stime,
        "backend_cpu": backends.ru_utime + backends.ru_stime,
    }


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds that are within an interval; they are sorted by their beginnings."""
    total, until = 0.0, 0.0
    for began, ended in intervals:
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def in_turn(case: Case, variants: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The figures of each variant, each in a process of its own."""
    measured = {}
    for variant in variants:
        began = time.perf_counter()
        command = [sys.executable, __file__, json.dumps(asdict(replace(case, **VARIANTS[variant])))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        measured[variant] = json.loads(done.stdout.splitlines()[-1])
        if "refused" not in measured[variant]:
            print(f"{variant}, seed {case.seed}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return measured


def time_row(variant: str, of: dict[str, Any], first: dict[str, Any]) -> str:
    if "refused" in of:
        return f"| {variant} | refused: {of['refused']} | | | | | | |"
    wall = of["wall"]
    return (
        f"| {variant} | {wall:.1f} s | {wall / first['wall']:.2f} | {of['collect']:.1f} s | {of['train']:.1f} s | "
        f"{1 - first['train'] / wall:.0%} | {1 - of['sampling'] / wall:.0%} | "
        f"{of['cpu']:.0f} + {of['backend_cpu']:.0f} s |"
    )


TIMES = """| | wall | of K = 0 | collecting | training | learner idle | sampler idle | CPU: agents + backend |
|---|---|---|---|---|---|---|---|"""


def score_row(seed: int, measured: dict[str, dict[str, Any]]) -> str:
    low, high = measured[FIRST]["ci95"]
    cells = []
    for of in measured.values():
        inside = "" if low <= of.get("score", low) <= high else " (outside)"
        cells.append("refused" if "refused" in of else f"{of['score']:.3f}{inside}")
    return f"| {seed} | {low:.3f} to {high:.3f} | {' | '.join(cells)} |"


def make_large(folder: Path, hidden: int, layers: int) -> str:
    """A model with random weights that speaks as the help desk's does."""
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "head_dim": 16}
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), hidden // 16)
    config = AutoConfig.from_pretrained(HELP_DESK, **sizes, **heads)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(HELP_DESK).save_pretrained(folder)
    return str(folder)


def hidden_share(measured: dict[str, dict[str, Any]]) -> str:
    """How much of the training time is hidden behind collecting."""
    first, streamed = measured[FIRST], measured["streamed"]
    share = f"Training takes {first['train'] / first['wall']:.0%} of the time of K = 0"
    if "refused" in streamed:
        return f"{share}."
    return f"{share}, of which streaming hides {1 - (streamed['wall'] - first['collect']) / first['train']:.0%}."


def report(size: Size = WHOLE) -> str:
    """The section `never_wait` of RESULTS.md."""
    case = Case(str(HELP_DESK), epochs=size.epochs, groups=size.groups, pause=size.pause)
    runs = [in_turn(case, size.variants)]
    with tempfile.TemporaryDirectory() as folder:
        large = replace(case, model=make_large(Path(folder), size.hidden, size.layers), epochs=size.large_epochs)
        larger = in_turn(replace(large, score="coin", max_tokens=8), [FIRST, "streamed"])
    on_one_device = one_device.report(*size.one_device)
    quick = [replace(case, seed=seed, pause=size.pause * SHORT) for seed in range(1, size.seeds)]
    runs += [in_turn(each, size.variants) for each in quick]
    times = "\n".join(time_row(variant, of, runs[0][FIRST]) for variant, of in runs[0].items())
    larger_times = "\n".join(time_row(variant, of, larger[FIRST]) for variant, of in larger.items())
    scores = "\n".join(score_row(seed, measured) for seed, measured in enumerate(runs))
    names = " | ".join(runs[0])
    return f"""## Never wait for the slowest episode

{size.epochs} epochs of {size.groups} groups of {GENERATIONS} episodes, {CONCURRENCY} at a time. An episode has four
model calls, after each of which a tool sleeps: log-normal, median {agent.MEDIAN} s, 99th percentile
{agent.PERCENTILE_99:.0f} s, seeded by the episode. Wall time is from the first call to the end of the run, without
validations. The learner idles but for the training of K = 0, and the sampler while no call is in flight. Asked for:
K = 1 at most 0.68 of K = 0, K = 2 at most 0.58.

{TIMES}
{times}

Held-out scores at the end ({size.groups} rows, {REPETITIONS} times), which should be within the 95 % confidence
interval of K = 0. The tools of the seeds after the first take {SHORT:.0%} of the time, on which no result depends.

| seed | interval of K = 0 | {names} |
|---|---|{"---|" * len(runs[0])}
{scores}

### A model whose training takes longer

{size.large_epochs} epochs with random weights (hidden size {size.hidden}, {size.layers} layers). Asked for: streaming
hides at least 60 % of the training time, which is 20 to 30 % of an epoch.

{TIMES}
{larger_times}

{hidden_share(larger)}

{on_one_device}"""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(child(Case(**json.loads(sys.argv[1])))))
    else:
        print(report())
