"""The uploads of `finetuning.hub`: a tracker, which looks at checkpoints after each epoch in place of metrics."""

import logging
import tempfile
from pathlib import Path
from typing import ClassVar

from insitu.config import Config
from insitu.errors import BackendError, ConfigError
from insitu.release.model_export import (
    check_base,
    check_repository,
    create_repository,
    export_model,
    open_source,
    upload,
)
from insitu.runs.checkpoints import checkpoint_of_run
from insitu.runs.reader import RunReader
from insitu.schemas.finetuning import HubConfig, TrainerAdapterConfig
from insitu.schemas.kinds import TRAINER_ADAPTER
from insitu.training.trackers import Step, TrackedRun, Tracker

logger = logging.getLogger(__name__)


class HubUploads(Tracker):
    """An upload that fails is tried again after the next epoch; the last one decides whether the tracker has failed."""

    key: ClassVar[str] = "finetuning.hub"
    end_seconds: ClassVar[float] = 1800.0

    @classmethod
    def check(cls, config: Config) -> None:
        finetuning = config.finetuning
        if (hub := finetuning.hub) is None:
            raise ConfigError(f"{cls.key} is missing: it names the repository")
        check_repository(hub.repo, f"{cls.key}.repo")
        block = config.blocks.get((TRAINER_ADAPTER.section, str(finetuning.trainer_adapter)))
        if not isinstance(block, TrainerAdapterConfig) or (model := block.starts_from) is None:
            raise ConfigError(f"{cls.key}: allowed with a trainer adapter that starts its backend (with a model)")
        if block.trains_adapters and not hub.merge and Path(model).exists():
            check_base(Path(model).absolute(), cls.key, "merge: true")
        if hub.push == "best" and finetuning.validation is None:
            raise ConfigError(f"{cls.key}.push: best needs the key finetuning.validation; allowed without it: last")

    def start(self, run: TrackedRun, continued: str | None) -> str:
        prefix = f"{self.key}."
        given = {key.removeprefix(prefix): value for key, value in run.settings.items() if key.startswith(prefix)}
        self._hub = HubConfig.model_validate(given)
        self._run, self._uploaded, self._version = run.folder.parent, "", 0
        self._was_scored = False
        self._error: Exception | None = None
        return create_repository(self._hub.repo, self._hub.private)

    def log(self, step: Step) -> None:
        try:
            folder = checkpoint_of_run(self._run, "best" if self._hub.push == "best" else "latest", self.key)
        except ConfigError as error:  # the weights are not trained, or not written yet
            self._error = self._error or error
            return
        if folder.name == self._uploaded:
            return
        try:
            source = open_source(self._run, folder)
            was_scored = self._is_scored(source.record.version)
            with tempfile.TemporaryDirectory(prefix=".hub-", dir=self._run) as draft:
                target = export_model(source, Path(draft) / folder.name, merge=self._hub.merge, name=self._hub.repo)
                upload(target, self._hub.repo, f"{folder.name} of the run {self._run.name}")
        except (BackendError, ConfigError, OSError) as error:  # OSError: the run has deleted the checkpoint meanwhile
            logger.warning("%s: %s", folder.name, error)
            self._error = error
        else:
            self._uploaded, self._error = folder.name, None
            self._version, self._was_scored = source.record.version, was_scored

    def _is_scored(self, version: int) -> bool:
        return any(each["policy_version"] == version for each in RunReader(self._run).validations())

    def finish(self, status: str) -> None:
        if not self._was_scored and self._is_scored(self._version):
            self._uploaded = ""  # its card lacks the score that it got after it was uploaded
        self.log(Step(0, {}, {}))
        if self._error is not None:
            raise BackendError(f"the last checkpoint was not uploaded: {self._error}")
