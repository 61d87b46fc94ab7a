"""Credit by function: numbers by hand, what must not change, and a policy gradient that has to come out right."""

import random
from collections.abc import Sequence
from fractions import Fraction
from statistics import fmean, pvariance
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from insitu.advantages.credit import (
    AdvantageConfig,
    Credit,
    CreditedCall,
    call_advantages,
    credit_by_function,
    credited_calls,
    group_advantages,
    member_advantages,
    step_returns,
)
from insitu.schemas.episodes import ModelCall
from insitu.schemas.finetuning import Trajectory
from insitu.training.trainers import InsituTrainerConfig

CENTRED = AdvantageConfig(baseline="mean", scale="none")
LEFT_OUT = AdvantageConfig(baseline="leave_one_out", scale="none")
COUNTERFACTUAL = AdvantageConfig(baseline="leave_one_function_out", scale="none")
BY_FUNCTION = Credit("function")

value = st.integers(-64, 64).map(lambda n: n / 16)  # exact in binary
members = st.lists(st.lists(value, max_size=4), min_size=2, max_size=6)


def episode(reward: float, *made: tuple[str, float] | str, rewarded: Sequence[str] | None = None) -> Trajectory:
    """An episode whose calls were made in these functions, with step rewards where there are any."""
    names = [m if isinstance(m, str) else m[0] for m in made]
    steps = None if all(isinstance(m, str) for m in made) else [0.0 if isinstance(m, str) else m[1] for m in made]
    calls = [
        ModelCall(k, "m", [{"role": "user", "content": "row"}], token_ids=[1] * (k + 1), functions=("<workflow>", name))
        for k, name in enumerate(names)
    ]
    metadata = None if rewarded is None else {"rewarded_functions": rewarded}
    places = list(range(len(calls)))
    return Trajectory(reward=reward, calls=calls, trained_calls=places, shaped_rewards=steps, metadata=metadata)


def test_members_by_hand() -> None:
    returns = [[4.0, 2.0], [1.0], [], [2.0]]  # means 3, 1, 2: the mean of the group is 2, whatever the number of calls
    assert member_advantages(returns, CENTRED) == [[2.0, 0.0], [-1.0], [], [0.0]]
    assert member_advantages(returns, LEFT_OUT) == [[2.5, 0.5], [-1.5], [], [0.0]]
    alike = ["a", "b", "a", "a"]  # 0 and 3 were asked the same; 1 is alone and is compared with both
    assert member_advantages(returns, COUNTERFACTUAL, alike) == [[2.0, 0.0], [-1.5], [], [-1.0]]
    scaled = AdvantageConfig(scale="population_std", epsilon=0)  # variances around 2: (4 + 0) / 2, 1, 0
    assert member_advantages(returns, scaled)[0] == pytest.approx([2.0, 0.0])
    assert member_advantages(returns, AdvantageConfig(epsilon=0))[1] == pytest.approx([-1 / 1.5**0.5])
    assert member_advantages([[1.0, 2.0], []], CENTRED) == [[0.0, 0.0], []]


