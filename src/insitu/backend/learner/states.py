"""Makes the state to train on: that of a snapshot or of the loaded model, and the logged jobs since trained again."""

import functools
import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from insitu.backend.compute import in_another_thread
from insitu.backend.learner.batches import Ranks
from insitu.backend.learner.checkpoints import TrainState, Workers, check_optimizer, open_optimizer
from insitu.backend.learner.code import CodeFolder
from insitu.backend.learner.logprobs import LogprobComputer, PolicyForward
from insitu.backend.learner.parts import train_parts
from insitu.backend.learner.policy import ReferenceWeights, build_policy, fingerprint
from insitu.backend.learner.versions import Versions
from insitu.backend.model import LoadedModel, load_model
from insitu.disk.model_files import TrainingRecord, check_model, read_record
from insitu.schemas.training_jobs import TrainingSettings

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class States:
    """Makes states of a policy's versions. The loaded model, in `folder`, is step `origin.step` of its training."""

    loaded: LoadedModel
    saved: Versions
    origin: TrainingRecord
    folder: Path
    load_version: Callable[[int], nn.Module]
    ranks: Ranks
    code: CodeFolder

    def __post_init__(self) -> None:
        self.workers = Workers(self.loaded, self.ranks)
        self._compute_logprobs = LogprobComputer(self.loaded)

    def check_files(self, *, weights: bool = True) -> None:
        """Raises BackendError if the next job cannot continue from the files; hashing weights takes seconds per GB.

        The optimizer state of the loaded model may have been deleted; the newest snapshot always has one.
        """
        base = self.saved.base(self.saved.latest)
        folder = self.saved.folder_of(base) if base else self.folder
        if weights and base:
            check_model(folder)
        check_optimizer(folder, required=base > 0)

    def after(self, version: int, settings: TrainingSettings | None = None) -> Generator[None, None, TrainState]:
        """The state after a version that has a snapshot, where the next job has these settings, or whose job is logged.

        Raises BackendError if a logged job is damaged.
        """
        base, state = self.saved.base(version), None
        for number in range(base + 1, version + 1):
            logger.warning("version %d has no snapshot: training its logged job again", number)
            logged, rows = yield from in_another_thread(functools.partial(self.saved.logged, number), lambda _: None)
            state = state or self.restore(logged, base)
            state.prepare(logged)
            for _ in train_parts(state, logged, rows):
                yield None
            self._check_repeated(number, state)
        if state is None:
            assert settings is not None
            state = self.restore(settings, base)
        return state

    def _check_repeated(self, version: int, state: TrainState) -> None:
        """Says so if a logged job, trained again, gave other weights than before."""
        record = read_record(self.saved.job_of(version))
        before = record and record.job and record.job.weights
        if before and (served := state.policy.served()) is not None and fingerprint(served) != before:
            reason = "its libraries, their versions, the processor or the number of its cores are others now"
            logger.warning("version %d, trained again, has other weights than it had: %s", version, reason)

    def restore(self, settings: TrainingSettings, base: int = 0) -> TrainState:
        """The state of a snapshot, or of the loaded model, for a job with these settings."""
        policy = build_policy(self.loaded, settings.lora, settings.seed)
        folder = self.saved.folder_of(base) if base else None
        if folder is not None:
            policy.load(folder)
        with open_optimizer(folder or self.folder) as saved:
            if not saved.names and self.origin.step + base:
                logger.warning("%s has no optimizer state: the optimizer starts anew", folder or self.folder)
            masters = {name: f"weights.{name}" for name in policy.trainable}
            policy.overwrite((name, saved.read(key)) for name, key in masters.items() if key in saved.names)
            forward = PolicyForward(policy.module, self._compute_logprobs)
            self.ranks.shard(policy.module, forward)
            state = TrainState(
                *(policy, forward, self._compute_logprobs, self.workers),
                reference=lambda: self.references,
                before_step=self.saved.wait,
                ranks=self.ranks,
                code=self.code,
            )
            state.set_optimizer(settings)
            prefix, trainable = state.optimizer_prefix, policy.trainable
            for name, keys in saved.states(prefix.removesuffix("/")).items():
                if (parameter := trainable.get(name)) is not None:
                    entries = {key: saved.read_part(f"{prefix}{key}.{name}", parameter) for key in keys}
                    state.optimizer.state[parameter] = entries
        return state

    @property
    def references(self) -> ReferenceWeights:
        return ReferenceWeights(lambda: self._initial, self.saved.latest, self.load_version)

    @functools.cached_property
    def _initial(self) -> nn.Module:
        """The weights that training started from, possibly in an earlier process."""
        if self.origin.step == 0:
            return self.loaded.module
        loaded, dtype = self.loaded, str(self.loaded.dtype).removeprefix("torch.")
        return load_model(self.origin.started_from, str(loaded.device), dtype, loaded.quantization).module
