"""From the calls of a group's episodes to its training rows: which calls are trained, and with what advantage."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from insitu.algorithms.advantages import AdvantageConfig, group_advantages, member_advantages
from insitu.algorithms.credit import Weighed, step_returns
from insitu.algorithms.rows import rows_of
from insitu.config import WORKFLOW, credited_function, is_targeted, models_named
from insitu.errors import TrajectoryError
from insitu.schemas.episodes import ModelCall
from insitu.schemas.finetuning import EpisodeItem, EpisodeItemRole, Trajectory
from insitu.trajectories.conversations import Turn, conversations

_ROLES = {role.value: role for role in EpisodeItemRole} | {"developer": EpisodeItemRole.SYSTEM}


def targeted_calls(
    calls: Sequence[ModelCall], functions: Sequence[str], model: str | None, llms: Collection[str]
) -> list[int]:
    """The places of the calls that are trained.

    A call counts if it was made inside one of `functions` and to the targeted model: `model` names it by its key
    under `llms`, its model name, or `name@step`; `llms` holds the keys that this comes to (see Config.trained_llms).
    """
    return [
        place
        for place, call in enumerate(calls)
        if call.token_ids
        and call.error is None
        and is_targeted(call.functions, functions)
        and _is_model(call, model, llms)
    ]


def _is_model(call: ModelCall, model: str | None, llms: Collection[str]) -> bool:
    if llms and call.llm is not None:
        return call.llm in llms
    if model is None:
        return not llms
    return bool(models_named(model, {call.llm or "": call.model}))


def dialogue(calls: Sequence[ModelCall]) -> list[EpisodeItem]:
    """The readable dialogue: the messages and answer of the last call that continues the first.

    Calls that did not continue it are conversations of their own and stay in the trajectory's `calls`.
    """
    found = conversations(calls)
    return [_item(turn) for turn in found[0]] if found else []


def _item(turn: Turn) -> EpisodeItem:
    message, call = turn
    role = _ROLES.get(str(message.get("role")), EpisodeItemRole.OTHER)
    metadata = {key: value for key, value in message.items() if key not in ("role", "content")}
    if call is not None:
        metadata |= {"call": call.index, "finish_reason": call.finish_reason}
    logprobs = None
    if role is EpisodeItemRole.ASSISTANT:
        logprobs = (call.logprobs if call is not None else None) or []
    return EpisodeItem(role=role, content=text_of(message.get("content")), logprobs=logprobs, metadata=metadata or None)


def text_of(content: Any) -> str:
    """A message's content as text; of a list of parts, the text parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


class Credit(NamedTuple):
    """How rewards become the advantages of calls; see `call_advantages`."""

    unit: str = "episode"
    discount: float = 1.0
    targets: Collection[str] = (WORKFLOW,)


BY_EPISODE = Credit()


def call_advantages(
    group: Sequence[Trajectory], config: AdvantageConfig, credit: Credit = BY_EPISODE
) -> list[dict[int, float]]:
    """For each trajectory of a group, the advantage of each of its trained calls, by place in `calls`.

    `credit: episode` gives every call of an episode the advantage of its reward within the group. `credit: step`
    compares the (discounted) returns of all trained calls of the group with one another. `credit: function` compares
    each call with those of the same function in the group's other episodes: by the returns of that function's rewards
    where it was given any, and by the episodes' rewards where not.
    """
    if credit.unit == "episode":
        advantages = group_advantages([t.reward for t in group], config)
        return [dict.fromkeys(t.trained_calls, a) for t, a in zip(group, advantages, strict=True)]
    if credit.unit == "function":
        return _by_function(group, config, credit)
    returns = [step_returns(_step_rewards(t), credit.discount) for t in group]
    flat = iter(group_advantages([g for of_episode in returns for g in of_episode], config))
    return [{place: next(flat) for place in t.trained_calls} for t in group]


def _by_function(group: Sequence[Trajectory], config: AdvantageConfig, credit: Credit) -> list[dict[int, float]]:
    found: list[dict[int, float]] = [{} for _ in group]
    made: dict[str, list[list[int]]] = {}  # by function, for each trajectory the places among its trained calls
    for number, t in enumerate(group):
        for k, place in enumerate(t.trained_calls):
            name = credited_function(t.calls[place].functions, credit.targets)
            made.setdefault(name, [[] for _ in group])[number].append(k)
    for name, members in made.items():
        rewarded = any(name in _rewarded(t, credit.targets) for t in group)
        returns = [
            step_returns([_step_reward(t, k) for k in ks], credit.discount) if rewarded else [t.reward] * len(ks)
            for t, ks in zip(group, members, strict=True)
        ]
        firsts = [t.calls[t.trained_calls[ks[0]]] if ks else None for t, ks in zip(group, members, strict=True)]
        contexts = [first and _asked(first) for first in firsts]
        advantages = member_advantages(returns, config, contexts)
        for number, (t, ks) in enumerate(zip(group, members, strict=True)):
            found[number] |= {t.trained_calls[k]: a for k, a in zip(ks, advantages[number], strict=True)}
    return found


def _rewarded(trajectory: Trajectory, targets: Collection[str]) -> Collection[str]:
    """The functions with rewards of their own: those that are told, or else all where there are step rewards."""
    if trajectory.shaped_rewards is None:
        return ()
    told: Collection[str] | None = (trajectory.metadata or {}).get("rewarded_functions")
    return {credited_function(call.functions, targets) for call in trajectory.calls} if told is None else told


def _step_reward(trajectory: Trajectory, k: int) -> float:
    """That of the k-th trained call; an episode in which nothing was given is worth nothing to the function."""
    return 0.0 if trajectory.shaped_rewards is None else _step_rewards(trajectory)[k]


def _asked(call: ModelCall) -> str:
    """What a function had seen when it began: all that the others have done before it, as far as it was told."""
    return json.dumps([call.messages, call.tools], sort_keys=True)


def weighed_calls(
    weighed: Iterable[tuple[Trajectory, Mapping[int, float | None]]], targets: Collection[str]
) -> list[Weighed]:
    """The trained calls of trajectories whose advantages are known, with their functions."""
    calls = [(t.calls[place], advantage) for t, of_calls in weighed for place, advantage in of_calls.items()]
    return [
        Weighed(credited_function(c.functions, targets), len(c.token_ids or ()), a) for c, a in calls if a is not None
    ]


def has_step_rewards(trajectory: Trajectory) -> bool:
    """Whether there is a reward for each trained call, as `credit: step` needs it."""
    return trajectory.shaped_rewards is not None and len(trajectory.shaped_rewards) == len(trajectory.trained_calls)


def _step_rewards(trajectory: Trajectory) -> list[float]:
    if trajectory.shaped_rewards is None:
        raise TrajectoryError(
            f"credit: step needs a reward for each model call; episode {trajectory.id} has none: give them by "
            "Context.get().reward(value), by custom steps with a `reward`, or as step_scores of the evaluator"
        )
    if len(trajectory.shaped_rewards) != len(trajectory.trained_calls):
        raise TrajectoryError(
            f"episode {trajectory.id} has {len(trajectory.trained_calls)} trained calls "
            f"and {len(trajectory.shaped_rewards)} step rewards"
        )
    return trajectory.shaped_rewards


def build_rows(group: Sequence[Trajectory], advantages: Sequence[dict[int, float]]) -> None:
    """Set the rows of each trajectory from its calls and their advantages."""
    for trajectory, of_calls in zip(group, advantages, strict=True):
        trajectory.rows = rows_of(trajectory.calls, of_calls, trajectory.id or "")
