"""Groups of functions that are configured together, in a block of `function_groups`.

@register_function_group(config_type=ShopConfig)
async def shop(config, builder):
    group = FunctionGroup(config=config, instance_name="shop")
    group.add_function("price", price, description="The price of a product.")
    yield group

await builder.get_function("shop.price")    also as "shop__price", the form of a tool's name
"""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel

from insitu.errors import ConfigError, PluginError, a_type, not_found
from insitu.registry import decorator
from insitu.schemas.components import FunctionBaseConfig, FunctionGroupBaseConfig
from insitu.schemas.kinds import FUNCTION_GROUP
from insitu.workflow.functions import Converter, FunctionInfo
from insitu.workflow.functions import Function as Function  # `nat.builder.function` has both


class FunctionGroup:
    """Functions by name, of which `include` or `exclude` of the block chooses some."""

    def __init__(self, *, config: FunctionGroupBaseConfig, instance_name: str | None = None) -> None:
        self.config = config
        self.instance_name = instance_name or config.type
        self._added: dict[str, Function] = {}

    def __repr__(self) -> str:
        return f"<function group {self.instance_name}>"

    def rename(self, name: str) -> None:
        """Gives the group the name of its block."""
        self.instance_name = name
        for own, function in self._added.items():
            function.name = f"{name}.{own}"

    def add_function(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        input_schema: type[BaseModel] | None = None,
        description: str | None = None,
        converters: Sequence[Converter] | None = None,
    ) -> None:
        """Adds an asynchronous function. Raises PluginError for a name that is taken."""
        if name in self._added:
            raise PluginError(f"function group {self.instance_name} has two functions called {name!r}")
        info = FunctionInfo.from_fn(fn, input_schema, description, converters)
        self._added[name] = Function(f"{self.instance_name}.{name}", FunctionBaseConfig(), info)

    @property
    def functions(self) -> dict[str, Function]:
        """The chosen functions, by their names in the group.

        Raises ConfigError if `include` or `exclude` names a function that does not exist.
        """
        for key in ("include", "exclude"):
            for name in getattr(self.config, key):
                if name not in self._added:
                    raise ConfigError(not_found(f"function_groups.{self.instance_name}.{key}:", name, self._added))
        chosen = self.config.include or [name for name in self._added if name not in self.config.exclude]
        return {name: self._added[name] for name in chosen}

    def function(self, name: str) -> Function:
        functions = self.functions
        if name not in functions:
            raise ConfigError(not_found(f"the function of group {self.instance_name}", name, functions))
        return functions[name]


def as_group(name: str, config: FunctionGroupBaseConfig, yielded: Any) -> FunctionGroup:
    """What a factory yielded, under the name of its block."""
    if not isinstance(yielded, FunctionGroup):
        problem = f"its factory ({config.type}) yielded {a_type(yielded)}; it must yield a FunctionGroup"
        raise PluginError(f"function_groups.{name}: {problem}")
    yielded.rename(name)
    return yielded


register_function_group = decorator(FUNCTION_GROUP, finish=as_group)
