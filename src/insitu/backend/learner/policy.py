"""Trainable weights, all of the model's or LoRA adapters over weights shared with the served model; and their files.

A checkpoint folder is a model that `insitu backend --model` loads, plus the state to resume training from it (see
`model_files`).
"""

import copy
import functools
import hashlib
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from insitu.backend.adapters import speed_up
from insitu.backend.learner.batches import ALONE, Ranks, Row, is_sharded, whole
from insitu.backend.model import LoadedModel, check_experts, check_patterns, complete_model, quiet_peft, wrap_errors
from insitu.disk.model_files import split_revision
from insitu.errors import BackendError, JobFailed
from insitu.schemas.lora import LoRASettings
from insitu.schemas.training_jobs import TrainingSettings

_PROBED_TOKENS = 16
_FINGERPRINTED = 256
_EXPERT_LAYERS = {"gate", "router", "shared_expert_gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names of layers in experts, shared experts and routers."""


@dataclass
class TrainablePolicy:
    """`module` has float32 master weights where it is trainable; full ones round to those of the loaded dtype."""

    module: nn.Module
    lora: LoRASettings | None
    loaded: LoadedModel
    _is_shared: bool = False
    """Whether a served model may have the same memory."""

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def prepare_layers(self, settings: TrainingSettings) -> None:
        """As a job asks for them. Raises BackendError if they cannot be."""
        self.checkpoint_activations(settings.gradient_checkpointing)
        self.compile_layers(settings.compile)

    def checkpoint_activations(self, enabled: bool) -> None:
        """Whether the backward pass recomputes the activations of each layer. Raises BackendError if it cannot."""
        for layer in self._layers("gradient_checkpointing", enabled):
            layer.gradient_checkpointing = enabled
            layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
            layer.training = enabled  # of this module only: the modules in it stay in evaluation mode

    def compile_layers(self, enabled: bool) -> None:
        """Whether the layers are compiled, for any number of tokens; copies of the module are not.

        Raises BackendError if they cannot be.
        """
        if enabled:
            check_compiler(self.loaded.device)
        for layer in self._layers("compile", enabled):
            if enabled and layer._compiled_call_impl is None:
                layer.compile(dynamic=True)
            elif not enabled:
                layer._compiled_call_impl = None

    def _layers(self, key: str, required: bool) -> list[Any]:
        """The layers that transformers marks. Raises BackendError if there are none but a setting requires them."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [layer for layer in self.module.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if required and not layers:
            model = type(self.loaded.module).__name__
            raise BackendError(f"{key} is true, but transformers does not support it for {model}")
        return layers

    def served(self, ranks: Ranks = ALONE) -> nn.Module | None:
        """A frozen model in the dtypes of the loaded one, sharing its untrained tensors; None on all ranks but 0.

        It has the memory of the trained weights, until `unshare`, or a copy of them in another dtype. All ranks must
        call it. Distributed weights are gathered one after the other, into the CPU's memory.
        """
        base = self.loaded.module if self.lora is None else self.module
        dtypes = {name: p.dtype for name, p in self.loaded.module.named_parameters()} if self.lora is None else {}
        weights = {}
        for name, parameter in self.trainable.items():
            tensor = whole(parameter.detach())
            if ranks.index == 0:
                device = "cpu" if ranks.shards_weights else tensor.device
                weights[name] = tensor.to(device, dtypes.get(name, self.loaded.dtype))
        if ranks.index:
            return None
        self._is_shared = True
        module = replace_weights(base, weights).requires_grad_(False)
        return module.to("cpu") if ranks.shards_weights else module

    def unshare(self) -> None:
        """Gives the trained weights other memory than a served model has, before they change."""
        if self._is_shared:
            for parameter in self.trainable.values():
                parameter.data = parameter.data.clone()
        self._is_shared = False

    def save(self, folder: Path, served: nn.Module) -> None:
        """Saves adapters in float32, full weights in the served dtype."""
        if self.lora is None:
            served.save_pretrained(folder)  # type: ignore[operator]
            return
        self.module.save_pretrained(folder, save_embedding_layers=False)  # type: ignore[operator]
        (folder / "README.md").unlink(missing_ok=True)

    def load(self, folder: Path) -> None:
        """Loads the weights that `save` wrote, which `check_model` has checked. Raises BackendError if it cannot."""
        if self.lora is None:
            attention: Any = self.loaded.module.config._attn_implementation  # type: ignore[union-attr]
            with wrap_errors(f"the weights of {folder} could not be read"):
                module = complete_model(type(self.loaded.module), folder, self.loaded.dtype, attention)
            self.overwrite((name, as_master(name, p)) for name, p in module.to(self.loaded.device).named_parameters())
        else:
            prefix = f".{self.module.active_adapter}."
            short = {name.replace(".modules_to_save", "").replace(prefix, "."): name for name in self.trainable}
            path = folder / "adapter_model.safetensors"
            with wrap_errors(f"{path} cannot be read"):
                saved = load_file(path)
            if saved.keys() != short.keys():
                different = sorted(saved.keys() ^ short.keys())[0]
                problem = "lacks" if different in short else "has the unknown tensor"
                raise BackendError(f"{path} is not of these adapters: it {problem} {different}")
            self.overwrite((short[key], value) for key, value in saved.items())
        if (name := first_not_finite(self.trainable.items())) is not None:
            raise BackendError(f"the weights of {folder} cannot be used: {name} has NaN or infinite values")

    @torch.no_grad()
    def overwrite(self, values: Iterable[tuple[str, Tensor]]) -> None:
        trainable = self.trainable
        for name, value in values:
            trainable[name].copy_(value)


def served_bytes(loaded: LoadedModel, lora: LoRASettings | None) -> int:
    """Bytes of the weights of a version, without those that all versions share."""
    if lora is None:
        return sum(parameter.nbytes for parameter in loaded.module.parameters())
    trained = build_policy(loaded, lora, seed=0).trainable.values()
    return sum(parameter.numel() for parameter in trained) * loaded.dtype.itemsize


def activation_bytes(loaded: LoadedModel) -> int:
    """About what the backward pass needs of a token: the inputs and outputs of the linear layers but the head."""
    head = loaded.module.get_output_embeddings()  # type: ignore[operator]
    layers = (each for each in loaded.module.modules() if isinstance(each, (nn.Linear, Conv1D)) and each is not head)
    return loaded.dtype.itemsize * sum(sum(layer.weight.shape) for layer in layers) or 1


def build_policy(loaded: LoadedModel, lora: LoRASettings | None, seed: int) -> TrainablePolicy:
    """A trainable copy of `loaded`, which is not modified; `seed` initializes new adapters.

    Raises BackendError if the weights to train are quantized.
    """
    if lora is None and loaded.quantization is not None:
        raise BackendError(f"the weights of {loaded.source} are quantized ({loaded.quantization}); train with lora")
    if lora is not None and loaded_adapter(loaded.module) is None:
        module = _with_adapters(loaded, lora, seed)
    else:
        trained = {name: p for name, p in loaded.module.named_parameters() if lora is None or _is_adapted(name)}
        module = replace_weights(loaded.module, {name: as_master(name, p) for name, p in trained.items()})
    for name, parameter in module.named_parameters():
        if lora is None or _is_adapted(name):
            parameter.requires_grad_(True)
    return TrainablePolicy(module, lora, loaded)


def _is_adapted(name: str) -> bool:
    """Whether a parameter of a model with adapters is trained."""
    return "lora_" in name or ".modules_to_save." in name


@torch.no_grad()
def as_master(name: str, weight: Tensor) -> Tensor:
    """A copy in float32 that rounds to `weight`: of a matrix of fewer bits, at random in the interval that does.

    From the middle of the intervals, whose width is hundreds of small updates, no update would reach a border: none
    would change a rounded weight. From places at random, an update by a tenth of the width changes one in ten.
    """
    master = weight.detach().to(torch.float32, copy=True)
    if weight.dtype == torch.float32 or weight.ndim < 2 or "lora_" in name:
        return master
    half = int(torch.finfo(weight.dtype).eps / torch.finfo(torch.float32).eps) // 2  # in steps of float32
    chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    steps = torch.randint(1 - half, half, master.shape, generator=chance, dtype=torch.int32).to(master.device)
    master.view(torch.int32).add_(steps.mul_(master != 0))
    return master


def loaded_adapter(module: nn.Module) -> LoRASettings | None:
    """Settings of the adapters that the loaded model already has."""
    configs = getattr(module, "peft_config", None)
    if not configs:
        return None
    config = configs[module.active_adapter]
    if config.peft_type != "LORA":
        raise BackendError(f"the adapter is of type {config.peft_type}; only LORA adapters can be trained")
    targets = config.target_modules
    return LoRASettings(
        rank=config.r,
        alpha=config.lora_alpha,
        rslora=config.use_rslora,
        target_modules=targets if isinstance(targets, str) else sorted(targets),
        modules_to_save=list(config.modules_to_save or ()),
    )


def same_adapters(requested: LoRASettings | None, current: LoRASettings | None) -> bool:
    """Whether a job may train with the requested adapters where the current ones are trained."""
    if requested is None or current is None:
        return requested is current
    named, trained = (sorted(m) if isinstance(m := lora.target_modules, list) else m for lora in (requested, current))
    # A checkpoint of adapters lists the modules that a name such as `all-linear` selected.
    same_targets = named == trained or (isinstance(named, str) and not isinstance(trained, str))
    others = {"target_modules": requested.target_modules, "init": requested.init}
    return same_targets and requested == current.model_copy(update=others)


def replace_weights(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A copy of the module with the parameters in `weights` replaced and all other tensors shared."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    for name, parameter in module.named_parameters():
        if name in weights:
            shared[id(parameter)] = nn.Parameter(weights[name], requires_grad=False)
    return copy.deepcopy(module, shared).eval()


def _with_adapters(loaded: LoadedModel, lora: LoRASettings, seed: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    check_patterns("lora", {"target_modules": lora.target_modules}, loaded.module)
    _check_saved(loaded.module, lora.modules_to_save)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        use_rslora=lora.rslora,
        init_lora_weights=True if lora.init == "kaiming" else lora.init,
        target_modules=_target_modules(loaded.module, lora),
        modules_to_save=list(lora.modules_to_save) or None,
        task_type="CAUSAL_LM",
        revision=split_revision(loaded.source)[1],
    )
    with torch.random.fork_rng(), quiet_peft():
        torch.manual_seed(seed)
        try:
            module = get_peft_model(replace_weights(loaded.module, {}), config).eval()
        except ValueError as error:
            raise BackendError(f"lora.target_modules is {lora.target_modules!r}: {error}") from error
        except TypeError as error:  # a list of layers, or a layer that has an adapter
            raise BackendError(f"lora.modules_to_save is {lora.modules_to_save!r}: {error}") from error
    check_experts(f"lora.target_modules is {lora.target_modules!r}", module)
    speed_up(module)
    return module


def _check_saved(module: Any, names: Sequence[str]) -> None:
    """Raises BackendError for modules to train whole that the model lacks, or that it shares the weights of."""
    own = dict(module.named_modules())
    embeddings = (module.get_input_embeddings(), module.get_output_embeddings())
    tied = embeddings[0] is not None and embeddings[1] is not None and embeddings[0].weight is embeddings[1].weight
    for name in names:
        found = [each for path, each in own.items() if path.endswith(name)]  # as peft chooses them
        if not any(True for each in found for _ in each.parameters()):
            raise BackendError(f"lora.modules_to_save names {name}, but the model has no such module with weights")
        if tied and any(part is shared for each in found for part in each.modules() for shared in embeddings):
            raise BackendError(
                f"lora.modules_to_save names {name}, but this model's embeddings are tied: one is the other"
            )


def _target_modules(module: nn.Module, lora: LoRASettings) -> str | list[str]:
    """Names for peft, which takes `all-linear`, and some names of layers, for the stacked weights of experts too."""
    stacked = (".experts." in name and parameter.ndim == 3 for name, parameter in module.named_parameters())
    if lora.target_modules != "all-linear" or not any(stacked):
        return lora.target_modules
    head = module.get_output_embeddings()  # type: ignore[operator]
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    return [name for name in linear if name.rpartition(".")[2] not in _EXPERT_LAYERS]


def adamw(parameters: dict[str, nn.Parameter], settings: TrainingSettings) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices only, not for norms and biases."""
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim <= 1]
    groups = [{"params": matrices, "decays": True}, {"params": vectors, "decays": False}]
    fused = all(p.device.type in ("cpu", "cuda") and not is_sharded(p) for p in parameters.values())
    return torch.optim.AdamW([group for group in groups if group["params"]], fused=fused)


