"""The command `info`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pydantic import BaseModel


@click.group("info")
def command() -> None:
    """Describe this installation."""


@command.command("components")
@click.argument("names", nargs=-1, metavar="[TYPE]...")
def components(names: tuple[str, ...]) -> None:
    """List the registered components, built in and of installed plugins: each `_type` with its keys.

    With TYPEs, only these are listed, and with the meaning of each key.
    """
    from insitu.config.keys import description
    from insitu.errors import ConfigError
    from insitu.registry import KINDS, not_found, registry

    known = {kind: registry.names(kind) for kind in KINDS}
    for name in names:
        if not any(name in of_kind for of_kind in known.values()):
            raise ConfigError(not_found("_type", name, sorted({n for of_kind in known.values() for n in of_kind})))
    for kind, of_kind in known.items():
        listed = [name for name in of_kind if not names or name in names]
        if listed:
            print(f"{kind.section}:")
        for name in listed:
            registration = registry.find(kind, name)
            assert registration is not None
            model = registration.config_type
            origin = "" if name in kind.built_in else f" ({model.__module__})"
            print(f"  {name}{origin}: {description(model)}".rstrip(": "))
            for line in _keys(model, "", bool(names)):
                print(f"    {line}")


def _keys(model: "type[BaseModel]", prefix: str, with_meaning: bool) -> Iterator[str]:
    """A line per key, those of nested blocks with dotted names."""
    from insitu.config.keys import bounds, default, models_of, shown_fields, type_text

    for name, field in shown_fields(model).items():
        inner = models_of(field.annotation)
        value = default(field).replace("`", "")
        value = {"required": value, "see below": ""}.get(value, f"default {value}")
        words = type_text(field.annotation).replace("`", "") + bounds(field)
        meaning = f"  {' '.join(field.description.split())}" if with_meaning and field.description else ""
        yield f"{prefix}{name}: {', '.join(filter(None, (words, value)))}{meaning}"
        for nested in inner:
            yield from _keys(nested, f"{prefix}{name}.", with_meaning)