# Four episodes, their calls by function and step reward. The expert is asked inside the solver; only the solver is
# given its own rewards. The last has failed, with on_failure -3, which its last call pays.
#
#   reward  3: plan 0, solve 2, solve 4      planned to be easy
#   reward  0: plan 0, solve 2               planned to be hard
#   reward  4: ask 0, solve 4                nobody has planned, and it was easy
#   reward -3: plan -3
#
# Worked out on paper: for each credit and discount the differences to each baseline, call by call, and for each group
# that is compared the sum of squares around its mean and the number of its members.
HAND: dict[tuple[str, float], tuple[dict[str, str], dict[str, tuple[str, int]]]] = {
    # mean 1; of the others 1/3, 4/3, 0, 7/3
    ("episode", 1.0): (
        {"mean": "2 2 2  -1 -1  3 3  -4", "leave_one_out": "8/3 8/3 8/3  -4/3 -4/3  4 4  -16/3"},
        {"all": ("30", 4)},
    ),
    # returns 6 6 4, 2 2, 4 4, -3: mean 25/8
    ("step", 1.0): (
        {"mean": "23/8 23/8 7/8  -9/8 -9/8  7/8 7/8  -49/8", "leave_one_out": "23/7 23/7 1  -9/7 -9/7  1 1  -7"},
        {"all": ("471/8", 8)},
    ),
    # returns 2 4 4, 1 2, 2 4, -3: mean 2
    ("step", 0.5): (
        {"mean": "0 2 2  -1 0  0 2  -5", "leave_one_out": "0 16/7 16/7  -8/7 0  0 16/7  -40/7"},
        {"all": ("38", 8)},
    ),
    # plan: rewards 3, 0, -3. ask: in one episode alone. solve: returns 6 4, 2, 4, worth 5, 2, 4: mean 11/3
    ("function", 1.0): (
        {
            "mean": "3 7/3 1/3  0 -5/3  0 1/3  -3",
            "leave_one_out": "9/2 3 1  0 -5/2  0 1/2  -9/2",
            "leave_one_function_out": "9/2 2 0  0 -5/2  0 -1  -9/2",  # the two easy ones against each other
        },
        {"plan": ("18", 3), "solve": ("17/3", 3)},
    ),
    # solve: returns 4 4, 2, 4: mean 10/3
    ("function", 0.5): (
        {
            "mean": "3 2/3 2/3  0 -4/3  0 2/3  -3",
            "leave_one_out": "9/2 1 1  0 -2  0 1  -9/2",
            "leave_one_function_out": "9/2 0 0  0 -2  0 0  -9/2",
        },
        {"plan": ("18", 3), "solve": ("8/3", 3)},
    ),
    # target_functions: [plan, solve], so that the expert's call is the solver's: returns 4 4, 2, 2 4: mean 3
    ("targets", 0.5): (
        {
            "mean": "3 1 1  0 -1  -1 1  -3",
            "leave_one_out": "9/2 3/2 3/2  0 -3/2  -1 1  -9/2",
            "leave_one_function_out": "9/2 1 1  0 -3/2  -2 0  -9/2",
        },
        {"plan": ("18", 3), "solve": ("3", 3)},
    ),
}
OF = ["plan", "solve", "solve", "plan", "solve", "ask", "solve", "plan"]


def hand_made() -> list[Trajectory]:
    group = [
        episode(3.0, ("plan", 0.0), ("solve", 2.0), ("solve", 4.0), rewarded=["solve"]),
        episode(0.0, ("plan", 0.0), ("solve", 2.0), rewarded=["solve"]),
        episode(4.0, ("ask", 0.0), ("solve", 4.0), rewarded=["solve"]),
        episode(-3.0, ("plan", -3.0), rewarded=[]),
    ]
    for call, plan in ((c, plan) for t, plan in zip(group, ["easy", "hard", "easy", ""], strict=True) for c in t.calls):
        name = call.functions[-1]
        call.functions = ("<workflow>", "solve", "ask") if name == "ask" else call.functions
        call.messages = [{"role": "user", "content": "the row" if name == "plan" else plan}]
    return group


@pytest.mark.parametrize("scale", ["none", "sample_std", "population_std"])
@pytest.mark.parametrize(
    ("credit", "discount", "baseline"),
    [(credit, discount, baseline) for (credit, discount), (by_hand, _) in HAND.items() for baseline in by_hand],
)
def test_every_way_to_give_credit_by_hand(credit: str, discount: float, baseline: Any, scale: Any) -> None:
    by_hand, squares = HAND[credit, discount]
    divisors = {
        name: 1.0 if scale == "none" else (Fraction(total) / (n - (scale == "sample_std"))) ** 0.5 + 0.5
        for name, (total, n) in squares.items()
    }
    compared = ["all" if "all" in squares else "solve" if (credit, name) == ("targets", "ask") else name for name in OF]
    differences = [float(Fraction(a)) for a in by_hand[baseline].split()]
    expected = [a / divisors.get(name, 1.0) for a, name in zip(differences, compared, strict=True)]
    config = AdvantageConfig(baseline=baseline, scale=scale, epsilon=0.5)
    named = {"targets": Credit("function", discount, ["plan", "solve"])}
    found = call_advantages(hand_made(), config, named.get(credit, Credit(credit, discount)))
    assert [a for of_episode in found for _, a in sorted(of_episode.items())] == pytest.approx(expected)


@given(members, st.sampled_from([CENTRED, LEFT_OUT, COUNTERFACTUAL]))
def test_members_sum_to_nothing_and_are_moved_by_nothing(returns: list[list[float]], config: AdvantageConfig) -> None:
    advantages = member_advantages(returns, config)
    if config.baseline != "leave_one_function_out":
        assert sum(fmean(a) for a in advantages if a) == pytest.approx(0, abs=1e-9)
    shifted = member_advantages([[g + 3 for g in member] for member in returns], config)
    assert [a for m in shifted for a in m] == pytest.approx([a for m in advantages for a in m], abs=1e-9)
    twice = member_advantages([member * 2 for member in returns], config)
    assert [a for m in twice for a in m] == pytest.approx([a for m in advantages for a in m * 2], abs=1e-9)
    single = [m[:1] for m in returns if m]
    assert [a for m in member_advantages(single, config) for a in m] == group_advantages([g for (g,) in single], config)


