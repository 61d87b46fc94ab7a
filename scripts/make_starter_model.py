"""Builds the starting model that `insitu init` writes, in a minute or two.

    python scripts/make_starter_model.py

It is the model of examples/help_desk, made anew for agents of every framework: its chat template finds the question and
the results of tools in what a framework writes around them, and leaves the rest out. Where there is a tool called
`final_answer` (smolagents) it answers by that tool.
"""

import random
import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "examples"), str(ROOT / "examples/help_desk")]

import make_model as desk  # noqa: E402
from starting_model import END, IGNORED, Row, build_tokenizer, make_model  # noqa: E402

FINAL = ('<tool_call>{"name": "final_answer", "arguments": {"answer": "', '"}}</tool_call>')
CHAT_TEMPLATE = (
    "{% set final = 'final_answer' in ((tools or []) | tojson) %}"
    f"{{% set items = {desk.ITEMS} %}}{{% set results = {desk.RESULTS} %}}"
    "{% set questions = " + str([question.split("{}") for each in desk.QUESTIONS.values() for question in each]) + " %}"
    "{% for message in messages %}{% set text = message.content or '' %}"
    "{% set about = namespace(question='', result='') %}"
    "{% if message.role == 'assistant' %}<|assistant|>"
    "{% if 'Calling tools:' in text %}<tool_call>"
    "{% for item in items %}{% if item in text %}"
    '{"name": "{{ \'orders\' if \'orders\' in text else \'manual\' }}", "arguments": {"item": "{{ item }}"}}'
    "{% endif %}{% endfor %}</tool_call>{% else %}{{ text }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>"
    "{% elif message.role != 'system' %}"
    "{% for item in items %}{% for question in questions %}"
    "{% set asked = question[0] ~ item ~ question[1] %}"
    "{% if asked in text %}{% set about.question = asked %}{% endif %}"
    "{% endfor %}{% endfor %}"
    "{% for result in results %}{% if result in text %}{% set about.result = result %}{% endif %}{% endfor %}"
    "{% if about.question %}<|user|>{{ '!' if final }}{{ about.question }}<|end|>"
    "{% else %}<|tool|>{{ about.result or 'nothing' }}<|end|>{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def lesson(rng: random.Random) -> list[tuple[str, bool]]:
    (asked, _), call, told, (answer, _) = desk.lesson(rng)
    if rng.random() < 0.5:
        return [(asked, False), call, told, (answer, True)]
    final = answer.removesuffix(END).join(FINAL) + END
    return [(asked.replace("<|user|>", "<|user|>!"), False), call, told, (final, True)]


def tokenizer_of(seed: int) -> PreTrainedTokenizerFast:
    """A word is one token, and so is each fixed part of a tool call."""
    rng = random.Random(seed)
    fixed = "|".join(part.replace("{", r"\{").replace("}", r"\}") for part in (*FINAL, *desk.CALL))
    texts = (text for _ in range(2000) for text, _ in lesson(rng))
    return build_tokenizer(texts, rf"{fixed}| ?[A-Za-z]+|[^A-Za-z ]", desk.ROLES, CHAT_TEMPLATE)


def lessons(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[Row]:
    """The text that the model says is learned."""
    rows = []
    for _ in range(desk.LESSONS_PER_STEP):
        encoded = [(tokenizer.encode(text, add_special_tokens=False), said) for text, said in lesson(rng)]
        ids = [token for tokens, _ in encoded for token in tokens]
        rows.append((ids, [token if said else IGNORED for tokens, said in encoded for token in tokens]))
    return rows


if __name__ == "__main__":
    make_model(__doc__, ROOT / "src/insitu/starter/model", 900, desk.LAYERS, tokenizer_of, lessons)
