"""Advantages of calls: which calls are trained, which reward each is judged by, and how rewards are compared."""

import json
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from insitu.errors import TrajectoryError
from insitu.schemas.components import WORKFLOW
from insitu.schemas.config import matching_llms
from insitu.schemas.episodes import Episode, ModelCall
from insitu.schemas.finetuning import Trajectory

_MAX_RETURN = 1e38
"""Largest magnitude of a return, a sum of rewards: the learner computes with 32 bits, which hold 3.4e38."""


class TrainedCalls(NamedTuple):
    """Which calls of episodes are trained.

    Those are the calls that have token ids (a message, if they are trained `as_text`) and no error, were made inside
    one of `functions`, and went to the target model. `llms` are the selected keys of the `llms` section (see
    Config.trained_llms). The configured `model` is compared only if `llms` is empty or the llm of the call is unknown.
    """

    functions: Sequence[str] = (WORKFLOW,)
    llms: frozenset[str] = frozenset()
    model: str | None = None
    as_text: bool = False

    def of(self, episode: Episode) -> list[int]:
        """Their positions in `episode.calls`, which are remembered there."""
        if episode.trained_calls is None:
            episode.trained_calls = self.positions(episode.calls)
        return episode.trained_calls

    def positions(self, calls: Sequence[ModelCall]) -> list[int]:
        return [position for position, call in enumerate(calls) if self._is_trained(call)]

    def _is_trained(self, call: ModelCall) -> bool:
        is_sampled = call.message is not None if self.as_text else bool(call.token_ids)
        if call.error is not None or not is_sampled or not is_targeted(call.functions, self.functions):
            return False
        if self.llms and call.llm is not None:
            return call.llm in self.llms
        if self.model is None:
            return not self.llms
        return bool(matching_llms(self.model, {call.llm or "": call.model}))

    def why_none(self, calls: Sequence[ModelCall]) -> str:
        """Why none of an episode's calls is trained."""
        if any(call.llm in self.llms and call.token_ids is None and call.error is None for call in calls):
            return "its model calls have no token ids: their server sends none"
        called = {f"{call.llm or call.model} in {' > '.join(call.functions)}" for call in calls}
        target = f"{' or '.join(sorted(self.llms))} in {' or '.join(self.functions)}"
        return f"the model calls of {target} are trained; it called {', '.join(sorted(called)) or 'none'}"


def is_targeted(functions: Collection[str], targets: Collection[str]) -> bool:
    """Whether one of the enclosing `functions` of a call is in `targets`; `<workflow>` matches every call."""
    return WORKFLOW in targets or not set(targets).isdisjoint(functions)


def credited_function(functions: Sequence[str], targets: Collection[str]) -> str:
    """The function that gets credit for a call made inside `functions` (outermost first).

    It is the innermost one in `targets`. If `targets` contains `<workflow>` or none of them encloses the call, it is
    the innermost function; `<workflow>` outside any function.
    """
    targeted = [name for name in functions if name in targets] if WORKFLOW not in targets else []
    return (targeted or functions or (WORKFLOW,))[-1]


