"""A checked file as plain values without its secrets, and how they differ from others."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from insitu.config.code import code_digest
from insitu.config.keys import fields_not_in_file, may_change, references
from insitu.config.yaml_loader import parse_override
from insitu.schemas.components import WORKFLOW, CodeRef, TypedBaseModel
from insitu.schemas.config import Config
from insitu.schemas.evaluation import RunRequest
from insitu.schemas.parts import PYTHON
from insitu.wire.redaction import MASK, hide_url_secrets, is_reference, is_secret_key, is_sent_block, redact

_PLACES = {"file_path", "api_key", "base_url", "url"}
"""Where something is, in any block. A dataset is compared by its content."""


def resolved_config(config: Config, *, given: bool = False) -> dict[str, Any]:
    """Every key with its value, given or default, by section; with `given`, without defaults. Secrets are hidden."""
    values: dict[str, Any] = {
        "general": _plain(config.general, given),
        "eval": {"general": _plain(config.eval, given)},
        "finetuning": _plain(config.finetuning, given),
    }
    for (section, name), block in config.blocks.items():
        place = values
        for part in section.split("."):
            place = place.setdefault(part, {})
        place[name] = {"_type": block.type, **_plain(block, given)}
    return without_secrets(values)


def _plain(model: BaseModel, given: bool) -> dict[str, Any]:
    hidden = fields_not_in_file(type(model))
    return model.model_dump(mode="json", exclude=hidden, exclude_unset=given, serialize_as_any=True, fallback=str)


def without_secrets(value: Any, *, secret: bool = False) -> Any:
    """Hides all values below a secret key or in a block for another program, and secrets in URLs, however short."""
    if isinstance(value, Mapping):
        return {
            name: without_secrets(inner, secret=secret or is_secret_key(str(name)) or is_sent_block(str(name), inner))
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(item, secret=secret) for item in value]
    if secret and not isinstance(value, bool | None) and value != "" and not is_reference(value):
        return MASK
    return hide_url_secrets(redact(value)) if isinstance(value, str) else value


def overrides_of(request: RunRequest | None) -> dict[str, str]:
    """KEY and VALUE of the options that set keys of the file. A VALUE that holds a secret is masked."""
    if request is None:
        return {}
    texts = dict(request.override) | {key: str(value) for key, value in request.values.items()}
    for key, text in texts.items():
        setting = parse_override(key, text)
        for part in reversed(key.split(".")):
            setting = {part: setting}
        if without_secrets(setting) != setting:
            texts[key] = MASK
    return texts


def options_of(request: RunRequest | None) -> dict[str, str]:
    """The other options that say where episodes come from, such as `--dataset`. A secret is masked."""
    if request is None:
        return {}
    given = request.model_dump(include={"dataset", "endpoint", "endpoint_timeout", "result_json_path"})
    changed = {name: value for name, value in given.items() if value != RunRequest.model_fields[name].default}
    return {f"--{name}": str(value) for name, value in without_secrets(changed).items()}


def is_harmless(config: Config, key: str) -> bool:
    """Whether a change of this key leaves the results of a run comparable."""
    if key.rpartition(".")[2] in _PLACES:
        return True
    models = {"general": type(config.general), "eval.general": type(config.eval), "finetuning": type(config.finetuning)}
    models |= {f"{section}.{name}": type(block) for (section, name), block in config.blocks.items()}
    around = [where for where in models if key.startswith(f"{where}.")]
    return any(may_change(models[where], key.removeprefix(f"{where}.").split(".")) for where in around)


def code_of(config: Config) -> dict[str, str]:
    """Digests of the Python code that the blocks of a file name, by their keys."""
    return {
        "workflow" if name == WORKFLOW else f"{section}.{name}": digest
        for (section, name), block in config.blocks.items()
        if (digest := "".join(_code(block, config.folder)))
    }


def _code(block: TypedBaseModel, folder: Path) -> Iterator[str]:
    """The digests of the code that a block names; of a plugin's, also of the file that its settings are from."""
    module = type(block).__module__
    if not module.startswith("insitu."):
        yield code_digest(CodeRef(f"{module}:"), folder) or ""
    for _, ref in references(block, ""):
        if isinstance(ref, CodeRef):
            yield code_digest(ref, folder) or ""


def block_digest(config: Config, section: str, name: str) -> str:
    """A digest of what decides the results of a block: its settings and code, and those of the blocks that it names.

    What may change between the processes of a run is none of that.
    """
    digest, left, seen = hashlib.sha256(), [(section, name)], set[tuple[str, str]]()
    while left:
        if (place := left.pop()) in seen or (block := config.blocks.get(place)) is None:
            continue
        seen.add(place)
        key = ".".join(place)
        values = leaves(without_secrets(_plain(block, given=False)))
        settings = {name: value for name, value in values if not is_harmless(config, f"{key}.{name}")}
        content = [key, block.type, settings, *_code(block, config.folder)]
        digest.update(json.dumps(content, sort_keys=True, default=str).encode())
        left += [(ref.section, str(ref)) for _, ref in references(block, "") if not isinstance(ref, CodeRef)]
    return digest.hexdigest()[:16]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The dotted keys of nested settings whose values differ, with both values; None where one has no such key."""
    then, new = dict(leaves(before)), dict(leaves(now))
    return {key: (then.get(key), new.get(key)) for key in {**then, **new} if then.get(key) != new.get(key)}


def nested(settings: Any, key: str) -> Any:
    """The value of a dotted key; None if it is not set."""
    for part in key.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested settings by dotted key."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def code_digests(settings: Any, where: str = "") -> dict[str, str]:
    """The digests of the parts in nested settings that are Python code, by the key of the part."""
    settings = dict(enumerate(settings)) if isinstance(settings, list) else settings
    if not isinstance(settings, Mapping):
        return {}
    digests = {where: str(settings["sha256"])} if settings.get("_type") == PYTHON and settings.get("sha256") else {}
    for key, value in settings.items():
        digests |= code_digests(value, f"{where}.{key}".lstrip("."))
    return digests
