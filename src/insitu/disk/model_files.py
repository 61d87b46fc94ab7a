"""Folders of models and of checkpoints: what may be in them, and whether it is what was saved.

checkpoints/step_000012/
    config.json model.safetensors, or adapter_config.json adapter_model.safetensors; tokenizer and its template
    optimizer.safetensors    AdamW's moments by parameter name, float32 weights where others are served
    training.json            TrainingRecord, with the digest of each other file
job_log/step_000013/
    rows.safetensors settings.json training.json    the job of a step that may have no checkpoint

The backend writes these folders. Whatever loads one checks it first, so that damaged weights are never served or
trained.

The files of a model are safetensors and JSON: no pickles, no code, no adapters but LoRA. A pickle can run code when it
is read, and so can Python files beside a model. Libraries guard against both in ways that differ between releases, so a
local folder is checked before they read it. For those of a hub they get `SAFE_OPTIONS`.
"""

import hashlib
import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import BaseModel

from insitu.disk.files import cannot_read, sync_path
from insitu.disk.json_files import read_object
from insitu.errors import BackendError, InsituError, first_problem
from insitu.schemas.config import file_name_problem
from insitu.schemas.lora import LoRASettings
from insitu.schemas.training_jobs import Retention

logger = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"
RECORD_FILE = "training.json"
JOB_LOG = "job_log"
"""The folder of logged jobs, beside that of the checkpoints."""
STATE_FILES = (OPTIMIZER_FILE, RECORD_FILE)
"""What training resumes from, besides the model."""
NO_CODE = {"trust_remote_code": False}
"""For configurations and tokenizers. Without it, transformers asks on the terminal whether to run a folder's code."""
SAFE_OPTIONS = {**NO_CODE, "use_safetensors": True}
"""For weights."""
_DIGEST_LENGTH = 16
_SAMPLES, _SAMPLE = 1024, 4096
"""Parts of a file that are compared, and the bytes of one."""
_LONGEST_HEADER = 100_000_000
"""Bytes; the limit of safetensors itself."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class JobRecord(BaseModel):
    """The job that made a version, so that its key is known to later processes too.

    `weights` is a digest of what a logged job has trained; where it is None, the files of the checkpoint have one.
    """

    id: str
    key: str | None = None
    digest: str | None = None
    metrics: dict[str, Any] = {}
    weights: str | None = None


class TrainingRecord(BaseModel):
    """`step` counts all jobs since the start of training, `version` those of the process that wrote the checkpoint.

    `started_from` is the model that training started from, the reference of the KL penalty. Without `lora` all weights
    are trained. `sha256` has the digests of the other files by name; None if another program wrote it. `tokens`
    counts those that all jobs have computed.
    """

    step: int
    version: int
    started_from: str
    lora: LoRASettings | None = None
    job: JobRecord | None = None
    tokens: int = 0
    sha256: dict[str, str] | None = None


def write_record(folder: Path, record: TrainingRecord) -> None:
    """Writes the record with the digests of all other files, which must be complete; each is synced meanwhile."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != RECORD_FILE)
    with ThreadPoolExecutor() as pool:
        synced = [pool.submit(sync_path, path) for path in files]
        digests = dict(zip((path.name for path in files), pool.map(_digest, files), strict=True))
        for each in synced:
            each.result()
    complete = record.model_copy(update={"sha256": digests})
    (folder / RECORD_FILE).write_text(complete.model_dump_json(indent=2) + "\n", "utf-8")


def read_record(source: str | Path) -> TrainingRecord | None:
    """The record of a checkpoint folder; None for any other source."""
    path = Path(source) / RECORD_FILE
    try:
        return TrainingRecord.model_validate_json(path.read_bytes()) if path.is_file() else None
    except ValueError as error:
        raise BackendError(f"{path} cannot be read: {first_problem(error)}") from error


