"""Chat templates of our own in the form of each family of models, for tests that parse what they render.

`ALL_FAMILIES` maps a name to its template and to the formats that it is for. The templates render what a model of the
family would write; in all of them a message of the assistant ends with `END`, or in harmony with one of its own ends.
"""

import json
import re
from typing import Any, NamedTuple

END = "<|im_end|>"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "scale": {"type": "number"},
                    "brief": {"type": "boolean"},
                    "places": {"type": "array"},
                    "options": {"type": "object"},
                },
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "lookup_name",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    },
]


class Family(NamedTuple):
    """`calls` renders the variable `calls` of a message; `reasoning` is what stands around reasoning."""

    tools: str
    reasoning: str
    calls: str
    around: tuple[str, str] | None = None
    hint: str = ""
    """What the template says of tools."""
    template: str | None = None
    """The whole template, where the parts above do not make it."""

    @property
    def source(self) -> str:
        return self.template or _template(self)

    @property
    def is_whole(self) -> bool:
        """Whether a message with calls has no other text."""
        return not re.search(r"<|\[T|functools", self.calls + (self.template or "")) or "content is none" in self.calls


def _template(family: Family) -> str:
    reasoning = ""
    if family.around is not None:
        start, end = family.around
        reasoning = (
            "{% if m.reasoning_content %}"
            + start
            + "{{ '\n' + m.reasoning_content + '\n' }}"
            + end
            + "{{ '\n\n' }}{% endif %}"
        )
    return (
        "{% if tools %}<|im_start|>system\n"
        + family.hint
        + "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
        + END
        + "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + reasoning
        + "{{ m.content or '' }}{% if m.tool_calls %}{% set calls = m.tool_calls %}"
        + family.calls
        + "{% endif %}"
        + END
        + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


_JSON = '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'
_NEMO = (
    '[TOOL_CALLS][{% for c in calls %}{"name": {{ c.function.name | tojson }}, "arguments": '
    '{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]'
)
_LIST = "[{% for c in calls %}" + _JSON + "{% if not loop.last %}, {% endif %}{% endfor %}]"
_VALUE = "{{ v if v is string else v | tojson }}"
_EACH = "{% for k, v in c.function.arguments.items() %}"
_PYTHON = (
    "[{% for c in calls %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]"
)
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    "{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments | tojson }}\n```<｜tool▁call▁end｜>{% if not loop.last %}\n{% endif %}{% endfor %}"
    "<｜tool▁calls▁end｜>"
)
_DEEPSEEK_31 = (
    "<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
    "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
)
_DEEPSEEK_TEXT = (
    "{% if m.content is none %}<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}<｜tool▁call▁end｜>"
    "{% if not loop.last %}\n{% endif %}{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
)
"""As the templates of V3 and R1, which add arguments to text, and leave out calls beside content."""
_KIMI = (
    "<|tool_calls_section_begin|>{% for c in calls %}<|tool_call_begin|>functions."
    "{{ c.function.name }}:{{ loop.index0 }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>"
)
_QWEN = (
    "{% for c in calls %}<tool_call>\n<function={{ c.function.name }}>\n"
    + _EACH
    + "<parameter={{ k }}>\n"
    + _VALUE
    + "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
_GLM = (
    "{% for c in calls %}<tool_call>{{ c.function.name }}\n"
    + _EACH
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
    + _VALUE
    + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
)
_MINIMAX = (
    '<minimax:tool_call>\n{% for c in calls %}<invoke name="{{ c.function.name }}">\n'
    + _EACH
    + '<parameter name="{{ k }}">'
    + _VALUE
    + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>"
)
_HERMES = "{% for c in calls %}<tool_call>\n" + _JSON + "\n</tool_call>{% endfor %}"
_LLAMA = (
    '{% for c in calls %}{"name": {{ c.function.name | tojson }}, "parameters": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %}; {% endif %}{% endfor %}"
)
_MISTRAL_NEW = (
    "{% for c in calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
)
_HARMONY = """{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}\
{% if m.role == 'assistant' %}\
{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}\
{% if m.tool_calls %}{% if m.content %}\
<|start|>assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>{% endif %}\
{% for c in m.tool_calls %}<|start|>assistant<|channel|>commentary to=functions.{{ c.function.name }} \
<|constrain|>json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}\
{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}\
{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""

_GEMMA4 = (
    "{% macro value(x) %}{% if x is string %}<|\"|>{{ x }}<|\"|>{% elif x is mapping %}{{ '{' }}"
    '{% for k, v in x.items() %}<|"|>{{ k }}<|"|>:{{ value(v) }}{% if not loop.last %},{% endif %}{% endfor %}'
    "{{ '}' }}{% elif x is iterable %}[{% for v in x %}{{ value(v) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ x | tojson }}{% endif %}{% endmacro %}"
    "{% for c in calls %}<|tool_call>call:{{ c.function.name }}{{ '{' }}{% for k, v in c.function.arguments.items() %}"
    "{{ k }}:{{ value(v) }}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}"
)

_THINK = ("<think>", "</think>")
FAMILIES = {
    "hermes": Family("hermes", "think", _HERMES, _THINK),
    "smollm3": Family("hermes", "think", _HERMES, _THINK, "<tools> <tool_call> </tool_call>"),
    "qwen3_coder": Family("qwen3_coder", "none", _QWEN),
    "llama3": Family("llama3_json", "none", _LLAMA, hint="<|start_header_id|>"),
    "llama3_ipython": Family("llama3_json", "none", "<|python_tag|>" + _LLAMA),
    "llama4": Family("llama4_pythonic", "none", "<|python_start|>" + _PYTHON + "<|python_end|>"),
    "llama4_bare": Family("llama4_pythonic", "none", _PYTHON, hint="<|header_start|>"),
    "llama4_json": Family(
        "llama4_pythonic", "none", "<|python_start|><|python_end|>" + _LLAMA.replace("; ", ""), hint="<|header_start|>"
    ),
    "mistral_nemo": Family("mistral", "none", _NEMO),
    "mistral_old": Family("mistral", "none", "[TOOL_CALLS] " + _LIST),
    "mistral": Family("mistral", "mistral", _MISTRAL_NEW, ("[THINK]", "[/THINK]")),
    "gpt_oss": Family("openai", "harmony", "", template=_HARMONY),
    "deepseek_v3": Family("deepseek_v3", "none", _DEEPSEEK),
    "deepseek_v31": Family("deepseek_v3", "think", _DEEPSEEK_31, _THINK),
    "glm45": Family("glm45", "think", _GLM, _THINK),
    "gemma3": Family("gemma3", "none", _PYTHON, hint="<start_of_turn>"),
    "gemma4": Family("gemma4", "gemma4", _GEMMA4, ("<|channel>thought", "<channel|>")),
    "pythonic": Family("pythonic", "none", _PYTHON, hint="[func_name1(params_name1=params_value1)]"),
    "phi4": Family("phi4_mini_json", "none", "<|tool_call|>" + _LIST + "<|/tool_call|>"),
    "phi4_functools": Family("phi4_mini_json", "none", "functools" + _LIST),
    "granite": Family(
        "granite",
        "granite",
        "<|tool_call|>" + _LIST,
        ("Here is my thought process:", "Here is my response:"),
        "<|start_of_role|>",
    ),
    "xlam": Family("xlam", "none", _LIST, hint='[{"name": "tool_call_name", "arguments": {}}]'),
    "minimax_m2": Family("minimax_m2", "think", _MINIMAX, _THINK),
    "kimi_k2": Family("kimi_k2", "none", _KIMI),
}
ALL_FAMILIES = {**FAMILIES, "deepseek_text": Family("deepseek_v3", "none", _DEEPSEEK_TEXT)}
"""With the one whose template gets arguments as text."""
ENDS = (END, "<|call|>", "<|return|>")


def message(content: str, calls: list[tuple[str, dict[str, Any]]], reasoning: str = "") -> dict[str, Any]:
    """A message of the assistant as templates get it."""
    named = [
        {"type": "function", "id": f"call{i:05}", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(calls)
    ]
    return {
        "role": "assistant",
        "content": content if content or not calls else None,
        "tool_calls": named,
        "reasoning_content": reasoning,
        "thinking": reasoning,
    }


def render(family: Family, messages: list[dict[str, Any]], tools: Any = TOOLS, *, prompt: bool = False) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    if "+ c.function.arguments" in family.calls:  # as the model wrote them, in its own way
        messages = [{**each, "tool_calls": [*map(_with_text, each.get("tool_calls") or ())]} for each in messages]
    rendered, _ = render_jinja_template(
        [messages], tools=tools, chat_template=family.source, add_generation_prompt=prompt
    )
    return rendered[0]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False, separators=(",", ":"))
    return {**call, "function": {**function, "arguments": text}}


def completion(family: Family, answer: dict[str, Any]) -> tuple[str, str]:
    """The prompt of a question, and what a model of the family would answer, without the end of the message."""
    question = [{"role": "user", "content": "Well?"}]
    prompt = render(family, question, prompt=True)
    text = render(family, [*question, answer]).removeprefix(prompt)
    end = next(end for end in ENDS if text.endswith(end))
    return prompt, text.removesuffix(end)
