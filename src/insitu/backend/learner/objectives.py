"""What each training method does with log-probabilities: the loss of an optimizer step, and its metrics.

Shapes: B rows of a micro-batch, K maximum trained tokens per row, P preference pairs, E episodes.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from insitu.backend.learner.batches import Row, group_rows, pad
from insitu.backend.learner.code import NO_CODE, CodeFolder
from insitu.backend.learner.losses import PolicyBatch, PolicyLoss, dpo_loss, kto_loss, policy_loss, probe, row_weights
from insitu.errors import BackendError
from insitu.schemas.training_jobs import TrainingSettings

SIDES = ("chosen", "rejected")


class RowLogprobs(NamedTuple):
    """Log-probabilities of the trained tokens of some rows; only `new_BK` carries a gradient.

    `start_BK` are those under the weights at the start of the job, `ref_BK` those under the method's reference; None
    if the method needs none.
    """

    new_BK: Tensor
    start_BK: Tensor | None
    ref_BK: Tensor | None
    mask_BK: Tensor

    def sums(self) -> Tensor:
        """The sum over each row's tokens (B), in double precision: large sums are subtracted from one another."""
        return torch.where(self.mask_BK, self.new_BK, 0.0).double().sum(1)

    def log_ratios(self) -> Tensor:
        """The sum over each row's tokens of new - ref (B), in double precision."""
        assert self.ref_BK is not None
        return torch.where(self.mask_BK, self.new_BK - self.ref_BK, 0.0).double().sum(1)


class KnownSums(NamedTuple):
    """The sums over a row's trained tokens, computed before the gradients of its optimizer step."""

    logprob: float
    log_ratio: float


class PartialLoss(NamedTuple):
    """The share of some rows in the loss of an optimizer step, and detached sums by the names of `Objective.sums`."""

    loss: Tensor
    sums: Sequence[Tensor]


class StepResult(NamedTuple):
    """One optimizer step; `sums` are over all its rows, by the names of `Objective.sums`, and `entropy`."""

    tokens: int
    sums: dict[str, float]
    grad_norm: float
    learning_rate: float


LossOfRows = Callable[[Sequence[int], RowLogprobs], PartialLoss]
"""Called with the indices of a micro-batch's rows and their log-probabilities, from several threads.

Over all micro-batches of a step the losses and sums add up to those of the step, however it is split.
"""


@dataclass
class Objective(ABC):
    """A training method, for the rows of a job and the `plan` of its optimizer steps.

    `rows` are those of the job, and after them any that the method adds. `uses_start` says whether it needs
    log-probabilities under the weights at the start of the job, other than as its reference.
    """

    settings: TrainingSettings
    rows: Sequence[Row]
    plan: Sequence[Sequence[int]]
    max_length: int
    code: CodeFolder = NO_CODE
    sums: Sequence[str] = field(init=False)
    uses_start: bool = field(init=False, default=False)
    measures_kl: ClassVar[bool] = False

    def __post_init__(self) -> None:  # noqa: B027
        """What a method computes of the rows and the plan beforehand; nothing by default."""

    def units(self, step: int) -> list[list[int]]:
        """The rows of a step; those that the loss compares are together, to be kept in one micro-batch if they fit."""
        return [[index] for index in self.plan[step]]

    def baseline_rows(self, step: int) -> Sequence[int]:
        """Rows without a gradient whose sums the loss of this step depends on."""
        return ()

    def has_gradient(self, index: int) -> bool:
        """Whether the loss of a row may depend on the weights; metrics are measured on all."""
        return True

    def weight(self) -> int:
        """The number of tokens or episodes over which the loss of a job with a single step is the mean."""
        return self.count_tokens(range(len(self.rows)))

    @abstractmethod
    def step_loss(self, step: int, known: Mapping[int, KnownSums]) -> LossOfRows:
        """The loss of a step. `known` holds its baseline rows, and the rows of units split over micro-batches."""

    def metrics(self, steps: Sequence[StepResult]) -> dict[str, Any]:
        """Metrics over these steps, besides those that all methods have."""
        return {}

    def count_tokens(self, indices: Iterable[int]) -> int:
        return sum(len(self.rows[index].positions) for index in indices)


