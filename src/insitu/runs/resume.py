"""Continues a run whose process has ended: from which point, with which episodes, and whether it still is the same."""

import asyncio
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from insitu.builder import Builder
from insitu.config import Config
from insitu.config.resolved import code_digests, code_of, differences, is_harmless, leaves, nested, resolved_config
from insitu.disk.files import delete_drafts, writing
from insitu.errors import BackendError, ConfigError, InsituError, describe_error
from insitu.runs.files import EPISODES, JOURNAL, PROGRESS, PROGRESS_HISTORY
from insitu.runs.reader import RunReader
from insitu.runs.records import EpochState, Phase, RunProgress, RunStatus, journal_record
from insitu.runs.store import RunStore, set_aside
from insitu.schemas.episodes import Episode
from insitu.schemas.finetuning import PolicyEndpoint, TrainingJobStatus
from insitu.schemas.kinds import EVALUATOR

logger = logging.getLogger(__name__)

_MODEL = "trainer_adapters.*.model"
_BY_CONTENT = {
    "dataset": "the dataset",
    "held_out": "the held-out dataset",
    "held_out_scoring": "an evaluator in",
    "starting_model": "the starting model",
}
"""What run.json has with its digest, and what messages call it."""
_LISTED = 10


def find_run(folder: Path, key: str) -> RunProgress | None:
    """The progress of the run in `folder`; None if none has begun there.

    Raises ConfigError naming `key` if there is a run that cannot continue.
    """
    progress = RunReader(folder).progress()
    if progress is None and (folder / EPISODES).exists():
        raise ConfigError(
            f"{key}: the run in {folder} has no {PROGRESS}: a trainer without epochs recorded it; it cannot "
            "continue from an epoch"
        )
    return progress


def check_same_run(folder: Path, config: Config, origin: Mapping[str, Any], *, force: bool) -> list[str]:
    """Compares the file with the one that the run in `folder` started with; returns a sentence per harmless change.

    `origin` has the inputs that are compared by content, as run.json names them. Raises ConfigError for changes after
    which the run's earlier epochs would say nothing about its later ones, unless `force` is given; for another model
    even then, as a run continues with its own weights.
    """
    recorded = RunReader(folder).settings(required=True)
    settings = recorded.get("config") or {}
    recorded_keys = dict(leaves(settings))
    harmless: list[str] = []
    serious: list[str] = []
    for key, (before, now) in differences(settings, resolved_config(config)).items():
        if key not in recorded_keys and nested(config.data, key) is None:  # a key that is new, and is not set
            continue
        changes = harmless if is_harmless(config, key) else serious
        changes.append(f"{key} was {before!r:.100} and is {now!r:.100}")
        if force and fnmatch(key, _MODEL):
            raise ConfigError(
                f"--force: {changes[-1]}, but the run in {folder} continues with the weights that it has. Set the "
                "model as it was, or start another run"
            )
    for name, what in _BY_CONTENT.items():
        before, now = (of.get(name) or {} for of in (recorded, origin))
        if _content(before) != _content(now) and (name == "dataset" or (before and now)):
            earlier, place = (of.get("file", of.get("source")) or "none" for of in (before, now))
            # Those of calls from Python are in temporary folders.
            is_other = name in ("dataset", "held_out") and Path(earlier).name != Path(place).name
            serious.append(f"{what} was {earlier} and is {place}" if is_other else f"{what} {place} has changed")
    code, now = recorded.get("code") or {}, code_of(config)
    for key in (key for key, digest in code.items() if now.get(key, digest) != digest):
        changes = serious if key.startswith(EVALUATOR.section) else harmless
        changes.append(f"the code of {key} has changed")
    if serious and not force:
        listed = "; ".join(serious[:_LISTED]) + (f"; and {len(serious) - _LISTED} more" * (len(serious) > _LISTED))
        raise ConfigError(
            f"--resume: the run in {folder} was started with other settings: {listed}. Set them as they were, or give "
            "--force to continue with these"
        )
    return harmless + serious