class AdvantageConfig(BaseModel):
    """How a group's rewards become advantages."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    type: Literal["group_relative"] = Field(default="group_relative", alias="_type", exclude=True, repr=False)
    baseline: Literal["mean", "leave_one_out", "leave_one_function_out"] = "mean"
    """Subtracted from each reward. `mean`: the mean of the group. `leave_one_out`: the mean of the other members (RLOO,
    arXiv:2402.14740). `leave_one_function_out`, with `credit: function`: the mean of the other members in which the
    function's first call had the same messages and tools."""
    scale: Literal["none", "sample_std", "population_std"] = "sample_std"
    """Divisor of the difference. `none`: 1 (Dr. GRPO, arXiv:2503.20783). `sample_std`, `population_std`: the standard
    deviation of the group's rewards, with n - 1 or n in the denominator of the variance."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


def group_advantages(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """One advantage per reward; all 0 for a group of one member or without variance."""
    return [a for (a,) in member_advantages([[reward] for reward in rewards], config)]


def member_advantages(
    returns: Sequence[Sequence[float]], config: AdvantageConfig, situations: Sequence[Hashable] | None = None
) -> list[list[float]]:
    """One advantage for each return of each member of a group; members without returns are left out.

    A member counts once, however many returns it has: means are taken over the members' means, and the variance is
    the mean over members of their mean squared deviation from the group's mean. So only the baseline `mean` depends on
    the member itself. For `leave_one_function_out`, members in the same of `situations` are compared with one another,
    and one that is alone in its situation with all the others.
    """
    for index, member in enumerate(returns):
        for value in member:
            if not abs(value) <= _MAX_RETURN:  # NaN too
                allowed = f"from {-_MAX_RETURN:g} to {_MAX_RETURN:g}"
                raise TrajectoryError(f"reward {index} of the group is {value}; allowed: {allowed}")
    members = [index for index, member in enumerate(returns) if member]
    divisor = 0.0
    if len(members) > 1 and len({value for member in returns for value in member}) > 1:
        means = {index: fmean(returns[index]) for index in members}
        mean = math.fsum(means.values()) / len(means)
        divisor = 1.0 if config.scale == "none" else _deviation(returns, mean, config) + config.epsilon
    if divisor == 0:  # also of differences whose squares are 0
        return [[0.0] * len(member) for member in returns]
    baselines = dict.fromkeys(members, mean)
    if config.baseline != "mean":
        if situations is None or config.baseline == "leave_one_out":
            situations = [None] * len(returns)
        baselines = {index: _mean_of_others(index, means, situations) for index in members}
    return [[(value - baselines[index]) / divisor for value in member] for index, member in enumerate(returns)]


def _mean_of_others(index: int, means: Mapping[int, float], situations: Sequence[Hashable]) -> float:
    others = [other for other in means if other != index]
    alike = [other for other in others if situations[other] == situations[index]]
    return fmean(means[other] for other in alike or others)


def _deviation(returns: Sequence[Sequence[float]], mean: float, config: AdvantageConfig) -> float:
    squares = [fmean([(value - mean) ** 2 for value in member]) for member in returns if member]
    freedom = len(squares) - 1 if config.scale == "sample_std" else len(squares)
    return math.sqrt(math.fsum(squares) / freedom)


CallAdvantages = Mapping[int, float | list[float] | None]
"""The advantage of each trained call by its index in `Trajectory.calls`, or of each of its tokens; None if the backend
computes it."""


class Credit(NamedTuple):
    """The unit of credit (`episode`, `step` or `function`), the discount of later steps, the targeted functions."""

    unit: str = "episode"
    discount: float = 1.0
    targets: Collection[str] = (WORKFLOW,)


BY_EPISODE = Credit()


def call_advantages(
    group: Sequence[Trajectory], config: AdvantageConfig, credit: Credit = BY_EPISODE
) -> list[dict[int, float]]:
    """For each trajectory of a group, the advantage of each trained call by its index in `calls`.

    `episode`: every call gets the advantage of its episode's reward within the group. `step`: the discounted returns
    of all trained calls of the group are compared. `function`: each call is compared with those of the same function
    in the group's other episodes, by the returns of that function's step rewards, or by the episodes' rewards if it
    received none.
    """
    if credit.unit == "episode":
        advantages = group_advantages([t.reward for t in group], config)
        return [dict.fromkeys(t.trained_calls, a) for t, a in zip(group, advantages, strict=True)]
    if credit.unit == "function":
        return _by_function(group, config, credit)
    returns = [step_returns(_step_rewards(t), credit.discount) for t in group]
    flat = iter(group_advantages([g for member in returns for g in member], config))
    return [{index: next(flat) for index in t.trained_calls} for t in group]


def group_relative(
    rewards: Sequence[float], episodes: Sequence[Trajectory], config: AdvantageConfig, credit: Credit
) -> list[list[float]]:
    """The advantage of each trained call of the episodes of a group."""
    estimated = call_advantages(episodes, config, credit)
    return [[of_calls[k] for k in t.trained_calls] for t, of_calls in zip(episodes, estimated, strict=True)]


def step_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """G_k = sum over j >= k of discount^(j-k) r_j, for the steps of one episode."""
    backwards = accumulate(reversed(rewards), lambda following, reward: reward + discount * following)
    return [*backwards][::-1]


def _by_function(group: Sequence[Trajectory], config: AdvantageConfig, credit: Credit) -> list[dict[int, float]]:
    result: list[dict[int, float]] = [{} for _ in group]
    steps: dict[str, list[list[int]]] = {}  # by function, for each trajectory the positions among its trained calls
    for number, t in enumerate(group):
        for k, index in enumerate(t.trained_calls):
            name = credited_function(t.calls[index].functions, credit.targets)
            steps.setdefault(name, [[] for _ in group])[number].append(k)
    for name, members in steps.items():
        rewarded = any(name in _rewarded_functions(t, credit.targets) for t in group)
        returns: list[list[float]] = []
        situations: list[str | None] = []  # of members in the same one, the function's first prompt is the same
        for t, ks in zip(group, members, strict=True):
            if rewarded and ks:
                rewards = [0.0] * len(t.trained_calls) if t.shaped_rewards is None else _step_rewards(t)
                returns.append(step_returns([rewards[k] for k in ks], credit.discount))
            else:
                returns.append([t.reward] * len(ks))
            first = t.calls[t.trained_calls[ks[0]]] if ks else None
            situations.append(json.dumps([first.messages, first.tools], sort_keys=True) if first else None)
        advantages = member_advantages(returns, config, situations)
        for number, (t, ks) in enumerate(zip(group, members, strict=True)):
            result[number] |= {t.trained_calls[k]: a for k, a in zip(ks, advantages[number], strict=True)}
    return result


def _rewarded_functions(trajectory: Trajectory, targets: Collection[str]) -> Collection[str]:
    """The functions with step rewards: those recorded, or all functions if only the rewards are known."""
    if trajectory.shaped_rewards is None:
        return ()
    recorded: Collection[str] | None = (trajectory.metadata or {}).get("rewarded_functions")
    if recorded is not None:
        return recorded
    return {credited_function(call.functions, targets) for call in trajectory.calls}


def has_step_rewards(trajectory: Trajectory) -> bool:
    """Whether every trained call has a step reward, as `credit: step` requires."""
    return trajectory.shaped_rewards is not None and len(trajectory.shaped_rewards) == len(trajectory.trained_calls)


def _step_rewards(trajectory: Trajectory) -> list[float]:
    if trajectory.shaped_rewards is None:
        raise TrajectoryError(
            f"credit: step needs a reward for each model call; episode {trajectory.id} has none: use "
            "Context.get().reward(value), custom steps with a `reward`, or step_scores of the evaluator"
        )
    if len(trajectory.shaped_rewards) != len(trajectory.trained_calls):
        raise TrajectoryError(
            f"episode {trajectory.id} has {len(trajectory.trained_calls)} trained calls "
            f"and {len(trajectory.shaped_rewards)} step rewards"
        )
    return trajectory.shaped_rewards


class CreditedCall(NamedTuple):
    """A trained call: the function it is credited to, its number of sampled tokens, and its advantage."""

    function: str
    tokens: int
    advantage: float


def credited_calls(
    estimated: Iterable[tuple[Trajectory, CallAdvantages]], targets: Collection[str]
) -> list[CreditedCall]:
    """The trained calls whose advantages are known; of a call with one per token, the mean magnitude."""
    credited = []
    for t, of_calls in estimated:
        known = {index: advantage for index, advantage in of_calls.items() if advantage is not None}
        for index, advantage in known.items():
            function = credited_function(t.calls[index].functions, targets)
            size = fmean(map(abs, advantage)) if isinstance(advantage, list) else advantage
            credited.append(CreditedCall(function, len(t.calls[index].token_ids or ()), size))
    return credited


def credit_by_function(calls: Iterable[CreditedCall]) -> dict[str, dict[str, float]]:
    """For each function its `calls` and `tokens`, the mean |advantage| per token, and its share of their sum.

    The shares sum to 1, or are all 0 if every advantage is. They are weighted by tokens, the unit of the loss, so
    they do not depend on how an episode is cut into rows.
    """
    shares: dict[str, dict[str, float]] = {}
    weights: dict[str, float] = {}
    for call in calls:
        share = shares.setdefault(call.function, {"calls": 0, "tokens": 0})
        share["calls"] += 1
        share["tokens"] += call.tokens
        weights[call.function] = weights.get(call.function, 0.0) + abs(call.advantage) * call.tokens
    total = sum(weights.values())
    for name, share in shares.items():
        share["mean_abs_advantage"] = weights[name] / share["tokens"] if share["tokens"] else 0.0
        share["share"] = weights[name] / total if total else 0.0
    return dict(sorted(shares.items()))
