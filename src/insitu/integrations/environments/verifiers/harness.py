"""The harness that runs tasks in this process: the model answers, and calls tools over MCP until it does not.

verifiers' own chat harness, `null`, does the same in a process for each episode. Import this with verifiers only.
"""

import asyncio
import sys
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
from openai.types.chat import ChatCompletion
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

from insitu.capture.transport import new_session
from insitu.errors import BackendUnavailable, WorkflowError
from insitu.integrations.environments.tool_loop import run_tools
from insitu.workflow.llms import ModelClient

__all__ = ["ChatHarness"]

HARNESS_ID = "insitu_chat"
"""verifiers imports a harness by its id, as the name of a module without a package."""
sys.modules.setdefault(HARNESS_ID, sys.modules[__name__])


class ChatHarnessConfig(HarnessConfig):
    max_retries: int = 2
    """Retries of a request after a transient error."""


class _Stopped(Exception):
    """The task, or a limit of the environment, has ended the conversation."""


@dataclass(frozen=True)
class _Endpoint:
    """The model as verifiers serves it to one episode; `complete` is that of a `ModelClient`."""

    session: aiohttp.ClientSession
    url: str
    headers: dict[str, str]
    model: str
    trace: Trace
    max_retries: int

    async def post(self, url: str, body: dict[str, Any]) -> Any:
        for attempt in range(self.max_retries + 1):
            retry = {"x-stainless-retry-count": str(attempt)}  # a turn that was recorded is not recorded again
            async with self.session.post(url, json=body, headers={**self.headers, **retry}) as response:
                if response.status < 400:
                    return await response.json()
                status, said = response.status, (await response.text())[:500]
            if self.trace.stop_condition is not None:
                raise _Stopped
            if status != 429 and status < 500:
                raise WorkflowError(f"the model's request was refused with status {status}: {said}")
            if attempt < self.max_retries:
                await asyncio.sleep(0.5 * 2**attempt)
        raise BackendUnavailable(f"the model's server answered with status {status}: {said}")

    async def complete(self, messages: list[dict[str, Any]], **options: Any) -> ChatCompletion:
        body = {"model": self.model, "messages": messages, **options}
        return ChatCompletion.construct(**await self.post(f"{self.url}/chat/completions", body))


class ChatHarness(Harness[ChatHarnessConfig]):
    """A chat loop with the tools of the task and of its taskset."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        servers_config = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(new_session(through_proxies=False))
            headers = {"Authorization": f"Bearer {secret}"}
            model = _Endpoint(session, endpoint, headers, ctx.model, trace, self.config.max_retries)
            tools, names, servers = await connect_mcp({"mcpServers": servers_config}, stack)
            hidden = set(self.config.disabled_tools or ())
            tools = [tool for tool in tools if tool["function"]["name"] not in hidden]

            async def call(name: str, arguments: dict[str, Any]) -> str | list[dict[str, Any]] | None:
                if tool_interception_url is not None:
                    asked = {"tool_call_id": "", "name": name, "arguments": arguments}
                    verdict = await model.post(tool_interception_url, asked)
                    if verdict["action"] == "stop":
                        return None
                    if verdict["action"] == "deny":
                        return cast(str, verdict["message"].get("content", ""))
                if name not in names or name in hidden:
                    return f"error: unknown tool {name!r}"
                return cast(str, await call_mcp(servers, names, name, arguments))

            with suppress(_Stopped):
                await run_tools(cast(ModelClient, model), messages, tools, call, sys.maxsize)
        return ProgramResult(0, "", "")
