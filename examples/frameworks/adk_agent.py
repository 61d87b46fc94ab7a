"""A Google ADK agent that looks at things."""

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, Part

from insitu.integrations.frameworks.adk import ToolReports
from insitu.plugin_api import Builder, FunctionBaseConfig, LLMRef, register_function


class AgentConfig(FunctionBaseConfig, name="adk_agent"):
    llm: LLMRef
    stream: bool = False


def look(at: str) -> str:
    """Tells the colour of a thing."""
    return {"sky": "blue", "grass": "green"}[at]


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder):
    model = await builder.get_llm(config.llm, wrapper_type="adk")
    looker = LlmAgent(name="looker", model=model, tools=[look])
    runner = InMemoryRunner(looker, plugins=[ToolReports()])
    mode = RunConfig(streaming_mode=StreamingMode.SSE if config.stream else StreamingMode.NONE)

    async def answer(question: str) -> str:
        session = await runner.session_service.create_session(app_name=runner.app_name, user_id="user")
        asked = Content(role="user", parts=[Part(text=question)])
        run = runner.run_async(user_id="user", session_id=session.id, new_message=asked, run_config=mode)
        events = [event async for event in run if event.is_final_response()]
        return events[-1].content.parts[0].text

    yield answer
