"""How a family of models writes tool calls and reasoning."""

from insitu.plugin_api import CallGrammar, CallSyntax, ReasoningFormat, ToolCall, ToolFormat, ToolFunction, parsed_call


def parse(text: str, tools: object) -> list[ToolCall]:
    """The call between `<<call ` and `<<end>>`: NAME, `>>`, and the arguments as JSON."""
    name, _, arguments = text.partition(">>")
    return [parsed_call({"name": name, "arguments": arguments})]


def write_call(grammar: CallGrammar, function: ToolFunction) -> str:
    start, end = grammar.text(f"<<call {function.word}>>"), grammar.text("<<end>>")
    return f"{start} {grammar.json(function.parameters)} {end}"


CALLS = ToolFormat(
    markers=("<<call <<end>>",),
    parse=parse,
    regions=(("<<call ", "<<end>>"),),
    syntaxes=(CallSyntax(write_call, between=("\n",)),),
)
NOTES = ReasoningFormat(markers=("<<note>>",), start=("<<note>>",), end=("<<done>>",))
