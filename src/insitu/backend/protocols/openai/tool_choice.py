"""`tools` and `tool_choice` of a chat completion: which tools the model is offered, and which of them it must call."""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from insitu.errors import RequestRefused

Tool = dict[str, Any]
_ALLOWED = "none, auto, required, a function by name, or allowed_tools"


class ToolChoice(NamedTuple):
    """The tools in the prompt, and those of which a call is forced."""

    offered: list[Tool]
    forced: Sequence[Tool] = ()
    one: bool = False
    """Whether a single call is forced, of the function that the request names."""

    @classmethod
    def of(cls, choice: Any, tools: list[Tool]) -> "ToolChoice":
        """Raises RequestRefused for a choice that the tools do not allow."""
        for index, tool in enumerate(tools):
            function = tool.get("function")
            if isinstance(function, dict) and not isinstance(function.get("strict"), bool | None):
                key = f"tools.{index}.function.strict"
                raise RequestRefused(f"{key} is {function['strict']!r:.80}; allowed: true, false", param=key)
        if choice is None or choice == "auto":
            return cls(tools)
        if choice == "none":
            return cls([])
        kind = choice.get("type") if isinstance(choice, dict) else None
        if choice != "required" and kind not in ("function", "allowed_tools"):
            _refuse(f"is {choice!r:.80}; allowed: {_ALLOWED}")
        if not tools:
            _refuse(f"is {choice!r:.80}, which needs tools")
        if choice == "required":
            return cls(tools, [_named(tool, tools) for tool in tools])
        if kind == "function":
            return cls(tools, [_named(choice, tools)], one=True)
        allowed = choice.get("allowed_tools")
        chosen, mode = (allowed.get("tools"), allowed.get("mode")) if isinstance(allowed, dict) else (None, None)
        if not isinstance(chosen, list) or not chosen or mode not in ("auto", "required"):
            _refuse("allowed_tools needs tools and the mode auto or required")
        offered = [_named(each, tools) for each in chosen]
        return cls(offered, offered if mode == "required" else ())


def _named(choice: Any, tools: list[Tool]) -> Tool:
    """The tool that a choice names."""
    by_name = {name: tool for tool in tools if (name := function_name(tool))}
    name = function_name(choice)
    if name not in by_name:
        _refuse(f"names the function {name!r:.80}; those of tools: {', '.join(by_name)}")
    return by_name[name]


def function_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _refuse(problem: str) -> NoReturn:
    raise RequestRefused(f"tool_choice {problem}", param="tool_choice")
