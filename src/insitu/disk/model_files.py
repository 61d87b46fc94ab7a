"""What the files of a model may be: safetensors and JSON, no pickles, no code, no adapters but LoRA.

A pickle can run code when it is read, and so can Python files beside a model. Libraries guard against both in ways that
differ between releases, so a local folder is checked before they read it. For those of a hub they get `SAFE_OPTIONS`.
"""

from pathlib import Path
from typing import Any

from insitu.disk.files import file_name_problem
from insitu.disk.json_files import read_object
from insitu.errors import BackendError

NO_CODE = {"trust_remote_code": False}
"""For configurations and tokenizers. Without it, transformers asks on the terminal whether to run a folder's code."""
SAFE_OPTIONS = {**NO_CODE, "use_safetensors": True}
"""For weights."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def check_weights(folder: Path) -> None:
    """Raises BackendError unless the weights of a model in `folder` are safetensors in that folder."""
    index, config = folder / "model.safetensors.index.json", folder / "config.json"
    if (chosen := read_object(config).get("transformers_weights")) is not None:
        _check_part(config, chosen)
    if (folder / "model.safetensors").exists():
        return
    if not index.exists():
        raise BackendError(_no_safetensors(folder, "model.safetensors"))
    parts = read_object(index).get("weight_map")
    for name in parts.values() if isinstance(parts, dict) else ():
        _check_part(index, name)


def _check_part(where: Path, name: Any) -> None:
    if not str(name).endswith(".safetensors") or file_name_problem(str(name)) is not None:
        raise BackendError(f"{where} names {name!r:.80}; allowed: .safetensors files in the same folder")


def check_adapter(folder: Path, config: dict[str, Any]) -> None:
    """Raises BackendError unless `folder` holds LoRA adapters as safetensors; `config` is its adapter_config.json."""
    where, kind = folder / "adapter_config.json", config.get("peft_type")
    if kind != "LORA":
        raise BackendError(f"{where}: peft_type is {kind!r:.80}; allowed: 'LORA'")
    if config.get("megatron_config"):
        raise BackendError(f"{where}: megatron_config is set, for which peft would import the module that it names")
    if not (folder / "adapter_model.safetensors").exists():
        raise BackendError(_no_safetensors(folder, "adapter_model.safetensors"))


def check_templates(source: str, templates: Any) -> None:
    """Raises BackendError for named chat templates that would be saved outside the folder of a checkpoint."""
    for name in templates if isinstance(templates, dict) else ():
        if (problem := file_name_problem(str(name))) is not None:
            raise BackendError(f"the tokenizer of {source} has a chat template whose name {name!r:.80} {problem}")


def _no_safetensors(folder: Path, wanted: str) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if not pickles:
        return f"{folder} has no {wanted}"
    return (
        f"{folder} has {pickles[0]} but no {wanted}: pickled weights are not read, because they can run code; convert "
        "them to safetensors first"
    )


def code_problem(error: Exception) -> str | None:
    """What to say of an error of transformers about code in a model's files; None for other errors."""
    if "trust_remote_code" not in str(error):
        return None
    return "it needs Python code of its repository (auto_map), which is never run; use a model that transformers has"
