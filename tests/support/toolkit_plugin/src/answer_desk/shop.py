"""A group of functions that share what is configured once: the shop's prices and stock."""

from nat.builder.builder import Builder
from nat.builder.function import FunctionGroup
from nat.cli.register_workflow import register_function_group
from nat.data_models.function import FunctionGroupBaseConfig
from pydantic import Field


class ShopConfig(FunctionGroupBaseConfig, name="desk_shop"):
    """The shop."""

    prices: dict[str, float] = Field(default_factory=dict, description="The price of each product.")


@register_function_group(config_type=ShopConfig)
async def desk_shop(config: ShopConfig, builder: Builder):
    group = FunctionGroup(config=config, instance_name="shop")

    async def price(product: str, count: int = 1) -> float:
        return config.prices[product] * count

    async def products(containing: str) -> list[str]:
        return [name for name in config.prices if containing in name]

    async def close(reason: str) -> str:
        return f"closed: {reason}"

    group.add_function("price", price, description="The price of so many pieces of a product.")
    group.add_function("products", products, description="The products whose names contain a text.")
    group.add_function("close", close, description="Closes the shop.")
    yield group
