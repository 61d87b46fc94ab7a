"""What a chat template makes of a conversation, told by its rendering.

The control plane may have no jinja2. Then nothing is known, which is no problem.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
"""Tags of transformers around what the model writes; they render nothing."""
_SECONDS = 10
"""For rendering a template, which takes a fraction of one."""
_REASON, _ANSWER = "reason-7f3a", "answer-7f3a"
_FUNCTION = {"name": "look", "arguments": {"at": "sky"}}
_ASKED = {"role": "user", "content": "Well?"}
_ANSWERED = {"role": "assistant", "content": _ANSWER, "reasoning_content": _REASON, "thinking": _REASON}
_CALLED = {**_ANSWERED, "content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": _FUNCTION}]}
_RETURNED = {"role": "tool", "name": "look", "tool_call_id": "call00000", "content": "blue"}
_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def _template(source: str) -> Any:
    """Compiled as transformers does. Raises ImportError without jinja2, and its TemplateSyntaxError."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: "today"}
    return environment.from_string(_GENERATION.sub("", source))


def chosen_template(templates: str | Mapping[str, str]) -> str:
    """The template for requests with tools."""
    if isinstance(templates, str):
        return templates
    return templates.get("tool_use") or templates.get("default") or ""


def template_error(source: str) -> str | None:
    """A syntax error, and its line."""
    try:
        _template(source)
    except ImportError:
        return None
    except Exception as error:  # of a program of the model's author
        line = getattr(error, "lineno", None)
        return f"{error}" + (f" (line {line})" if line else "")
    return None


def dropped_reasoning(source: str) -> str | None:
    """What reasoning of earlier messages a template leaves out; None: it keeps all, or that is not known.

    The template runs in another process: it is a program of the model's author, which may loop.
    """
    code = "import sys; from insitu.formats.templates import _dropped; print(_dropped(sys.stdin.read()) or '')"
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, input=source, capture_output=True, encoding="utf-8", timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() or None


def _dropped(source: str) -> str | None:
    try:
        template = _template(source)
        texts = [
            template.render(messages=messages, tools=_TOOLS, add_generation_prompt=True, bos_token="", eos_token="")
            for messages in ([_ASKED, _CALLED, _RETURNED], [_ASKED, _ANSWERED, _ASKED])
        ]
    except Exception:  # no jinja2, or a template that refuses this conversation
        return None
    if _ANSWER not in texts[1] or _REASON in texts[1]:
        return None
    return "of a message once the user has sent another" if _REASON in texts[0] else "of every earlier message"
