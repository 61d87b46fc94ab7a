"""Writes tests/data/art/vectors.json: rows, advantages and losses as ART's own modules compute them.

    .environments/art/0.5.4/bin/python scripts/art_vectors.py
    .environments/art/0.5.18/bin/python scripts/art_vectors.py

Each run adds its release. torch and transformers come from .venv, which has them for the backend.
"""

import json
import random
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path += [str(next((ROOT / ".venv/lib").glob("python*")) / "site-packages"), str(ROOT / "tests/support")]

import art  # noqa: E402
import torch  # noqa: E402
from art import loss as art_loss  # noqa: E402
from art.preprocessing.pack import packed_tensors_from_tokenized_results  # noqa: E402
from art.preprocessing.tokenize import tokenize_trajectory_groups  # noqa: E402
from openai.types.chat.chat_completion import Choice  # noqa: E402
from tiny_models import byte_tokenizer  # noqa: E402

TARGET = ROOT / "tests/data/art/vectors.json"
REWARDS = [[1.0, 0.0, 0.25], [0.5, 2.0], [3.0, 3.0], [0.1, 0.1, 0.1, 0.7]]
ANSWERS = ["yes", "no", "it may be", "why", "I can not say"]
OLD_CASES = [{}, {"ppo": False}, {"epsilon": 0.1, "epsilon_high": 0.3}]
CASES = [
    {},
    {"ppo": True},
    {"ppo": True, "epsilon": 0.1, "epsilon_high": 0.3},
    {"ppo": True, "importance_sampling_level": "sequence"},
    {"epsilon": 0.3},
    {"importance_sampling_level": "sequence", "epsilon_high": 0.2},
]
BALANCES = [0.0, 0.4, -0.25]


def choice(text: str, draw: random.Random) -> Choice:
    """Sampled letter by letter, and the end of the turn."""
    tokenizer = byte_tokenizer()
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    content = [
        {"token": f"token_id:{id}", "bytes": [], "logprob": -draw.uniform(0.1, 3), "top_logprobs": []} for id in ids
    ]
    message = {"role": "assistant", "content": text}
    return Choice.model_validate(
        {"finish_reason": "stop", "index": 0, "logprobs": {"content": content}, "message": message}
    )


def made_groups() -> list[art.TrajectoryGroup]:
    """One turn, or two of one conversation, or a second history: lengths differ, so weights do."""
    draw = random.Random(0)
    groups = []
    for number, rewards in enumerate(REWARDS):
        members = []
        for place, reward in enumerate(rewards):
            messages: list[Any] = [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"question {number}"},
            ]
            more = {}
            messages = [*messages, choice(draw.choice(ANSWERS), draw)]
            if place == 1:
                messages += [{"role": "user", "content": "and?"}, choice(draw.choice(ANSWERS), draw)]
            if place == 2:
                asked: list[Any] = [{"role": "user", "content": "again"}, choice(draw.choice(ANSWERS), draw)]
                more = {"additional_histories": [art.trajectories.History(messages_and_choices=asked)]}
            members.append(art.Trajectory(messages_and_choices=messages, reward=reward, **more))
        groups.append(art.TrajectoryGroup(members))
    return groups


def art_tokenizer():
    """Ours, as ART can use it.

    ART puts the highest unused id below vocab_size in the place of what was sampled, and it must be a letter by
    itself: of a byte alphabet that is so below 94. And releases before 0.5.17 expect a list from a template.
    """
    tokenizer = byte_tokenizer()

    class Usable(type(tokenizer)):
        vocab_size = 94

        def apply_chat_template(self, *args, **kwargs):
            return super().apply_chat_template(*args, **kwargs | {"return_dict": False})

    tokenizer.__class__ = Usable
    return tokenizer


def packed(groups: list[art.TrajectoryGroup], scale_rewards: bool, balance: float, length: int) -> dict:
    """As one sequence where `length` allows."""
    random.seed(0)
    results = list(
        tokenize_trajectory_groups(art_tokenizer(), groups, False, scale_rewards, shuffle_group_trajectories=False)
    )
    return packed_tensors_from_tokenized_results(results, length, pad_token_id=0, advantage_balance=balance)


def case(groups: list[art.TrajectoryGroup], config: dict, scale_rewards: bool, balance: float) -> dict:
    tensors = packed(groups, scale_rewards, balance, 4096)
    mask = tensors["assistant_mask"]
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(mask.shape, generator=generator) * 0.4
    logprobs = torch.where(mask, tensors["logprobs"], -1.0) + noise
    # The loss reads what predicts the next token: one place to the left.
    new = torch.roll(logprobs, -1, 1).requires_grad_(True)
    inputs = {key: value.clone() for key, value in tensors.items() if isinstance(value, torch.Tensor)}
    result = art_loss.loss_fn(inputs, new, None, None, config)
    loss = result.policy_loss if hasattr(result, "policy_loss") else result.mean_policy_loss
    loss.backward()
    gradient = torch.roll(new.grad, 1, 1)
    return {
        "config": config,
        "scale_rewards": scale_rewards,
        "advantage_balance": balance,
        "token_ids": tensors["tokens"][mask].tolist(),
        "advantages": tensors["advantages"][mask].tolist(),
        "new_logprobs": logprobs[mask].tolist(),
        "loss": loss.item(),
        "gradient": gradient[mask].tolist(),
    }


def main() -> None:
    release = version("openpipe-art")
    groups = made_groups()
    cases = [case(groups, config, True, 0.0) for config in (OLD_CASES if release == "0.5.4" else CASES)]
    cases += [case(groups, {}, scale, balance) for scale in (True, False) for balance in BALANCES]
    lengths = {length: len(packed(groups, True, 0.0, length)["tokens"]) for length in (80, 120, 200, 400, 2048)}
    data = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    data["trajectory_groups"] = [group.model_dump(mode="json") for group in groups]
    data[release] = {"cases": cases, "sequences": lengths}
    TARGET.write_text(json.dumps(data, sort_keys=True) + "\n")
    print(f"{TARGET}: {release}, {len(cases)} cases")


main()