def saved_checkpoints(folder: Path) -> list[tuple[Path, TrainingRecord]]:
    """The checkpoints in `folder`, or the logged jobs, oldest first. Raises BackendError if one has no record."""
    checkpoints = []
    for path in folder.glob("step_*"):
        if (record := read_record(path)) is None:
            raise BackendError(
                f"{path} is not a checkpoint of this backend: it has no {RECORD_FILE}; move it elsewhere"
            )
        checkpoints.append((path, record))
    return sorted(checkpoints, key=lambda each: each[1].step)


def check_model(folder: Path) -> None:
    """Raises BackendError if a file of the checkpoint's model is missing or differs from what was saved.

    Does nothing for a folder without a record, or with one that lists no files.
    """
    for name, sha256 in _listed(folder).items():
        if name != OPTIMIZER_FILE:
            _check(folder / name, sha256)


def check_optimizer_file(folder: Path, *, required: bool) -> None:
    """Raises BackendError if the optimizer state differs from what was saved, or is missing and `required`."""
    path = folder / OPTIMIZER_FILE
    listed = _listed(folder)
    if OPTIMIZER_FILE in listed and (required or path.exists()):
        _check(path, listed[OPTIMIZER_FILE])


def weights_digest(folder: Path) -> str | None:
    """The digest of a checkpoint's weights, by its record; None for folders without one."""
    record = read_record(folder)
    if record is not None and record.job is not None and record.job.weights is not None:
        return record.job.weights
    own = (f"{name} {sha256}" for name, sha256 in sorted(_listed(folder).items()) if name.endswith(".safetensors"))
    text = " ".join(each for each in own if not each.startswith(OPTIMIZER_FILE))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH] if text else None


