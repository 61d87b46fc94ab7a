"""Runs made up for the pages: dialogues of every kind, long ones, failed ones, and damaged files.

python tests/with_browser/made_runs.py FOLDER    writes them into a folder, to look at them with `insitu view FOLDER`
"""

import json
import math
import random
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from insitu.runs.records import RunProgress, training_records
from insitu.runs.store import RunStore
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, EpisodeStatus, ModelCall
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import Trajectory
from insitu.schemas.groups import GroupRecord
from insitu.training.preference_builders import DPOFromGroupsConfig, episode_pairs

MODEL = Path(__file__).resolve().parents[2] / "examples/tic_tac_toe/model"
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><b>bold</b> &amp; \u202eabc"
HOSTILE_ROW = "row <b>&\"'?#/%2F"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WORDS = ["the", "plan", "is", "to", "look", "at", "this", "table", "then", "compare", "both", "prices", "and", "answer"]

Messages = list[dict[str, Any]]


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


class Conversation:
    """Builds the calls of an episode, each of which extends the one before."""

    def __init__(self, chance: random.Random, started: float = 1.79e9) -> None:
        self.chance = chance
        self.now = started
        self.calls: list[ModelCall] = []
        self.messages: Messages = []

    def add(self, role: str, content: Any, **fields: Any) -> "Conversation":
        self.messages = [*self.messages, {"role": role, "content": content, **fields}]
        return self

    def call(
        self, text: str, llm: str = "player", function: str = "", sampled: str | None = None, **fields: Any
    ) -> "Conversation":
        """A completion; `sampled` is the text of its tokens if that is not its content."""
        ids = _tokenizer().encode(sampled if sampled is not None else text, add_special_tokens=False).ids
        functions = ("<workflow>", function) if function else ("<workflow>",)
        started, self.now = self.now, self.now + 0.2 + self.chance.random()
        message = {"role": "assistant", "content": text, **fields}
        tokens = {
            "prompt_token_ids": [len(self.calls)] * 12,
            "token_ids": ids,
            "logprobs": [self._logprob() for _ in ids],
        }
        known = {
            "llm": llm,
            "functions": functions,
            "finish_reason": "tool_calls" if "tool_calls" in fields else "stop",
            "policy_version": 0,
            "sampling": {"temperature": 1.0, "max_tokens": 512},
            "usage": {"prompt_tokens": 12, "completion_tokens": len(ids)},
            "started": started,
            "ended": self.now,
        }
        self.calls.append(ModelCall(len(self.calls), "policy", self.messages, message=message, **tokens, **known))
        self.messages = [*self.messages, message]
        return self

    def fail(self, error: str) -> "Conversation":
        times = {"started": self.now, "ended": self.now + 2.0}
        self.calls.append(
            ModelCall(
                len(self.calls), "policy", self.messages, llm="player", functions=("<workflow>",), error=error, **times
            )
        )
        return self

    def fresh(self) -> "Conversation":
        """The next call starts another conversation."""
        self.messages = []
        return self

    def _logprob(self) -> float:
        return -self.chance.expovariate(4) if self.chance.random() < 0.7 else -self.chance.expovariate(0.6)


def _sentence(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))


def _tool_call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def tools(chance: random.Random, good: bool) -> Conversation:
    """Reasoning, a tool with long JSON, a tool that fails, an answer."""
    same = random.Random(7)
    rows = [{"city": f"city {n}", "price": round(same.uniform(20, 900), 2), "stars": n % 5} for n in range(80)]
    search = _tool_call(
        "search_hotels",
        city="Lisbon",
        filters={"stars": [4, 5], "max_price": 220, "amenities": ["wifi", "breakfast", "late checkout"]},
        limit=80,
    )
    talk = Conversation(chance).add(
        "system", "You are a travel agent. Use the tools. Answer with the name of one hotel.\n" + _sentence(same, 60)
    )
    talk.add(
        "user", "Find me a quiet hotel in Lisbon for three nights in May, at most 220 euros a night, with breakfast."
    )
    thought = "I should search first, " + _sentence(chance, 30)
    talk.call(
        "",
        sampled=f"<think>{thought}</think>{json.dumps(search['function'])}",
        reasoning_content=thought,
        tool_calls=[search],
    )
    talk.add("tool", json.dumps(rows), tool_call_id="call_search_hotels", name="search_hotels")
    talk.call("Let me check the availability.", tool_calls=[_tool_call("availability", hotel=7 if good else 9)])
    talk.add(
        "tool",
        "ok: 3 nights free" if good else "error: no such hotel",
        tool_call_id="call_availability",
        name="availability",
    )
    return talk.call("Hotel 7, " + _sentence(chance, 25) if good else "I do not know.")


