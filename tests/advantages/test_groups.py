"""From calls to advantages: which calls are trained, what the dialogue was, and the credit of each call."""

import re
from typing import Any

import pytest
from factories import sampled

from insitu.advantages.credit import AdvantageConfig, Credit, TrainedCalls, call_advantages
from insitu.advantages.estimator import FunctionEstimator, GroupRelativeEstimator, estimate_epoch, training_rows
from insitu.collect.conversations import main_conversation
from insitu.errors import TrajectoryError
from insitu.schemas.episodes import ModelCall
from insitu.schemas.finetuning import EpisodeItemRole, Trajectory, TrajectoryCollection, message_text, text_content

CENTRED = AdvantageConfig(baseline="mean", scale="none")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(index: int = 0, messages: list[dict[str, Any]] | None = None, answer: Any = "yes", **other: Any) -> ModelCall:
    values = {"model": "m", "llm": "player", "token_ids": [1], "logprobs": [-float(index + 1)], **other}
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    return ModelCall(index=index, messages=messages or [user("?")], message=message, **values)


# which calls


@pytest.mark.parametrize(
    ("sampling", "logprobs_temperature", "problem"),
    [
        ({}, None, None),
        ({"temperature": 1}, None, None),
        ({"temperature": 1.5, "top_p": 1, "top_k": -1}, 1.5, None),
        ({"temperature": None, "top_p": None}, 1.0, None),
        ({"temperature": 1.5}, None, "raw_logprobs"),  # a call of a server that does not say it
        ({"temperature": 1.5}, 1.0, "raw_logprobs"),
        ({"temperature": 0}, 1.0, "greedy"),
        ({"top_p": 0.9}, 1.0, "top_p"),
        ({"top_k": 20}, 1.0, "top_k"),
        ({"min_tokens": 2}, 1.0, "min_tokens"),
        ({"stop_token_ids": [2]}, 1.0, None),
        ({"allowed_token_ids": [2]}, 1.0, "allowed_token_ids"),
        ({"guided_choice": ["a"], "guided_json": None}, 1.0, "guided_choice"),
        ({"response_format": {"type": "json_object"}}, 1.0, "response_format"),
        ({"response_format": {"type": "json_object"}, "logprobs_processed": True}, 1.0, None),
        ({"bad_words": ["a"], "top_k": 3, "logprobs_processed": True}, 1.0, "top_k"),
        ({"tool_choice": "auto"}, 1.0, None),
        ({"tool_choice": "required"}, 1.0, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, 1.0, "tool_choice"),
        ({"repetition_penalty": 1.5, "logprobs_processed": True}, 1.0, "repetition_penalty"),
    ],
)
def test_calls_whose_distribution_is_unknown_are_not_trained(
    sampling: dict[str, Any], logprobs_temperature: float | None, problem: str | None
) -> None:
    """The other call of the episode is; an episode without one is dropped."""
    kind = {"sampling": sampling, "logprobs_temperature": logprobs_temperature, "prompt_token_ids": [1]}
    groups = [
        Trajectory(reward=reward, id=f"{reward}", calls=[call(0, **kind), other], trained_calls=trained)
        for reward, trained in ((0.0, [0, 1]), (1.0, [0]))
        if (other := call(1, prompt_token_ids=[5]))
    ]
    collection = TrajectoryCollection(trajectories=[groups], run_id="r")
    epoch = estimate_epoch(collection, GroupRelativeEstimator(CENTRED, Credit()))
    kept = [(t.id, t.trained_calls, [*of_calls]) for t, of_calls in epoch.advantages]
    if problem is None:
        assert kept == [("0.0", [0, 1], [0, 1]), ("1.0", [0], [0])]
    else:
        assert kept == [("0.0", [1], [1])]
        assert epoch.collection.dropped == {"unmodeled_sampling": 1}
        assert epoch.metrics == {"untrained_calls": {problem: 2}}


@pytest.mark.parametrize(
    ("targets", "model", "llms", "expected"),
    [
        (["<workflow>"], None, [], [0, 1, 2, 3]),
        (["<workflow>"], None, ["player"], [0, 1]),
        (["player_move"], None, [], [1, 3]),
        (["player_move", "judge"], None, [], [1, 2, 3]),
        (["nowhere"], None, [], []),
        (["<workflow>"], "judge", ["judge"], [2]),
        (["<workflow>"], "policy@3", ["player"], [0, 1, 3]),
        (["<workflow>"], "policy", ["player"], [0, 1, 3]),
        (["<workflow>"], "policy", [], [0, 1, 3]),
        (["<workflow>"], "policy@7", [], [0, 1, 3]),
        (["<workflow>"], "pol", [], []),
        (["player_move"], "policy", [], [1, 3]),
    ],
)
def test_targeted_calls(targets: list[str], model: str | None, llms: list[str], expected: list[int]) -> None:
    calls = [
        call(0, model="policy", functions=("<workflow>",)),
        call(1, model="policy@7", functions=("<workflow>", "player_move", "inner")),
        call(2, model="big", llm="judge", functions=("<workflow>", "judge")),
        call(3, model="policy", llm=None, functions=("<workflow>", "player_move")),
        call(4, model="policy", functions=("<workflow>", "player_move"), token_ids=[]),
        call(5, model="policy", functions=("<workflow>", "player_move"), token_ids=None),
    ]
    assert TrainedCalls(targets, llms, model).positions(calls) == expected


