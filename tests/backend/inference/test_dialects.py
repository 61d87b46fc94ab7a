"""The other APIs of `insitu backend`, by the official clients of OpenAI and Anthropic."""

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from processes import serving
from tiny_backend import Served
from tiny_models import save_tiny_model

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def claude(served: Served) -> Any:
    """Sends the key as `x-api-key`."""
    async with anthropic.AsyncAnthropic(base_url=served.address, api_key=served.token, max_retries=0) as client:
        yield client


@pytest.fixture
async def gpt(served: Served) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{served.address}/v1", api_key=served.token, max_retries=0) as client:
        yield client


async def test_every_api_gives_what_chat_completions_give(served: Served, claude: Any, gpt: Any) -> None:
    """Of greedy samples, streamed or not; with the number of tokens and the reason for the end."""
    chat = await gpt.chat.completions.create(model="policy", messages=HELLO, max_tokens=12, temperature=0)
    expected, sampled = chat.choices[0].message.content, chat.usage.completion_tokens
    asked: Any = {"model": "policy", "extra_body": {"temperature": 0}}

    message = await claude.messages.create(messages=HELLO, max_tokens=12, **asked)
    async with claude.messages.stream(messages=HELLO, max_tokens=12, **asked) as stream:
        streamed = await stream.get_final_message()
    for each in (message, streamed):
        assert "".join(block.text for block in each.content) == expected
        assert (each.usage.input_tokens, each.usage.output_tokens) == (chat.usage.prompt_tokens, sampled)
        assert each.stop_reason == "max_tokens"

    response = await gpt.responses.create(input="hello", max_output_tokens=12, **asked)
    limits = {"max_output_tokens": 12, **asked}
    events = [event async for event in await gpt.responses.create(input="hello", stream=True, **limits)]
    for each in (response, events[-1].response):
        assert each.output_text == expected
        assert each.usage.output_tokens == sampled
        assert each.incomplete_details.reason == "max_output_tokens"
    assert len({tuple(sample["token_ids"]) for sample in served.samples()[-5:]}) == 1


async def test_a_message_without_text_is_a_turn_of_the_prompt(claude: Any) -> None:
    """It has no content block, as with Anthropic's API."""
    asked: Any = {"model": "policy", "max_tokens": 4, "extra_body": {"temperature": 0}}
    said = (await claude.messages.create(messages=HELLO, **asked)).content[0].text
    empty = await claude.messages.create(messages=HELLO, stop_sequences=[said[0]], **asked)
    assert empty.content == []
    assert (empty.stop_reason, empty.stop_sequence) == ("stop_sequence", said[0])
    async with claude.messages.stream(messages=HELLO, stop_sequences=[said[0]], **asked) as stream:
        streamed = await stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", said[0])
    turns = [{"role": "assistant", "content": content} for content in (empty.content, "")]
    sent, written = [await claude.messages.create(messages=[*HELLO, turn, *HELLO], **asked) for turn in turns]
    assert sent.usage.input_tokens == written.usage.input_tokens
    begun = [*HELLO, {"role": "assistant", "content": []}]
    begun = await claude.messages.create(messages=begun, **asked)
    assert begun.usage.input_tokens == empty.usage.input_tokens, "it begins the answer"


async def test_refusals_have_the_form_of_their_api(claude: Any, gpt: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'other'") as unknown:
        await claude.messages.create(model="other", messages=HELLO, max_tokens=4)
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await claude.messages.create(model="policy", messages=HELLO, max_tokens=0)
    with pytest.raises(anthropic.BadRequestError, match="the request is malformed"):
        await claude.messages.create(model="policy", messages=[1], max_tokens=4)
    with pytest.raises(openai.NotFoundError, match="there is no response 'r'"):
        await gpt.responses.create(model="policy", input="a", previous_response_id="r")
    with pytest.raises(openai.BadRequestError, match="model"):
        await gpt.responses.create(model=None, input="a")
    both = gpt.with_options(default_headers={"x-api-key": "of another server"})
    assert (await both.models.list()).data, "the gateway sends both; one of them is enough"
    with pytest.raises(anthropic.AuthenticationError):
        await claude.with_options(api_key="wrong").messages.create(model="policy", messages=HELLO, max_tokens=4)


def test_an_api_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    """Its requests are not answered as if they were chats."""
    script = tmp_path / "without.py"
    missing = "insitu.integrations.dialects.anthropic"
    script.write_text(f"import sys\nsys.modules[{missing!r}] = None\nfrom insitu.cli import main\nmain()\n")
    options = ("--model", save_tiny_model(tmp_path / "model"), "--port", "0", "--output_dir", tmp_path / "out")
    with serving(script, "backend", *options) as (_, address):
        client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
        with pytest.raises(anthropic.InternalServerError, match="cannot translate requests to messages") as refused:
            client.messages.create(model="policy", messages=HELLO, max_tokens=4)
        assert refused.value.status_code == 501
        answer = openai.OpenAI(base_url=f"{address}/v1", api_key="none").chat.completions.create(
            model="policy", messages=HELLO, max_tokens=4
        )
        assert answer.choices
