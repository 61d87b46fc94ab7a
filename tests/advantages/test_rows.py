"""Model calls to rows: exact prefixes merge, everything else is a separate row, each sampled token is trained once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.advantages.estimator import rows_of
from insitu.errors import TrajectoryError
from insitu.schemas.episodes import ModelCall, TrainingRow


def call(index: int, prompt: list[int] | None, sampled: list[int] | None) -> ModelCall:
    logprobs = None if sampled is None else [-(index + 1) - i / 100 for i in range(len(sampled))]
    return ModelCall(index=index, model="m", messages=[], prompt_token_ids=prompt, token_ids=sampled, logprobs=logprobs)


def test_a_dialogue_is_one_row() -> None:
    calls = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6])]
    (row,) = rows_of(calls, {0: 0.5, 1: -2.0}, "episode")
    assert row.token_ids == [1, 2, 3, 4, 5, 6]
    assert row.loss_mask == [0, 0, 1, 1, 0, 1]
    assert row.logprobs == [0, 0, -1, -1.01, 0, -2]
    assert row.advantages == [0, 0, 0.5, 0.5, 0, -2.0]
    assert (row.episode, row.calls) == ("episode", [0, 1])
    TrainingRow.model_validate(row.model_dump())


def test_a_broken_prefix_makes_rows_of_their_own() -> None:
    """The second prompt holds the first answer with one token changed, as after a new tokenisation of its text."""
    first, kept = call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6])
    assert len(rows_of([first, kept], {0: 1.0, 1: 1.0})) == 1
    broken = call(1, [1, 2, 3, 9, 5], [6])
    one, other = rows_of([first, broken], {0: 1.0, 1: 1.0})
    assert (one.token_ids, one.loss_mask) == ([1, 2, 3, 4], [0, 0, 1, 1])
    assert (other.token_ids, other.loss_mask) == ([1, 2, 3, 9, 5, 6], [0, 0, 0, 0, 0, 1])
    assert other.logprobs[-1] == -2


@pytest.mark.parametrize("prompt", [[1, 2, 3], [1, 2], [1], [0, 1, 2, 3, 4], [1, 2, 4, 3]])
def test_less_than_the_whole_row_is_no_prefix(prompt: list[int]) -> None:
    assert len(rows_of([call(0, [1, 2], [3, 4]), call(1, prompt, [7])], {0: 1.0, 1: 1.0})) == 2


def test_branches_part_and_the_shared_answer_is_trained_once() -> None:
    calls = [call(0, [1], [2]), call(1, [1, 2, 3], [4]), call(2, [1, 2, 5], [6]), call(3, [1, 2, 5, 6, 7], [8])]
    one, other = rows_of(calls, dict.fromkeys(range(4), 1.0))
    assert (one.token_ids, one.loss_mask, one.calls) == ([1, 2, 3, 4], [0, 1, 0, 1], [0, 1])
    assert (other.token_ids, other.loss_mask, other.calls) == ([1, 2, 5, 6, 7, 8], [0, 0, 0, 1, 0, 1], [2, 3])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_row_has_the_temperature_of_its_call(temperature: float) -> None:
    sampled = call(0, [1], [2])
    sampled.logprobs_temperature = temperature
    (row,) = rows_of([sampled], {0: 1.0})
    assert row.temperature == temperature


def test_calls_of_another_temperature_are_rows_of_their_own() -> None:
    """As far as they are trained; preferences compare sums of rows, at temperature 1."""
    calls = [call(0, [1], [2]), call(1, [1, 2, 3], [4]), call(2, [1, 2, 3, 4, 5], [6])]
    for each, temperature in zip(calls, (1.5, None, 1.5), strict=True):
        each.logprobs_temperature = temperature
    first, second = rows_of(calls, dict.fromkeys(range(3), 1.0))
    assert (first.temperature, first.loss_mask, first.calls) == (1.5, [0, 1, 0, 0, 0, 1], [0, 2])
    assert (second.temperature, second.loss_mask, second.calls) == (1.0, [0, 0, 0, 1], [1])
    (merged,) = rows_of(calls, {0: 1.0, 2: 1.0})
    assert (merged.temperature, merged.loss_mask) == (1.5, [0, 1, 0, 0, 0, 1])
    (whole,) = rows_of(calls, dict.fromkeys(range(3), 1.0), tempered=False)
    assert (whole.temperature, whole.loss_mask) == (1.0, [0, 1, 0, 1, 0, 1])


def test_calls_with_other_parameters_that_change_logits_are_rows_of_their_own() -> None:
    """And a row keeps its answers apart by what is between them, as penalties count the tokens of one."""
    calls = [call(0, [1], [2]), call(1, [1, 2, 3], [4]), call(2, [1, 2, 3, 4], [5]), call(3, [1, 2, 3, 4, 6], [7])]
    for each in calls:
        each.sampling = {"presence_penalty": 0.5, "temperature": 1, "logprobs_processed": True}
    first, second = rows_of(calls, dict.fromkeys(range(4), 1.0))
    assert (first.shaping, first.loss_mask, first.calls) == ({"presence_penalty": 0.5}, [0, 1, 0, 1, 0, 1], [0, 1, 3])
    assert (second.shaping, second.loss_mask, second.calls) == ({"presence_penalty": 0.5}, [0, 0, 0, 0, 1], [2])
    calls[1].sampling["presence_penalty"] = 1.0
    assert [row.calls for row in rows_of(calls, {0: 1.0, 1: 1.0, 3: 1.0})] == [[0, 3], [1, 2]]
    for each in calls:
        each.sampling.pop("logprobs_processed")  # they are those of the logits as they were
    (row,) = rows_of(calls, dict.fromkeys(range(3), 1.0))
    assert (row.shaping, row.loss_mask) == ({}, [0, 1, 0, 1, 1])


def test_of_several_rows_the_longest_is_continued() -> None:
    calls = [call(0, [1], [2]), call(1, [1], [2, 3]), call(2, [1, 2, 3, 4], [5])]
    one, other = rows_of(calls, dict.fromkeys(range(3), 1.0))
    assert (one.token_ids, other.token_ids) == ([1, 2], [1, 2, 3, 4, 5])


def test_untrained_calls_are_context_and_alone_make_no_row() -> None:
    calls = [call(0, [1], [2]), call(1, [1, 2, 3], [4]), call(2, [8], [9])]
    (row,) = rows_of(calls, {1: 1.0})
    assert (row.token_ids, row.loss_mask) == ([1, 2, 3, 4], [0, 0, 0, 1])
    assert rows_of(calls, {}) == []


def test_what_training_needs_must_be_there() -> None:
    for lacking in (call(4, None, [1]), call(4, [1], None)):
        with pytest.raises(TrajectoryError, match="episode e: call 4 is trained but has no token ids"):
            rows_of([lacking], {0: 1.0}, "e")
        assert rows_of([lacking], {}, "e") == []
    unknown = call(4, [1], [2, 3])
    unknown.logprobs = None
    with pytest.raises(TrajectoryError, match="call 4 has 2 sampled tokens and none logprobs"):
        rows_of([unknown], {0: 1.0}, "e")
    unknown.logprobs = [-1.0]
    with pytest.raises(TrajectoryError, match="call 4 has 2 sampled tokens and 1 logprobs"):
        rows_of([unknown], {0: 1.0}, "e")
    assert rows_of([unknown], {}, "e") == []


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[list[ModelCall], dict[int, float]]:
    """Calls whose prompts continue an earlier call, continue it with a mistake, or begin anew."""
    calls: list[ModelCall] = []
    for index in range(draw(st.integers(1, 7))):
        start: list[int] = []
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            start = [*(earlier.prompt_token_ids or []), *(earlier.token_ids or [])]
            if draw(st.integers(0, 3)) == 0:
                start[draw(st.integers(0, len(start) - 1))] = 9
        calls.append(call(index, start + draw(tokens), draw(tokens)))
    trained = draw(st.sets(st.integers(0, len(calls) - 1)))
    return calls, {place: float(place + 1) for place in trained}


@given(episodes())
def test_each_sampled_token_is_trained_once_after_exactly_its_prompt(
    episode: tuple[list[ModelCall], dict[int, float]],
) -> None:
    """Against the definition: a trained token's context is the prompt it was sampled after, token for token."""
    calls, advantages = episode
    rows = rows_of(calls, advantages)
    expected = sorted(
        ((c.prompt_token_ids or []) + (c.token_ids or [])[: i + 1], (c.logprobs or [])[i], advantages[place])
        for place, c in enumerate(calls)
        if place in advantages
        for i in range(len(c.token_ids or []))
    )
    found = []
    for row in rows:
        assert isinstance(row.advantages, list)
        assert len(row.token_ids) == len(row.loss_mask) == len(row.logprobs) == len(row.advantages)
        assert all(a == 0 for a, m in zip(row.advantages, row.loss_mask, strict=True) if not m)
        found += [
            (row.token_ids[: i + 1], row.logprobs[i], row.advantages[i]) for i, m in enumerate(row.loss_mask) if m
        ]
    assert sorted(found) == expected


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=6))
def test_an_unbroken_dialogue_of_any_length_is_one_row(turns: list[tuple[list[int], list[int]]]) -> None:
    calls: list[ModelCall] = []
    so_far: list[int] = []
    for index, (said, sampled) in enumerate(turns):
        calls.append(call(index, so_far + said, sampled))
        so_far = so_far + said + sampled
    (row,) = rows_of(calls, dict.fromkeys(range(len(calls)), 1.0))
    assert row.token_ids == so_far
    assert sum(row.loss_mask) == sum(len(sampled) for _, sampled in turns)