# the dialogue


def test_the_dialogue_is_the_last_call_that_continues_the_first() -> None:
    start = [{"role": "developer", "content": "rules"}, user("move?")]
    calls = [
        call(0, start, "a1"),
        call(1, [user("unrelated")], "judged"),
        call(2, [*start, said("a1"), {"role": "tool", "content": "no", "tool_call_id": "t"}], "b2"),
    ]
    items = main_conversation(calls)
    assert [(i.role.value, i.content) for i in items] == [
        ("system", "rules"),
        ("user", "move?"),
        ("assistant", "a1"),
        ("tool", "no"),
        ("assistant", "b2"),
    ]
    assert [i.logprobs and sampled(i.logprobs) for i in items] == [None, None, [-1.0], None, [-3.0]]
    assert items[3].metadata == {"tool_call_id": "t"}
    assert items[4].metadata == {"call": 2, "finish_reason": None}


def test_equal_answers_keep_their_own_logprobs() -> None:
    first = [user("go")]
    second = [*first, said("same"), user("invalid, again")]
    third = [*second, said("same"), user("invalid, again")]
    items = main_conversation([call(0, first, "same"), call(1, second, "same"), call(2, third, "other")])
    answers = [i.logprobs for i in items if i.role is EpisodeItemRole.ASSISTANT]
    assert [*map(sampled, answers)] == [[-1.0], [-2.0], [-3.0]]


def test_an_answer_that_was_changed_keeps_no_logprobs() -> None:
    first = [user("go")]
    items = main_conversation(
        [call(0, first, "<think>hm</think>yes"), call(1, [*first, said("yes"), user("and?")], "no")]
    )
    answers = [(i.content, sampled(i.logprobs)) for i in items if i.role is EpisodeItemRole.ASSISTANT]
    assert answers == [("yes", []), ("no", [-2.0])]


def test_calls_that_failed_and_tool_calls() -> None:
    tools = [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    asked = {"role": "assistant", "content": None, "tool_calls": tools}
    items = main_conversation(
        [call(0, answer=None, error="http 500"), call(1, [user("?")], asked, finish_reason="tool_calls")]
    )
    assert items[-1].content == ""
    assert items[-1].metadata == {"call": 1, "finish_reason": "tool_calls", "tool_calls": tools}
    assert main_conversation([]) == []
    assert main_conversation([call(0, answer=None)]) == []


def test_text_of_parts() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {}},
        "b",
        {"type": "text", "text": None},
        {"type": "text", "text": "c"},
    ]
    assert text_content(parts) == "abc"
    assert text_content(None) == ""


