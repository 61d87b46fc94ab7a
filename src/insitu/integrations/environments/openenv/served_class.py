"""Serves an environment class: `python -m ...served_class MODULE:CLASS PORT SESSIONS`.

It runs as a separate process, in the working directory that has the class, and imports little of insitu.
"""

import sys
import typing
from pathlib import Path
from typing import Any

from insitu.config.code import load_code
from insitu.errors import ConfigError, install_command


def types_of(environment: Any, base: Any) -> list[Any]:
    """The classes of an environment's actions, observations and states: the parameters of its generic base, or the
    general ones."""
    for kind in environment.__mro__:
        for generic in getattr(kind, "__orig_bases__", ()):
            origin, parameters = typing.get_origin(generic), typing.get_args(generic)
            if origin is base and not any(isinstance(each, typing.TypeVar) for each in parameters):
                return [*parameters]
    hints = typing.get_type_hints(environment.step)
    return [hints.get("action"), hints.get("return")]


def main(ref: str, port: str, sessions: str) -> None:
    try:
        import uvicorn
        from openenv.core.env_server import Action, Environment, Observation, create_fastapi_app
    except ImportError as error:
        sys.exit(f"workflow.class needs the extra openenv ({install_command('openenv')}): {error}")
    try:
        environment = load_code(ref, "workflow.class", Path.cwd())
    except ConfigError as error:
        sys.exit(str(error))
    if not (isinstance(environment, type) and issubclass(environment, Environment)):
        sys.exit(f"workflow.class: {ref} is not an environment class of OpenEnv")
    action, observation = (
        kind if isinstance(kind, type) and issubclass(kind, general) else general
        for kind, general in zip(types_of(environment, Environment), (Action, Observation), strict=False)
    )
    limit = int(sessions) if getattr(environment, "SUPPORTS_CONCURRENT_SESSIONS", False) else 1
    app = create_fastapi_app(environment, action, observation, max_concurrent_envs=limit)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", ws_max_size=2**27)


if __name__ == "__main__":
    main(*sys.argv[1:])
