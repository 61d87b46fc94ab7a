"""How families of models write tool calls and reasoning: the text of a completion in, the parts of a message out.

registry      the formats by name, and which of them a chat template asks for; read this first
forced_calls  grammars of the calls that `tool_choice` forces, each family's in `syntaxes`
tool_calls    the text of a call in each format, as its name and its arguments
templates     what a chat template keeps of a conversation
regions       where a completion has content, reasoning and calls
parser        a completion, whole or in pieces, as content, reasoning and tool calls
dialects      the APIs that agents use, each translated to completions
"""
