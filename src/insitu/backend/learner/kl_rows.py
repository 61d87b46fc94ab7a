"""The rows of a job on which the metric `kl` is measured, chosen so that its two forward passes cost little."""

import itertools
import math
from collections.abc import Sequence

from insitu.backend.learner.batches import Packer, Sizes, group_rows

KL_ROWS, KL_TOKENS = 128, 512
"""Maximum rows of the last step on which the metric is measured; fewer once they have so many trained tokens."""
KL_SHARE = 0.03
"""Maximum cost of the metric as a share of the job's: that of its forward and backward passes."""


def kl_budget(sizes: Sizes, rows: int, *, lora: bool) -> float:
    """The input tokens on which the metric may be measured after a job of these sizes, which computed `rows` rows.

    A backward pass costs as much as two forward passes, or one if the weights are frozen; the metric takes two.
    """
    with_gradient = sizes.computed_tokens * (1 - sizes.rows_without_gradient / rows)
    return KL_SHARE * (sizes.computed_tokens + (1 if lora else 2) * with_gradient) / 2


def kl_rows(packer: Packer, indices: Sequence[int], rows: int | None, budget: float | None, job: int) -> list[int]:
    """Selects the rows of `indices` on which the metric is measured: one of each episode, then a second, and so on.

    At most `rows`, or what the constants above allow. `job` counts the jobs of a training from 0.

    With a `budget` of input tokens, rows with the same prompt follow each other, as it is computed once. If it is less
    than a row, the metric is measured after every second, third, ... job, so that it costs no more on average.
    """
    by_episode = group_rows(packer.rows, indices)
    in_turn: list[int] = [index for each in itertools.zip_longest(*by_episode) for index in each if index is not None]
    if rows is not None:
        return in_turn[:rows]
    if budget is not None:
        by_prompt: dict[bytes, list[int]] = {}
        for index in in_turn:
            row = packer.rows[index]
            by_prompt.setdefault(row.token_ids[: row.positions[0]].tobytes(), []).append(index)
        in_turn = [*itertools.chain(*by_prompt.values())]
        interval = max(1, math.ceil(packer.computed_tokens(in_turn[:1])[0] / budget))
        in_turn = [*packer.fitting(in_turn, interval * budget)] if job % interval == 0 else []
    before = itertools.accumulate((len(packer.rows[index].positions) for index in in_turn), initial=0)
    return [index for index, tokens in zip(in_turn, before, strict=False) if tokens < KL_TOKENS][:KL_ROWS]
