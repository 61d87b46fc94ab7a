"""Preference pairs: which candidates are compared, found by brute force too, and what they were sampled by."""

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.disk.json_files import dump_json
from insitu.preferences.candidates import Targets, candidates_of
from insitu.preferences.pairs import PairOptions, preference_pairs
from insitu.preferences.selection import distinct_pairs, pair_rows
from insitu.runs.records import journal_record
from insitu.schemas.episodes import CandidateStep, DropReason, Episode, EpisodeKey, EpisodeStatus, ModelCall, StepLog
from insitu.schemas.finetuning import Trajectory, TrajectoryCollection
from insitu.schemas.groups import GroupRecord
from insitu.schemas.steps import (
    IntermediateStep,
    IntermediateStepPayload,
    InvocationNode,
    StreamEventData,
    TTCEventData,
)
from insitu.training.preference_builders import DPOFromGroupsConfig, episode_pairs

ALL = PairOptions()


def candidate(index: int, score: float | None, response: str = "", turn: str = "t", prompt: Any = "p") -> CandidateStep:
    return CandidateStep(turn, index, prompt, response or f"answer {index}", score)


candidate_sets = st.lists(
    st.tuples(
        st.sampled_from("ab"),  # turn
        st.sampled_from(["p", "q"]),  # prompt
        st.sampled_from(["x", "y", "z"]),  # response
        st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0])),
    ),
    max_size=9,
)
pair_options = st.builds(
    PairOptions,
    exhaustive=st.booleans(),
    min_score_diff=st.sampled_from([0.0, 0.25, 0.3, 1.5]),
    max_pairs=st.sampled_from([None, 1, 2, 5]),
    single_candidates_dropped=st.booleans(),
)


def brute_force(candidates: list[CandidateStep], options: PairOptions) -> list[tuple[str, int, int]]:
    """(turn, chosen, rejected), from the text of the contract: every ordered pair is tried."""
    found = []
    for turn in dict.fromkeys(c.turn_id for c in candidates):
        members = [c for c in candidates if c.turn_id == turn and c.score is not None]
        allowed = [
            (better, worse)
            for better in members
            for worse in members
            if better.score > worse.score
            and better.score - worse.score >= options.min_score_diff
            and better.response != worse.response
            and better.prompt == worse.prompt
        ]
        places = {id(c): members.index(c) for c in members}
        allowed.sort(
            key=lambda p: (p[1].score - p[0].score, *sorted((places[id(p[0])], places[id(p[1])])))
        )  # the largest difference first, then in the order of the candidates
        limit = options.max_pairs if options.exhaustive else 1
        if options.exhaustive and limit is not None:  # repetitions are the first that are left out
            texts = [(b.prompt, b.response, w.response) for b, w in allowed]
            distinct = [k for k, text in enumerate(texts) if text not in texts[:k]]
            repeated = [k for k in range(len(texts)) if k not in distinct]
            allowed = [allowed[k] for k in sorted([*distinct, *repeated][:limit])]
        found += [(turn, b.candidate_index, w.candidate_index) for b, w in allowed[:limit]]
    return found


@settings(max_examples=150, deadline=None)
@given(candidate_sets, pair_options)
def test_pairs_are_those_found_by_brute_force_and_every_other_pair_has_a_reason(
    drawn: list[tuple[str, str, str, float | None]], options: PairOptions
) -> None:
    candidates = [CandidateStep(t, i, p, r, s) for i, (t, p, r, s) in enumerate(drawn)]
    pairs, dropped = preference_pairs(candidates, options)
    made = [(p.turn_id, p.chosen.candidate_index, p.rejected.candidate_index) for p in pairs]
    assert made == brute_force(candidates, options)
    assert all(count > 0 for count in dropped.values())
    scored = Counter(c.turn_id for c in candidates if c.score is not None)
    assert dropped[DropReason.UNSCORED_CANDIDATE] == len(candidates) - scored.total()
    single = sum(count == 1 for count in scored.values())
    assert dropped[DropReason.SINGLE_CANDIDATE] == (single if options.single_candidates_dropped else 0)
    if options.exhaustive:
        of_pairs = dropped.total() - dropped[DropReason.UNSCORED_CANDIDATE] - dropped[DropReason.SINGLE_CANDIDATE]
        assert len(pairs) + of_pairs == sum(math.comb(count, 2) for count in scored.values())


