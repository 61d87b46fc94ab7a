"""One epoch's collection: drives the trajectory builder, and records episodes and groups as they finish."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from insitu.builder import Builder
from insitu.errors import TrajectoryError
from insitu.interfaces import TrajectoryBuilder
from insitu.preferences.pairs import ALIKE
from insitu.schemas.episodes import Episode
from insitu.schemas.finetuning import PolicyEndpoint, TrajectoryCollection
from insitu.training.metrics import why_no_pairs
from insitu.training.progress import JOURNAL, journal_record
from insitu.training.report import Report, counts
from insitu.training.store import RunStore
from insitu.training.traffic import Leftovers, PolicyTraffic
from insitu.trajectories.builder import GroupRecord
from insitu.trajectories.recovery import recover_calls


@dataclass(frozen=True)
class EpochCollector:
    """`pairs`: what is collected are preference pairs. `may_be_empty`: an epoch without differences is no failure.

    `journaled`: finished episodes are recorded immediately, not with their group, so that a run can continue with them.
    """

    trajectory_builder: TrajectoryBuilder
    builder: Builder
    store: RunStore
    report: Report
    pairs: bool
    may_be_empty: bool
    journaled: bool

    async def collect(
        self, epoch: int, run_id: str, served: PolicyEndpoint | None, finished: Sequence[Episode] = ()
    ) -> tuple[TrajectoryCollection, Leftovers]:
        """Collects the episodes that are not among the `finished`. Raises TrajectoryError if none can be trained."""
        errors: Counter[str] = Counter()
        traffic = PolicyTraffic(self.builder, served)
        journal = {episode.key for episode in finished}

        def on_episode(episode: Episode) -> None:
            self.report.advance()
            traffic.add(episode)
            if self.journaled and episode.key not in journal:
                self.store.append(JOURNAL, [journal_record(episode)])

        def on_group(record: GroupRecord) -> None:
            self.store.append_group(record, epoch)
            errors.update(f"{e.reason}: {e.error}" for e in record.episodes if e.error is not None)

        self.report.begin(f"epoch {epoch}: collecting", self.trajectory_builder.episodes_per_epoch)
        try:
            await traffic.start()
            callbacks = {"on_episode": on_episode, "on_group": on_group, "finished": [*finished]}
            meta = {"epoch": epoch, "vocab_size": served.vocab_size if served is not None else None, **callbacks}
            await self.trajectory_builder.start_run(run_id, meta)
            collection = await self.trajectory_builder.finalize(run_id, meta)
        finally:
            self.report.end()
        leftovers, warning = await traffic.finish()
        if warning is not None:
            self.report.note(f"epoch {epoch}: {warning}")
        for error, count in errors.most_common(3):
            self.report.note(f"epoch {epoch}: {count} x {error}")
        self._check(epoch, collection, errors)
        groups = [[recover_calls(t) for t in group] for group in collection.trajectories]
        for number, group in enumerate(groups):
            for k, trajectory in enumerate(group):
                if trajectory.id is None:  # a plugin's builder may leave ids unset
                    group[k] = trajectory.model_copy(update={"id": f"{run_id}/{epoch}/group {number}/{k}"})
        return collection.model_copy(update={"epoch": epoch, "trajectories": groups}), leftovers

    def _check(self, epoch: int, collection: TrajectoryCollection, errors: Counter[str]) -> None:
        alike = self.may_be_empty and not ALIKE.isdisjoint(collection.dropped)
        if any(collection.trajectories) or alike:
            return
        first = [f"most often {error}" for error, _ in errors.most_common(1)]
        causes = first or (why_no_pairs(collection.dropped) if self.pairs else [])
        raise TrajectoryError(
            f"epoch {epoch}: no {'preference pair' if self.pairs else 'episode'} can be trained on; dropped: "
            + "; ".join([counts(collection.dropped), *causes])
            + f" (all of them: {self.store.folder / 'episodes.jsonl'})"
        )