class PolicyGradient(Objective):
    """GRPO and its relatives: `losses.policy_loss`."""

    measures_kl = True

    def __post_init__(self) -> None:
        self.uses_start = self.settings.old_logprobs == "recomputed"
        self._objective = self.code.function("objective", self.settings.objective)
        self._names = probe(self._objective, self.settings)
        self.sums = (*(name for name in PolicyLoss._fields if name != "metrics"), *self._names)
        self._weighs_advantages = self.settings.objective in ("clip", "cispo") and self.settings.kl.beta == 0

    def weight(self) -> int:
        return super().weight() if self.settings.loss_agg_mode == "token" else len(group_rows(self.rows, self.plan[0]))

    def has_gradient(self, index: int) -> bool:
        return not self._weighs_advantages or bool(self.rows[index].advantages.any())

    def step_loss(self, step: int, known: Mapping[int, KnownSums]) -> LossOfRows:
        indices = self.plan[step]
        rows = [self.rows[index] for index in indices]
        weights = row_weights([len(row.positions) for row in rows], [row.episode for row in rows], self.settings)
        row_weight = dict(zip(indices, weights, strict=True))

        def loss_of(indices: Sequence[int], logprobs: RowLogprobs) -> PartialLoss:
            new_BK, start_BK, ref_BK, mask_BK = logprobs
            rows, device = [self.rows[index] for index in indices], new_BK.device
            rollout_BK = pad([row.rollout_logprobs for row in rows]).to(device)
            inputs = PolicyBatch(
                old_logprobs_BT=start_BK if start_BK is not None and self.uses_start else rollout_BK,
                rollout_logprobs_BT=rollout_BK,
                ref_logprobs_BT=ref_BK,
                advantage_BT=pad([row.advantages for row in rows]).to(device),
                mask_BT=mask_BK,
                weight_B=torch.tensor([row_weight[index] for index in indices], device=device),
            )
            loss, *sums, metrics = policy_loss(new_BK, inputs, self.settings, self._objective)
            if metrics.keys() != {*self._names}:
                raise BackendError(f"objective: its metrics are {[*metrics]}, but were {[*self._names]} before")
            return PartialLoss(loss, [loss.detach(), *sums, *(metrics[n] for n in self._names)])

        return loss_of

    def metrics(self, steps: Sequence[StepResult]) -> dict[str, Any]:
        """The gap to the sampler is that of the first step, before the weights changed."""
        tokens, first = sum(step.tokens for step in steps), steps[0]
        ratio_mean = first.sums["sampled_ratio"] / first.tokens
        mean_square = first.sums["sampled_ratio_squares"] / first.tokens
        metrics = {
            "kl": _total(steps, "kl") / tokens if self.settings.kl.beta > 0 else None,
            **{name: _total(steps, name) / tokens for name in self._names},
            "logprob_gap": first.sums["gap"] / first.tokens,
            "ratio_mean": ratio_mean,
            "effective_sample_size": ratio_mean**2 / mean_square if mean_square else None,
        }
        if self.settings.token_mask is not None or self.settings.sequence_mask is not None:
            metrics["masked_share"] = _total(steps, "excluded") / tokens
        return metrics


class SupervisedFinetuning(Objective):
    """The mean negative log-likelihood of the step's trained tokens."""

    sums = ("loss",)

    def step_loss(self, step: int, known: Mapping[int, KnownSums]) -> LossOfRows:
        tokens = self.count_tokens(self.plan[step])

        def loss_of(indices: Sequence[int], logprobs: RowLogprobs) -> PartialLoss:
            loss = -logprobs.sums().sum() / tokens
            return PartialLoss(loss, [loss.detach()])

        return loss_of