def model_digest(model: Path) -> str:
    """The digest of a model's files: of their sizes and of samples, as hashing all takes seconds per GB."""
    digest = hashlib.sha256()
    parts = [model] if model.is_file() else [*model.glob("*.safetensors"), *model.glob("*.json")]
    for path in sorted(parts):
        if path.name != OPTIMIZER_FILE:
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                for place in range(0, size, max(_SAMPLE, size // _SAMPLES)):
                    file.seek(place)
                    digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:_DIGEST_LENGTH]


def copy_model(folder: Path, target: Path) -> None:
    """Copies the checkpoint's model without the state of its training. Raises BackendError if a file is damaged.

    The copies are checked, so that a checkpoint that is deleted meanwhile is reported and not half copied.
    """
    listed = _listed(folder)
    for name in {*listed, *(path.name for path in folder.iterdir())} - {*STATE_FILES}:
        try:
            shutil.copyfile(folder / name, target / name)
        except FileNotFoundError:
            raise _missing(folder / name) from None
        if name in listed:
            _check(target / name, listed[name], folder / name)


def _listed(folder: Path) -> dict[str, str]:
    record = read_record(folder)
    return (record.sha256 or {}) if record is not None else {}


def _missing(path: Path) -> BackendError:
    return BackendError(f"{path} is missing, but {RECORD_FILE} lists it; use another checkpoint")


def _check(path: Path, sha256: str, original: Path | None = None) -> None:
    """`original` is the file that the message names, if `path` is its copy."""
    try:
        damaged = _digest(path) != sha256
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        raise BackendError(str(cannot_read(path, error))) from error
    if damaged:
        raise BackendError(
            f"{original or path} is damaged: its SHA-256 is not that in {RECORD_FILE}; restore the file or use another "
            "checkpoint"
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expired(versions: Collection[int], keep: Retention) -> list[int]:
    """The versions that a policy deletes, oldest first; never the latest, nor those that it names."""
    kept = {*sorted(versions)[-keep.last :], *keep.versions}
    if keep.every is not None:
        kept |= {version for version in versions if version % keep.every == 0}
    return sorted(version for version in versions if version > keep.after and version not in kept)


def check_weights(folder: Path) -> None:
    """Raises BackendError unless the weights of a model in `folder` are safetensors in that folder."""
    index, config = folder / "model.safetensors.index.json", folder / "config.json"
    if (chosen := read_object(config, follow_links=True).get("transformers_weights")) is not None:
        _check_part(config, chosen)
    if (folder / "model.safetensors").exists():
        return
    if not index.exists():
        raise BackendError(_no_safetensors(folder, "model.safetensors"))
    parts = read_object(index, follow_links=True).get("weight_map")
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


def chat_template(folder: Path) -> tuple[Any, Any]:
    """The chat template of a model in `folder`, or its templates by name, and its response template; None: it has none.

    An adapter has that of its base model if it has no tokenizer. Raises BackendError if a file cannot be read.
    """
    settings = read_object(folder / "tokenizer_config.json", follow_links=True)
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
    file = folder / "chat_template.jinja"
    try:
        template = file.read_text(encoding="utf-8") if file.exists() else template
    except (OSError, ValueError) as error:
        raise BackendError(f"{file} cannot be read: {error}") from error
    return template, settings.get("response_template")


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


class StoredModel(NamedTuple):
    """What the files of a model say of its size: its config.json, the number of its parameters, None if the weights are
    not here, the rank of its adapters and their parameters for each rank, if it is an adapter, and its modules with
    weights, if known, each with the number of parameters of an adapter of rank 1 over its matrix."""

    config: dict[str, Any]
    parameters: int | None
    lora_rank: int | None = None
    lora: int | None = None
    modules: Mapping[str, int] = MappingProxyType({})


def stored_model(source: str) -> StoredModel | None:
    """Reads the configuration and the headers of the weights of a folder, or of a Hub name that was downloaded before.

    None if they are not on this machine, or damaged, which loading the model reports.
    """
    folder = Path(source) if Path(source).is_dir() else downloaded(source)
    try:
        if folder is None:
            return None
        if (folder / "adapter_config.json").is_file():
            adapter = read_object(folder / "adapter_config.json", follow_links=True)
            base = str(adapter.get("base_model_name_or_path"))
            model = stored_model(base if Path(base).exists() else str(folder / base)) or stored_model(base)
            if model is None or not (rank := int(adapter.get("r") or 0)):
                return model
            trained = sum(map(math.prod, _shapes(folder / "adapter_model.safetensors").values()))
            return model._replace(lora_rank=rank, lora=math.ceil(trained / rank))
        files = [path for path in folder.glob("*.safetensors") if path.name != OPTIMIZER_FILE]
        shapes = {name: shape for path in files for name, shape in _shapes(path).items()}
        modules: Counter[str] = Counter()
        for name, shape in shapes.items():
            modules[name.rpartition(".")[0]] += sum(shape) if len(shape) > 1 else 0  # a bias has no adapter
        config = read_object(folder / "config.json", follow_links=True)
        return StoredModel(config, sum(map(math.prod, shapes.values())) if files else None, modules=modules)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, InsituError) as error:
        logger.info("the size of %s is unknown: %s", source, error)
        return None


def split_revision(source: str | Path) -> tuple[str, str | None]:
    """The name of a model of the Hub and its branch, tag or commit, which follows `@`; a path of this machine has none.

    Raises BackendError for an empty revision.
    """
    name, separator, revision = str(source).partition("@")
    if not separator or Path(source).exists():
        return str(source), None
    if not revision:
        raise BackendError(f"{source} ends in @ without a revision; a model of the Hub is NAME or NAME@REVISION")
    return name, revision


def downloaded(source: str) -> Path | None:
    """The folder of a model in the Hub's cache, named after its commit; None if it is not there.

    https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    name, revision = split_revision(source)
    home = os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface"
    model = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub") / f"models--{name.replace('/', '--')}"
    if name.count("/") > 1:
        return None
    known = model / "refs" / (revision or "main")
    if known.is_file():
        return model / "snapshots" / known.read_text().strip()
    return snapshot if revision and (snapshot := model / "snapshots" / revision).is_dir() else None


def _shapes(path: Path) -> dict[str, list[int]]:
    """The shape of each tensor in a safetensors file, by its header."""
    with path.open("rb") as file:
        header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _LONGEST_HEADER)))
    return {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
