"""A function that gives whole answers and streams them: the desk's look-up."""

from collections.abc import AsyncGenerator

from nat.builder.builder import Builder
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_function
from nat.data_models.function import FunctionBaseConfig
from pydantic import BaseModel, Field


class LookConfig(FunctionBaseConfig, name="desk_look"):
    """Looks at a place."""

    weather: str = Field(default="clear", description="What is seen everywhere.")


class LookInput(BaseModel):
    at: str = Field(description="The place to look at.")


class Sight(BaseModel):
    place: str
    seen: str


def sentence(sight: Sight) -> str:
    return f"{sight.place} is {sight.seen}"


@register_function(config_type=LookConfig)
async def desk_look(config: LookConfig, builder: Builder):
    async def _look(query: LookInput) -> Sight:
        return Sight(place=query.at, seen=config.weather)

    async def _stream(query: LookInput) -> AsyncGenerator[str, None]:
        for word in (query.at, "is", config.weather):
            yield word

    yield FunctionInfo.create(
        single_fn=_look,
        stream_fn=_stream,
        input_schema=LookInput,
        single_output_schema=Sight,
        description="Looks at a place and says what the weather is there.",
        converters=[sentence],
    )
