"""Compares insitu's advantages and losses with a file of reference values: python scripts/check_losses.py FILE.

Prints the largest error of each variant, in value and gradient, and exits with 1 if one exceeds 1e-6.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from insitu.advantages.credit import AdvantageConfig, group_advantages
from insitu.backend.learner.losses import PolicyBatch, dpo_loss, policy_loss, row_weights
from insitu.schemas.training_jobs import DPOSettings, LossSettings

TOLERANCE = 1e-6
CONVENTIONS = {
    "grpo_ddof1_eps1e6": AdvantageConfig(baseline="mean", scale="sample_std", epsilon=1e-6),
    "grpo_ddof1_eps1e4": AdvantageConfig(baseline="mean", scale="sample_std", epsilon=1e-4),
    "grpo_ddof0_eps1e6": AdvantageConfig(baseline="mean", scale="population_std", epsilon=1e-6),
    "dr_grpo": AdvantageConfig(baseline="mean", scale="none"),
    "rloo": AdvantageConfig(baseline="leave_one_out", scale="none"),
}
SETTING_NAMES = {"level": "importance_sampling_level", "aggregation": "loss_agg_mode", "constant": "loss_scale_factor"}
"""The file's `params` to the fields of LossSettings, where the names differ."""
INPUTS = {"note", "clip_eps", "old_logp", "new_logp", "ref_logp", "rollout_logp", "mask", "rewards", "group"}


class Unchecked(Exception):
    """The file describes a variant that cannot be checked."""


def advantages(data: dict[str, Any], name: str) -> list[float]:
    """The advantage of each row of the file under a named convention."""
    members: dict[Any, list[int]] = {}
    for row, group in enumerate(data["group"]):
        members.setdefault(group, []).append(row)
    values = [0.0] * len(data["group"])
    for rows in members.values():
        rewards = [data["rewards"][row] for row in rows]
        for row, value in zip(rows, group_advantages(rewards, CONVENTIONS[name]), strict=True):
            values[row] = value
    return values


def largest_error(ours: list[float], theirs: list[float]) -> float:
    """Returns NaN if either side contains one, infinity if the lengths differ."""
    if len(ours) != len(theirs):
        return math.inf
    errors = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return math.nan if any(map(math.isnan, errors)) else max(errors, default=0.0)


def loss_settings(params: dict[str, Any], data: dict[str, Any]) -> LossSettings:
    low, high = data.get("clip_eps", (0.2, 0.2))
    settings = {SETTING_NAMES.get(key, key): value for key, value in params.items() if key != "advantage"}
    if (kl := settings.get("kl") or {}).get("estimator") == "k1":  # the vectors have it as a term of the loss
        settings["kl"] = {**kl, "estimator": "k1_in_loss"}
    try:
        return LossSettings.model_validate({"clip_low": low, "clip_high": high} | settings)
    except ValueError as error:
        raise Unchecked(f"invalid params: {error}") from None


def matrix(rows: list[list[float | None]], width: int) -> torch.Tensor:
    """(rows, width) in float64; null and the missing end of a shorter row become NaN."""
    padded = [[math.nan if v is None else v for v in row] + [math.nan] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.float64)


def loss_errors(data: dict[str, Any], variant: dict[str, Any]) -> tuple[float, float, str]:
    """Returns the errors of value and gradient, and a remark."""
    params = variant["params"]
    settings = loss_settings(params, data)
    name, remark = params.get("advantage"), ""
    if name in CONVENTIONS:
        rows = advantages(data, name)
    elif name in data.get("advantages", {}):
        rows, remark = data["advantages"][name], f"  (advantage {name!r} taken from the file)"
    else:
        raise Unchecked(
            f"advantage {name!r} is unknown; known: {', '.join([*CONVENTIONS, *data.get('advantages', {})])}"
        )

    width = max(map(len, data["mask"]))
    mask = matrix(data["mask"], width).nan_to_num(0).bool()
    new = matrix(data["new_logp"], width).requires_grad_()
    old = matrix(data["old_logp"], width)
    # NaN, which counts as an error, if a variant uses an input the file lacks.
    rollout, ref = (
        matrix(data[key], width) if key in data else torch.full_like(old, math.nan)
        for key in ("rollout_logp", "ref_logp")
    )
    weights = row_weights(mask.sum(1).tolist(), [""] * len(mask), settings)
    batch = PolicyBatch(
        old_logprobs_BT=old,
        rollout_logprobs_BT=rollout,
        ref_logprobs_BT=ref if settings.kl.beta > 0 else None,
        advantage_BT=torch.tensor(rows, dtype=torch.float64)[:, None].expand_as(old),
        mask_BT=mask,
        weight_B=torch.tensor(weights, dtype=torch.float64),
    )
    loss = policy_loss(new, batch, settings).loss
    (gradient,) = torch.autograd.grad(loss, new)
    ours = [row[: len(theirs)] for row, theirs in zip(gradient.tolist(), variant["grad_new_logp"], strict=True)]
    return (
        largest_error([loss.item()], [variant["value"]]),
        max(map(largest_error, ours, variant["grad_new_logp"]), key=lambda error: (math.isnan(error), error)),
        remark,
    )


def dpo_errors(block: dict[str, Any]) -> tuple[float, float]:
    """Returns the errors of the mean loss over pairs, and of its gradient with respect to the chosen sides."""
    sides = ("chosen", "rejected", "ref_chosen", "ref_rejected")
    chosen, rejected, ref_chosen, ref_rejected = (torch.tensor(block[side], dtype=torch.float64) for side in sides)
    chosen.requires_grad_()
    settings = DPOSettings(beta=block["beta"], loss_type="sigmoid")
    loss = dpo_loss(chosen - ref_chosen, rejected - ref_rejected, settings).mean()
    (gradient,) = torch.autograd.grad(loss, chosen)
    return (
        largest_error([loss.item()], [block["sigmoid_loss"]]),
        largest_error(gradient.tolist(), block["grad_chosen"]),
    )


def report(name: str, *errors: float, remark: str = "") -> bool:
    good = all(error <= TOLERANCE for error in errors)  # False for NaN too
    print(f"{'ok  ' if good else 'FAIL'} {name:50} {'  '.join(f'{error:.1e}' for error in errors)}{remark}")
    return good


def check(data: dict[str, Any]) -> bool:
    good = bool(data.keys() & {"advantages", "losses", "dpo"})
    if not good:
        print("FAIL the file has none of the blocks advantages, losses, dpo")
    for name, values in data.get("advantages", {}).items():
        if name in CONVENTIONS:
            good &= report(f"advantages {name}", largest_error(advantages(data, name), values))
        else:
            print(f"skip advantages {name}: unknown convention; known: {', '.join(CONVENTIONS)}")
    for name, variant in data.get("losses", {}).items():
        try:
            *errors, remark = loss_errors(data, variant)
            good &= report(f"loss {name}", *errors, remark=remark)
        except (Unchecked, KeyError, ValueError) as error:
            good = False
            print(f"FAIL loss {name}: {error}")
    if "dpo" in data:
        good &= report("dpo sigmoid_loss", *dpo_errors(data["dpo"]))
    for name in data.keys() - INPUTS - {"advantages", "losses", "dpo"}:
        print(f"skip {name}: not checked by this script")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    return 0 if check(json.loads(parser.parse_args().file.read_text())) else 1


if __name__ == "__main__":
    sys.exit(main())
