"""The sections of a file, and the file as a checked whole."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import Field

from insitu.errors import ConfigError, not_found
from insitu.schemas.components import WORKFLOW, Block, FunctionBaseConfig, LLMBaseConfig, MayChange, TypedBaseModel
from insitu.schemas.finetuning import FinetuneConfig, TrainerAdapterConfig, TrainerConfig
from insitu.schemas.kinds import FUNCTION, LLM, TRAINER, TRAINER_ADAPTER, Kind

logger = logging.getLogger(__name__)

Moved = Mapping[Path, Path]
"""Folders that a run has moved aside, and where they are now."""
MAX_NAME_BYTES = 200
"""Length of a name that becomes a file's or folder's; file systems allow 255 bytes."""


class GeneralConfig(Block):
    """The section `general`."""

    seed: int = 0
    """Seed for dataset order, sampling, subsampling and, on CPU, training."""
    folder: Path | None = None
    """The folder for relative paths that do not exist in the working directory, and for modules, in place of the YAML
    file's; relative to that."""
    plugins: list[str] = Field(default_factory=list)
    """Modules imported before the file is checked; the file's own folder is importable."""
    executor: MayChange[Any] = None
    """Where episodes run: a block whose `_type` is `local` (in this process, the default), `service` (in
    workflow services) or `ray` (on a cluster)."""
    metrics_port: MayChange[int | None] = Field(default=None, ge=0, le=65535)
    """Port on which a run answers `GET /health` and `GET /metrics`; 0: a free one. None: it does not."""
    metrics_host: MayChange[str] = "127.0.0.1"
    """Address to bind for `metrics_port`; one that other machines can connect to needs INSITU_METRICS_TOKEN."""


class OutputConfig(Block):
    """The block `eval.general.output`."""

    dir: Path = Path(".tmp/insitu/eval")
    """Folder for the files of an evaluation, relative to the working directory."""


class EvalGeneralConfig(Block):
    """The section `eval.general`."""

    max_concurrency: MayChange[int] = Field(default=8, ge=1)
    """Maximum number of episodes in flight."""
    output_dir: MayChange[Path | None] = None
    """Folder for the files of an evaluation, relative to the working directory; none: `output.dir`."""
    output: MayChange[OutputConfig | None] = None
    """Alternative to `output_dir`."""
    episode_timeout: MayChange[float | None] = Field(default=None, gt=0)
    """Time limit for one attempt at an episode, in seconds; none: no limit."""
    retries: int = Field(default=0, ge=0)
    """Retries of an episode after a transient error (timeout, backend unavailable)."""
    evaluator_timeout: MayChange[float | None] = Field(default=600.0, gt=0)
    """Time limit for scoring, in seconds per episode. An evaluator that gets many episodes together has that much time
    for each `max_concurrency` of them; none: no limit."""
    stall_warning: MayChange[float | None] = Field(default=300.0, gt=0)
    """Seconds after which a run in which no episode completes, and no training job makes progress, says what it is
    waiting for; it is repeated as often. None: never."""
    stall_timeout: MayChange[float | None] = Field(default=None, gt=0)
    """Seconds after which such a run ends with exit code 1; none: it waits for ever."""
    dataset: Any = None
    """The dataset: a block whose `_type` is the file's format."""

    def scoring_limit(self, episodes: int) -> float | None:
        """Seconds for one call of an evaluator with this many episodes."""
        if self.evaluator_timeout is None:
            return None
        return self.evaluator_timeout * math.ceil(episodes / self.max_concurrency)

    @property
    def folder(self) -> Path:
        return self.output_dir or (self.output or OutputConfig()).dir