@given(members, st.lists(st.sampled_from("ab"), min_size=6, max_size=6), st.integers(0, 5), value)
def test_a_baseline_leaves_its_own_member_out(
    returns: list[list[float]], situations: list[str], at: int, other: float
) -> None:
    """Whatever else the function had got in this episode, what it is compared with is the same: so no bias."""
    at %= len(returns)
    for config in (LEFT_OUT, COUNTERFACTUAL):
        baselines = set()
        for own in ([5.0, -5.0, 7.0], [5.0, other + 100]):
            changed = [*returns[:at], own, *returns[at + 1 :]]
            if sum(map(bool, changed)) > 1:
                advantages = member_advantages(changed, config, situations[: len(returns)])[at]
                baselines |= {round(g - a, 9) for g, a in zip(own, advantages, strict=True)}
        assert len(baselines) <= 1


def test_functions_are_compared_with_themselves() -> None:
    group = [
        episode(1.0, ("plan", 1.0), "work", rewarded=["plan"]),
        episode(0.0, ("plan", 0.0), "work", rewarded=["plan"]),
    ]
    group += [episode(1.0, ("plan", 0.5), "work", "work", rewarded=["plan"]), episode(0.0, "work")]
    plan, work = [0.5, -0.5, 0.0], [0.5, -0.5, 0.5, -0.5]
    expected = [{0: plan[0], 1: work[0]}, {0: plan[1], 1: work[1]}, {0: plan[2], 1: work[2], 2: work[2]}, {0: work[3]}]
    assert call_advantages(group, CENTRED, BY_FUNCTION) == expected


def test_rewards_of_its_own_are_those_that_were_given_even_where_they_are_nothing() -> None:
    rewarded = [episode(r, ("plan", 0.0), rewarded=["plan"]) for r in (1.0, 0.0)]
    assert call_advantages(rewarded, CENTRED, BY_FUNCTION) == [{0: 0.0}, {0: 0.0}]
    unrewarded = [episode(r, ("plan", 0.0), rewarded=[]) for r in (1.0, 0.0)]
    assert call_advantages(unrewarded, CENTRED, BY_FUNCTION) == [{0: 0.5}, {0: -0.5}]
    scored = [episode(0.0, ("plan", r), ("work", -r)) for r in (1.0, 0.0)]  # by an evaluator's step_scores: all are
    assert call_advantages(scored, CENTRED, BY_FUNCTION) == [{0: 0.5, 1: -0.5}, {0: -0.5, 1: 0.5}]


def test_returns_of_a_function_are_discounted_by_its_own_steps() -> None:
    group = [episode(0.0, ("plan", 1.0), ("work", 9.0), ("plan", 4.0)), episode(0.0, ("plan", 2.0))]
    first, second = call_advantages(group, CENTRED, Credit("function", discount=0.5))
    assert (first[0], first[2], second[0]) == (0.25, 1.25, -0.75)  # returns 3 and 4, mean 3.5, against 2: 2.75
    assert first[1] == 0.0, "work was done in one episode alone"


def test_target_functions_name_the_groups() -> None:
    group = [episode(1.0, "ask"), episode(0.0, "other")]
    for call, outer in ((group[0].calls[0], "plan"), (group[1].calls[0], "plan")):
        call.functions = ("<workflow>", outer, call.functions[-1])
    assert call_advantages(group, CENTRED, BY_FUNCTION) == [{0: 0.0}, {0: 0.0}]
    assert call_advantages(group, CENTRED, Credit("function", targets=["plan"])) == [{0: 0.5}, {0: -0.5}]


@given(st.lists(value, min_size=2, max_size=6), st.sampled_from([CENTRED, LEFT_OUT, COUNTERFACTUAL, AdvantageConfig()]))
def test_one_function_judged_by_the_episode_is_credit_by_episode(rewards: list[float], config: AdvantageConfig) -> None:
    group = [episode(r, *["f"] * (1 + k % 3)) for k, r in enumerate(rewards)]
    by_function, by_episode = call_advantages(group, config, BY_FUNCTION), call_advantages(group, config)
    assert all(one == pytest.approx(other) for one, other in zip(by_function, by_episode, strict=True))