class DirectPreference(Objective):
    """DPO and its relatives: the mean over pairs of `dpo_loss`, and the chosen sides' negative log-likelihood."""

    sums = (
        *("loss", "sft_loss", "pairs"),
        *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected"),
    )

    def __post_init__(self) -> None:
        self._sides: dict[str, tuple[list[int], list[int]]] = {}
        for index, row in enumerate(self.rows):
            self._sides.setdefault(row.pair, ([], []))[not row.preferred].append(index)
        self._tokens = {side: tuple(map(self.count_tokens, sides)) for side, sides in self._sides.items()}

    def units(self, step: int) -> list[list[int]]:
        return group_rows(self.rows, self.plan[step])

    def step_loss(self, step: int, known: Mapping[int, KnownSums]) -> LossOfRows:
        assert self.settings.dpo is not None
        settings = self.settings.dpo
        pairs = list(dict.fromkeys(self.rows[index].pair for index in self.plan[step]))
        chosen_tokens = sum(self._tokens[pair][0] for pair in pairs)

        def loss_of(indices: Sequence[int], logprobs: RowLogprobs) -> PartialLoss:
            here = list(dict.fromkeys(self.rows[index].pair for index in indices))
            sides = [self._sides[pair][side] for side in (0, 1) for pair in here]
            ratios, logps = _completion_sums(sides, indices, logprobs, known)
            if settings.average_logprobs:
                tokens = ratios.new_tensor([self._tokens[pair][side] for side in (0, 1) for pair in here])
                ratios, logps = ratios / tokens, logps / tokens
            chosen_P, rejected_P = ratios.chunk(2)
            loss_P = settings.preference_loss_weight * dpo_loss(chosen_P, rejected_P, settings) / len(pairs)
            is_chosen_B = torch.tensor([bool(self.rows[index].preferred) for index in indices], device=ratios.device)
            sft_loss = -torch.where(is_chosen_B, logprobs.sums(), 0.0).sum() / chosen_tokens
            weighted_sft = settings.sft_loss_weight * sft_loss
            with torch.no_grad():
                # A pair split over micro-batches is in the loss of each, and counts in the sums of the first.
                at = set(indices)
                counted_P = torch.tensor([self._sides[pair][0][0] in at for pair in here], device=ratios.device)
                rewards = (settings.beta * ratios).chunk(2)
                per_pair = (*rewards, (rewards[0] > rewards[1]).double(), *logps.chunk(2))
                sums = [(counted_P * loss_P).sum() + weighted_sft, sft_loss.detach(), counted_P.sum()]
                sums += [(counted_P * values_P).sum() for values_P in per_pair]
            return PartialLoss(loss_P.sum() + weighted_sft, sums)

        return loss_of

    def metrics(self, steps: Sequence[StepResult]) -> dict[str, Any]:
        pairs = _total(steps, "pairs")
        means = {name: _total(steps, name) / pairs for name in self.sums if "/" in name}
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return {"sft_loss": _total(steps, "sft_loss") / len(steps), **means}


