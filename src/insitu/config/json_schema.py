"""A JSON Schema of the YAML file, for editors: what `check_config` checks without importing a plugin.

Blocks of a built-in `_type` have the keys of its model; those of plugins are free. References, and what only a
validator knows, are left to `insitu validate`.
"""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaValue, models_json_schema

from insitu.config.checking import _WITHOUT_EFFECT
from insitu.config.keys import _fields, fields_not_in_file
from insitu.registry import registry
from insitu.schemas import kinds
from insitu.schemas.components import TypedBaseModel, default_empty_blocks
from insitu.schemas.config import EvalGeneralConfig, GeneralConfig
from insitu.schemas.documentation import DocumentedSchema
from insitu.schemas.finetuning import FinetuneConfig
from insitu.schemas.kinds import KINDS, Kind

_VARIABLE = {"type": "string", "pattern": r"\$\{"}
"""A variable of the environment in place of a value that is no text."""
_NO_TEXT = ("int", "float", "bool", "literal", "enum")
_NULL = {"type": "null"}


class _Generator(DocumentedSchema):
    def emit_warning(self, kind: Any, detail: str) -> None:
        """A default that JSON does not have is left out."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        made = super().generate_inner(schema)
        return {"anyOf": [made, _VARIABLE]} if schema["type"] in _NO_TEXT else made

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        """Has all keys that a field may have in a file, and no others."""
        made, model = super().model_schema(schema), schema["cls"]
        hidden, fields, found = fields_not_in_file(model), _fields(model), made.get("properties", {})
        properties: dict[str, Any] = {"_type": {"type": "string"}} if issubclass(model, TypedBaseModel) else {}
        required = set(made.pop("required", ()))
        for name, field in model.model_fields.items():
            keys = [key for key, each in fields.items() if each is field]
            if name in hidden:
                properties.update(dict.fromkeys(keys if name != "type" else (), True))  # a warning says who sets it
                continue
            shown = next(found[key] for key in (*keys, name) if key in found)
            if default_empty_blocks(model, {name: None}) == {}:
                shown = {"anyOf": [shown, _NULL]}
            properties.update(dict.fromkeys(keys, shown))
            if len(keys) > 1:
                required -= {*keys}
        made["properties"] = properties
        if required & properties.keys():
            made["required"] = sorted(required & properties.keys())
        tolerant = issubclass(model, TypedBaseModel) and model.ignores_unknown_keys
        made["additionalProperties"] = tolerant or model.model_config.get("extra") == "allow"
        return made


def json_schema() -> dict[str, Any]:
    """The schema of a file, as an object of JSON."""
    models = {(kind, name): _model_of(kind, name) for kind in KINDS for name in kind.built_in}
    sections = (GeneralConfig, EvalGeneralConfig, FinetuneConfig)
    inputs = [(model, "validation") for model in dict.fromkeys((*models.values(), *sections))]
    refs, shared = models_json_schema(inputs, schema_generator=_Generator)  # type: ignore[arg-type]
    ref: dict[type[BaseModel], JsonSchemaValue] = {model: made for (model, _), made in refs.items()}  # type: ignore[misc]
    definitions = shared["$defs"]
    for kind in KINDS:
        definitions[kind.section] = _component({name: ref[m] for (each, name), m in models.items() if each is kind})
    general, evaluation, finetuning = (ref[model] for model in (GeneralConfig, EvalGeneralConfig, FinetuneConfig))
    for section, key, kind in ((general, "executor", kinds.EXECUTOR), (evaluation, "dataset", kinds.DATASET)):
        _definition(definitions, section)["properties"][key]["anyOf"] = [_to(kind.section), _NULL]
    file = _object(
        {
            "general": general,
            "workflow": _to(kinds.FUNCTION.section),
            "eval": _object({"general": evaluation, "evaluators": _named(kinds.EVALUATOR)}),
            "finetuning": finetuning,
            **{kind.section: _named(kind) for kind in KINDS if "." not in kind.section},
        }
    )
    output = _definition(definitions, evaluation)["properties"]["output"]["anyOf"][0]
    for where, section in {"general": general, "eval.general": evaluation, "eval.general.output": output}.items():
        _definition(definitions, section)["properties"].update(dict.fromkeys(_WITHOUT_EFFECT[where], True))
    file["properties"].update(dict.fromkeys(_WITHOUT_EFFECT[""], True))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "insitu", **file, "$defs": definitions}


def _definition(definitions: dict[str, Any], ref: JsonSchemaValue) -> dict[str, Any]:
    made: dict[str, Any] = definitions[ref["$ref"].rpartition("/")[2]]
    return made


def _model_of(kind: Kind, name: str) -> type[BaseModel]:
    registration = registry.find(kind, name)
    assert registration is not None  # built in
    return registration.config_type


def _component(models: dict[str, JsonSchemaValue]) -> JsonSchemaValue:
    """A block whose `_type` chooses its keys, if it is built in."""
    names: list[JsonSchemaValue] = [{"enum": [*models]}] if models else []
    properties = {"_type": {"anyOf": [*names, {"type": "string"}]}}
    block: JsonSchemaValue = {"type": "object", "required": ["_type"], "properties": properties}
    if models:
        block["allOf"] = [{"if": {"properties": {"_type": {"const": n}}}, "then": ref} for n, ref in models.items()]
    return block


def _named(kind: Kind) -> JsonSchemaValue:
    return {"type": ["object", "null"], "additionalProperties": _to(kind.section)}


def _object(properties: dict[str, Any]) -> JsonSchemaValue:
    """A mapping with these keys, each of which may be empty."""
    listed = {key: {"anyOf": [value, _NULL]} for key, value in properties.items()}
    return {"type": "object", "properties": listed, "additionalProperties": False}


def _to(section: str) -> JsonSchemaValue:
    return {"$ref": f"#/$defs/{section}"}