def test_the_counterfactual_baseline_is_unbiased_and_varies_less() -> None:
    """A router decides by coin whether the row is hard; the solver's reward hangs on that far more than on itself.

    The gradient of a Bernoulli solver is E[A (a - p)] = 2 p (1 - p) / 2 = 0.5 here, with every baseline that does not
    look at the solver's own choice.
    """
    draw = random.Random(5)
    estimates: dict[str, list[float]] = {"leave_one_out": [], "leave_one_function_out": []}
    for _ in range(4000):
        group, choices = [], []
        for _ in range(6):
            hard, choice = draw.random() < 0.5, draw.random() < 0.5
            t = episode((-8.0 if hard else 8.0) + 2.0 * choice, "solve")
            t.calls[0].messages = [{"role": "user", "content": "hard" if hard else "easy"}]
            group.append(t)
            choices.append(choice)
        for config in (LEFT_OUT, COUNTERFACTUAL):
            advantages = [a[0] for a in call_advantages(group, config, BY_FUNCTION)]
            estimates[config.baseline].append(fmean(a * (c - 0.5) for a, c in zip(advantages, choices, strict=True)))
    plain, counterfactual = estimates["leave_one_out"], estimates["leave_one_function_out"]
    assert fmean(plain) == pytest.approx(0.5, abs=0.12)
    assert fmean(counterfactual) == pytest.approx(0.5, abs=0.06)
    assert pvariance(counterfactual) < pvariance(plain) / 4


def test_the_spread_by_hand() -> None:
    calls = [
        CreditedCall("plan", 2, 0.5),
        CreditedCall("plan", 2, -1.0),
        CreditedCall("work", 10, 0.1),
        CreditedCall("idle", 0, 3.0),
    ]
    assert credit_by_function(CreditedCall(*call) for call in calls) == {
        "idle": {"calls": 1, "tokens": 0, "mean_abs_advantage": 0.0, "share": 0.0},
        "plan": {"calls": 2, "tokens": 4, "mean_abs_advantage": 0.75, "share": 0.75},
        "work": {"calls": 1, "tokens": 10, "mean_abs_advantage": 0.1, "share": 0.25},
    }
    assert credit_by_function([]) == {}
    assert credit_by_function([CreditedCall("plan", 2, 0.0)])["plan"]["share"] == 0.0


@given(st.lists(st.tuples(st.sampled_from("fgh"), st.integers(1, 9), value), min_size=1, max_size=20))
def test_shares_add_up_and_calls_may_be_cut_anywhere(made: list[tuple[str, int, float]]) -> None:
    whole = credit_by_function(CreditedCall(*call) for call in made)
    assert sum(of["share"] for of in whole.values()) == pytest.approx(int(any(a for _, _, a in made)))
    cut = credit_by_function(CreditedCall(name, 1, a) for name, tokens, a in made for _ in range(tokens))
    for name, of in whole.items():
        for key in ("tokens", "mean_abs_advantage", "share"):
            assert cut[name][key] == pytest.approx(of[key])


def test_weighed_calls_are_the_trained_ones() -> None:
    t = episode(1.0, "plan", "work")
    assert credited_calls([(t, {1: 0.5})], ["<workflow>"]) == [CreditedCall("work", 2, 0.5)]


def test_step_returns() -> None:
    assert step_returns([1, 0, -2], 1.0) == [-1, -2, -2]
    assert step_returns([1, 0, -2], 0.5) == [0.5, -1, -2]
    assert step_returns([1, 0, -2], 0.0) == [1, 0, -2]
    assert step_returns([], 0.5) == []


@pytest.mark.parametrize("unit", ["step", "function"])
def test_returns_of_the_largest_rewards_are_numbers(unit: str) -> None:
    """Each reward is allowed; their sums are larger than a reward may be."""
    group = [episode(0.0, ("work", 1e30), ("work", 1e30)), episode(0.0, ("work", -1e30), ("work", -1e30))]
    small = [episode(0.0, ("work", 1.0), ("work", 1.0)), episode(0.0, ("work", -1.0), ("work", -1.0))]
    expected = call_advantages(small, AdvantageConfig(), Credit(unit))
    assert call_advantages(group, AdvantageConfig(), Credit(unit)) == [pytest.approx(of, abs=1e-5) for of in expected]


def test_a_discount_without_steps_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"discount is 0\.9, which needs credit: step or function, not episode"):
        InsituTrainerConfig(discount=0.9)
    assert InsituTrainerConfig(discount=0.9, credit="step").discount == 0.9


@pytest.mark.parametrize("credit", ["episode", "step"])
def test_a_baseline_that_needs_functions_is_refused_without(credit: Any) -> None:
    baseline = {"baseline": "leave_one_function_out"}
    with pytest.raises(ValidationError, match=f"needs credit: function, not {credit}"):
        InsituTrainerConfig(credit=credit, advantages=baseline)  # type: ignore[arg-type]
    InsituTrainerConfig(credit="function", advantages=baseline)  # type: ignore[arg-type]
