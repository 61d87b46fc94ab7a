"""A tiny model that has learnt by heart to call a tool, to read its result and to answer.

Its chat template renders what the dialogue is about and nothing of what frameworks write around it, so one model serves
all of them. Where there is a tool `final_answer` the answer is a call of it.
"""

import random
from pathlib import Path

import torch
from tiny_models import byte_tokenizer, tiny_config
from transformers import LlamaForCausalLM

COLOURS = {"sky": "blue", "grass": "green"}
TEMPLATE = (
    "{% set final = 'final_answer' in ((tools or []) | tojson) %}"
    "{% for message in messages %}{% set text = message.content or '' %}"
    "{% if message.role == 'assistant' %}<|im_start|>assistant\n{{ text }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>{{ '\n' }}"
    "{% elif message.role == 'system' %}"
    "{% elif '[' in text and '?' in text %}<|im_start|>user\n"
    "{{ '!' if final }}[{{ text.split('[')[1].split('?')[0] }}?<|im_end|>{{ '\n' }}"
    "{% elif 'blue' in text %}<|im_start|>tool\nblue<|im_end|>{{ '\n' }}"
    "{% elif 'green' in text %}<|im_start|>tool\ngreen<|im_end|>{{ '\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def dialogue(thing: str, number: str, final: bool) -> list[tuple[str, bool]]:
    """Pieces of text, and whether the model says them."""
    colour = COLOURS[thing]
    answer = f"It is {colour}."
    if final:
        answer = f'<tool_call>{{"name": "final_answer", "arguments": {{"answer": "{answer}"}}}}</tool_call>'
    return [
        (
            f"<|im_start|>user\n{'!' * final}[{number}] What colour is the {thing}?<|im_end|>\n<|im_start|>assistant\n",
            False,
        ),
        (f'<tool_call>{{"name": "look", "arguments": {{"at": "{thing}"}}}}</tool_call><|im_end|>', True),
        (f"\n<|im_start|>tool\n{colour}<|im_end|>\n<|im_start|>assistant\n", False),
        (f"{answer}<|im_end|>", True),
    ]


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
        rows = [row(thing, final) for thing in COLOURS for final in (False, True) for _ in range(2)]
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
