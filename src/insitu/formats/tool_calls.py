"""The text of tool calls, as models of each family write it, as names and arguments.

A function here gets what stands between the delimiters of a format and the tools of the request, and returns the calls.
It raises ValueError if the text is not complete calls of its format, or has strings that UTF-8 cannot encode or numbers
that JSON does not have, and RecursionError if it is nested too deeply.
"""

import ast
import json
import re
import secrets
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

Tools = Sequence[Mapping[str, Any]]
"""The tools of a request, in OpenAI's form."""


class ToolCall(NamedTuple):
    """A call of a function with `arguments` by name.

    `id` is the one that the model wrote, if its format has ids. `text` are the arguments exactly as it wrote them, in
    formats whose calls contain them as JSON, so that the next prompt can repeat the sampled text.
    """

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    text: str | None = None

    def openai(self, new_id: str) -> dict[str, Any]:
        arguments = json.dumps(self.arguments, ensure_ascii=False) if self.text is None else self.text
        return {"id": self.id or new_id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Nine letters and digits: the templates of Mistral refuse others."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def json_calls(text: str, tools: Tools) -> list[ToolCall]:
    """JSON objects `{"name": ..., "arguments": {...}}`, one after another or in a list.

    Llama calls the arguments `parameters`, and separates calls by semicolons.
    """
    return [call._replace(id=None) for call in _json_objects(text)]


def phi_calls(text: str, tools: Tools) -> list[ToolCall]:
    """As `json_calls`, also without the first bracket, which is one of the delimiter."""
    for bracket in ("[", "{"):
        with suppress(ValueError):
            return json_calls(bracket + text, tools)
    return json_calls(text, tools)


def _json_objects(text: str) -> list[ToolCall]:
    return [
        parsed_call(value, value.get("id") if isinstance(value, dict) else None)
        for values in _json_values(text)
        for value in (values if isinstance(values, list) else [values])
    ]


def llama4_calls(text: str, tools: Tools) -> Iterable[ToolCall]:
    """Between `<|python_start|>` and `<|python_end|>`, or after them: as `python_calls`, or as `json_calls`."""
    first, _, second = (part.strip() for part in text.partition("<|python_end|>"))
    if first and second:
        raise ValueError("text on both sides of <|python_end|>")
    calls = first or second
    return json_calls(calls, tools) if calls.startswith("{") else python_calls(calls, tools)


def mistral_calls(text: str, tools: Tools) -> list[ToolCall]:
    """After `[TOOL_CALLS]`: as `json_calls`; of newer models `NAME[ARGS]{...}`, `NAME[CALL_ID]ID[ARGS]{...}`.

    Objects may have an `id`. The templates refuse ids that are not like those of `short_id`.
    """
    calls: list[ToolCall] = []
    for part in text.split("[TOOL_CALLS]"):
        if part.lstrip().startswith(("[", "{")):
            calls += _json_objects(part)
            continue
        head, found, arguments = part.partition("[ARGS]")
        name, _, own_id = head.partition("[CALL_ID]")
        if not found:  # the oldest of the new form has no delimiter
            name, brace, rest = part.partition("{")
            arguments = brace + rest
        calls.append(parsed_call({"name": name.strip(), "arguments": arguments}, own_id.strip()))
    return [call if _SHORT_ID.fullmatch(call.id or "") else call._replace(id=None) for call in calls]


_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(?>(.*?)<｜tool▁sep｜>)(.*?)<｜tool▁call▁end｜>", re.DOTALL)


def deepseek_calls(text: str, tools: Tools) -> Iterator[ToolCall]:
    """V3 and R1 write `function<sep>NAME` and the arguments in a Markdown block, V3.1 writes `NAME<sep>{...}`."""
    for name, arguments in _only(_DEEPSEEK, text):
        second, fence, block = arguments.partition("\n```json\n")
        if fence and block.rstrip().endswith("\n```"):
            name, arguments = second, block.rstrip().removesuffix("```")
        yield parsed_call({"name": name.strip(), "arguments": arguments})


_KIMI = re.compile(r"<\|tool_call_begin\|>(?>(.*?)<\|tool_call_argument_begin\|>)(.*?)<\|tool_call_end\|>", re.DOTALL)


def kimi_calls(text: str, tools: Tools) -> Iterator[ToolCall]:
    """Calls whose ids, `functions.NAME:INDEX`, hold the name."""
    for own_id, arguments in _only(_KIMI, text):
        name = own_id.strip().rpartition(":")[0].removeprefix("functions.")
        yield parsed_call({"name": name, "arguments": arguments}, own_id.strip())


_BARE_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:')
_NULL = re.compile(r"(?<=[:,\[])\s*(?:None|nil)\b")


def gemma4_calls(text: str, tools: Tools) -> list[ToolCall]:
    """`call:NAME{KEY:VALUE}`: JSON whose strings stand between `<|"|>`, and whose keys may have no delimiters."""
    head, brace, rest = text.strip().partition("{")
    parts = (brace + rest).split('<|"|>')
    if not head.startswith("call:") or len(parts) % 2 == 0:
        raise ValueError("the text is not a complete call")
    parts[::2] = [_NULL.sub("null", _BARE_KEY.sub(r'\1"\2":', part)) for part in parts[::2]]
    parts[1::2] = map(json.dumps, parts[1::2])
    return [parsed_call({"name": head.removeprefix("call:").strip(), "arguments": _json("".join(parts))})]


def harmony_calls(text: str, tools: Tools) -> list[ToolCall]:
    """After `to=functions.`: the name, perhaps a word, whatever begins with a token, and the arguments.

    Without text for these, a call of a function that requires arguments is cut off. A thought that mentions a call may
    go on to another one.
    """
    head, found, arguments = text.partition("<|message|>")
    name, *others = (re.split(r"[\s<]", part, maxsplit=1)[0] for part in head.split("to=functions."))
    words = head.removeprefix(name).partition("<|")[0].split()
    if len(words) > 1 or {*others} - {name}:
        raise ValueError("the text is not the header of a call")
    if found and not arguments.strip() and not _parameters(name, tools).get("required"):
        arguments = "{}"
    return [parsed_call({"name": name, "arguments": arguments})]


class TagPatterns(NamedTuple):
    """Match a call, as its name and its body, and an argument in that, as its name and its value.

    The line breaks that a format adds around a value are no part of it.
    """

    call: re.Pattern[str]
    argument: re.Pattern[str]


_NAME, _QUOTED = r"([^>\n]+)", r'"?([^">]+)"?'
QWEN = TagPatterns(
    re.compile(rf"<function={_NAME}>(.*?)</function>", re.DOTALL),
    re.compile(rf"<parameter={_NAME}>\n?(.*?)\n?</parameter>", re.DOTALL),
)
MINIMAX = TagPatterns(
    re.compile(rf"<invoke name={_QUOTED}>(.*?)</invoke>", re.DOTALL),
    re.compile(rf"<parameter name={_QUOTED}>(.*?)</parameter>", re.DOTALL),
)


def tagged_calls(patterns: TagPatterns, text: str, tools: Tools) -> Iterator[ToolCall]:
    """A tag for each call and, in it, for each argument, whose type the tool's schema says."""
    for name, body in _only(patterns.call, text):
        yield _typed_call(name, dict(_only(patterns.argument, body, empty=True)), tools)


_GLM_NAME = re.compile(r"[^\s<>{}\"]+")
_GLM_ARGUMENT = re.compile(r"<arg_key>(?>(.*?)</arg_key>)\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def glm_calls(text: str, tools: Tools) -> list[ToolCall]:
    """The name, and `<arg_key>` with `<arg_value>` for each argument, whose type the tool's schema says.

    Without arguments it must be the name of a tool: models also mention the tags around a call.
    """
    name, found, rest = text.partition("<arg_key>")
    name = name.strip()
    if not _GLM_NAME.fullmatch(name) or not (found or name in tool_names(tools)):
        raise ValueError(f"{name!r} is not the name of a function")
    arguments = {key.strip(): value for key, value in _only(_GLM_ARGUMENT, found + rest, empty=True)}
    return [_typed_call(name, arguments, tools)]


def python_calls(text: str, tools: Tools) -> Iterator[ToolCall]:
    """Python calls with keyword arguments, in a list or alone: `[weather(city="Bern"), time(zone="CET")]`."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError) as error:
        raise ValueError(f"not Python: {error}") from None
    for call in parsed.elts if isinstance(parsed, ast.List) else [parsed]:
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            raise ValueError("not calls with keyword arguments")
        arguments = {each.arg: _python_value(each.value) for each in call.keywords}
        yield parsed_call({"name": ast.unparse(call.func), "arguments": arguments})


_PYTHON_NAMES = {"true": True, "false": False, "null": None}


def _python_value(node: ast.expr) -> Any:
    """Raises ValueError for what JSON does not have."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _PYTHON_NAMES:
            return _PYTHON_NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_python_value(each) for each in elements]
        case ast.Dict(keys=keys, values=values):
            pairs = [
                (_python_value(key) if key else key, _python_value(value))
                for key, value in zip(keys, values, strict=True)
            ]
            if all(isinstance(key, str) for key, _ in pairs):
                return dict(pairs)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError(f"not a JSON value: {ast.unparse(node)}")


def tool_names(tools: Tools) -> set[str]:
    return {str(_mapping(tool.get("function")).get("name")) for tool in tools}


def mentions_call(text: str, tools: Tools) -> bool:
    """Whether a text has the name of a tool where calls in JSON, in Python, or between tags have it.

    The text may end within a name in JSON.
    """
    known = tool_names(tools)
    name = f"(?:{'|'.join(map(re.escape, known))})"
    start = re.search(r"""["']name["']\s*+:\s*+["']([^"']*+)$""", text)
    is_cut_off = start is not None and any(each.startswith(start[1]) for each in known)
    places = rf"""(?::\s*+["'](?:functions\.)?|["']name["']\s*+:\s*+){name}(?!\w)|<function={name}>\s*+(?:<|$)"""
    return is_cut_off or re.search(rf"{places}|(?<!\w){name}\(", text) is not None


def parsed_call(value: Any, own_id: Any = None) -> ToolCall:
    """Raises ValueError unless `value` is an object with a name and arguments."""
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} instead of a call")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    text = arguments.strip(_BETWEEN) if isinstance(arguments, str) else None
    if text is not None:
        arguments = _json(text)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call needs a name and arguments")
    json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()  # UnicodeEncodeError is a ValueError
    return ToolCall(name, arguments, own_id if isinstance(own_id, str) and own_id else None, text)


