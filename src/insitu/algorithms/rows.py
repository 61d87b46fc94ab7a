"""Model calls -> training rows, by exact token prefix: sampled tokens are the trained tokens."""

from collections.abc import Mapping, Sequence

from insitu.errors import TrajectoryError
from insitu.schemas.episodes import ModelCall, TrainingRow


def rows_of(calls: Sequence[ModelCall], advantages: Mapping[int, float], episode: str = "") -> list[TrainingRow]:
    """The rows of one episode; `advantages` gives the weight of each trained call by its place in `calls`.

    A call is appended to the row its prompt begins with, token for token (of several, the longest), and opens a new
    row otherwise. So each sampled token is trained in exactly one row, and stands elsewhere as context only. Calls
    without an advantage are context; a row without a trained token is not given.
    """
    rows: list[TrainingRow] = []
    for place, call in enumerate(calls):
        if call.prompt_token_ids is None or call.token_ids is None:
            if place in advantages:
                raise TrajectoryError(f"episode {episode}: call {call.index} is to be trained but has no token ids")
            continue
        prompt, sampled = call.prompt_token_ids, call.token_ids
        row = _extended_by(rows, prompt)
        if row is None:
            row = TrainingRow.model_construct(
                token_ids=[], loss_mask=[], logprobs=[], advantages=[], episode=episode, calls=[]
            )
            rows.append(row)
        trained = place in advantages
        if trained and (call.logprobs is None or len(call.logprobs) != len(sampled)):
            found = "none" if call.logprobs is None else str(len(call.logprobs))
            raise TrajectoryError(
                f"episode {episode}: call {call.index} has {len(sampled)} sampled tokens and {found} logprobs"
            )
        added = prompt[len(row.token_ids) :]
        _append(row, added, trained=False)
        _append(row, sampled, trained, call.logprobs, advantages.get(place, 0.0))
        row.calls.append(call.index)
    return [row for row in rows if any(row.loss_mask)]


def _extended_by(rows: Sequence[TrainingRow], prompt: list[int]) -> TrainingRow | None:
    fitting = [r for r in rows if len(r.token_ids) <= len(prompt) and prompt[: len(r.token_ids)] == r.token_ids]
    return max(fitting, key=lambda r: len(r.token_ids), default=None)


def _append(
    row: TrainingRow,
    tokens: Sequence[int],
    trained: bool,
    logprobs: Sequence[float] | None = None,
    advantage: float = 0.0,
) -> None:
    n = len(tokens)
    row.token_ids.extend(tokens)
    row.loss_mask.extend([int(trained)] * n)
    row.logprobs.extend(logprobs if trained and logprobs is not None else [0.0] * n)
    assert isinstance(row.advantages, list)
    row.advantages.extend([advantage if trained else 0.0] * n)
