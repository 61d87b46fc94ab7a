"""Settings of LoRA adapters."""

from typing import Annotated, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from insitu.schemas.components import Settings


class LoRASettings(Settings):
    """Trains low-rank adapters instead of all weights (Hu et al., arXiv:2106.09685).

    Keys may have the names that `peft.LoraConfig` gives them: `r`, `lora_alpha`, `use_rslora`, `init_lora_weights`.
    """

    rank: int = Field(default=16, ge=1, le=65536, validation_alias=AliasChoices("rank", "r"))
    """Rank of the two matrices whose product is added to each weight."""
    alpha: float = Field(default=32, gt=0, validation_alias=AliasChoices("alpha", "lora_alpha"))
    """The product is multiplied by alpha / rank."""
    rslora: bool = Field(default=False, validation_alias=AliasChoices("rslora", "use_rslora"))
    """Multiplies by alpha / sqrt(rank) instead, so that high ranks learn as fast (arXiv:2312.03732)."""
    init: Annotated[
        Literal["kaiming", "gaussian"], BeforeValidator(lambda value: "kaiming" if value is True else value)
    ] = Field(default="kaiming", validation_alias=AliasChoices("init", "init_lora_weights"))
    """How the first matrix is drawn; the second is 0, so that training starts from the outputs of the model."""
    dropout: float = Field(default=0.0, ge=0, le=0, validation_alias=AliasChoices("dropout", "lora_dropout"))
    """Always 0: with dropout the learner's log-probabilities would not be those of the sampler."""
    target_modules: str | list[str] = "all-linear"
    """Layers that get adapters: module names or suffixes, or `all-linear`."""
    modules_to_save: list[str] = Field(default_factory=list)
    """Modules that are trained whole beside the adapters, by the ends of their names, such as `lm_head`. vLLM cannot
    load these, and of tied embeddings neither side can be named."""
