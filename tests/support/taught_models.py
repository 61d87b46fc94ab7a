"""Small models that are taught to answer in the form of a family, and the dialogues that they are taught.

`teach(family, folder)` saves a model that continues the prompts of `dialogue(family)` turn by turn, and answers
`BREAK` with calls that end too early.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from message_formats import END, ENDS, Family, completion, message, render
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

QUESTION = "How is Zürich, and who is Åsa?"
BREAK = "Break off."
_STEPS = 400
_LEARNED = 0.03
"""Mean loss of a token at which teaching ends."""
_LENGTH = 2048
_NESTED = {
    "city": "Zürich 🙂",
    "days": 3,
    "scale": 0.5,
    "brief": True,
    "places": ["日本", None, [1, {"a": "ü, }] x"}]],
    "options": {"unit": "°C", "deep": {"list": [], "text": 'say "hi"\\n'}},
}
_SPECIAL = re.compile(r"<\|[a-z_]+\|>|<｜[^｜]+｜>|\[/?[A-Z_]+\]")
_ADDED = re.compile(r"</?(?:think|tool_call|minimax:tool_call|arg_key|arg_value)>")
"""Tokens that are not special in the tokenizers of their families."""


class Turn(NamedTuple):
    """A message of the model, and what the tools that it calls return."""

    content: str
    calls: list[tuple[str, dict[str, Any]]]
    reasoning: str
    results: list[str]

    @property
    def message(self) -> dict[str, Any]:
        return message(self.content, self.calls, self.reasoning)


def dialogue(family: Family) -> list[Turn]:
    """Two calls at once where the family has that, a second tool, and an answer."""
    thinks, said = family.reasoning != "none", "" if family.is_whole else "I look."
    first = [("weather", _NESTED), ("lookup_name", {"query": "Åsa"})][: 1 if family.tools == "openai" else 2]
    return [
        Turn(said, first, "Weather and a name.\nBoth." if thinks else "", ["Snow.", "A name."][: len(first)]),
        Turn("", [("lookup_name", {"query": "名前 ü"})], "One more." if thinks else "", ["Found."]),
        Turn("Snow, and a name: Åsa. 🙂", [], "Enough." if thinks else "", []),
    ]


def conversation(turns: list[Turn]) -> list[dict[str, Any]]:
    """The messages up to the results of the last of these turns."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    for turn in turns:
        messages.append(turn.message)
        for call, result in zip(turn.message["tool_calls"], turn.results, strict=True):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return messages


def cut_off(family: Family) -> str:
    """The calls of the first turn without their end."""
    turn = dialogue(family)[0]
    text = completion(family, message("", turn.calls[:1]))[1]
    return text[: text.index("°C")]


@cache
def lessons(family: Family) -> list[tuple[str, str]]:
    """Prompts, and what the model answers to them, the end of the message included."""
    turns, pairs = dialogue(family), []
    for number, turn in enumerate(turns):
        before = conversation(turns[:number])
        prompt = render(family, before, prompt=True)
        whole = render(family, [*before, turn.message])
        assert whole.startswith(prompt), "the template keeps everything"
        pairs.append((prompt, whole[len(prompt) :]))
    end = next(end for end in ENDS if pairs[0][1].endswith(end))
    question = [{"role": "user", "content": BREAK}]
    return [*pairs, (render(family, question, prompt=True), cut_off(family) + end)]


@cache
def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """Words and bytes, and the markers of the family as single tokens."""
    texts = [text for pair in lessons(family) for text in pair]
    found = sorted({marker for text in texts for marker in _SPECIAL.findall(text)} | {END})
    added = sorted({marker for text in texts for marker in _ADDED.findall(text)})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = [word for text in texts for word in re.split("|".join(map(re.escape, [*found, *added])), text)]
    trainer = trainers.BpeTrainer(
        vocab_size=1024, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": [text for text in found if text != END]})
    fast.chat_template = family.source
    return fast


def teach(family: Family, folder: Path) -> Path:
    """Saves a model that has learned the lessons by heart, and its tokenizer; raises AssertionError if it has not."""
    tokenizer = tokenizer_of(family)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in ENDS if end in tokenizer.get_vocab()]
    pairs = [[tokenizer.encode(text, add_special_tokens=False) for text in pair] for pair in lessons(family)]
    rows = [[*prompt, *answer] for prompt, answer in pairs[-2:]]
    size = (len(rows), max(map(len, rows)))
    ids, labels = torch.full(size, tokenizer.pad_token_id), torch.full(size, -100)
    for row, of_row in enumerate((pairs[:-1], pairs[-1:])):
        ids[row, : len(rows[row])] = torch.tensor(rows[row])
        for prompt, answer in of_row:
            assert rows[row][: len(prompt) + len(answer)] == prompt + answer, "tokens of turns stay as they were"
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=_LENGTH,
                initializer_range=0.08,
                bos_token_id=None,
                eos_token_id=ends,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(_STEPS):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss.item() < _LEARNED:
            break
    assert loss.item() < _LEARNED, f"loss {loss.item():.3f}"
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