class KahnemanTversky(Objective):
    """KTO: the mean over episodes of `kto_loss`.

    Its reference point, the KL divergence from the reference, is estimated as in TRL and the authors' code: the mean
    log-ratio of the step's completions after one another's prompts, at least 0. With a single episode it is 0.
    """

    sums = ("loss", "kl", *(f"{name}/{side}" for side in SIDES for name in ("counts", "rewards", "logps")))

    def __post_init__(self) -> None:
        rows, extended = self.rows, list(self.rows)
        self._baselines: list[range] = []  # by step
        for step in range(len(self.plan)):
            first = len(extended)
            extended += mismatched_rows([rows[unit[0]] for unit in self.units(step)], self.max_length)
            self._baselines.append(range(first, len(extended)))
        self.rows = extended

    def units(self, step: int) -> list[list[int]]:
        return group_rows(self.rows, self.plan[step])

    def baseline_rows(self, step: int) -> Sequence[int]:
        return self._baselines[step]

    def step_loss(self, step: int, known: Mapping[int, KnownSums]) -> LossOfRows:
        assert self.settings.kto is not None
        settings = self.settings.kto
        episodes = self.units(step)
        number = {index: number for number, members in enumerate(episodes) for index in members}
        baseline = [known[index].log_ratio for index in self._baselines[step]]
        kl = max(math.fsum(baseline) / len(baseline), 0.0) if baseline else 0.0

        def loss_of(indices: Sequence[int], logprobs: RowLogprobs) -> PartialLoss:
            here = [episodes[each] for each in dict.fromkeys(number[index] for index in indices)]
            ratio_E, logps_E = _completion_sums(here, indices, logprobs, known)
            is_good_E = torch.tensor([bool(self.rows[members[0]].preferred) for members in here], device=ratio_E.device)
            loss_E = kto_loss(ratio_E, is_good_E, ratio_E.new_tensor(kl), settings) / len(episodes)
            with torch.no_grad():
                at = set(indices)  # an episode split over micro-batches counts in the sums of the first
                counted_E = torch.tensor([members[0] in at for members in here], device=ratio_E.device)
                sums = [(counted_E * loss_E).sum(), counted_E.sum() * kl / len(episodes)]
                for of_side_E in (counted_E & is_good_E, counted_E & ~is_good_E):
                    sums += [of_side_E.sum(), (of_side_E * settings.beta * ratio_E).sum(), (of_side_E * logps_E).sum()]
            return PartialLoss(loss_E.sum(), sums)

        return loss_of

    def metrics(self, steps: Sequence[StepResult]) -> dict[str, Any]:
        """None for a side without episodes."""
        means: dict[str, Any] = {"kl": _total(steps, "kl") / len(steps)}
        for side in SIDES:
            count = _total(steps, f"counts/{side}")
            for name in ("rewards", "logps"):
                means[f"{name}/{side}"] = _total(steps, f"{name}/{side}") / count if count else None
        chosen, rejected = means["rewards/chosen"], means["rewards/rejected"]
        means["rewards/margins"] = None if chosen is None or rejected is None else chosen - rejected
        return means


def mismatched_rows(rows: Sequence[Row], max_length: int) -> list[Row]:
    """Each row's prompt with the completion of another row; none for a single row.

    The rows are sorted by prompt and their completions rotated by the size of the largest group with one prompt, so
    that no completion follows its own prompt unless one has more than half of the rows. A completion is everything from
    the first trained token on; it is cut off at `max_length`.
    """
    if len(rows) < 2:
        return []
    prompts = [row.token_ids[: row.positions[0]] for row in rows]
    keys = [prompt.tobytes() for prompt in prompts]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    shift = max(Counter(keys).values()) % len(rows) or 1
    mismatched = []
    for position, index in enumerate(order):
        prompt, other = prompts[index], rows[order[position - shift]]
        start = int(other.positions[0])
        tokens = np.concatenate([prompt, other.token_ids[start : other.positions[-1] + 1]])[:max_length]
        positions = other.positions - start + len(prompt)
        mismatched.append(Row(tokens, positions[positions < len(tokens)]))
    return mismatched


def _completion_sums(
    completions: Sequence[Sequence[int]], indices: Sequence[int], logprobs: RowLogprobs, known: Mapping[int, KnownSums]
) -> tuple[Tensor, Tensor]:
    """The log-ratios new - ref and the log-probabilities of completions, each a list of rows.

    Rows of the micro-batch `indices` carry the gradient; those in other micro-batches are `known`.
    """
    at = set(indices)
    elsewhere = [[known[index] for index in rows if index not in at] for rows in completions]
    owner = {index: number for number, rows in enumerate(completions) for index in rows}
    owner_B = torch.tensor([owner[index] for index in indices], device=logprobs.new_BK.device)
    ratios_B, logps_B = logprobs.log_ratios(), logprobs.sums()
    ratios = ratios_B.new_tensor([math.fsum(each.log_ratio for each in rows) for rows in elsewhere])
    logps = logps_B.new_tensor([math.fsum(each.logprob for each in rows) for rows in elsewhere])
    return ratios.index_add(0, owner_B, ratios_B), logps.index_add(0, owner_B, logps_B)


def _total(steps: Sequence[StepResult], name: str) -> float:
    return math.fsum(step.sums[name] for step in steps)