@pytest.mark.parametrize(
    ("candidates", "options", "dropped"),
    [
        ([], ALL, {}),
        ([candidate(0, 1.0)], ALL, {"single_candidate": 1}),
        ([candidate(0, 1.0)], ALL._replace(single_candidates_dropped=False), {}),
        ([candidate(0, 1.0), candidate(1, None)], ALL, {"unscored_candidate": 1, "single_candidate": 1}),
        ([candidate(i, 0.5) for i in range(3)], ALL, {"equal_scores": 3}),
        ([candidate(i, 0.5) for i in range(3)], ALL._replace(exhaustive=False), {"equal_scores": 3}),
        ([candidate(0, 0.0, "a"), candidate(1, 1.0, "a")], ALL, {"identical_responses": 1}),
        ([candidate(0, 0.0), candidate(1, 1.0, prompt="other")], ALL, {"different_prompts": 1}),
        ([candidate(0, 0.0), candidate(1, 0.1)], ALL._replace(min_score_diff=0.2), {"small_difference": 1}),
    ],
)
def test_a_turn_without_a_pair_has_a_reason(
    candidates: list[CandidateStep], options: PairOptions, dropped: dict[str, int]
) -> None:
    assert preference_pairs(candidates, options) == ([], dropped)


def test_the_largest_differences_are_kept() -> None:
    candidates = [candidate(i, score) for i, score in enumerate([0.1, 0.9, 0.4])]
    pairs, dropped = preference_pairs(candidates, ALL._replace(max_pairs=2))
    assert [(p.chosen.candidate_index, p.rejected.candidate_index) for p in pairs] == [(1, 0), (1, 2)]
    assert dropped == {"max_pairs": 1}


def test_repetitions_leave_their_places_to_other_pairs() -> None:
    scored = [("a", 1.0), ("a", 1.0), ("b", 0.0), ("c", 0.5)]
    candidates = [candidate(index, score, text) for index, (text, score) in enumerate(scored)]
    pairs, dropped = preference_pairs(candidates, ALL._replace(max_pairs=2))
    assert [(p.chosen.response, p.rejected.response) for p in pairs] == [("a", "b"), ("a", "c")]
    assert dropped == {"equal_scores": 1, "max_pairs": 3}


HI = [{"role": "user", "content": "hi"}]
LATER = [*HI, {"role": "assistant", "content": "one"}, {"role": "user", "content": "and now?"}]


def call(index: int, text: str, messages: Any = HI, function: str = "answer", **values: Any) -> ModelCall:
    tokens = {"prompt_token_ids": [1, len(messages)], "token_ids": [7, index], "logprobs": [-0.1, -0.2]}
    return ModelCall(
        index,
        "m",
        messages,
        message={"role": "assistant", "content": text},
        functions=("<workflow>", function),
        **(tokens | values),
    )


def end(name: str = "move", function: str = "answer", event: str = "TTC_END", **data: Any) -> IntermediateStep:
    payload = IntermediateStepPayload(event_type=event, name=name, data=TTCEventData(**data))
    return IntermediateStep(
        payload=payload,
        function_ancestry=InvocationNode(function_id="1", function_name=function, parent_name="<workflow>"),
    )


