"""The dimensions of a run, and a covering array of them: every two values that go together meet in some run.

Values that are refused together are in `REFUSED`. A run of each such pair is refused, and the error names the key.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from allpairspy import AllPairs

GROUP_RELATIVE = ("grpo", "warm-up")
DIMENSIONS: Mapping[str, Sequence[str]] = {
    "method": (*GROUP_RELATIVE, "dpo of episodes", "dpo of turns", "kto", "sft"),
    "credit": ("episode", "step", "function"),
    "baseline": ("mean", "leave_one_out", "by rank"),
    "executor": ("local", "service", "two services", "ray"),
    "adapter": ("child", "url", "art", "customizer"),
    "front": ("file", "python", "resumed", "forked"),
    "validation": ("none", "every epoch", "beside"),
    "keep": ("default", "all", "little"),
    "report_to": ("none", "recording"),
    "weights": ("all", "lora"),
    "episodes": ("complete", "failing", "cut off", "alike at first"),
    "on_failure": ("exclude", "number"),
    "curriculum": ("off", "on"),
    "processes": ("1", "2"),
    "staleness": ("0", "1"),
    "stream": ("whole", "streamed"),
}
"""The first value of each is that of a run without the feature."""

Case = dict[str, str]
Value = tuple[str, str]
"""A dimension and one of its values."""


def _pairs(one: str, values: Sequence[str], other: str, others: Sequence[str]) -> Iterator[frozenset[Value]]:
    return (frozenset({(one, value), (other, another)}) for value in values for another in others)


PREFERENCES = [method for method in DIMENSIONS["method"] if method not in GROUP_RELATIVE]
REFUSED: Mapping[frozenset[Value], str] = {
    **dict.fromkeys(_pairs("method", PREFERENCES, "credit", ("step", "function")), "credit"),
    **dict.fromkeys(_pairs("method", PREFERENCES, "baseline", ("leave_one_out", "by rank")), "advantages"),
    **dict.fromkeys(_pairs("method", PREFERENCES, "curriculum", ["on"]), "curriculum_learning"),
    **dict.fromkeys(_pairs("adapter", ["url"], "processes", ["2"]), "learner"),
    **dict.fromkeys(_pairs("keep", ["little"], "staleness", ["1"]), "keep.last"),
    **dict.fromkeys(_pairs("adapter", ["art"], "validation", ["beside"]), "validation.beside"),
}
"""Values that a file cannot have together, and the key that the error names."""
ELSEWHERE = ("credit", "baseline", "keep", "weights", "processes", "staleness", "stream")
"""What a block of ART or NeMo Customizer has no key for: their servers decide."""
ABSENT: frozenset[frozenset[Value]] = frozenset(
    pair
    for adapter, absent in {
        "customizer": {
            "method": [method for method in DIMENSIONS["method"] if method != "dpo of turns"],
            **{name: DIMENSIONS[name][1:] for name in (*ELSEWHERE, "report_to", "curriculum", "validation")},
            "front": ["python", "forked"],
        },
        "art": {
            "method": DIMENSIONS["method"][1:],
            **{name: DIMENSIONS[name][1:] for name in ELSEWHERE},
            "front": ["forked"],
        },
        "url": {"front": ["forked"]},
    }.items()
    for name, values in absent.items()
    for pair in _pairs("adapter", [adapter], name, values)
)
"""NeMo Customizer trains all pairs in one job; ART has one method. Forks need the checkpoints, which are elsewhere."""


TRIPLES: Sequence[Case] = [
    {"method": "warm-up", "validation": "every epoch", "episodes": "alike at first"},
    {"stream": "streamed", "staleness": "1", "validation": "beside"},
    {"stream": "streamed", "staleness": "1", "validation": "beside", "front": "resumed"},
]
"""Values of which more than two have to meet: the weights of the warm-up are scored, and are the best; all that
overlaps."""


def go_together(values: Sequence[str]) -> bool:
    """Whether a file can have the values of the first dimensions."""
    return _fit(dict(zip(DIMENSIONS, values, strict=False)))


def _fit(case: Case) -> bool:
    return not any(frozenset(pair) in REFUSED or frozenset(pair) in ABSENT for pair in combinations(case.items(), 2))


def cases() -> list[Case]:
    """Runs in which every two values that go together meet."""
    rows = AllPairs([list(values) for values in DIMENSIONS.values()], filter_func=go_together)
    runs = [dict(zip(DIMENSIONS, row, strict=True)) for row in rows]
    missing = uncovered(runs)  # the generator stops where a row that it has begun cannot be completed
    while missing:
        pair = min(missing, key=sorted)
        runs.append(_completed(dict(pair), missing))
        missing -= {frozenset(met) for met in combinations(runs[-1].items(), 2)}
    return [*runs, *({name: values[0] for name, values in DIMENSIONS.items()} | triple for triple in TRIPLES)]


def _completed(case: Case, missing: set[frozenset[Value]]) -> Case:
    """A run with these values, and others that meet as many of the missing pairs as they can."""
    for dimension in [name for name in DIMENSIONS if name not in case]:
        fitting = [value for value in DIMENSIONS[dimension] if _fit(case | {dimension: value})]
        met = {value: sum(frozenset({(dimension, value), old}) in missing for old in case.items()) for value in fitting}
        case = case | {dimension: max(fitting, key=lambda value: met[value])}
    return {dimension: case[dimension] for dimension in DIMENSIONS}


def uncovered(runs: Sequence[Case]) -> set[frozenset[Value]]:
    """Pairs of values that go together and meet in none of the runs."""
    wanted = {
        pair
        for (one, values), (other, others) in combinations(DIMENSIONS.items(), 2)
        for pair in _pairs(one, values, other, others)
    }
    met = {frozenset(pair) for run in runs for pair in combinations(run.items(), 2)}
    return wanted - met - REFUSED.keys() - ABSENT


def refused_cases() -> list[tuple[Case, str]]:
    """A run of each refused pair whose other values are the first ones, and the key that its error names."""
    plain = {name: values[0] for name, values in DIMENSIONS.items()}
    return [(plain | dict(pair), key) for pair, key in REFUSED.items()]


def name(case: Case) -> str:
    """The values that differ from those of a plain run."""
    values = {key: value for key, value in case.items() if value != DIMENSIONS[key][0]}
    return ", ".join(f"{key} {value}" if value.isdigit() else value for key, value in values.items()) or "plain"
