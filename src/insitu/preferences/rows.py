"""The training rows of preferences: the tokens that were sampled, or messages where no call was recorded."""

from collections.abc import Sequence

from insitu.advantages.estimator import rows_of
from insitu.schemas.episodes import CandidateStep, ModelCall, PreferencePair, TrainingRow
from insitu.schemas.finetuning import Trajectory


def pair_rows(pair: PreferencePair, calls: Sequence[ModelCall], name: str) -> list[TrainingRow]:
    """The rows of both sides of a pair called `name`: candidates of an episode with these calls.

    If the tokens of one side are unknown, both are sent as messages, so that they share their prompt.
    """
    sides = ((pair.chosen, True), (pair.rejected, False))
    if all(_tokens_known(candidate, calls) for candidate, _ in sides):
        rows = [(_sampled_row(candidate, calls), preferred) for candidate, preferred in sides]
    else:
        rows = [(_text_row(candidate), preferred) for candidate, preferred in sides]
    return [row.model_copy(update={"pair": name, "preferred": preferred}) for row, preferred in rows]


def episode_rows(episode: Trajectory, *, pair: str = "", preferred: bool | None = None) -> list[TrainingRow]:
    """The rows of an episode, which may be one side of a pair."""
    rows = rows_of(episode.calls, dict.fromkeys(episode.trained_calls, 1.0), episode.id or "")
    return [row.model_copy(update={"pair": pair, "preferred": preferred}) for row in rows]


def _tokens_known(candidate: CandidateStep, calls: Sequence[ModelCall]) -> bool:
    call = calls[candidate.call] if candidate.call is not None else None
    return call is not None and bool(call.token_ids) and call.prompt_token_ids is not None


def _sampled_row(candidate: CandidateStep, calls: Sequence[ModelCall]) -> TrainingRow:
    assert candidate.call is not None  # _tokens_known
    [row] = rows_of([calls[candidate.call]], {0: 1.0})
    return row


def _text_row(candidate: CandidateStep) -> TrainingRow:
    prompt = candidate.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    messages = [*messages, {"role": "assistant", "content": candidate.response}]
    return TrainingRow(messages=messages, trained_messages=[len(messages) - 1])