@pytest.mark.parametrize(("value", "recorded"), [(np.float32(0.5), "0.5"), (np.int64(3), "3"), (3 + 4j, "3+4j")])
def test_what_a_candidate_has_is_journaled_whatever_it_is(value: Any, recorded: str) -> None:
    steps = StepLog([end(output=value, more=value)])
    episode = Episode(EpisodeKey("r", 1, "0", 0), EpisodeStatus.OK, "a", [], steps)
    (step,) = json.loads(dump_json(journal_record(episode)))["steps"]
    assert [str(step["payload"]["data"][name]) for name in ("output", "more")] == [recorded] * 2


def read(steps: list[IntermediateStep], calls: list[ModelCall], trained: Any = None, **more: Any) -> Any:
    trained = range(len(calls)) if trained is None else trained
    return candidates_of(steps, calls, "move", Targets(trained, ["<workflow>"], more.get("text", False)))


def test_a_candidate_has_the_prompt_of_the_call_that_sampled_it() -> None:
    steps = [
        end(event="TTC_START", input="one"),
        end(name="other", output="one", score=9.0),
        end(input="hi", output="one", turn_id="t0", turn_index=0, candidate_index=0, score=0.5),
        end(input="the answer", output="two", turn_id="t0", turn_index=0, candidate_index=1, score=math.nan),
        end(output=" one\n", turn_index=1, score=1),
        end(output={"role": "assistant", "content": "3"}, turn_index=1, score=None),
    ]
    calls = [call(0, "one"), call(1, "two"), call(2, "one", LATER), call(3, "move 3", LATER)]
    candidates, dropped = read(steps, calls)
    assert dropped == {}
    assert [(c.turn_id, c.candidate_index, c.call, c.score, c.response) for c in candidates] == [
        ("t0", 0, 0, 0.5, "one"),
        ("t0", 1, 1, None, "two"),
        ("turn 1", 0, 2, 1.0, " one\n"),
        ("turn 1", 1, 3, None, "3"),
    ]
    assert [c.prompt for c in candidates] == [HI, HI, LATER, LATER]


@pytest.mark.parametrize(
    ("value", "score"), [(np.float32(0.5), 0.5), (np.int64(3), 3.0), (np.ones(2), None), ("1", None), (10**400, None)]
)
def test_a_score_may_be_a_number_of_another_library(value: Any, score: float | None) -> None:
    step = end(output="x")
    step.payload.data = StreamEventData(output="x", score=value)
    ((candidate,), _) = read([step], [call(0, "x")])
    assert candidate.score == score
    assert score is None or type(candidate.score) is float


def test_a_call_without_messages_has_sampled_its_candidate() -> None:
    candidates, _ = read([end(input="hi", output="x", score=1.0)], [call(0, "x", [])])
    assert [(c.call, c.prompt) for c in candidates] == [(0, [])]


def test_candidates_of_one_prompt_have_calls_of_their_own() -> None:
    steps = [end(input=HI, output="x", turn_id="t", score=s) for s in (1.0, 0.0)]
    candidates, _ = read(steps, [call(0, "x"), call(1, "x")])
    assert {c.call for c in candidates} == {0, 1}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])  # in which they are reported: as sampled, by score
def test_a_part_of_several_completions_belongs_to_the_one_in_its_place(order: tuple[int, ...]) -> None:
    parts = ["1", "3", "2"]
    steps = [end(turn_id="t", candidate_index=k, output=parts[k], score=k) for k in order]
    candidates, _ = read(steps, [call(k, f"1, 2 or 3? {part}") for k, part in enumerate(parts)])
    assert [c.call for c in candidates] == [*order]


@pytest.mark.parametrize(
    ("said", "reported", "sampled_by"),
    [
        (["I play 5", "I play 3", "I play 15"], ["5", "3"], [0, 1]),  # the last is not reported
        (["I play 5", "I play 15"], ["15", "5"], [1, 0]),
        (["x5", "x15"], ["5", "15"], [0, 1]),  # no words, and then by their places
    ],
)
def test_a_part_is_first_looked_for_as_a_word(said: list[str], reported: list[str], sampled_by: list[int]) -> None:
    steps = [end(turn_id="t", candidate_index=k, output=part, score=k) for k, part in enumerate(reported)]
    candidates, dropped = read(steps, [call(k, text) for k, text in enumerate(said)])
    assert ([c.call for c in candidates], dropped) == (sampled_by, {})


