"""What the episodes that were played show: failures, calls that are not recorded, lengths, scores that change."""

import re
from collections.abc import Iterator, Sequence

from insitu.doctor.findings import Evidence, Finding, Severity, severity_of
from insitu.doctor.plan import Plan
from insitu.schemas.episodes import DropReason, Episode, ModelCall
from insitu.training.metrics import cut_off, share_of
from insitu.workflow.llms import is_same_server

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
    DropReason.EVALUATOR_ERROR: ("{plan.evaluator}", "correct the evaluator: it must score every answer of the agent"),
    DropReason.NO_SCORE: ("{plan.evaluator}", "return a number for every answer, 0 for a useless one"),
    DropReason.NAN_SCORE: ("{plan.evaluator}", "return a finite number for every answer"),
    DropReason.NO_CALLS: (
        "workflow",
        "let the agent call the model of its llm: builder.get_llm, or the parameter model",
    ),
    DropReason.NO_TARGET_CALLS: (
        "finetuning.target_functions ({functions})",
        "name functions that call the trained llm, or <workflow> for all calls",
    ),
    "prompt_too_long": ("{plan.adapter}.model", "shorten the prompts, or train a model with a longer context"),
    "no_token_ids": ("{llm}", "use _type: policy, or a server that returns token ids and logprobs"),
}
"""Where to look, and what to change, by the reason of a failed episode."""


def about_calls(plan: Plan, evidence: Evidence) -> Iterator[Finding]:
    """Calls that go to another model than the trained one, or that are not recorded."""
    served, episodes = evidence.served, evidence.episodes
    calling = [episode for episode in episodes if episode.calls]
    if served is not None and calling:
        requested = {url for episode in calling for url in episode.requested}
        reached = any(is_same_server(url, served.base_url) for url in requested) or evidence.traffic_problem is not None
        if requested and not reached:
            counted = evidence.leftovers is not None and evidence.leftovers.unknown_completions is not None
            severity = Severity.STOPS_LEARNING if counted else Severity.HARMS  # it may have two names
            who, others = share_of(len(calling), len(episodes), "episodes"), ", ".join(sorted(requested))
            what = f"the model that is trained is served at {served.base_url}, but {who} called {others}"
            change = "use _type: policy, which is the model under training wherever it is served"
            yield Finding("other_server", severity, what, plan.llm("base_url"), change)
            return
    if evidence.sampled_problem is not None:
        what, change = evidence.sampled_problem, "use an llm of _type: policy, and let nothing else train the backend"
        yield Finding("other_weights", Severity.STOPS_LEARNING, what, plan.llm("model_name"), change)
    severity = Severity.HARMS if calling else Severity.STOPS_LEARNING
    if evidence.traffic_problem is not None:
        llm = " or ".join(f"llms.{name}" for name in plan.llms)
        change = f"give the agent the client of {llm} instead of its own, and let others use another server"
        yield Finding("unrecorded_calls", severity, evidence.traffic_problem, "workflow", change)
    if evidence.leftovers is not None and (stray := evidence.leftovers.stray_completions):
        what = f"{stray} completions were requested outside every episode: they are not recorded and not trained"
        change = "let each thread or task of the agent enter the episode that it works for with Context.activate()"
        yield Finding("stray_calls", severity, what, "workflow", change)


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
        where, change = _CHANGES.get(code, ("workflow", "see the first error"))
        functions = ", ".join(plan.target_functions)
        where = where.format(plan=plan, llm=plan.llm("_type"), functions=functions)
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
    example = changed[0]
    differences = [abs(e.first - e.second) for e in changed if e.first is not None and e.second is not None]
    by = f", by up to {max(differences):g}" if differences else ""
    first, second = ("none" if score is None else f"{score:g}" for score in (example.first, example.second))
    share = share_of(len(changed), len(evidence.rescored), "outputs")
    what = f"{share} got another score the second time{by}, such as {first} and {second} for {example.episode}"
    change = "make the score depend on the answer and the row only: no randomness, temperature 0 for a judge"
    yield Finding("changing_scores", Severity.HARMS, what, plan.evaluator, change)