@dataclass(frozen=True)
class Config:
    """A checked file, which never changes. `blocks` holds the validated block of every component, by (section, name).

    `data` is what was checked, before its variables were expanded: `check_config` makes the same of it in another
    process with these `variables` of the environment.
    """

    general: GeneralConfig = field(default_factory=GeneralConfig)
    eval: EvalGeneralConfig = field(default_factory=EvalGeneralConfig)
    finetuning: FinetuneConfig = field(default_factory=FinetuneConfig)
    blocks: Mapping[tuple[str, str], TypedBaseModel] = field(default_factory=lambda: MappingProxyType({}))
    folder: Path = field(default_factory=Path.cwd)
    source: str = "configuration"
    data: Mapping[str, Any] | None = field(default=None, repr=False)
    variables: frozenset[str] = frozenset()
    working_dir: Path = field(default_factory=Path.cwd)
    """That of the process when the file was read: the workflow may change it."""

    @property
    def max_concurrency(self) -> int:
        return self.eval.max_concurrency

    @property
    def workflow(self) -> FunctionBaseConfig:
        return self.block(FUNCTION, WORKFLOW)  # type: ignore[return-value]

    def names(self, kind: Kind) -> list[str]:
        return [name for section, name in self.blocks if section == kind.section]

    def block(self, kind: Kind, name: str) -> TypedBaseModel:
        """The block called `name`; raises ConfigError listing the existing blocks."""
        try:
            return self.blocks[kind.section, name]
        except KeyError:
            if name == WORKFLOW:
                raise ConfigError(f"{self.source} has no section workflow") from None
            raise ConfigError(not_found(f"{kind.section}:", name, self.names(kind))) from None

    def llm(self, name: str) -> LLMBaseConfig:
        """The block of a model."""
        return self.block(LLM, name)  # type: ignore[return-value]

    @property
    def trainer(self) -> TrainerConfig | None:
        """The block of the trainer; None if there is none of the name that `finetuning` has."""
        block = self.blocks.get((TRAINER.section, str(self.finetuning.trainer)))
        return block if isinstance(block, TrainerConfig) else None

    @property
    def run_dir(self) -> Path:
        """`finetuning.output_dir`; absolute once code of the file has changed the working directory."""
        folder = Path(self.finetuning.output_dir)
        return folder if Path.cwd() == self.working_dir else self.working_dir / folder

    def trained_llms(self) -> frozenset[str]:
        """The keys of `llms` whose calls are trained: those of `target_model`, else every policy, else all."""
        models, target = self.model_names(), self.finetuning.target_model
        if target is not None:
            return frozenset(matching_llms(target, models))
        return frozenset(self.policy_llms()) or frozenset(models)

    def policy_llms(self) -> list[str]:
        """The keys of the llms that are the model under training, wherever that is served."""
        return [name for name in self.names(LLM) if self.block(LLM, name).type == "policy"]

    @property
    def serves_policy(self) -> bool:
        """Whether an llm is the model under training."""
        return bool(self.policy_llms())

    def model_names(self) -> dict[str, str | None]:
        """The model name by key of `llms`; None if only the running backend knows it."""
        adapter = self.blocks.get((TRAINER_ADAPTER.section, str(self.finetuning.trainer_adapter)))
        served = adapter.served_name if isinstance(adapter, TrainerAdapterConfig) else None
        blocks = {name: self.llm(name) for name in self.names(LLM)}
        of_policy = {name: served if block.type == "policy" else None for name, block in blocks.items()}
        return {name: block.request_settings().get("model_name", of_policy[name]) for name, block in blocks.items()}

    def find_path(self, path: str | Path, key: str, moved: Moved | None = None) -> Path:
        """An input file or folder, relative to the working directory or else to the file's own folder.

        Logs a warning if both have one. Follows the folders that the run has `moved` aside.
        """
        path = Path(path).expanduser()
        candidates = [*dict.fromkeys((self.working_dir / path, self.folder / path))]  # one, if it is absolute
        paths = [place for candidate in candidates if (place := moved_path(candidate, moved)).exists()]
        if not paths:
            raise ConfigError(f"{key}: {str(path)!r} does not exist; looked for {' and '.join(map(str, candidates))}")
        if len(paths) == 2 and not paths[0].samefile(paths[1]):
            warn_once(
                f"{key}: {str(path)!r} names two files: {paths[0]} is used, {paths[1]} beside the YAML file is not"
            )
        return paths[0]


def file_name_problem(name: str) -> str | None:
    """Why a name cannot be part of a file's name, in words that follow the name; None if it can."""
    if not name or name in (".", "..") or any(character in "/\\\0" for character in name):
        return "cannot be the name of a file; allowed: text without / and \\"
    if len(name.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
        return f"is too long for the name of a file; allowed: {MAX_NAME_BYTES} bytes"
    return None


def matching_llms(target: str, models: Mapping[str, str | None]) -> list[str]:
    """The keys of `models` (llm key -> model name) that `target`, a key or a model name, selects.

    Without an exact match, `@step` suffixes are ignored and llms whose model name is still unknown also match.
    """
    exact = [key for key, model in models.items() if model == target]
    possible = [k for k, model in models.items() if model is None or _without_step(model) == _without_step(target)]
    return [target] if target in models else exact or possible


def _without_step(model: str) -> str:
    name, _, step = model.rpartition("@")
    return name if name and step.isdecimal() else model


def moved_path(path: Path, moved: Moved | None) -> Path:
    """Where a path of the file is now: the file means what was there before the run moved an earlier one aside."""
    resolved = path.resolve() if moved else path
    for before, after in (moved or {}).items():
        if resolved.is_relative_to(before):
            return after / resolved.relative_to(before)
    return path


@lru_cache
def warn_once(message: str) -> None:
    """A path is looked up several times in a run."""
    logger.warning("%s", message)
