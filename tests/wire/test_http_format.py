"""The HTTP formats both sides of the wire share, against examples as servers send them."""

import math
from typing import Any

import pytest

from insitu.wire.addresses import http_url
from insitu.wire.connection import choice_tokens, event_data, parse_events
from insitu.wire.http_format import error_body, error_message, format_event, format_token_id, parse_token_ids


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:80"), ("::1", "http://[::1]:80"), ("a.b", "http://a.b:80")]
)
def test_ipv6_addresses_are_bracketed_in_urls(host: str, url: str) -> None:
    assert http_url(host, 80) == url


def test_events_are_parsed_as_they_were_formatted() -> None:
    stream = format_event(b'{"a": 1}') + b": a comment\n\n" + format_event(b"[2]", "named") + format_event(b"[DONE]")
    assert stream.startswith(b'data: {"a": 1}\n\n')
    assert b"event: named\ndata: [2]\n\n" in stream
    events, rest = [], b""
    for cut in range(0, len(stream), 3):
        found, rest = parse_events(rest + stream[cut : cut + 3])
        events += found
    assert (events, rest) == ([{"a": 1}, [2]], b"")


def test_events_are_parsed_as_whole_bodies_are() -> None:
    events, _ = parse_events(b'data:\n\ndata: {"a": Infinity, "b": "\\ud800"}\n\n')
    assert events == [{"a": math.inf, "b": "\ud800"}]


@pytest.mark.parametrize(
    ("line", "data"),
    [
        (b"data:x\r", b"x"),
        (b"data: x ", b"x"),
        (b"event: x", None),
        (b"", None),
        (b": data: x", None),
        (b"data:\r", None),
    ],
)
def test_only_data_lines_have_data(line: bytes, data: bytes | None) -> None:
    assert event_data(line) == data


def test_an_error_body_names_its_kind() -> None:
    body = error_body("no such model", 404, "model", "model_not_found")
    assert body == {
        "error": {"message": "no such model", "type": "not_found_error", "param": "model", "code": "model_not_found"}
    }
    assert [error_body("x", status)["error"]["type"] for status in (400, 500)] == [
        "invalid_request_error",
        "server_error",
    ]
    assert error_message(body) == "no such model"


@pytest.mark.parametrize(
    ("body", "message"),
    [({"error": "busy"}, "busy"), ({"error": {"code": 7}}, "{'code': 7}"), ({"error": None}, None), ([], None)],
)
def test_the_message_of_other_servers_errors(body: Any, message: str | None) -> None:
    assert error_message(body) == message


def test_token_ids_are_read_from_the_names_of_tokens() -> None:
    assert parse_token_ids([format_token_id(7), "token_id:0"]) == [7, 0]
    for tokens in ([], ["token_id:7", " the"], ["token_id:"], ["a token_id:7"], [None]):
        assert parse_token_ids(tokens) is None


CHAT = {"content": [{"token": "token_id:7", "logprob": -0.5}]}
TEXT = {"tokens": ["token_id:7"], "token_logprobs": [-0.5]}


@pytest.mark.parametrize(
    ("choice", "ids", "logprobs"),
    [
        ({"token_ids": [7], "logprobs": {"content": [{"token": "a", "logprob": -0.5}]}}, [7], [-0.5]),
        ({"logprobs": CHAT}, [7], [-0.5]),
        ({"logprobs": TEXT}, [7], [-0.5]),
        ({"token_ids": [], "logprobs": None}, [], []),
        ({"logprobs": None}, None, None),
    ],
)
def test_sampled_tokens_of_a_choice(choice: Any, ids: list[int] | None, logprobs: list[float] | None) -> None:
    assert choice_tokens(choice) == (ids, logprobs)
