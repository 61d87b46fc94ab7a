"""Chat templates, encoding, and incremental decoding of sampled tokens."""

import re
from collections.abc import Iterable, Sequence
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_template_utils import render_jinja_template

from insitu.errors import RequestRefused
from insitu.formats.parser import MessageFormats
from insitu.formats.registry import no_tool_template, renders_tools
from insitu.formats.templates import chosen_template

_NULL_CONTENT = re.compile(r"\bcontent\\?['\"]?\]? is (?:not )?none")
_REPLACEMENT = "\ufffd"
_MOST_PENDING = 32
"""Tokens without text that are decoded again with each further one; more are no beginning of a character."""
_MOST_MISSING = 3
"""Tokens that may be the start of a character of four bytes."""
_MAX_CACHED_LENGTH = 4096
"""Characters of a cached prompt; longer ones seldom recur."""
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
"""The bytes of GPT-2's printable alphabet."""


class ChatTokenizer:
    """A tokenizer with its chat template; avoids the overhead of `apply_chat_template`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._fast = tokenizer.backend_tokenizer
        self._fast.no_padding()
        self._fast.no_truncation()
        self._special = dict(tokenizer.special_tokens_map)
        self._encode = lru_cache(1024)(lambda text, special: self._fast.encode(text, add_special_tokens=special).ids)
        self.decode_token = cache(self._decode_token)
        self._visible = self.encode("a", add_special_tokens=False)
        self._visible_text = self.decode(self._visible, skip_special_tokens=False)
        self.eos_token_ids = frozenset(eos_token_ids) | {tokenizer.eos_token_id} - {None}
        self.formats = MessageFormats.of(tokenizer.chat_template, getattr(tokenizer, "response_template", None))
        """How the model writes tool calls and reasoning."""
        self._renders_tools = renders_tools(chosen_template(tokenizer.chat_template))
        self._reads_null = _NULL_CONTENT.search(str(tokenizer.chat_template)) is not None

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts of the special tokens."""
        return tuple(sorted({each.content for each in self._tokenizer.added_tokens_decoder.values() if each.special}))

    @cached_property
    def markers(self) -> dict[str, int]:
        """The tokens that grammars take as no text, and their ids: special ones, and added ones such as `<think>`."""
        return {
            token.content: number
            for number, token in self._tokenizer.added_tokens_decoder.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    def render_prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The prompt's token ids; without the generation prompt, those of the messages alone.

        Raises RequestRefused if the chat template rejects the messages, or leaves out the tools.
        """
        text = self.render(messages, tools, template_kwargs, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text, see `render_prompt`."""
        if tools and not self._renders_tools:
            problem = no_tool_template(Path(self._tokenizer.name_or_path).name)
            raise RequestRefused(problem, param="tools", code="no_tool_template")
        try:
            messages = [*map(self._without_empty_content, messages)] if self._reads_null else messages
            rendered = render_jinja_template(
                [[*messages]],
                tools=tools,
                chat_template=self._tokenizer.get_chat_template(tools=tools),
                add_generation_prompt=add_generation_prompt,
                **(self._special | (template_kwargs or {})),
            )
        except Exception as error:  # the template is a program of the model's author, run on a client's input
            raise RequestRefused(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error
        return str(rendered[0][0])

    @staticmethod
    def _without_empty_content(message: dict[str, Any]) -> dict[str, Any]:
        """Templates that ask whether a message has content, as those of DeepSeek do, add its calls only if not."""
        return {**message, "content": message.get("content") or None} if message.get("tool_calls") else message

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Special tokens written in the text are parsed in either case."""
        if len(text) > _MAX_CACHED_LENGTH:  # only encode_batch releases the interpreter's lock
            return list(self._fast.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)
        return list(self._encode(text, add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text, by default without special tokens."""
        return str(self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def _decode_token(self, token_id: int) -> tuple[str, list[int]]:
        """A single token's text and UTF-8 bytes (a token may be part of a character).

        It is decoded after another one: some decoders drop a space at the start.
        """
        text = self.decode([*self._visible, token_id], skip_special_tokens=False).removeprefix(self._visible_text)
        raw = _raw_bytes(self._fast.id_to_token(token_id) or "") if _REPLACEMENT in text else None
        return text, list(text.encode() if raw is None else raw)


class CompletionText:
    """The text of a growing list of tokens: up to the last complete character, and up to the first stop string.

    Text that may turn out to be the start of a stop string is held back.
    """

    def __init__(self, tokenizer: ChatTokenizer, stop: Sequence[str] = (), *, skip_special_tokens: bool = True) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._stop = [text for text in stop if text]
        self._held = ""
        self.stopped = ""
        """The stop string that was found."""
        self._ids: list[int] = []
        self._emitted = 0
        """Number of tokens whose text has been returned."""
        self._context = 0
        """Start of the tokens decoded along before `_emitted`: whitespace depends on the preceding token."""

    def add(self, token_id: int) -> str:
        """The text that is final with this token; empty in the middle of a character."""
        self._ids.append(token_id)
        return self._before_stop(self._next_text(final=False))

    def flush(self) -> str:
        """The remaining text, replacement characters included."""
        text = self._before_stop(self._next_text(final=True))
        held, self._held = self._held, ""
        return text + held

    def _next_text(self, final: bool) -> str:
        before = self._decode(self._ids[self._context : self._emitted])
        now = self._decode(self._ids[self._context :])
        end = len(self._ids)
        if end - self._emitted > _MOST_PENDING and not final:
            if now == before:  # special tokens, which are skipped
                del self._ids[self._emitted :]
            elif now.endswith(_REPLACEMENT):
                settled = self._decode(self._ids[self._context : end - _MOST_MISSING])
                if now.startswith(settled):  # invalid bytes, not the first ones of a character
                    now, end, final = settled, end - _MOST_MISSING, True
        if len(now) <= len(before) or (now.endswith(_REPLACEMENT) and not final):
            return ""
        self._context, self._emitted = self._emitted, end
        return now[len(before) :]

    def _before_stop(self, text: str) -> str:
        """What certainly precedes any stop string."""
        text = self._held + text
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, self.stopped = min(found)
            self._held = ""
            return text[:end]
        end = len(text) - max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[end:]
        return text[:end]


def overlap(text: str, marker: str) -> int:
    """Length of the longest proper prefix of `marker` that `text` ends with."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)


def _raw_bytes(symbol: str) -> bytes | None:
    """The bytes of a vocabulary entry that is not valid text: `<0xE2>`, or GPT-2's printable alphabet."""
    if len(symbol) == 6 and symbol.startswith("<0x"):
        return bytes([int(symbol[3:5], 16)])
    try:
        return bytes(_BYTE_OF[character] for character in symbol)
    except KeyError:
        return None
