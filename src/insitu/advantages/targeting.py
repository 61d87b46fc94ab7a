"""Selects the model calls to train on, and the function each call is credited to."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from insitu.schemas.components import WORKFLOW
from insitu.schemas.episodes import Episode, ModelCall


class TrainedCalls(NamedTuple):
    """Which calls of episodes are trained; see `targeted_calls`."""

    functions: Sequence[str] = (WORKFLOW,)
    llms: frozenset[str] = frozenset()
    model: str | None = None

    def of(self, episode: Episode) -> list[int]:
        """Their positions in `episode.calls`, which are remembered there."""
        if episode.trained_calls is None:
            episode.trained_calls = targeted_calls(episode.calls, self.functions, self.model, self.llms)
        return episode.trained_calls

    def why_none(self, calls: Sequence[ModelCall]) -> str:
        return why_untargeted(calls, self.functions, self.llms)


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


def matching_llms(target: str, models: Mapping[str, str | None]) -> list[str]:
    """The keys of `models` (llm key -> model name) that `target`, a key or a model name, selects.

    Without an exact match, `@step` suffixes are ignored and llms whose model name is still unknown also match.
    """
    exact = [key for key, model in models.items() if model == target]
    possible = [k for k, model in models.items() if model is None or _without_step(model) == _without_step(target)]
    return [target] if target in models else exact or possible


def _without_step(model: str) -> str:
    name, _, step = model.rpartition("@")
    return name if name and step.isdecimal() else model


def targeted_calls(
    calls: Sequence[ModelCall],
    targets: Collection[str],
    target_model: str | None,
    llms: Collection[str],
    *,
    as_text: bool = False,
) -> list[int]:
    """Positions in `calls` of the calls to train on.

    Those are the calls that have token ids (a message, if they are trained `as_text`) and no error, were made inside
    one of `targets`, and went to the target model. `llms` are the selected keys of the `llms` section (see
    Config.trained_llms). The configured `target_model` is compared only if `llms` is empty or the llm of the call is
    unknown.
    """
    every = WORKFLOW in targets
    return [
        position
        for position, call in enumerate(calls)
        if (call.message is not None if as_text else call.token_ids)
        and call.error is None
        and (every or is_targeted(call.functions, targets))
        and _is_to_target_model(call, target_model, llms)
    ]


def why_untargeted(calls: Sequence[ModelCall], targets: Collection[str], llms: Collection[str]) -> str:
    """Why none of an episode's calls is trained."""
    if any(call.llm in llms and call.token_ids is None and call.error is None for call in calls):
        return "its model calls have no token ids: their server sends none"
    called = {f"{call.llm or call.model} in {' > '.join(call.functions)}" for call in calls}
    target = f"{' or '.join(sorted(llms))} in {' or '.join(targets)}"
    return f"the model calls of {target} are trained; it called {', '.join(sorted(called)) or 'none'}"


def _is_to_target_model(call: ModelCall, target_model: str | None, llms: Collection[str]) -> bool:
    if llms and call.llm is not None:
        return call.llm in llms
    if target_model is None:
        return not llms
    return bool(matching_llms(target_model, {call.llm or "": call.model}))
