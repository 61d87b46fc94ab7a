"""A tiny model that has learnt by heart to call a tool, to read its result and to answer.

Its chat template renders what the dialogue is about and nothing of what frameworks write around it, so one model serves
all of them. Where there is a tool `final_answer` (smolagents) the answer is a call of it. There calls and results are
told as text, and a failed call by its error only: they are rendered as the messages they stand for.
"""

import random
from pathlib import Path

import torch
from model_families import tiny_config
from tiny_models import byte_tokenizer
from transformers import LlamaForCausalLM

COLOURS = {"sky": "blue", "grass": "green"}
NIGHT = "night"
"""What the tool knows no colour of: it raises."""
SEEN = {**COLOURS, NIGHT: "error"}


def call_of(thing: str) -> str:
    return f'<tool_call>{{"name": "look", "arguments": {{"at": "{thing}"}}}}</tool_call>'


TEMPLATE = (
    "{% set final = 'final_answer' in ((tools or []) | tojson) %}"
    "{% set failure %}"
    "{% if final %}<|im_start|>assistant\n" + call_of(NIGHT) + "<|im_end|>{{ '\n' }}{% endif %}"
    "<|im_start|>tool\nerror<|im_end|>{{ '\n' }}{% endset %}"
    "{% for message in messages %}{% set text = message.content or '' %}"
    "{% if message.role == 'assistant' and not (text or message.tool_calls) %}"
    "{% elif message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if 'Calling tools:' in text %}"
    + "".join(f"{{% if '{thing}' in text %}}{call_of(thing)}{{% endif %}}" for thing in SEEN)
    + "{% else %}{{ text }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>{{ '\n' }}"
    "{% elif message.role == 'system' %}"
    "{% elif '[' in text and '?' in text %}<|im_start|>user\n"
    "{{ '!' if final }}[{{ text.split('[')[1].split('?')[0] }}?<|im_end|>{{ '\n' }}{{ failure if 'rror' in text }}"
    "{% elif text.startswith('What colour') %}<|im_start|>user\n[0000] {{ text }}<|im_end|>{{ '\n' }}"
    "{% elif 'blue' in text %}<|im_start|>tool\nblue<|im_end|>{{ '\n' }}"
    "{% elif 'green' in text %}<|im_start|>tool\ngreen<|im_end|>{{ '\n' }}"
    "{% elif 'night' in text or 'rror' in text %}{{ failure }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def answer_of(thing: str) -> str:
    return f"It is {COLOURS.get(thing, 'dark')}."


def dialogue(thing: str, number: str, final: bool) -> list[tuple[str, bool]]:
    """Pieces of text, and whether the model says them."""
    answer = answer_of(thing)
    if final:
        answer = f'<tool_call>{{"name": "final_answer", "arguments": {{"answer": "{answer}"}}}}</tool_call>'
    return [
        (
            f"<|im_start|>user\n{'!' * final}[{number}] What colour is the {thing}?<|im_end|>\n<|im_start|>assistant\n",
            False,
        ),
        (f"{call_of(thing)}<|im_end|>", True),
        (f"\n<|im_start|>tool\n{SEEN[thing]}<|im_end|>\n<|im_start|>assistant\n", False),
        (f"{answer}<|im_end|>", True),
    ]


def looker() -> Path:
    """The model, which learns for half a minute, and is kept until its recipe changes."""
    recipe = Path(__file__)
    folder = recipe.parents[2] / ".environments/looker"
    weights = folder / "model.safetensors"
    if not weights.exists() or weights.stat().st_mtime < recipe.stat().st_mtime:
        save_looker(folder)
    return folder


def save_looker(folder: Path) -> Path:
    tokenizer = byte_tokenizer(TEMPLATE)
    chance = random.Random(0)

    def row(thing: str, final: bool) -> tuple[list[int], list[int]]:
        ids, labels = [], []
        for text, said in dialogue(thing, f"{chance.randrange(10_000):04d}", final):
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            labels += piece if said else [-100] * len(piece)
        return ids, labels

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        rows = [row(thing, final) for thing in SEEN for final in (False, True)]
        longest = max(len(ids) for ids, _ in rows)
        return (
            torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows]),
            torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows]),
        )

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config(hidden_size=64, max_position_embeddings=1024))
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        below = 0
        for _ in range(600):
            ids, labels = batch()
            loss = model(ids, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            below = below + 1 if loss < 0.005 else 0
            if below == 10:
                break
        else:
            raise AssertionError(f"the model has not learnt its dialogues: loss {loss:.4f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
