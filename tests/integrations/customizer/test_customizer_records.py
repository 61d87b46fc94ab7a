"""Preference pairs as records: the two formats, the split by turn, duplicates and samples."""

import json
import random
from typing import Any

import pytest
from pairs_plugin import pairs_of

from insitu.disk.json_files import dump_lines
from insitu.errors import TrajectoryError
from insitu.integrations.customizer.records import single_pairs, split_records
from insitu.plugin_api import DPOItem, EpisodeItem, Trajectory, TrajectoryCollection
from insitu.preferences.selection import distinct_pairs, pair_item, sampled_pairs


def collection(*rows: tuple[str, list[str]]) -> TrajectoryCollection:
    """A turn per row: its question, and its answers from best to worst."""
    groups = [pairs_of({"id": n, "question": q, "answers": answers}) for n, (q, answers) in enumerate(rows)]
    return TrajectoryCollection(trajectories=groups, run_id="r1")


def random_turns(generator: random.Random) -> TrajectoryCollection:
    """Pairs whose chosen response names their turn: by the metadata, or by the prompt where the metadata do not."""
    groups = []
    for number in range(generator.randint(1, 12)):
        metadata, turn = generator.choice(
            [
                (None, f"prompt {number % 4}"),
                ({"row_id": "7"}, f"prompt {number % 4}"),
                ({"turn_id": number % 3}, f"turn {number % 3}"),
                ({"row_id": "7", "generation": 1, "turn_id": number}, f"turn 7/1/{number}"),
            ]
        )
        prompt = f"prompt {number % 4}"
        items = [
            DPOItem(prompt=prompt, chosen_response=turn, rejected_response=str(k))
            for k in range(generator.randint(1, 6))
        ]
        cut = generator.randint(0, len(items) - 1)
        episodes = [part for part in (items[:cut], items[cut:]) if part]
        groups.append([Trajectory(episode=part, reward=1.0, metadata=metadata) for part in episodes])
    return TrajectoryCollection(trajectories=groups, run_id="r1")


SPLIT: dict[str, Any] = {"training_type": "dpo", "full_history": False, "validation_fraction": 0.5, "seed": 0}
MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1 ="}]


@pytest.mark.parametrize(
    ("training_type", "full_history", "expected"),
    [
        ("dpo", False, [{"prompt": "1 + 1 =", "chosen_response": "2", "rejected_response": r} for r in "34"]),
        ("dpo", True, [{"prompt": MESSAGES, "chosen_response": "2", "rejected_response": r} for r in "34"]),
        ("sft", False, [{"prompt": "1 + 1 =", "completion": "2"}]),
        ("sft", True, [{"messages": [*MESSAGES, {"role": "assistant", "content": "2"}]}]),
    ],
)
def test_formats(training_type: str, full_history: bool, expected: list[dict[str, Any]]) -> None:
    pairs = collection(("1 + 1 =", ["2", "3"]), ("1 + 1 =", ["2", "4"]))
    split = split_records(pairs, training_type, full_history, 0.5, seed=1)
    records = sorted([*split.training, *split.validation], key=json.dumps)
    assert records == sorted(expected * (2 // len(expected)), key=json.dumps)
    assert split.shortened_prompts == (0 if full_history else 2)
    assert [json.loads(line) for line in dump_lines(records).splitlines()] == records


def test_a_prompt_of_text_is_one_message_of_the_history() -> None:
    pairs = [
        Trajectory(episode=[DPOItem(prompt=p, chosen_response="a", rejected_response="b")], reward=1) for p in "pq"
    ]
    given = TrajectoryCollection(trajectories=[pairs], run_id="r1")
    assert split_records(given, **SPLIT | {"full_history": True}).training[0]["prompt"][0]["role"] == "user"
    assert split_records(given, **SPLIT).training[0]["prompt"] in ("p", "q")
    assert split_records(given, **SPLIT).shortened_prompts == 0


def test_no_turn_is_in_both_parts() -> None:
    generator = random.Random(5)
    for seed in range(300):
        pairs = single_pairs(random_turns(generator))
        items = [pair_item(t) for group in pairs.trajectories for t in group]
        turns = {item.chosen_response for item in items}
        fraction = generator.uniform(0.01, 0.99)
        if len(turns) == 1:
            with pytest.raises(TrajectoryError, match="preference pairs are of one turn"):
                split_records(pairs, "dpo", False, fraction, seed)
            continue
        split = split_records(pairs, "dpo", False, fraction, seed)
        assert split == split_records(pairs, "dpo", False, fraction, seed)
        assert len(split.training) + len(split.validation) == len(items)
        training, validation = ({r["chosen_response"] for r in part} for part in (split.training, split.validation))
        assert training
        assert validation
        assert not training & validation
        assert abs(len(validation) - fraction * len(turns)) <= 1


def test_the_split_depends_on_the_seed() -> None:
    pairs = collection(*((f"{n}", ["a", "b"]) for n in range(20)))
    splits = [split_records(pairs, **SPLIT | {"seed": seed}).validation for seed in range(3)]
    assert splits[0] != splits[1] != splits[2]


def test_duplicates_are_pairs_with_the_same_three_texts() -> None:
    pairs = single_pairs(collection(("q", ["a", "b", "c"]), ("q", ["a", "b"]), ("other", ["a", "b"])))
    unique = distinct_pairs(pairs)
    items = [pair_item(t) for group in unique.trajectories for t in group]
    assert len(items) == 4  # a > b, a > c, b > c, and a > b for the other question
    assert len({item.model_dump_json() for item in items}) == 4
    assert [len(group) for group in unique.trajectories] == [3, 1]


def test_a_sample_is_seeded_and_keeps_the_order() -> None:
    pairs = single_pairs(collection(*((f"{n}", ["a", "b", "c"]) for n in range(10))))
    everything = [t.id or pair_item(t).model_dump_json() for group in pairs.trajectories for t in group]
    chosen = sampled_pairs(pairs, 7, seed=4)
    kept = [pair_item(t).model_dump_json() for group in chosen.trajectories for t in group]
    assert len(kept) == 7
    assert kept == [text for text in everything if text in set(kept)]
    assert sampled_pairs(pairs, 7, seed=4) == chosen != sampled_pairs(pairs, 7, seed=5)
    assert sampled_pairs(pairs, 30, seed=4) == pairs
    assert chosen.dropped == {"max_pairs": len(everything) - 7}


def test_what_cannot_be_trained_is_refused_in_a_sentence() -> None:
    message = EpisodeItem(role="user", content="hello")
    for episode, reason in (([message], "holds messages, not preference pairs"), ([], "holds no preference pair")):
        given = TrajectoryCollection(trajectories=[[Trajectory(episode=episode, reward=1.0)]], run_id="r1")
        with pytest.raises(TrajectoryError, match=f"a trajectory of group 0 {reason}"):
            single_pairs(given)
    with pytest.raises(TrajectoryError, match="run r1: there are no preference pairs to train on"):
        split_records(TrajectoryCollection(trajectories=[[]], run_id="r1"), **SPLIT)
    with pytest.raises(TrajectoryError, match="run r1: all 3 preference pairs are of one turn, so the validation"):
        split_records(collection(("q", ["a", "b", "c"])), **SPLIT)
