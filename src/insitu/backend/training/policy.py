"""Trainable weights: a full copy of the model's, or LoRA adapters over weights shared with the served model."""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from insitu.backend.model import LoadedModel, quiet_peft
from insitu.errors import BackendError
from insitu.schemas.training_jobs import LoRASettings


@dataclass
class TrainablePolicy:
    """`module` has float32 master weights where it is trainable."""

    module: nn.Module
    lora: LoRASettings | None
    loaded: LoadedModel

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    @property
    def has_dropout(self) -> bool:
        return self.lora is not None and self.lora.dropout > 0

    @contextlib.contextmanager
    def dropout(self, seed: int) -> Iterator[None]:
        """Enables the adapters' dropout within the block; the base model's is never active."""
        if not self.has_dropout:
            yield
            return
        layers = [module for name, module in self.module.named_modules() if "lora_dropout" in name]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            try:
                for layer in layers:
                    layer.train()
                yield
            finally:
                for layer in layers:
                    layer.eval()

    def served(self) -> nn.Module:
        """A frozen copy in the dtypes of the loaded model, sharing its untrained tensors."""
        if self.lora is not None:
            weights = {name: p.detach().to(self.loaded.dtype, copy=True) for name, p in self.trainable.items()}
            return _frozen(replace_weights(self.module, weights))
        dtypes = {name: p.dtype for name, p in self.loaded.module.named_parameters()}
        weights = {name: p.detach().to(dtypes[name], copy=True) for name, p in self.trainable.items()}
        return _frozen(replace_weights(self.loaded.module, weights))

    def save(self, folder: Path, served: nn.Module) -> None:
        """Saves adapters in float32, full weights in the served dtype."""
        if self.lora is None:
            served.save_pretrained(folder)  # type: ignore[operator]
            return
        self.module.save_pretrained(folder, save_embedding_layers=False)  # type: ignore[operator]
        (folder / "README.md").unlink(missing_ok=True)

    def load(self, folder: Path) -> None:
        """Loads the weights that `save` wrote."""
        if self.lora is None:
            saved: Iterable[tuple[str, Tensor]] = _from_pretrained(self.loaded, folder).named_parameters()
        else:
            prefix = f".{self.module.active_adapter}."
            short = {name.replace(prefix, "."): name for name in self.trainable}
            saved = ((short[key], value) for key, value in load_file(folder / "adapter_model.safetensors").items())
        self.overwrite(saved)

    @torch.no_grad()
    def overwrite(self, values: Iterable[tuple[str, Tensor]]) -> None:
        trainable = self.trainable
        for name, value in values:
            trainable[name].copy_(value)


def build_policy(loaded: LoadedModel, lora: LoRASettings | None, seed: int) -> TrainablePolicy:
    """A trainable copy of `loaded`, which is not modified; `seed` initializes new adapters."""
    if lora is None:
        weights = {name: p.detach().to(torch.float32, copy=True) for name, p in loaded.module.named_parameters()}
        module = replace_weights(loaded.module, weights)
    elif loaded_adapter(loaded.module) is not None:
        adapters = {name: p for name, p in loaded.module.named_parameters() if "lora_" in name}
        weights = {name: p.detach().to(torch.float32, copy=True) for name, p in adapters.items()}
        module = replace_weights(loaded.module, weights)
    else:
        module = _with_adapters(loaded, lora, seed)
        weights = {name: p for name, p in module.named_parameters() if "lora_" in name}
    for name, parameter in module.named_parameters():
        if name in weights:
            parameter.requires_grad_(True)
    return TrainablePolicy(module, lora, loaded)


def loaded_adapter(module: nn.Module) -> LoRASettings | None:
    """Settings of the adapters that the loaded model already has."""
    configs = getattr(module, "peft_config", None)
    if not configs:
        return None
    config = configs[module.active_adapter]
    if config.peft_type != "LORA" or config.modules_to_save:
        raise BackendError(
            f"the adapter is of type {config.peft_type} with modules_to_save {config.modules_to_save}; "
            "only LORA adapters without modules_to_save can be trained"
        )
    targets = config.target_modules
    return LoRASettings(
        rank=config.r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target_modules=targets if isinstance(targets, str) else sorted(targets),
    )


def replace_weights(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A copy of the module with the parameters in `weights` replaced and all other tensors shared."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    for name, parameter in module.named_parameters():
        if name in weights:
            shared[id(parameter)] = nn.Parameter(weights[name], requires_grad=False)
    return copy.deepcopy(module, shared).eval()


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False).eval()


def _with_adapters(loaded: LoadedModel, lora: LoRASettings, seed: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), quiet_peft():
        torch.manual_seed(seed)
        try:
            return get_peft_model(replace_weights(loaded.module, {}), config).eval()
        except ValueError as error:
            raise BackendError(f"lora.target_modules is {lora.target_modules!r}: {error}") from error


def _from_pretrained(loaded: LoadedModel, folder: Path) -> nn.Module:
    """The folder's weights in the class and dtype of the loaded model."""
    model_class = type(loaded.module)
    attention = loaded.module.config._attn_implementation  # type: ignore[union-attr]
    return model_class.from_pretrained(folder, dtype=loaded.dtype, attn_implementation=attention).to(loaded.device)  # type: ignore[attr-defined]
