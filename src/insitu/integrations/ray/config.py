"""The configuration of the executor that runs episodes on a Ray cluster."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from insitu.schemas.components import ExecutorBaseConfig
from insitu.wire.redaction import remember_environment


class RuntimeEnvConfig(BaseModel):
    """What Ray sets up for the workers, as in its own documentation."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True, frozen=True)

    working_dir: str | None = None
    """A folder that is copied to the workers, in which they run; or the URI of an archive."""
    py_modules: list[str] | None = None
    """Folders of Python packages, or URIs, that workers can import."""
    excludes: list[str] | None = None
    """Files of `working_dir` and `py_modules` that are not copied, as in a .gitignore."""
    pip: list[str] | dict[str, Any] | str | None = None
    """Packages to install, or a requirements file."""
    uv: list[str] | dict[str, Any] | str | None = None
    """The same, installed by uv."""
    conda: dict[str, Any] | str | None = None
    """A conda environment."""
    image_uri: str | None = None
    """A container image."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables. Secrets among them are sent to the running workers instead of being given to Ray, which
    writes them to files."""
    config: dict[str, Any] | None = None
    """Options of the set-up, such as `setup_timeout_seconds`."""

    @field_validator("env_vars", mode="before")
    @classmethod
    def _as_text(cls, variables: Any) -> Any:
        """Numbers of YAML are text in an environment."""
        if not isinstance(variables, dict):
            return variables
        numbers = {name: str(v) for name, v in variables.items() if type(v) in (int, float)}
        return variables | numbers

    @field_validator("env_vars")
    @classmethod
    def _remember_secrets(cls, variables: dict[str, str]) -> dict[str, str]:
        remember_environment(variables)
        return variables


class RayExecutorConfig(ExecutorBaseConfig, name="ray"):
    """Episodes run in worker processes on the machines of a Ray cluster."""

    address: str = "auto"
    """Address of the cluster's head, such as `10.0.0.5:6379`; auto: the cluster that this machine belongs to, or that
    the variable RAY_ADDRESS names."""
    workers: int = Field(ge=1)
    """Number of worker processes. They share `eval.general.max_concurrency` episodes equally."""
    cpus_per_worker: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for each worker."""
    runtime_env: RuntimeEnvConfig = Field(default_factory=RuntimeEnvConfig)
    """What Ray sets up for the workers: their files, packages and environment variables."""
    pass_env: list[str] = Field(default_factory=list)
    """Names of environment variables that workers get from this process, besides those that the file refers to."""
    start_timeout: float = Field(default=300.0, gt=0)
    """Seconds to wait for the first worker."""
    max_losses: int = Field(default=3, ge=0)
    """How often an attempt is made again because its worker has ended. After the second loss it gets a worker without
    other episodes, so that an agent that ends its process fails only itself."""
