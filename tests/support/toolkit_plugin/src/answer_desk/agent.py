"""A LangGraph agent whose tools are functions of the workflow."""

import logging

from nat.builder.builder import Builder
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_function
from nat.data_models.component_ref import FunctionGroupRef, FunctionRef, LLMRef
from nat.data_models.function import FunctionBaseConfig
from pydantic import Field

from .models import Question, question_from_text

logger = logging.getLogger(__name__)


class DeskAgentConfig(FunctionBaseConfig, name="desk_agent"):
    """Answers with the help of tools."""

    llm_name: LLMRef = Field(description="The model that decides.")
    tool_names: list[FunctionRef | FunctionGroupRef] = Field(
        default_factory=list, description="Functions and groups of functions it may call."
    )
    recursion_limit: int = Field(default=8, description="Most steps through the graph.")


@register_function(config_type=DeskAgentConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def desk_agent(config: DeskAgentConfig, builder: Builder):
    from langchain_core.messages import HumanMessage
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    tools = await builder.get_tools(config.tool_names, wrapper_type=LLMFrameworkEnum.LANGCHAIN)
    llm = await builder.get_llm(config.llm_name, wrapper_type=LLMFrameworkEnum.LANGCHAIN)
    model = llm.bind_tools(tools)

    async def decide(state: MessagesState):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("decide", decide)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "decide")
    graph.add_conditional_edges("decide", tools_condition)
    graph.add_edge("tools", "decide")
    agent = graph.compile()

    async def _answer(question: Question) -> str:
        """Answers with the help of tools."""
        state = await agent.ainvoke(
            {"messages": [HumanMessage(content=question.text)]}, config={"recursion_limit": config.recursion_limit}
        )
        logger.debug("%d messages", len(state["messages"]))
        return state["messages"][-1].content

    yield FunctionInfo.from_fn(
        _answer, input_schema=Question, description=_answer.__doc__, converters=[question_from_text]
    )