def test_rounding_makes_no_difference() -> None:
    assert preference_pairs([candidate(0, 0.1 + 0.2), candidate(1, 0.3)], ALL)[1] == {"equal_scores": 1}
    pairs, _ = preference_pairs([candidate(0, 1.0), candidate(1, 0.9)], ALL._replace(min_score_diff=0.1))
    assert len(pairs) == 1


def played(generation: int, reward: float, *answers: str) -> tuple[Episode, Trajectory]:
    """An episode of a conversation for each answer, and its trajectory."""
    calls = [call(k, text, [{"role": "user", "content": f"move {k}"}]) for k, text in enumerate(answers)]
    for each in calls:
        each.token_ids = [*str((each.message or {})["content"]).encode()]
        each.logprobs = [-0.1] * len(each.token_ids)
    key = EpisodeKey("r", 1, "row", generation)
    fields: dict[str, Any] = {"calls": calls, "trained_calls": [*range(len(calls))], "rows": []}
    trajectory = Trajectory.model_construct(episode=[], reward=reward, id=key.text(), **fields)
    return Episode(key, EpisodeStatus.OK, calls=calls, reward=reward), trajectory


def test_episodes_differ_by_all_that_is_trained_of_them() -> None:
    """Not by their first conversation alone."""
    made = [played(0, 1.0, "a", "x"), played(1, 0.0, "a", "y"), played(2, 0.5, "a", "y"), played(3, 0.0, "a", "z")]
    episodes, trajectories = map(list, zip(*made, strict=True))
    config = DPOFromGroupsConfig(exhaustive_pairs=True)
    group = episode_pairs(GroupRecord("row", episodes, trajectories, Counter()), config)
    assert group.dropped == {"identical_responses": 1, "equal_scores": 1}
    collection = TrajectoryCollection(trajectories=[group.trajectories], run_id="r", epoch=1)
    assert (len(group.trajectories), distinct_pairs(collection).dropped) == (4, {"duplicate_pair": 1})
    texts = episode_pairs(GroupRecord("row", episodes, trajectories, Counter()), config, as_text=True)
    assert texts.dropped == {"identical_responses": 5, "equal_scores": 1}


def test_only_targeted_calls_have_candidates() -> None:
    steps = [end(output="one", score=1.0), end(output="two", score=0.0), end(output="nobody", score=0.0)]
    calls = [call(0, "one"), call(1, "two", function="opponent")]
    candidates, dropped = read(steps, calls, trained=[0])
    assert [c.response for c in candidates] == ["one"]
    assert dropped == {"untargeted_candidate": 1, "unsampled_candidate": 1}


def test_text_that_nobody_recorded_is_trained_as_text_where_every_model_is_trained() -> None:
    steps = [end(input=HI, output="one", score=1.0), end(input="hi", output="two", function="elsewhere", score=0.0)]
    candidates, dropped = read(steps, [], text=True)
    assert ([c.call for c in candidates], dropped) == ([None, None], {})
    in_answer = Targets([], ["answer"], text=True)
    candidates, dropped = candidates_of(steps, [], "move", in_answer)
    assert ([c.response for c in candidates], dropped) == (["one"], {"untargeted_candidate": 1})


def at(seconds: float, **data: Any) -> IntermediateStep:
    """A candidate that is reported at this time."""
    step = end(**data)
    step.payload.event_timestamp = seconds
    return step