def check_finite(module: Any, settings: TrainingSettings, rows: Sequence[Row]) -> None:
    """Raises JobFailed for weights that are not finite, or so large that the logits of the first row are not.

    No loss has been computed with the weights of the last step.
    """
    name = first_not_finite(module.named_parameters())
    if name is None and rows:
        tokens = torch.from_numpy(rows[0].token_ids[:_PROBED_TOKENS].astype(np.int64)).to(module.device)
        with torch.inference_mode():
            name = first_not_finite([("a logit", module(input_ids=tokens[None], use_cache=False).logits)])
    if name is not None:
        raise JobFailed(
            f"{name} is not finite after the last optimizer step (learning_rate {settings.learning_rate:g}); the "
            "weights from before the job were restored"
        )


def fingerprint(module: nn.Module) -> str:
    """A digest of some elements of each parameter: hashing all takes seconds per GB."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        for part in plain_tensors(parameter.detach()):
            flat = part.flatten()
            chosen = flat[:: max(1, flat.numel() // _FINGERPRINTED)].float().cpu().numpy()
            digest.update(f"{name} {tuple(parameter.shape)} ".encode() + chosen.tobytes())
    return digest.hexdigest()[:16]


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that a quantized one consists of; any other is its own only part."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain_tensors(getattr(tensor, name))]


@functools.cache
def check_compiler(device: torch.device) -> None:
    """Compiles a small function. Raises BackendError with the reason if torch.compile does not work here."""
    with warnings.catch_warnings(), wrap_errors("compile is true, but torch.compile fails"):
        warnings.simplefilter("ignore")  # of torch's own modules
        values = torch.ones(8, device=device, requires_grad=True)
        torch.compile(lambda each: each.sin().exp() + 1, dynamic=True)(values).sum().backward()


def first_not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The name of the first tensor that has NaN or infinite values."""
    parts = ((name, part) for name, tensor in tensors for part in plain_tensors(tensor))
    return next((name for name, part in parts if not is_finite(part)), None)


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; so are those with a finite sum, which is known in a tenth of the time."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


class ReferenceWeights(NamedTuple):
    """The weights that a reference can choose from; each function returns a frozen model.

    `initial`: those that training started from. `load_version`: those of a version whose checkpoint is kept; `version`
    is that at the start of the job.
    """

    initial: Callable[[], nn.Module]
    version: int
    load_version: Callable[[int], nn.Module]


def initial(weights: ReferenceWeights) -> nn.Module:
    return weights.initial()


def job_start(weights: ReferenceWeights) -> None:
    """Returns None: the weights at the start of the job, whose log-probabilities need no second model."""
