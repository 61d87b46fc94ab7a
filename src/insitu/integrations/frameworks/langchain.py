"""LangChain: a `ChatOpenAI` on the recording transport, and callbacks that report runs as intermediate steps.

Importing this module makes LangChain and LangGraph report every model and tool run inside an episode; outside one, the
reports are discarded.
"""

from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.tools import StructuredTool
from langchain_core.tracers.context import register_configure_hook
from langchain_openai import ChatOpenAI

from insitu.agents.frameworks import FunctionTool, ToolSteps, push, sync_http
from insitu.integrations.frameworks import ModelSteps
from insitu.schemas.steps import IntermediateStepType, StreamEventData, UsageInfo
from insitu.workflow.functions import Function
from insitu.workflow.llms import ModelClient

_ARGUMENT_NAMES = {"stop": "stop_sequences"}  # parameters that ChatOpenAI names differently


def make_llm(llm: ModelClient) -> ChatOpenAI:
    """Returns LangChain's model with the parameters of `llm`; its asynchronous calls share the connections of `llm`."""
    params = {_ARGUMENT_NAMES.get(name, name): value for name, value in llm.params.items()}
    return ChatOpenAI(
        model=llm.model,
        base_url=str(llm.client.base_url),
        api_key=lambda: llm.client.api_key,
        timeout=llm.client.timeout,
        max_retries=llm.client.max_retries,
        http_async_client=llm.http_client,
        http_client=sync_http(llm),
        use_responses_api=False,
        **params,
    )


def make_tool(function: Function) -> StructuredTool:
    """For `ToolNode` and `bind_tools`."""
    tool = FunctionTool(function, "langchain")
    return StructuredTool.from_function(
        coroutine=tool.run, name=tool.name, description=tool.description, args_schema=tool.schema
    )


async def ask_agent(agent: Any, question: Any) -> Any:
    """The text of the last message of a graph, or what another runnable returns. A mapping is a graph's whole input."""
    is_graph = type(agent).__module__.startswith("langgraph.")
    inputs = {"messages": [{"role": "user", "content": question}]}
    answer = await agent.ainvoke(inputs if is_graph and isinstance(question, str) else question)
    if is_graph and isinstance(answer, dict) and answer.get("messages"):
        answer = answer["messages"][-1]
    return answer.text if isinstance(answer, BaseMessage) else answer


class StepReporter(BaseCallbackHandler):
    """Pushes LLM_ and TOOL_ steps to the current episode."""

    run_inline = True  # a thread per event would cost more than the callback

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **others: Any
    ) -> None:
        params, inputs = others.get("invocation_params") or {}, list(messages[0])
        name = params.get("model") or params.get("model_name")
        _MODELS.start(run_id, name, inputs, chat_inputs=inputs, tools_schema=params.get("tools"))

    def on_llm_start(self, serialized: dict[str, Any], prompts: list[str], *, run_id: UUID, **others: Any) -> None:
        _MODELS.start(run_id, (others.get("invocation_params") or {}).get("model"), prompts)

    def on_llm_new_token(self, token: Any, *, run_id: UUID, **others: Any) -> None:
        push("langchain", IntermediateStepType.LLM_NEW_TOKEN, run_id, None, StreamEventData(chunk=token))

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **others: Any) -> None:
        generations = response.generations[0] if response.generations else []
        first, report = generations[0] if generations else None, response.llm_output or {}
        output = None if first is None else first.text
        usage = UsageInfo.model_construct(token_usage=report.get("token_usage"), num_llm_calls=1)
        _MODELS.end(run_id, output, generations, payload=first, usage_info=usage)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **others: Any) -> None:
        _MODELS.end(run_id, error=repr(error))

    def on_tool_start(self, serialized: dict[str, Any], input_str: str, *, run_id: UUID, **others: Any) -> None:
        name = (serialized or {}).get("name") or others.get("name")
        _TOOLS.start(run_id, name, others.get("inputs") or input_str, serialized)

    def on_tool_end(self, output: Any, *, run_id: UUID, **others: Any) -> None:
        _TOOLS.end(run_id, output)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **others: Any) -> None:
        _TOOLS.end(run_id, error=error)


_TOOLS = ToolSteps("langchain")
_MODELS = ModelSteps("langchain")
_REPORTER = StepReporter()  # shared by all episodes, since run ids are unique
_reporter: ContextVar[StepReporter | None] = ContextVar("insitu_langchain", default=_REPORTER)
register_configure_hook(_reporter, inheritable=True)