def parts(chance: random.Random) -> Conversation:
    """Images that the message contains and images elsewhere, and parts of unknown kinds."""
    content = [
        {"type": "text", "text": "What is in these pictures?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        {"type": "image_url", "image_url": {"url": "http://images.example.com/elsewhere.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2Zy8+"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA" * 40, "format": "wav"}},
    ]
    return Conversation(chance).add("user", content).call("A single red point, and nothing else that I can see.")


def hostile(chance: random.Random) -> Conversation:
    talk = Conversation(chance).add("system", HOSTILE).add("user", HOSTILE, name=HOSTILE)
    talk.call(HOSTILE, function=HOSTILE, reasoning_content=HOSTILE, tool_calls=[_tool_call(HOSTILE, html=HOSTILE)])
    return talk.add("tool", HOSTILE * 4, tool_call_id=HOSTILE, name=HOSTILE).call(f"{HOSTILE} javascript:alert(1)")


def team(chance: random.Random) -> Conversation:
    """A planner, three workers at the same time, and a writer: five conversations of two models."""
    talk = (
        Conversation(chance)
        .add("user", "Write a report on the three offers.")
        .call("1. read\n2. compare\n3. write", function="planner")
    )
    begun = talk.now
    ends = []
    for worker in range(3):
        talk.now = begun
        talk.fresh().add("user", f"Read offer {worker}.").call(_sentence(chance, 20), function="worker", llm="small")
        ends.append(talk.now)
    talk.now = max(ends)
    return talk.fresh().add("user", "Write it.").call(_sentence(chance, 60), function="writer")


def long_dialogue(chance: random.Random, calls: int = 200, words: int = 95) -> Conversation:
    """200 calls of 100 tokens."""
    talk = Conversation(chance).add("system", "You play a text adventure.")
    for turn in range(calls):
        talk.add("user", f"You are in room {turn}. " + _sentence(chance, 12)).call(_sentence(chance, words))
    return talk


def short(chance: random.Random, generation: int = 0) -> Conversation:
    return (
        Conversation(chance)
        .add("user", "What is 17 * 3?")
        .call(f"{17 * 3 + generation % 3}, because " + _sentence(chance, 8))
    )


class MadeRun:
    """A run's directory, written as the training loop writes it."""

    def __init__(self, folder: Path, epochs: int = 1, seed: int = 0) -> None:
        self.folder = folder
        self.epochs = epochs
        self.run_id = f"insitu_run_{folder.name}"
        self.chance = random.Random(seed)
        self.store = RunStore(folder)
        self.with_advantages: list[tuple[Trajectory, dict[int, float]]] = []
        self._validations: list[dict[str, Any]] = []
        checkpoint = folder / "backend/checkpoints/step_000001"
        checkpoint.mkdir(parents=True)
        shutil.copy(MODEL / "tokenizer.json", checkpoint)
        targets = {"functions": ["<workflow>"], "model": None, "llms": ["player"]}
        advantages = {"baseline": "mean", "scale": "sample_std", "epsilon": 1e-6}
        config = {
            "finetuning": {"num_epochs": epochs, "trainer_adapter": "backend"},
            "trainer_adapters": {"backend": {"_type": "insitu_trainer_adapter", "model": "Qwen/Qwen2.5-0.5B-Instruct"}},
        }
        settings = {"insitu": "0.1.0", "epochs": epochs, "seed": seed, "credit": "episode", "discount": 1.0}
        settings |= {"episodes_per_epoch": 16}
        computed = {"targets": targets, "advantages": advantages, "training": {"method": "grpo"}, "config": config}
        computed["given"] = config
        self.store.write("run.json", {"run_id": self.run_id, **settings, **computed})
        self.progress("running", 0)
        self.store.record_event("started", insitu="0.1.0")

    def progress(self, status: str, epoch: int, error: str | None = None) -> None:
        self.store.sync()
        state = RunProgress(
            run_id=self.run_id, status=status, error=error, epoch=epoch, policy_version=epoch, sizes=self.store.sizes()
        )
        self.store.write("progress.json", state.model_dump(mode="json"))

    def group(self, epoch: int, row: str, members: Sequence[tuple[Conversation, float | None]], **fields: Any) -> None:
        """Episodes with their rewards; None: the episode failed with a timeout."""
        episodes = []
        for generation, (talk, reward) in enumerate(members):
            key = EpisodeKey(self.run_id, epoch, row, generation)
            known = {
                "output": (talk.calls[-1].message or {}).get("content") if talk.calls else None,
                "scores": {"score": reward},
                "reasoning": "compared with the expected answer",
            }
            if reward is None:
                known = {
                    "reason": DropReason.TIMEOUT,
                    "error": f"EpisodeTimeout: no answer within 60 s, generation {generation}",
                }
            outcome = EpisodeStatus.FAILED if reward is None else EpisodeStatus.OK
            seconds = max((call.ended for call in talk.calls), default=0.0) - min(
                (call.started for call in talk.calls), default=0.0
            )
            episodes.append(Episode(key, outcome, calls=talk.calls, reward=reward, seconds=seconds, **(known | fields)))
        scored = [episode for episode in episodes if episode.reward is not None]
        trajectories = [
            Trajectory.model_construct(id=episode.key.text(), reward=episode.reward, calls=episode.calls, metadata={})
            for episode in scored
        ]
        dropped = Counter({DropReason.TIMEOUT: len(episodes) - len(scored)} if len(scored) < len(episodes) else {})
        question = members[0][0].messages[0]["content"] if members[0][0].messages else "nothing was asked"
        asked = EvalInputItem(id=row, input_obj=question, expected_output_obj=f"the answer to {row}")
        self.store.append_group(GroupRecord(row, episodes, trajectories, dropped), epoch, asked)
        rewards = [float(episode.reward or 0) for episode in scored]
        deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        for trajectory, reward in zip(trajectories, rewards, strict=True):
            advantage = (reward - statistics.fmean(rewards)) / (deviation + 1e-6)
            self.with_advantages.append(
                (trajectory, {position: advantage for position, call in enumerate(trajectory.calls) if call.token_ids})
            )

    def pairs(self, epoch: int, row: str, members: Sequence[tuple[Conversation, float]]) -> None:
        """A row whose episodes are compared: the best is chosen over each of the others, which are rejected."""
        episodes = [
            Episode(
                EpisodeKey(self.run_id, epoch, row, n), EpisodeStatus.OK, calls=talk.calls, reward=reward, output="said"
            )
            for n, (talk, reward) in enumerate(members)
        ]
        played = [
            Trajectory.model_construct(id=e.key.text(), reward=e.reward, calls=e.calls, trained_calls=[0])
            for e in episodes
        ]
        group = GroupRecord(row, episodes, played, Counter())
        made = episode_pairs(group, DPOFromGroupsConfig(exhaustive_pairs=True))
        self.store.append_group(
            made, epoch, EvalInputItem(id=row, input_obj="What is 17 * 3?", expected_output_obj="51")
        )
        metrics = self._metrics(epoch, [reward for _, reward in members])
        implicit = {"margins": 0.4, "accuracies": 0.8, "chosen": 0.3, "rejected": -0.1}
        metrics |= {f"rewards/{name}": value * epoch for name, value in implicit.items()}
        metrics |= dict.fromkeys(("num_trajectories", "filtered_trajectories"), len(made.trajectories))
        self.store.append("advantages.jsonl", training_records(epoch, made.trajectories, {}, []))
        self.store.append("training_metrics.jsonl", [metrics | {"pairs": len(made.trajectories)}])
        self.progress("running", epoch)

    def end_epoch(self, epoch: int, **metrics: Any) -> None:
        trajectories = [trajectory for trajectory, _ in self.with_advantages]
        self.store.append("advantages.jsonl", training_records(epoch, trajectories, {}, self.with_advantages))
        self.store.append(
            "training_metrics.jsonl", [self._metrics(epoch, [float(each.reward) for each in trajectories]) | metrics]
        )
        self.with_advantages = []
        self.progress("running", epoch)

    def validate(self, epoch: int, score: float, **fields: Any) -> None:
        half = 0.04
        self._validations.append(
            {
                "epoch": epoch,
                "policy_version": epoch,
                "avg_reward": score,
                "min_reward": 0.0,
                "max_reward": 1.0,
                "num_examples": 600,
                "ci95": [score - half, score + half],
                "dropped": {},
                "seconds": 8.0,
                **fields,
            }
        )
        self.store.write("validation_history.json", self._validations)

    def _metrics(self, epoch: int, rewards: list[float]) -> dict[str, Any]:
        chance, done = self.chance, epoch / max(self.epochs, 2)
        collected = {
            "avg_reward": statistics.fmean(rewards),
            "min_reward": min(rewards),
            "max_reward": max(rewards),
            "reward_std": 0.4 - 0.2 * done,
            "frac_reward_zero_std": 0.05 + 0.2 * done,
            "scores": {"score": statistics.fmean(rewards)},
            "num_trajectories": len(rewards),
            "num_episodes": len(rewards),
            "filtered_trajectories": len(rewards),
            "completions_mean_length": 120 + 40 * done,
            "completions_clipped_ratio": 0.02,
            "dropped": {"timeout": 1},
        }
        trained = {
            "job": "completed",
            "policy_version": epoch,
            "seconds": {"collect": 31.0, "train": 12.0, "validate": 0.0},
            "loss": 0.02 * math.exp(-done) * chance.uniform(0.6, 1.4),
            "kl": 0.2 * done,
            "entropy": 0.45 - 0.25 * done,
            "grad_norm": chance.uniform(0.3, 0.6),
            "clip_fraction": 0.1 * (1 - done),
            "learning_rate": 1e-4 * (1 - done),
            "tokens": 50_000,
        }
        time = f"2026-11-22T16:{epoch % 60:02d}:00+00:00"
        return {"epoch": epoch, "timestamp": time, "run_id": self.run_id, **collected, **trained}

    def end(self, status: str = "completed", error: str | None = None, epoch: int | None = None) -> Path:
        last = self.epochs if epoch is None else epoch
        self.progress(status, last, error)
        self.store.record_event(status, epoch=last, error=error)
        self.store.close()
        return self.folder


def learning(folder: Path, epochs: int = 15, rows: int = 4) -> Path:
    """A finished run whose score rises."""
    run = MadeRun(folder, epochs)
    run.validate(0, 0.31)
    for epoch in range(1, epochs + 1):
        for row in range(rows):
            likely = 0.3 + 0.6 * epoch / epochs
            run.group(
                epoch,
                f"row-{row:03d}",
                [(short(run.chance, each), float(run.chance.random() < likely)) for each in range(4)],
            )
        run.end_epoch(epoch)
        if epoch % 5 == 0:
            run.validate(epoch, 0.31 + 0.5 * epoch / epochs)
    return run.end()


def every_kind(folder: Path, calls: int = 200) -> Path:
    """One epoch with a dialogue of every kind."""
    run = MadeRun(folder)
    chance = run.chance
    run.group(1, "tools", [(tools(chance, good), float(good)) for good in (True, False)])
    run.group(1, "parts", [(parts(chance), 0.5), (parts(chance), 1.0)])
    run.group(1, HOSTILE_ROW, [(hostile(chance), 1.0), (hostile(chance), 0.0)], output=HOSTILE, reasoning=HOSTILE)
    run.group(1, "team", [(team(chance), 0.7), (team(chance), 0.2), (team(chance), 0.4)])
    run.group(1, "long", [(long_dialogue(chance, calls), 1.0), (long_dialogue(chance, calls // 10), 0.0)])
    run.group(
        1,
        "failed",
        [(Conversation(chance), None), (short(chance).fail("ReadTimeout: the model server did not answer"), None)],
    )
    run.group(1, "many", [(short(chance, each), round(chance.random(), 2) if each % 9 else None) for each in range(64)])
    run.end_epoch(1)
    run.validate(1, 0.5)
    return run.end()


def preferences(folder: Path) -> Path:
    """Two rows of three episodes, of which two pairs each are trained."""
    run = MadeRun(folder, epochs=2)
    for epoch in (1, 2):
        talks = [short(run.chance, each) for each in range(4)]
        run.pairs(epoch, "row-000", [*zip(talks, (1.0, 0.5, 0.0, 0.5), strict=True)])
    return run.end()


def bad(folder: Path) -> Path:
    """A run that hardly learns."""
    run = MadeRun(folder, epochs=10)
    said = ["3 x timeout: EpisodeTimeout: no answer within 60 s"]
    for epoch in (1, 2):
        run.group(epoch, "row-000", [(short(run.chance, each), float(each % 2)) for each in range(7)])
        run.end_epoch(epoch, filtered_trajectories=1, completions_clipped_ratio=1.0, warnings=said)
    return run.end("interrupted", epoch=2)


SIZE = 10_000_000


def huge(folder: Path) -> Path:
    """A tool that returned ten million characters."""
    run = MadeRun(folder)
    text = "".join(f"line {number:07d} of the log\n" for number in range(SIZE // 24 + 1))[: SIZE - 7] + "THE END"
    talk = Conversation(run.chance).add("user", "Read the log.").call("", tool_calls=[_tool_call("read", file="log")])
    talk.add("tool", text, tool_call_id="call_read", name="read").call("It ends.")
    run.group(1, "row-000", [(talk, 1.0)])
    run.end_epoch(1)
    return run.end()


def not_begun(folder: Path) -> Path:
    """No epoch is complete yet."""
    run = MadeRun(folder, epochs=15)
    run.store.close()
    return folder


def failed(folder: Path) -> Path:
    run = MadeRun(folder, epochs=3)
    run.group(1, "row-000", [(short(run.chance, each), float(each % 2)) for each in range(4)])
    run.end_epoch(1)
    return run.end("failed", "BackendError: the training job of epoch 2 failed: CUDA out of memory", epoch=1)


def corrupted(folder: Path) -> Path:
    """Every file that grows has a damaged place, and one of JSON is cut off."""
    learning(folder, epochs=3)
    for name in ("training_metrics.jsonl", "groups.jsonl", "advantages.jsonl", "events.jsonl"):
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        (folder / name).write_bytes(b"".join([*lines[:2], b'{"epoch": 2, "broken\n', *lines[2:-1], lines[-1][:20]]))
    content = bytearray((folder / "episodes.jsonl.gz").read_bytes())
    content[len(content) // 2 : len(content) // 2 + 40] = bytes(40)
    (folder / "episodes.jsonl.gz").write_bytes(content)
    calls = (folder / "calls.jsonl.gz").read_bytes()
    (folder / "calls.jsonl.gz").write_bytes(calls[: len(calls) * 2 // 3])
    history = (folder / "validation_history.json").read_bytes()
    (folder / "validation_history.json").write_bytes(history[: len(history) // 2])
    return folder


RUNS = {
    "learning": learning,
    "every_kind": every_kind,
    "preferences": preferences,
    "bad": bad,
    "huge": huge,
    "not_begun": not_begun,
    "failed": failed,
    "corrupted": corrupted,
}


def write_runs(folder: Path) -> Path:
    for name, write in RUNS.items():
        write(folder / name)
    return folder


if __name__ == "__main__":
    write_runs(Path(sys.argv[1]))