def _content(record: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies the content of a dataset or model, wherever it is."""
    return {key: value for key, value in record.items() if key != "file"}


def _copy_back(source: str, origin: Mapping[str, Any], folder: Path, moved: Path) -> None:
    """Copies the YAML file and the rows of a run, where they were moved with an earlier one, back into its folder."""
    records = (origin.get(name) or {} for name in ("dataset", "held_out"))
    for file in (source, *(record["file"] for record in records if "file" in record)):
        path = Path(file).resolve()
        if path.is_relative_to(folder) and (place := moved / path.relative_to(folder)).is_file():
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(place, path)


def _moved(folder: Path, moved: Path) -> str:
    """What to report of an earlier run in `folder` that was moved."""
    place, earlier = moved if folder.is_symlink() else folder.with_name(moved.name), None
    with suppress(ConfigError):  # its file cannot be used
        earlier = RunReader(moved).progress()
    if earlier is None or earlier.status == "completed":
        return f"moved the earlier run in {folder} to {place}"
    return f"moved the earlier run in {folder}, which was not complete, to {place}: --resume {place} continues it"


class ResumableRun:
    """A run as it is on disk. `progress` is the point from which it continues; every change of it is written."""

    def __init__(self, run_id: str) -> None:
        self.progress = RunProgress(run_id=run_id)
        self.continues = False
        """Whether an earlier process started this run."""
        self._store: RunStore | None = None
        self._builder: Builder | None = None
        self._forced = False
        self.jobs: list[TrainingJobStatus] = []
        """The last state of the job of each epoch that trained."""
        self.rewards: list[dict[str, Any]] = []
        """`reward_history.json`."""
        self._finished: list[Episode] = []
        """The episodes that an earlier process has run since that point."""
        self._versions: dict[int, int | None] = {}
        self._resumed: dict[str, Any] = {}
        """The event of a run that continues."""

    @property
    def next_epoch(self) -> int:
        return self.progress.epoch + 1

    @property
    def store(self) -> RunStore:
        if self._store is None:
            raise InsituError("the trainer has not been initialized")
        return self._store

    def open_folder(self, folder: Path, builder: Builder, origin: Mapping[str, Any]) -> list[str]:
        """Opens the store of the run in `folder` with `--resume`, of a new run otherwise; returns what to report.

        A new run moves an earlier one aside. Raises ConfigError if the run cannot continue with this file.
        """
        self._builder, request, config = builder, builder.request, builder.config
        progress = find_run(folder, "--resume") if request is not None and request.resume else None
        if request is None or progress is None:
            if request is not None and isinstance(request.resume, Path):
                raise ConfigError(f"--resume: {folder} holds no run that can continue")
            moved = set_aside(folder)
            if moved is not None:
                builder.moved[folder.resolve()] = moved  # the paths of the file follow it
            self._store = RunStore(folder)
            if moved is None:
                return []
            _copy_back(config.source, origin, folder.resolve(), moved)
            return [_moved(folder, moved)]
        self._forced = request.force
        changes = check_same_run(folder, config, origin, force=request.force)
        self._store = RunStore(folder)
        delete_drafts(folder)
        files = RunReader(folder)
        progress = files.progress() or progress  # again, as an earlier process may have ended before the lock
        self._store.cut_to(progress.sizes)
        self._resumed = {"epoch": progress.epoch, "epochs": config.finetuning.num_epochs, "changes": changes}
        self.progress = progress.model_copy(update={"status": "running", "error": None})
        self.continues = True
        states = files.history(progress)
        self._versions = {epoch: state.policy_version for epoch, state in states.items()}
        self.jobs = [state.job for _, state in sorted(states.items()) if state.job is not None]
        self.rewards = files.rewards(progress.epoch)
        self._finished = journal = files.journal(self.next_epoch)
        if progress.status == "failed" and not self.may_be_submitted(self.next_epoch):
            # An epoch is run again if none of its episodes can be trained: that may be why the run has failed.
            has_trained = any(each.reason is None for each in journal if each.key.epoch == self.next_epoch)
            self._finished = [each for each in journal if has_trained or each.key.epoch > self.next_epoch]
        if "token_ids" in config.finetuning.redact and not self.may_be_submitted(self.next_epoch):
            self._finished = []  # recorded before --force: the others of their epoch would not be
        if not self._finished or len(self._finished) < len(journal):
            # Else a kill while they are written again would lose what a submitted job needs.
            self._store.clear(JOURNAL)
            if self._finished:  # of later epochs
                self._store.append(JOURNAL, map(journal_record, self._finished))
        epochs_of = sorted({episode.key.epoch for episode in self._finished})
        named = f"epoch {' and '.join(map(str, epochs_of))}"
        more = f" and {len(self._finished)} episodes of {named}" if self._finished else ""
        notes = [f"run {progress.run_id} continues after epoch {progress.epoch}{more}"]
        return notes + [f"changed since the run was started: {change}" for change in changes]

    def changed_code(self, settings: Mapping[str, Any]) -> list[str]:
        """Compares the digests of the Python code in `settings` with those recorded; returns a sentence per change.

        Raises ConfigError for changes without `--force`.
        """
        if not self.continues:
            return []
        recorded = code_digests(RunReader(self.store.folder).settings(required=True))
        changed = [key for key, digest in code_digests(settings).items() if recorded.get(key, digest) != digest]
        if changed and not self._forced:
            raise ConfigError(
                f"--resume: the run in {self.store.folder} was started with other code: that of {', '.join(changed)} "
                "has changed. Restore it, or give --force to continue with this"
            )
        return [f"changed since the run was started: the code of {key}" for key in changed]

    def finished(self, epoch: int) -> list[Episode]:
        """The episodes of an epoch that need not be run again."""
        return [episode for episode in self._finished if episode.key.epoch == epoch]

    def version_after(self, epoch: int) -> int | None:
        """The version that was served after a complete epoch; 0: before the first, after a warm-up."""
        return self._versions[epoch]

    def may_be_submitted(self, epoch: int) -> bool:
        """Whether an earlier process may have submitted the job of an epoch."""
        return self.progress.submitted_epoch == epoch

    def check_version(self, version: int | None, *, warms_up: bool) -> None:
        """Raises BackendError unless the backend serves the weights the run had, or those of the job it then trained.

        That job is the warm-up, or that of the next epoch if it may have been submitted.
        """
        expected, epoch = self.progress.policy_version, self.next_epoch
        is_submitted = self.may_be_submitted(epoch)
        own_backend = RunReader(self.store.folder).own_backend
        job_is_lost = own_backend and version == expected  # it ended with the process
        if is_submitted and not self._finished and not job_is_lost:
            fork = f"; `insitu runs fork --epoch {epoch - 1}` makes a run that repeats the epoch" if own_backend else ""
            redacts = self._builder is not None and "token_ids" in self._builder.config.finetuning.redact
            why = "finetuning.redact leaves out token_ids" if redacts else "the trajectory builder does not report them"
            raise BackendError(
                f"--resume: the job of epoch {epoch} of {self.store.folder} was submitted, but its episodes were not "
                f"recorded, as {why}: the run cannot continue with them{fork}"
            )
        if version is None or expected is None or version == expected:
            return
        trains = is_submitted or (warms_up and not self.progress.warmed_up)
        if version != expected + 1 or not trains:
            why = "it has lost weights of this run, or another run has trained it"
            if own_backend:
                why = "checkpoints of this run are missing; `insitu runs fork --epoch N` makes a run from another one"
            raise BackendError(
                f"--resume: the run in {self.store.folder} was at policy version {expected}, but the backend serves "
                f"version {version}: {why}"
            )

    def served_before(self, epoch: int, endpoint: PolicyEndpoint | None) -> PolicyEndpoint | None:
        """The endpoint at the version that the next epoch trains: an earlier process may even have trained it."""
        if endpoint is None or not self.finished(epoch):
            return endpoint
        version = self.progress.policy_version
        return replace(endpoint, version=version, weights=endpoint.weights if version == endpoint.version else None)

    def check_versions(self, staleness: int) -> None:
        """Raises ConfigError if weights from which the next epochs are sampled have been deleted."""
        reader = RunReader(self.store.folder)
        sampled = reader.sampled_versions(reader.history(self.progress), self.progress.epoch, staleness)
        missing = sorted(sampled - {0} - reader.versions())
        if reader.own_backend and missing:
            raise ConfigError(
                f"--resume: staleness is {staleness}, so the epochs after {self.progress.epoch} of {self.store.folder} "
                f"are sampled from earlier weights, of which version {missing[-1]} was deleted (see `keep` of the "
                "trainer adapter); set staleness as it was, or lower"
            )

    async def record_submission(self, epoch: int) -> bool:
        """Records that the epoch's job is about to be submitted; returns whether an earlier process may have done so.

        It trains `progress.policy_version`.
        """
        if self.may_be_submitted(self.next_epoch):
            return True
        self.progress = self.progress.model_copy(update={"submitted_epoch": epoch})
        await asyncio.to_thread(self.write_progress)
        return False

    def write_progress(self) -> None:
        self.store.write(PROGRESS, self.progress.model_dump(mode="json"))

    async def commit(
        self, *, job: TrainingJobStatus | None = None, journal: Iterable[Mapping[str, Any]] = (), **changes: Any
    ) -> None:
        """Makes this the point from which the run continues, after a job; `journal` is that of later epochs."""
        store = self.store
        reached = self.progress.model_copy(update={"sizes": store.sizes(), **changes})
        store.append(PROGRESS_HISTORY, [EpochState.of(reached, job).model_dump(mode="json")])
        await asyncio.to_thread(store.sync)
        self.progress = reached.model_copy(update={"sizes": store.sizes()})
        await asyncio.to_thread(self.write_progress)
        self._versions[reached.epoch] = reached.policy_version
        self.jobs += [job] if job is not None else []
        store.clear(JOURNAL)
        if later := [*journal]:
            store.append(JOURNAL, later)
        self._finished = [episode for episode in self._finished if episode.key.epoch > reached.epoch]

    def enter(self, phase: Phase) -> None:
        """Records how far a run with a single job is. Waits for nothing: the job is not watched yet."""
        self.progress = self.progress.model_copy(update={"phase": phase})
        self.write_progress()

    def unlock(self) -> None:
        if self._store is not None:
            self._store.close()

    def continue_run(self) -> None:
        """Records that the run goes on, once nothing has refused it."""
        self.store.record_event("resumed", **self._resumed)
        self.write_progress()

    @contextmanager
    def recorded_end(self) -> Iterator[None]:
        """Records how the body, which is the run, has ended; the point from which it continues stays the same."""
        with self.recorded_failure():
            yield
        self._end("completed")

    @contextmanager
    def recorded_failure(self, *passing: type[BaseException]) -> Iterator[None]:
        """Records how the body has failed, but not by the errors that pass."""
        try:
            yield
        except passing:
            raise
        except asyncio.CancelledError:
            lost = self._builder.lost if self._builder is not None else None
            self._end("interrupted" if lost is None else "failed", lost)
            raise
        except BaseException as error:  # recorded, then re-raised
            self._end("failed" if isinstance(error, Exception) else "interrupted", error)
            raise

    def _end(self, status: RunStatus, error: BaseException | None = None) -> None:
        message = None if error is None else describe_error(error)
        self.progress = self.progress.model_copy(update={"status": status, "error": message})
        event = partial(self.store.record_event, status, epoch=self.progress.epoch, error=message)
        for record in (self.write_progress, event):
            try:
                record()
            except InsituError as problem:  # must not mask what ended the run
                logger.error("%s", problem)
