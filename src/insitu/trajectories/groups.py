"""From the calls of a group's episodes to its training rows: which calls are trained, and with what advantage."""

from collections.abc import Collection, Sequence
from typing import Any

from insitu.algorithms.advantages import AdvantageConfig, group_advantages
from insitu.algorithms.rows import rows_of
from insitu.config import is_targeted, models_named
from insitu.errors import TrajectoryError
from insitu.schemas.episodes import ModelCall
from insitu.schemas.finetuning import EpisodeItem, EpisodeItemRole, Trajectory
from insitu.trajectories.dialogues import Turn, dialogues

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

    Calls that did not continue it are dialogues of their own and stay in the trajectory's `calls`.
    """
    found = dialogues(calls)
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


def step_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """G_k = sum over j >= k of discount^(j-k) r_j, for the steps of one episode."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def call_advantages(
    group: Sequence[Trajectory], config: AdvantageConfig, credit: str = "episode", discount: float = 1.0
) -> list[dict[int, float]]:
    """For each trajectory of a group, the advantage of each of its trained calls, by place in `calls`.

    `credit: episode` gives every call of an episode the advantage of its reward within the group. `credit: step`
    compares the (discounted) returns of all trained calls of the group with one another.
    """
    if credit == "episode":
        advantages = group_advantages([t.reward for t in group], config)
        return [dict.fromkeys(t.trained_calls, a) for t, a in zip(group, advantages, strict=True)]
    returns = [step_returns(_step_rewards(t), discount) for t in group]
    flat = iter(group_advantages([g for of_episode in returns for g in of_episode], config))
    return [{place: next(flat) for place in t.trained_calls} for t in group]


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
