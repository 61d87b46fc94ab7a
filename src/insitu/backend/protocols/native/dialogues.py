"""Dialogues as messages to training rows, with the tokens that the model reads and samples in chat completions."""

from collections.abc import Sequence
from typing import Any

from insitu.advantages.estimator import rows_of
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.protocols.openai.chat import Message, template_messages
from insitu.errors import RequestRefused
from insitu.schemas.episodes import ModelCall, TrainingRow


def render_dialogue(
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    trained: Sequence[int] | None,
    tokenizer: ChatTokenizer,
    episode: str,
) -> list[TrainingRow]:
    """The rows of a dialogue: one, or several where the template changes earlier messages later on.

    A trained message is a completion of the prompt that the messages before it are rendered to, up to the token that
    ends its turn. `trained` are positions in `messages`; None: all assistant messages. Raises RequestRefused.
    """
    rendered = template_messages(messages)
    if trained is None:
        trained = [index for index, message in enumerate(messages) if message.role == "assistant"]
    calls = []
    for index in sorted(set(trained)):
        if not 0 <= index < len(messages) or messages[index].role != "assistant":
            role = f" is of role {messages[index].role!r}" if 0 <= index < len(messages) else " does not exist"
            raise _refused(f"trained_messages has {index}, but messages[{index}]{role}", "trained_messages")
        prompt = tokenizer.render_prompt(rendered[:index], tools)
        dialogue = tokenizer.render_prompt(rendered[: index + 1], tools, add_generation_prompt=False)
        if dialogue[: len(prompt)] != prompt:
            raise _refused(
                f"messages[{index}]: the chat template renders it differently from a completion of the messages before "
                "it, so its tokens are unknown; send token_ids",
                "messages",
            )
        completion = _until_end_of_turn(dialogue[len(prompt) :], tokenizer)
        if not prompt or not completion:
            raise _refused(f"messages[{index}]: the chat template renders no tokens for it, or before it", "messages")
        logprobs = [0.0] * len(completion)  # rows_of requires some
        calls.append(ModelCall(index, "", [], prompt_token_ids=prompt, token_ids=completion, logprobs=logprobs))
    return rows_of(calls, dict.fromkeys(range(len(calls)), 1.0), episode)


def _until_end_of_turn(tokens: list[int], tokenizer: ChatTokenizer) -> list[int]:
    """Without what the template adds after the last end-of-turn token, which the model does not sample."""
    ends = [position for position, token in enumerate(tokens) if token in tokenizer.eos_token_ids]
    return tokens[: ends[-1] + 1] if ends else tokens


def _refused(message: str, param: str) -> RequestRefused:
    return RequestRefused(message, param=param, code="invalid_job")
