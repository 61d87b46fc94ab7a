"""What the episodes that were played show: failures, calls that are not recorded, lengths, scores that change."""

import re
from collections.abc import Iterator, Sequence

from insitu.doctor.evidence import Evidence
from insitu.doctor.findings import Finding, Severity, severity_of
from insitu.doctor.plan import Plan
from insitu.schemas.episodes import DropReason, Episode, ModelCall
from insitu.training.metrics import cut_off, share_of
from insitu.workflow.policy_names import is_same_server

_TOO_LONG = re.compile(r"context_length_exceeded|together may have \d+|maximum context length")
_NEARLY = 0.9
_CHANGES: dict[str, tuple[str, str]] = {
    DropReason.WORKFLOW_ERROR: ("workflow", "correct the agent; `insitu run FILE --input ...` runs it once"),
    DropReason.TIMEOUT: ("eval.general.episode_timeout", "raise it, or make the agent faster"),
    DropReason.BACKEND_ERROR: (
        "{llm}",
        "see why the model's server fails; raise eval.general.retries if it is temporary",
    ),
    DropReason.CAPTURE_ERROR: ("{llm}", "use an llm of _type: policy, whose server returns token ids and logprobs"),
    DropReason.EVALUATOR_ERROR: ("{evaluator}", "correct the evaluator: it must score every answer of the agent"),
    DropReason.NO_SCORE: ("{evaluator}", "return a number for every answer, 0 for a useless one"),
    DropReason.NAN_SCORE: ("{evaluator}", "return a finite number for every answer"),
    DropReason.NO_CALLS: (
        "workflow",
        "let the agent call the model of its llm: builder.get_llm, or the parameter model",
    ),
    DropReason.NO_TARGET_CALLS: (
        "finetuning.target_functions ({functions})",
        "name functions that call the trained llm, or <workflow> for all calls",
    ),
    "prompt_too_long": ("{adapter}.model", "shorten the prompts, or train a model with a longer context"),
    "no_token_ids": ("{llm}", "use _type: policy, or a server that returns token ids and logprobs"),
}
"""Where to look, and what to change, by the reason of a failed episode."""


def about_calls(plan: Plan, evidence: Evidence) -> Iterator[Finding]:
    """Calls that go to another model than the trained one, or that are not recorded."""
    served, episodes = evidence.served, evidence.episodes
    calling = [episode for episode in episodes if episode.calls]
    if served is not None and calling:
        asked = {url for episode in calling for url in episode.requested}
        reached = any(is_same_server(url, served.base_url) for url in asked) or evidence.traffic_problem is not None
        if asked and not reached:
            counted = evidence.leftovers is not None and evidence.leftovers.unknown_completions is not None
            who = share_of(len(calling), len(episodes), "episodes")
            yield Finding(
                "other_server",
                Severity.STOPS_LEARNING if counted else Severity.HARMS,  # it may have two names
                f"the model that is trained is served at {served.base_url}, but {who} called "
                f"{', '.join(sorted(asked))}",
                plan.llm("base_url"),
                "use _type: policy, which is the model under training wherever it is served",
            )
            return
    if evidence.sampled_problem is not None:
        what, change = evidence.sampled_problem, "use an llm of _type: policy, and let nothing else train the backend"
        yield Finding("other_weights", Severity.STOPS_LEARNING, what, plan.llm("model_name"), change)
    if evidence.traffic_problem is not None:
        severity = Severity.HARMS if calling else Severity.STOPS_LEARNING
        llm = " or ".join(f"llms.{name}" for name in plan.llms)
        change = f"give the agent the client of {llm} instead of its own, and let others use another server"
        yield Finding("unrecorded_calls", severity, evidence.traffic_problem, "workflow", change)
    if evidence.leftovers is not None and (stray := evidence.leftovers.stray_completions):
        yield Finding(
            "stray_calls",
            Severity.HARMS if calling else Severity.STOPS_LEARNING,
            f"{stray} completions were requested outside every episode: they are not recorded and not trained",
            "workflow",
            "let each thread or task of the agent enter the episode that it works for with Context.activate()",
        )