def _parameters(name: str, tools: Tools) -> dict[str, Any]:
    """The schema of a tool's arguments; empty if it has none."""
    functions = (_mapping(tool.get("function")) for tool in tools)
    return _mapping(next((each.get("parameters") for each in functions if each.get("name") == name), None))


def _typed_call(name: str, texts: Mapping[str, str], tools: Tools) -> ToolCall:
    schema = _parameters(name, tools)
    properties = _mapping(schema.get("properties"))
    arguments = {key: _typed(text, schema_types(properties.get(key), schema)) for key, text in texts.items()}
    return parsed_call({"name": name, "arguments": arguments})


DESCRIPTIONS = frozenset(("title", "description", "default", "examples"))
"""Keys of a schema that do not say which values it allows."""
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/]+)")


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a property, with the keys of the definition of the root that it refers to, if it does.

    The only schema of `allOf` is such a definition, too, and none is one that says something else of a key. Empty for
    what is no schema.
    """
    found = _mapping(schema)
    for _ in range(_MAX_REFERENCES):
        match, parts = _REFERENCE.fullmatch(str(found.get("$ref"))), found.get("allOf")
        if match is not None:
            key, definition = "$ref", _mapping(root.get(match[1])).get(match[2])
        else:
            key, definition = "allOf", parts[0] if isinstance(parts, list) and len(parts) == 1 else None
        own = {name: value for name, value in found.items() if name != key}
        if not isinstance(definition, dict) or any(
            definition[name] != own[name] for name in definition.keys() & own.keys() - DESCRIPTIONS
        ):
            break
        found = {**definition, **own}
    return found


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


_MAX_REFERENCES = 8
"""One to another; they may go in a circle."""


def _typed(text: str, types: set[str]) -> Any:
    """A value of one of these types; without any, JSON where the text is JSON, else text."""
    if types == {"string"}:
        return text
    try:
        value = _json(text)
    except ValueError:
        return _PYTHON_CONSTANTS.get(text.strip(), text)
    is_of_another = any(type(value) in _JSON_TYPES.get(name, ()) for name in types - {"string"})
    return text if "string" in types and not is_of_another else value


_PYTHON_CONSTANTS: dict[str, Any] = {"True": True, "False": False, "None": None}
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
    "string": (str,),
}


def schema_types(schema: Any, root: Mapping[str, Any], seen: set[int] | None = None) -> set[str]:
    """The names of the types that a schema allows, which may refer to definitions of the root; empty if unknown.

    `seen` are the ids of the unions so far, as definitions may refer to each other in a circle.
    """
    found, seen = resolved(schema, root), set() if seen is None else seen
    stated = found.get("type")
    types = {name for name in (stated if isinstance(stated, list) else [stated]) if isinstance(name, str)}
    values = [found["const"]] if "const" in found else found.get("enum")
    if not stated and isinstance(values, list):
        types = {name for name, kinds in _JSON_TYPES.items() if any(type(value) in kinds for value in values)}
    for union in (found.get("anyOf"), found.get("oneOf")):
        if isinstance(union, list) and id(union) not in seen:
            seen.add(id(union))
            types = types.union(*(schema_types(each, root, seen) for each in union))
    return types


def _only(pattern: re.Pattern[str], text: str, *, empty: bool = False) -> list[Any]:
    """The groups of the matches that make up a text, with white space between them; none only if `empty`."""
    matches: list[Any] = []
    text = text.strip()
    at = 0
    while at < len(text):
        if (match := pattern.match(text, at)) is None:
            raise ValueError("the text is not complete calls")
        matches.append(match.groups())
        at = _WHITE_SPACE.match(text, match.end()).end()  # type: ignore[union-attr]
    if not (matches or empty):
        raise ValueError("the text has no call")
    return matches


_WHITE_SPACE = re.compile(r"\s*")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_BETWEEN = "; \t\r\n"
"""What may stand between JSON values, and around them."""
_SEPARATORS = re.compile(f"[{_BETWEEN}]*")
_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _json_values(text: str) -> Iterator[Any]:
    """Values one after another, separated by white space or semicolons; raises ValueError if there is none."""
    text = text.strip(_BETWEEN)
    at = 0
    while True:
        value, at = _DECODER.raw_decode(text, at)
        yield value
        at = _SEPARATORS.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return


def _json(text: str) -> Any:
    (value,) = _json_values(text)
    return value
