"""Plain functions: a coroutine as it is, and a generator that streams."""

from collections.abc import AsyncIterator

from nat.plugin_api import Builder, FunctionBaseConfig, FunctionInfo, register_function


class TidyConfig(FunctionBaseConfig, name="desk_tidy"):
    """Removes what a question has too much of."""

    lower: bool = False


class WordsConfig(FunctionBaseConfig, name="desk_words"):
    """Streams words."""


@register_function(config_type=TidyConfig)
async def desk_tidy(config: TidyConfig, builder: Builder):
    async def tidy(text: str) -> str:
        """Removes spaces at both ends and between words."""
        text = " ".join(text.split())
        return text.lower() if config.lower else text

    yield tidy


@register_function(config_type=WordsConfig)
async def desk_words(config: WordsConfig, builder: Builder):
    async def words(text: str) -> AsyncIterator[str]:
        for word in text.split():
            yield word

    yield FunctionInfo.from_fn(words, description="The words of a text, one by one.")