def test_text_of_tool_calls() -> None:
    function = {"type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    custom = {"type": "custom", "custom": {"name": "run_sql", "input": "select 1"}}
    message = {"role": "assistant", "content": ["so"], "tool_calls": [function, custom]}
    assert message_text(message) == 'so\nlook({"at": 1})\nrun_sql(select 1)'


# credit


def trajectory(reward: float, trained: list[int], steps: list[float] | None = None) -> Trajectory:
    calls = [call(i, prompt_token_ids=[i]) for i in range(max(trained) + 1)]
    return Trajectory(id=f"e{reward:g}", reward=reward, calls=calls, trained_calls=trained, shaped_rewards=steps)


def test_credit_of_the_episode_goes_to_all_its_trained_calls() -> None:
    group = [trajectory(1.0, [0, 2]), trajectory(0.0, [1])]
    assert call_advantages(group, CENTRED) == [{0: 0.5, 2: 0.5}, {1: -0.5}]
    assert call_advantages([trajectory(1.0, [0])], CENTRED) == [{0: 0.0}]


def test_credit_of_steps_compares_the_returns_of_all_calls() -> None:
    group = [trajectory(9.0, [0, 2], [1.0, 0.0]), trajectory(-9.0, [1], [-1.0])]
    assert call_advantages(group, CENTRED, Credit("step", 0.0)) == [{0: 1.0, 2: 0.0}, {1: -1.0}]
    first, second = call_advantages(group, CENTRED, Credit("step", 0.5))
    assert first == {0: 1.0, 2: 0.0}
    assert second == {1: -1.0}
    later = [trajectory(0.0, [0, 1], [0.0, 4.0]), trajectory(0.0, [0], [1.0])]
    assert call_advantages(later, CENTRED, Credit("step", 0.5)) == [{0: 2 - 7 / 3, 1: 4 - 7 / 3}, {0: 1 - 7 / 3}]


def test_step_rewards_must_be_there_for_each_trained_call() -> None:
    with pytest.raises(TrajectoryError, match="episode e1 has none"):
        call_advantages([trajectory(1.0, [0]), trajectory(0.0, [0], [1.0])], CENTRED, Credit("step"))
    with pytest.raises(TrajectoryError, match="episode e1 has 2 trained calls and 1 step rewards"):
        call_advantages([trajectory(1.0, [0, 1], [1.0])], CENTRED, Credit("step"))
    with pytest.raises(TrajectoryError, match="nan"):
        call_advantages([trajectory(float("nan"), [0]), trajectory(1.0, [0])], CENTRED)


@pytest.mark.parametrize(("credit", "dropped"), [("episode", {}), ("function", {}), ("step", {"no_step_rewards": 1})])
def test_an_episode_without_step_rewards_is_dropped_where_they_are_the_credit(
    credit: str, dropped: dict[str, int]
) -> None:
    group = [trajectory(1.0, [0], [1.0]), trajectory(2.0, [0], [0.5]), trajectory(3.0, [0])]
    for each in group[:2] if credit == "function" else ():
        each.shaped_rewards = None
    epoch = estimate_epoch(
        TrajectoryCollection(trajectories=[group], run_id="r"), GroupRelativeEstimator(CENTRED, Credit(credit))
    )
    assert epoch.collection.dropped == dropped


def of_two_calls(returned: Any) -> list[dict[int, float | list[float]]] | None:
    """What an advantage function's return value is for a group of one episode with calls of two and of one token."""
    calls = [call(0, prompt_token_ids=[1], token_ids=[2, 3]), call(1, prompt_token_ids=[4], token_ids=[5])]
    group = [Trajectory(id="e", reward=1.0, calls=calls, trained_calls=[0, 1])]
    return FunctionEstimator(lambda rewards, group: returned, {}).estimate(group)


def test_a_function_gives_advantages_of_episodes_calls_or_tokens() -> None:
    assert of_two_calls([0.5]) == [{0: 0.5, 1: 0.5}]
    assert of_two_calls([[0.5, -1]]) == [{0: 0.5, 1: -1.0}]
    assert of_two_calls([[[0.5, 0.25], 1.0]]) == [{0: [0.5, 0.25], 1: 1.0}]
    assert of_two_calls([[[0.0, 0.0], [0.0]]]) is None


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([1.0, 2.0], "2 values for 1 episodes"),
        ([[1.0]], "1 values for 2 trained calls"),
        ([[[1.0], [1.0]]], "call 0: the function returned 1 values for 2 tokens"),
        ([float("inf")], "an advantage is inf"),
        ([[["1", 2.0], 1.0]], "an advantage is '1'"),
        (None, "None was returned; allowed: advantages, as a list"),
        (["ab"], "episode e: 'ab' was returned; allowed: advantages, as a list"),
    ],
)
def test_what_a_function_returns_is_checked(returned: Any, problem: str) -> None:
    with pytest.raises(TrajectoryError, match=re.escape(problem)):
        of_two_calls(returned)


@pytest.mark.parametrize("credit", ["episode", "step", "function"])
def test_a_group_of_one_is_dropped_whatever_the_credit(credit: str) -> None:
    collection = TrajectoryCollection(trajectories=[[trajectory(1.0, [0, 1], [0.0, 1.0])]], run_id="r")
    epoch = estimate_epoch(collection, GroupRelativeEstimator(AdvantageConfig(), Credit(credit)))
    assert epoch.advantages == []
    assert (epoch.collection.trajectories, epoch.collection.dropped) == ([], {"single_member": 1})
    assert epoch.collection.drop_reasons == {"e1": "single_member"}


def test_text_without_calls_is_left_to_the_backend() -> None:
    groups = [[Trajectory(reward=r) for r in rewards] for rewards in ((1.0, 0.0), (1.0, 1.0))]
    collection = TrajectoryCollection(trajectories=groups, run_id="r")
    epoch = estimate_epoch(collection, GroupRelativeEstimator(AdvantageConfig(), Credit()))
    assert epoch.advantages == [(t, {}) for t in groups[0]]
    assert (epoch.collection.trajectories, epoch.collection.dropped) == (groups[:1], {"no_variance": 2})


def test_rows_get_the_advantages_of_their_calls_and_nothing_is_changed_in_place() -> None:
    group = [trajectory(1.0, [0, 2]), trajectory(0.0, [0])]
    collection = TrajectoryCollection(trajectories=[group], run_id="r")
    epoch = estimate_epoch(collection, GroupRelativeEstimator(CENTRED, Credit()))
    assert [[r.advantages for r in t.rows] for t in epoch.collection.trajectories[0]] == [
        [[0, 0.5], [0, 0.5]],
        [[0, -0.5]],
    ]
    assert collection.trajectories[0][0] is group[0]
    assert group[0].rows == group[1].rows == []
    default = training_rows(TrajectoryCollection(trajectories=[group], run_id="r"))
    assert [row.episode for row in default] == ["e1", "e1", "e0"]
