"""A plugin's adapter that gives `submit`, `find` and `status`: the rest of a job's life is the core's."""

import asyncio
from typing import Any

import pytest
from waiting import until

from insitu.collect.watchdog import Watchdog
from insitu.errors import BackendError, BackendUnavailable, JobFailed, JobLost, Stalled
from insitu.plugin_api import JobAdapter, TrainerAdapterConfig, TrainingJobRef, TrainingJobStatus, TrajectoryCollection
from insitu.schemas.finetuning import PolicyEndpoint
from insitu.training.jobs import check_completed, follow, job_warnings, new_version, submit_once, wait_for_job

REF = TrainingJobRef(run_id="r", backend="scripted", metadata={"job_id": "j-1"})
COLLECTION = TrajectoryCollection(trajectories=[], run_id="r", epoch=2)


class Scripted(JobAdapter):
    """An adapter whose job has the statuses of `script`, one per request: an error is raised, the last one stays."""

    poll_interval = 0.001
    max_status_failures = 3
    address = "http://scripted"

    def __init__(self, *script: str | Exception) -> None:
        super().__init__(TrainerAdapterConfig())
        self.script = [*script]
        self.submitted = 0
        self.searched: list[Any] = []
        self.known = False

    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        self.submitted += 1
        return REF

    async def find(self, run_id: str, epoch: int, version: int | None) -> TrainingJobRef | None:
        self.searched.append((run_id, epoch, version))
        return REF if self.known else None

    async def submit_again(self, ref: TrainingJobRef, error: JobLost) -> TrainingJobRef:
        return await self.submit(COLLECTION)

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        state = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(state, Exception):
            raise state
        return TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=state, metadata=ref.metadata)

    async def interrupted(self, ref: TrainingJobRef) -> TrainingJobStatus:
        return TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status="canceled")


async def test_a_job_is_polled_until_it_has_ended() -> None:
    adapter = Scripted("pending", "running", BackendUnavailable("503"), BackendUnavailable("503"), "running", "failed")
    status = await adapter.wait_until_complete(REF)
    with pytest.raises(JobFailed, match=r"^job j-1 ended as failed: no reason given$"):
        check_completed("job j-1", status)


async def test_it_gives_up_after_errors_in_a_row() -> None:
    adapter = Scripted("running", BackendUnavailable("503"))
    expected = r"job j-1: 3 status requests in a row failed .*; it continues at http://scripted; the last error: 503"
    with pytest.raises(BackendUnavailable, match=expected):
        await adapter.wait_until_complete(REF, 0.001)


async def test_a_lost_job_is_submitted_again_but_not_forever() -> None:
    adapter = Scripted("running", JobLost("gone"), "running", JobLost("gone"), "completed")
    assert (await adapter.wait_until_complete(REF)).status == "completed"
    assert adapter.submitted == 2
    adapter = Scripted(JobLost("gone"))
    with pytest.raises(JobLost, match="gone"):
        await adapter.wait_until_complete(REF)
    assert adapter.submitted == 2
    adapter = Scripted(*[JobLost("gone")] * 20, "completed")
    adapter.submits_again_for = 60.0  # from the first loss on
    assert (await adapter.wait_until_complete(REF)).status == "completed"
    assert adapter.submitted == 20
    adapter = Scripted(JobLost("gone"))
    adapter.submits_again_for = 0.05
    with pytest.raises(JobLost, match="gone"):
        await adapter.wait_until_complete(REF)
    assert adapter.submitted > 2


async def test_an_interruption_is_told_to_the_adapter_and_its_status_reported() -> None:
    reported: list[TrainingJobStatus] = []
    task = asyncio.create_task(follow(Scripted("running"), REF, 0.001, reported.append))
    await until(lambda: reported)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [reported[0].status, reported[-1].status] == ["running", "canceled"]


async def test_a_job_of_a_run_that_has_stalled_continues() -> None:
    reported: list[TrainingJobStatus] = []
    with pytest.raises(Stalled, match=r"waiting for training job j-1 .*; pending for"):
        await wait_for_job(Scripted("pending"), REF, Watchdog(None, 0.05), reported.append)
    assert [status.status for status in reported] == ["pending"]


async def test_what_an_earlier_process_has_submitted_is_searched_first() -> None:
    adapter = Scripted("running")
    await submit_once(adapter, COLLECTION, 1, resumed=False)
    assert (adapter.submitted, adapter.searched) == (1, [])
    await submit_once(adapter, COLLECTION, 1, resumed=True)
    assert (adapter.submitted, adapter.searched) == (2, [("r", 2, 1)])
    adapter.known = True
    assert await submit_once(adapter, COLLECTION, 1, resumed=True) == REF
    assert adapter.submitted == 2


@pytest.mark.parametrize(
    ("gap", "is_newest", "warned"), [(0.3, False, True), (0.1, False, False), (None, False, False)]
)
def test_a_learner_that_is_far_from_what_has_sampled_is_told(gap: float | None, is_newest: bool, warned: bool) -> None:
    status = TrainingJobStatus(run_id="r", backend="b", status="completed")
    warnings = job_warnings(status, gap, None, is_newest=is_newest)
    assert [text.partition(":")[2].partition(":")[0].strip() for text in warnings] == (
        ["logprob_gap is 0.3, above 0.2"] if warned else []
    )


@pytest.mark.parametrize(
    ("gap", "tolerance", "warned"), [(0.02, 0.01, True), (0.01, 0.01, False), (None, 0.01, False), (0.02, None, False)]
)
def test_a_learner_that_differs_from_the_sampler_is_told(
    gap: float | None, tolerance: float | None, warned: bool
) -> None:
    """By more than rounding, as far as that is known."""
    status = TrainingJobStatus(run_id="r", backend="b", status="completed")
    served = PolicyEndpoint(base_url="http://b/v1", model="m", api_key="k", logprob_tolerance=tolerance)
    said = "WARNING: logprob_gap is 0.02, above 0.01: the log-probabilities of the sampler differ from the learner's"
    assert [text.startswith(said) for text in job_warnings(status, gap, served)] == [True] * warned
    assert job_warnings(status, gap, None) == []


def test_a_job_after_which_the_backend_serves_what_it_served_before_is_an_error() -> None:
    served = PolicyEndpoint(base_url="http://b/v1", model="m", api_key="k", version=3)
    assert new_version(2, 2, served) == 3
    assert new_version(1, None, served) == 3
    assert new_version(1, None, None) is None
    assert new_version(2, 3, None) is None
    with pytest.raises(BackendError, match="epoch 2: the job completed, but the backend still serves policy version 3"):
        new_version(2, 3, served)
