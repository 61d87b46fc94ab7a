"""The token bridge: conversations whose template rewrites earlier turns stay one row."""

import json
from pathlib import Path
from typing import Any

import pytest
from factories import ROOT
from marks import slow_but
from message_formats import END, FAMILIES, TOOLS, completion, message
from processes import run
from tiny_backend import tiny_backend
from tiny_models import byte_tokenizer

from insitu.advantages.estimator import rows_of
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.protocols.openai.bridge import Continuation, bridged_prompt
from insitu.capture.ledger import OUTSIDE, CallLedger
from insitu.schemas.episodes import ModelCall
from insitu.workflow.context import EpisodeScope
from insitu.workflow.llms import PolicyConfig, connect

DROPS_REASONING = FAMILIES["hermes"].source.replace(
    "{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.last %}"
)
QUESTION = {"role": "user", "content": "Well?"}
CALL = ("weather", {"city": "Bérn", "days": 2})


def bridge(
    template: str, family: str, answer: dict[str, Any], *, ended: bool = True, sent: dict[str, Any] | None = None
) -> tuple[list[int], list[int] | None, list[int]]:
    """What was sampled of a conversation, the bridged prompt of its next turn, and that of the template.

    `sent` is the answer as the template gets it, if not as it is.
    """
    tokenizer = ChatTokenizer(byte_tokenizer(template))
    prompt, text = completion(FAMILIES[family], answer)
    sampled = tokenizer.encode(prompt + text + (END if ended else ""), add_special_tokens=False)
    role = "tool" if answer["tool_calls"] else "user"
    messages = [QUESTION, sent or answer, {"role": role, "content": "And now?", "tool_call_id": "call00000"}]
    continuation = Continuation(token_ids=sampled, num_messages=2)
    bridged = bridged_prompt(continuation, messages, lambda them: tokenizer.render(them, TOOLS), tokenizer)
    return sampled, bridged, tokenizer.render_prompt(messages, TOOLS)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt_oss"])
@pytest.mark.parametrize("calls", slow_but(([CALL, CALL],), [[], [CALL], [CALL, CALL]]))
def test_it_equals_a_template_that_keeps_everything(family, calls):
    reasoning = "Hm." if FAMILIES[family].around else ""
    _, bridged, rendered = bridge(
        FAMILIES[family].source, family, message("" if calls else "It rains.", calls, reasoning)
    )
    assert bridged == rendered


@pytest.mark.parametrize("calls", [[], [CALL]])
def test_what_the_template_drops_stays(calls):
    sampled, bridged, rendered = bridge(DROPS_REASONING, "hermes", message("Yes.", calls, "Hm."))
    assert rendered[: len(sampled)] != sampled
    assert bridged is not None
    assert bridged[: len(sampled)] == sampled
    assert rendered[-(len(bridged) - len(sampled)) :] == bridged[len(sampled) :]


def test_a_template_that_adds_arguments_to_text_gets_text():
    source = FAMILIES["hermes"].source
    adds = source.replace("c.function.arguments | tojson", "'' + c.function.arguments")
    answer = message("", [CALL])
    (call,) = answer["tool_calls"]
    function = call["function"] | {"arguments": json.dumps(CALL[1], ensure_ascii=False)}
    _, bridged, rendered = bridge(adds, "hermes", answer, sent=answer | {"tool_calls": [call | {"function": function}]})
    assert bridged == rendered == bridge(source, "hermes", answer)[1]


def test_an_answer_that_was_cut_off_is_ended_by_the_template():
    _, bridged, rendered = bridge(FAMILIES["hermes"].source, "hermes", message("It rai", []), ended=False)
    assert bridged == rendered
    assert bridge(FAMILIES["hermes"].source, "hermes", message("", [CALL]), ended=False)[1] is None


def test_a_template_without_the_answer_is_not_bridged():
    only_questions = FAMILIES["hermes"].source.replace(
        "for m in messages", "for m in messages if m.role != 'assistant'"
    )
    assert bridge(only_questions, "hermes", message("Yes.", []))[1] is None


@pytest.mark.parametrize("bridged", [False, True])
async def test_a_conversation_is_one_row(tmp_path: Path, bridged: bool) -> None:
    """The text of a random model is no UTF-8, so that its tokens cannot be found again from its messages."""
    with tiny_backend(tmp_path) as served:
        config = PolicyConfig(temperature=1.0, max_tokens=12, token_bridge=bridged)
        llm = connect("player", config, "policy", f"{served.address}/v1", served.token)
        messages = [{"role": "user", "content": "Your move?"}]
        with EpisodeScope(training=True) as scope:
            for _ in range(3):
                messages += [
                    {"role": "assistant", "content": await llm.ask(messages)},
                    {"role": "user", "content": "And?"},
                ]
        await llm.aclose()
    assert len(scope.calls) == 3
    rows = rows_of(scope.calls, {call.index: 1.0 for call in scope.calls})
    assert (len(rows) == 1) == bridged
    assert sum(map(sum, (row.loss_mask for row in rows))) == sum(len(call.token_ids or ()) for call in scope.calls)
    assert all("continues" not in call.sampling for call in scope.calls)


def test_a_backend_that_does_not_know_it_is_refused() -> None:
    example = ROOT / "examples/tic_tac_toe/dpo_customizer.yml"
    policy = "{_type: policy, temperature: 1.0, token_bridge: true}"
    done = run("validate", example, "-o", "llms.player", policy)
    assert done.returncode == 2
    assert "llms.player.token_bridge is true, but the backend of nemo_customizer_trainer_adapter" in done.stderr


def test_what_was_sampled_has_the_reasoning_that_the_agent_sends_back() -> None:
    def answer(reasoning: str) -> dict[str, Any]:
        return {"role": "assistant", "content": "5", "reasoning_content": reasoning}

    ledger = CallLedger(training=True)
    for index, reasoning in enumerate(("wrong", "right")):
        sampled: Any = {"prompt_token_ids": [1], "token_ids": [index], "message": answer(reasoning)}
        ledger.record([ModelCall(index, model="m", messages=[QUESTION], llm="p", **sampled)], OUTSIDE)

    def continued(message: dict[str, Any]) -> ModelCall | None:
        return ledger.continued([QUESTION, message, QUESTION], "p")

    assert continued(answer("right")) is ledger.calls[1]
    assert continued(answer("other")) is None
    assert continued({"role": "assistant", "content": "5"}) is ledger.calls[0]