def about_failures(plan: Plan, evidence: Evidence, found: Sequence[Finding]) -> Iterator[Finding]:
    """Episodes that cannot be trained, by reason, unless what was `found` about their calls explains them."""
    episodes, explained = evidence.episodes, {finding.code for finding in found}
    by_reason: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.reason is not None:
            by_reason.setdefault(_code(episode), []).append(episode)
    for code, failed in by_reason.items():
        if code == DropReason.NO_CALLS and explained & {"unrecorded_calls", "stray_calls"}:
            continue
        if "other_server" in explained and code in ("no_token_ids", DropReason.CAPTURE_ERROR):
            continue
        where, change = _where_and_change(code, plan)
        error = next((episode.error for episode in failed if episode.error), None)
        what = f"{share_of(len(failed), len(episodes), 'episodes')} failed as {code}" + (f": {error}" if error else "")
        severity = severity_of(len(failed), len(episodes)) if evidence.has_groups else Severity.STOPS_LEARNING
        yield Finding(code, severity, what, where, change)


def _code(episode: Episode) -> str:
    """The reason of a failed episode, or a more exact one."""
    if _TOO_LONG.search(episode.error or ""):
        return "prompt_too_long"
    without_ids = [call for call in episode.calls if call.token_ids is None and call.error is None]
    if episode.reason is DropReason.NO_TARGET_CALLS and len(without_ids) == len(episode.calls):
        return "no_token_ids"
    return str(episode.reason)


def _where_and_change(code: str, plan: Plan) -> tuple[str, str]:
    where, change = _CHANGES.get(code, ("workflow", "see the first error"))
    functions = ", ".join(plan.target_functions)
    return where.format(
        adapter=plan.adapter, evaluator=plan.evaluator, llm=plan.llm("_type"), functions=functions
    ), change


def about_lengths(plan: Plan, evidence: Evidence) -> Iterator[Finding]:
    """Answers that are cut off, and prompts that are nearly as long as the context."""
    answers, limit = evidence.answers, evidence.served.max_length if evidence.served is not None else None
    if not answers:
        return
    longest = max(map(_tokens, answers))
    full = [call for call in answers if call.finish_reason == "length" and limit is not None and _tokens(call) >= limit]
    cut = cut_off(answers)
    if full and 2 * len(full) >= sum(call.finish_reason == "length" for call in answers):
        severity = Severity.HARMS if cut is not None else Severity.NOTE
        what = f"{share_of(len(full), len(answers), 'answers')} were cut off at the model's context of {limit} tokens"
        change = "shorten the prompts, or train a model with a longer context"
        yield Finding("context_full", severity, what, f"{plan.adapter}.model", change)
    elif cut is not None:
        yield Finding(cut.code, Severity.HARMS, cut.what, plan.llm("max_tokens"), cut.change)
    if limit is not None and not full and longest >= _NEARLY * limit:
        what = f"a prompt and its answer have up to {longest} tokens, the model's context {limit}"
        change = "shorten the prompts, or train a model with a longer context, before they are longer"
        yield Finding("context_nearly_full", Severity.NOTE, what, f"{plan.adapter}.model", change)


def _tokens(call: ModelCall) -> int:
    return len(call.prompt_token_ids or ()) + len(call.token_ids or ())


def about_scores(plan: Plan, evidence: Evidence) -> Iterator[Finding]:
    """An evaluator that gives the same output another score."""
    changed = [each for each in evidence.rescored if each.first != each.second]
    if not changed:
        return
    example, known = changed[0], [e for e in changed if e.first is not None and e.second is not None]
    most = max((abs(e.first - e.second) for e in known if e.first is not None and e.second is not None), default=None)
    by = f", by up to {most:g}" if most is not None else ""
    yield Finding(
        "changing_scores",
        Severity.HARMS,
        f"{share_of(len(changed), len(evidence.rescored), 'outputs')} got another score the second time{by}, such as "
        f"{_score(example.first)} and {_score(example.second)} for {example.episode}",
        plan.evaluator,
        "make the score depend on the answer and the row only: no randomness, temperature 0 for a judge",
    )


def _score(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
