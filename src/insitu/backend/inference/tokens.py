"""Text, or messages through the tokenizer's own chat template, to prompt tokens, and sampled tokens back to text."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from insitu.errors import RequestRefused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "�"
_REMEMBERED_PROMPTS = 1024
_SHORT = 16_384
"""Characters of a prompt worth remembering: longer ones seldom recur, and a thousand of them would fill the memory."""


class ChatTokenizer:
    """A tokenizer with its chat template; renders and encodes without the detours of `apply_chat_template`."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", eos_token_ids: Iterable[int] = ()) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._tokenizer = tokenizer
        self._render = render_jinja_template
        self._fast = tokenizer.backend_tokenizer
        self._fast.no_padding()
        self._fast.no_truncation()
        self._special = dict(tokenizer.special_tokens_map)
        self._prompts: OrderedDict[tuple[str, bool], list[int]] = OrderedDict()
        self._pieces: dict[int, tuple[str, list[int]]] = {}
        self.eos_token_ids = frozenset(eos_token_ids) | {tokenizer.eos_token_id} - {None}

    def prompt(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None, variables: dict[str, Any] | None = None
    ) -> list[int]:
        """The prompt's token ids; `variables` are further ones of the chat template. Refuses what it refuses."""
        try:
            source = self._tokenizer.get_chat_template(tools=tools)
            rendered = self._render(
                [messages],
                tools=tools,
                chat_template=source,
                add_generation_prompt=True,
                **(self._special | (variables or {})),
            )
        except Exception as error:  # a program of the model's author, run on whatever the client sent
            raise RequestRefused(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error
        return list(self._encode(rendered[0][0], special=False))

    def text(self, text: str, special: bool) -> list[int]:
        """The token ids of a text; `special`: with those that the tokenizer puts around one.

        Special tokens that stand in the text are read as such either way.
        """
        return list(self._encode(text, special))

    def _encode(self, text: str, special: bool) -> list[int]:
        ids = self._prompts.get((text, special))
        if ids is None:
            if len(text) > _SHORT:  # only batches let go of the interpreter's lock
                return self._fast.encode_batch([text], add_special_tokens=special)[0].ids
            ids = self._prompts[text, special] = self._fast.encode(text, add_special_tokens=special).ids
            if len(self._prompts) > _REMEMBERED_PROMPTS:
                self._prompts.popitem(last=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text as an answer shows it, special tokens left out."""
        return self._fast.decode(token_ids, skip_special_tokens=True)

    def piece(self, token_id: int) -> tuple[str, list[int]]:
        """One token by itself: its text and its UTF-8 bytes (a token may be part of a character)."""
        found = self._pieces.get(token_id)
        if found is None:
            text = self._fast.decode([token_id], skip_special_tokens=False)
            raw = _raw_bytes(self._fast.id_to_token(token_id) or "") if _UNFINISHED in text else None
            found = self._pieces[token_id] = (text, list(text.encode() if raw is None else raw))
        return found


class TextStream:
    """The text of a growing list of tokens, given out only up to the last whole character."""

    def __init__(self, tokens: ChatTokenizer) -> None:
        self._tokens = tokens
        self._ids: list[int] = []
        self._shown = 0
        """Tokens whose text has been given out."""
        self._context = 0
        """Tokens before `_shown` that are decoded along, because spaces depend on the token before."""

    def add(self, token_id: int) -> str:
        """The text that this token completes, empty while a character is unfinished."""
        self._ids.append(token_id)
        return self._new(final=False)

    def finish(self) -> str:
        """Whatever is left, replacement characters included."""
        return self._new(final=True)

    def _new(self, final: bool) -> str:
        before = self._tokens.decode(self._ids[self._context : self._shown])
        now = self._tokens.decode(self._ids[self._context :])
        if len(now) <= len(before) or (now.endswith(_UNFINISHED) and not final):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return now[len(before) :]


class StopFinder:
    """Looks for stop strings in text that arrives in parts, and holds back what may become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [text for text in stop if text]
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The text that is certainly before any stop string."""
        text = self._held + text
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)]
        keep = max((self._overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _raw_bytes(symbol: str) -> bytes | None:
    """The bytes behind a vocabulary entry that is not text by itself: `<0xE2>`, or GPT-2's printable alphabet."""
    if len(symbol) == 6 and symbol.startswith("<0x"):
        return bytes([int(symbol[3:5], 16)])
    try:
        return bytes(_BYTE_OF[character] for character in symbol)
    except KeyError:
        return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bytes-to-unicode table, inverted: printable bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
