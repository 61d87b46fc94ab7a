"""On-policy distillation: the advantage of a sampled token is how much likelier a teacher finds it than the policy."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from insitu.advantages.credit import CallAdvantages
from insitu.advantages.estimator import AdvantageEstimator, sampling_problem, truncation
from insitu.schemas.episodes import DropReason, ModelCall
from insitu.schemas.finetuning import Trajectory

Gaps = list[float | None]
"""Teacher minus policy for each sampled token; None where the teacher has no log-probability."""


class TeacherEstimator(AdvantageEstimator):
    """Adds up what a teacher says of each token and, with `reward_coefficient`, the advantages of the rewards.

    The teacher's term is `coefficient` x (teacher - rollout), the log-probabilities of the token under the teacher and
    as it was sampled. Its mean over samples is minus the reverse KL divergence KL(policy || teacher) of each token's
    distribution, whose policy gradient is that of generalized knowledge distillation on the student's own samples
    (GKD, arXiv:2306.13649) and of MiniLLM (arXiv:2306.08543) without credit for the tokens that follow: a discount of
    0, as in Thinking Machines' on-policy distillation (2025). The `baseline` is not the group's mean reward, but the
    mean of the terms of all other trained tokens of the group, which may be one episode: without it every sampled token
    is made less likely on average, whatever takes its place.
    """

    compares = False

    def __init__(
        self, coefficient: float, reward_coefficient: float, rewards: AdvantageEstimator, *, baseline: bool = True
    ) -> None:
        self._coefficient, self._reward_coefficient = coefficient, reward_coefficient
        self._has_baseline = baseline
        self._rewards = rewards

    def settings(self) -> dict[str, Any]:
        return self._rewards.settings() if self._reward_coefficient else {}

    def drop_reason(self, trajectory: Trajectory) -> DropReason | None:
        if any(trajectory.calls[index].teacher_logprobs is None for index in trajectory.trained_calls):
            return DropReason.TEACHER_ERROR
        return self._rewards.drop_reason(trajectory) if self._reward_coefficient else None

    def problem(self, call: ModelCall) -> str | None:
        """A teacher's log-probabilities are those of unchanged logits at temperature 1, whatever the policy's are."""
        is_tempered = call.logprobs_temperature not in (None, 1)
        changed = truncation({key: value for key, value in call.sampling.items() if key != "logprobs_processed"})
        return sampling_problem(call) or ("teacher_temperature" if is_tempered else changed)

    def estimate(self, group: Sequence[Trajectory]) -> list[CallAdvantages] | None:
        of_rewards = None
        if self._reward_coefficient and (len(group) > 1 or not self._rewards.compares):
            of_rewards = self._rewards.estimate(group)
        terms = [{k: _gaps(t.calls[k]) for k in t.trained_calls} for t in group]
        if self._has_baseline:
            pairs = zip(group, terms, strict=True)
            trained = (
                term for t, of_calls in pairs for k, term in of_calls.items() if self.problem(t.calls[k]) is None
            )
            _subtract_others([*trained])
        estimated: list[CallAdvantages] = []
        for of_calls, rewards in zip(terms, of_rewards or [{}] * len(group), strict=True):
            estimated.append({k: self._added(term, rewards.get(k) or 0.0) for k, term in of_calls.items()})
        return estimated

    def _added(self, term: Gaps, of_reward: float | list[float]) -> list[float]:
        rewards = of_reward if isinstance(of_reward, list) else [of_reward] * len(term)
        weight, reward_weight = self._coefficient, self._reward_coefficient
        return [weight * (gap or 0.0) + reward_weight * r for gap, r in zip(term, rewards, strict=True)]


def _gaps(call: ModelCall) -> Gaps:
    pairs = zip(call.teacher_logprobs or (), call.logprobs or (), strict=True)
    return [None if teacher is None else teacher - own for teacher, own in pairs]


def _subtract_others(lists: Sequence[Gaps]) -> None:
    """Subtracts from each term the mean of the others."""
    known = [gap for term in lists for gap in term if gap is not None]
    total, others = math.fsum(known), len(known) - 1
    if others > 0:
        for term in lists:
            term[:] = [None if gap is None else gap - (total - gap) / others for gap in term]


def teacher_metrics(trained: Iterable[tuple[Trajectory, CallAdvantages]]) -> dict[str, float]:
    """`teacher_kl`: the mean of rollout - teacher over the trained tokens, an estimate of KL(policy || teacher)."""
    calls = (t.calls[index] for t, of_calls in trained for index in of_calls)
    gaps = [gap for call in calls if call.teacher_logprobs is not None for gap in _gaps(call) if gap is not None]
    return {"teacher_kl": -sum(gaps) / len(gaps)} if gaps else {}