def game() -> tuple[list[IntermediateStep], list[ModelCall]]:
    """A player with a model, then one without, who names the same numbers, then the first again."""
    first = [at(2, turn_id="t0", input="you have 0", output=text, score=k) for k, text in enumerate("12")]
    second = [at(4, turn_id="t1", input="you have 2", output=text, score=k) for k, text in enumerate("12")]
    third = [at(6, turn_id="t2", input="you have 4", output=text, score=k) for k, text in enumerate("12")]
    answers = [(1, "I add 1", "you have 0"), (1, "I add 2", "you have 0"), (5, "add 1", "now 4"), (5, "add 2", "now 4")]
    calls = [call(k, text, [{"role": "user", "content": q}]) for k, (_, text, q) in enumerate(answers)]
    timed = [replace(made, started=float(begun)) for made, (begun, _, _) in zip(calls, answers, strict=True)]
    return [*first, *second, *third], timed


def test_a_player_without_a_model_gets_no_call_of_another_player() -> None:
    steps, calls = game()
    candidates, dropped = read(steps, calls)
    assert [(c.turn_id, c.call) for c in candidates] == [("t0", 0), ("t0", 1), ("t2", 2), ("t2", 3)]
    assert dropped == {"unsampled_candidate": 2}


def test_of_texts_those_of_every_player_are_candidates() -> None:
    steps, calls = game()
    targets = Targets([0, 1], ["<workflow>"], text=False, only_text=True)  # the calls of turn 2 are of another model
    candidates, dropped = candidates_of(steps, calls, "move", targets)
    assert dropped == {}
    shown = [c.prompt if isinstance(c.prompt, str) else c.prompt[0]["content"] for c in candidates]
    assert shown == ["you have 0"] * 2 + ["you have 2"] * 2 + ["now 4"] * 2
    elsewhere = Targets([], ["answer"], text=False, only_text=True)
    assert candidates_of(steps, [], "move", elsewhere)[1] == {}
    assert candidates_of(steps, [], "move", elsewhere._replace(functions=["other"]))[1] == {"untargeted_candidate": 6}


def test_rows_hold_the_sampled_tokens_or_else_the_messages() -> None:
    steps = [end(output=text, turn_id="t", score=score) for text, score in (("one", 1.0), ("two", 0.0))]
    calls = [call(0, "one"), call(1, "two")]
    candidates, _ = read(steps, calls)
    [pair], _ = preference_pairs(candidates, ALL)
    rows = pair_rows(pair, calls, "e/pair 0")
    assert [(r.token_ids, r.loss_mask, r.pair, r.preferred) for r in rows] == [
        ([1, 1, 7, 0], [0, 0, 1, 1], "e/pair 0", True),
        ([1, 1, 7, 1], [0, 0, 1, 1], "e/pair 0", False),
    ]
    unknown = [calls[0], call(1, "two", prompt_token_ids=None)]
    rows = pair_rows(pair, unknown, "e/pair 0")
    assert [(r.messages, r.trained_messages, r.preferred) for r in rows] == [
        ([*HI, {"role": "assistant", "content": "one"}], [1], True),
        ([*HI, {"role": "assistant", "content": "two"}], [1], False),
    ]


def test_tool_calls_are_part_of_a_response() -> None:
    def looking(tool: str) -> dict[str, Any]:
        calls = [{"id": "1", "type": "function", "function": {"name": tool, "arguments": '{"at": "sky"}'}}]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    steps = [end(output=looking(tool), turn_id="t", score=score) for tool, score in (("look", 1.0), ("ask", 0.0))]
    calls = [call(0, ""), call(1, "")]
    for made, tool in zip(calls, ("ask", "look"), strict=True):
        made.message = looking(tool)
    candidates, _ = read(steps, calls)
    assert [(c.response, c.call) for c in candidates] == [('look({"at": "sky"})', 1), ('ask({"at": "sky"})', 0)]
    [pair], dropped = preference_pairs(candidates, ALL)
    assert (pair.chosen.call, dropped) == (1, {})
