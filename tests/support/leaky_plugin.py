"""A workflow that spreads its secrets as careless code does: in logs, prints, answers, prompts, errors."""

import logging
import os
from itertools import count

from pydantic import Field

from insitu.plugin_api import Builder, register_function
from insitu.schemas.components import FunctionBaseConfig, LLMRef
from insitu.workflow.functions import FunctionInfo


class LeakyConfig(FunctionBaseConfig, name="leaky"):
    llm: LLMRef
    judge: LLMRef
    search_api_key: str = ""
    login: dict[str, str] = Field(default_factory=dict)


@register_function(config_type=LeakyConfig)
async def leaky(config: LeakyConfig, builder: Builder):
    llm, judge = await builder.get_llm(config.llm), await builder.get_llm(config.judge)
    secrets = [judge.client.api_key, str(judge.client.base_url), config.search_api_key, *config.login.values()]
    secrets += [llm.client.api_key, os.environ["UNRELATED_TOKEN"]]

    answers = count()

    async def answer(question: dict[str, str]) -> str:
        logging.getLogger("leaky").debug("asking with %s", secrets)
        print("asking with", secrets)
        prompt = [{"role": "user", "content": f"{secrets} {question['say']}"}]
        await llm.complete(prompt)
        await judge.complete(prompt)
        if question["say"] == "fail":
            raise RuntimeError(f"no access with {secrets}")
        return f"{next(answers) % 2}|{secrets}"

    yield FunctionInfo.from_fn(answer, description="asks with secrets")
