"""Training by several ranks under torchrun gives what one process gives, and survives the loss of a rank.

On two CPU cores with gloo, in float32.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from factories import digits_project, read_lines
from fake_vllm import sampling
from processes import TESTS, wait_until
from real_model import real_model
from safetensors.torch import load_file
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from insitu.backend.inference.sampler import GenerationRequest, SamplingParams
from insitu.backend.learner.batches import Row
from insitu.backend.learner.jobs import TrainingQueue
from insitu.backend.learner.learner import Learner, Learners, TrainedVersion
from insitu.backend.model import LoadedModel, load_model
from insitu.errors import BackendError, JobFailed
from insitu.integrations.torchrun.group import RankGroup
from insitu.schemas.backend_processes import LearnerOptions
from insitu.schemas.lora import LoRASettings
from insitu.schemas.training_jobs import TrainingSettings

LORA = LoRASettings(rank=4, alpha=8)
JOBS, TOLERANCE = 3, 1e-6
LOSSES: dict[str, dict[str, Any]] = {
    f"{objective}-{level}-{mode}": {
        "objective": objective,
        "importance_sampling_level": level,
        "loss_agg_mode": mode,
        "loss_scale_factor": 50.0 if mode == "constant" else None,
    }
    for objective in ("clip", "cispo")
    for level in ("token", "sequence")
    for mode in ("token", "sequence", "constant")
}
PREFERENCES: dict[str, dict[str, Any]] = {
    f"{kind}-{'mean' if average else 'sum'}": {"method": "dpo", "dpo": {"loss_type": kind, "average_logprobs": average}}
    for kind in ("sigmoid", "ipo", "hinge", "robust")
    for average in (False, True)
}
CASES: dict[str, dict[str, Any]] = {
    **LOSSES,
    "rollout": {"old_logprobs": "rollout", "clip_low": 0.1},
    "truncated": {"truncated_importance": 1.5, "dual_clip": 3.0},
    "masked": {"token_mask": [0.99, 1.01], "sequence_mask": [0.999, 1.001]},
    "kl-k1": {"kl": {"beta": 0.1, "estimator": "k1", "in_reward": True}},
    "kl-k3": {"kl": {"beta": 0.1}},
    "kl-k2": {"kl": {"beta": 0.1, "estimator": "k2"}},
    **PREFERENCES,
    "dpo-job_start": {
        "method": "dpo",
        "dpo": {"reference": "job_start", "sft_loss_weight": 0.5, "label_smoothing": 0.1},
    },
    "kto": {"method": "kto", "kto": {"undesirable_weight": 0.5}},
    "kto-job_start": {"method": "kto", "kto": {"reference": "job_start"}},
    "sft": {"method": "sft"},
    "recomputed": {"gradient_checkpointing": True},
}
IN_STEPS = {"num_iterations": 2, "mini_batch_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(save_tiny_model(tmp_path_factory.mktemp("model"))), "cpu")


def rows_of(job: int, method: str = "grpo", few: bool = False) -> list[Row]:
    """Rows of very unequal lengths: one has more tokens than all the others. `few`: only that one.

    It is shorter for methods that sum over a row: the sum of many float32 log-probabilities is not exact to 1e-6.
    """
    rng = np.random.default_rng(job)
    longest = 60 if method in ("dpo", "kto") else 200
    rows = []
    for index in range(2 if method in ("dpo", "kto") else 1 if few else 10):
        rows += [_row(rng, longest if index == 0 else int(rng.integers(6, 14)), method, index, side) for side in (0, 1)]
    return rows if not few or method in ("dpo", "kto") else rows[:1]


def _row(rng: Any, length: int, method: str, index: int, side: int) -> Row:
    tokens = rng.integers(1, 300, length).astype(np.int32)
    positions = np.sort(rng.choice(np.arange(2, length), max(1, length // 3), replace=False))
    count, pair = len(positions), f"p{index}" if method == "dpo" else ""
    logprobs, weights = rng.normal(-3, 0.3, count).astype(np.float32), rng.normal(0, 1, count).astype(np.float32)
    preferred = side == 0 if method in ("dpo", "kto") else None
    return Row(
        *(tokens, positions, logprobs, weights),
        *(f"e{index}-{side}" if method == "kto" else f"e{index}", pair, preferred),
        temperature=1.5 if method == "grpo" and side else 1.0,
    )


def run(learner: Learner, job: int, **settings: Any) -> TrainedVersion:
    few = settings.pop("few", False)
    of_job = TrainingSettings(**{"learning_rate": 1e-4, "micro_batch_tokens": 64} | settings)
    steps = learner.run(of_job, rows_of(job, of_job.method, few), f"job-{job}", f"key-{job}")
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


@pytest.fixture
def groups(model: LoadedModel, tmp_path: Path) -> Iterator[list[RankGroup]]:
    made: list[RankGroup] = []
    yield made
    for group in made:
        group.close()


def ranked(
    model: LoadedModel, folder: Path, groups: list[RankGroup], processes: int = 2, strategy: Any = "auto"
) -> Learner:
    groups.append(RankGroup(LearnerOptions(processes=processes, strategy=strategy), model, folder))
    learner = Learner(model, folder, group=groups[-1])
    learner.resume()
    return learner


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state."""
    return {f"{f.name}/{k}": v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def shared_group(request: pytest.FixtureRequest, model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A group that trains the policies of many tests."""
    folder = tmp_path_factory.mktemp("ranks")
    group = RankGroup(LearnerOptions(processes=2), model, folder)
    yield request.param, group
    group.close()
    assert f'"strategy": "{request.param}"' in (folder / "learner/order.json").read_text()


@pytest.mark.parametrize("steps", [{}, IN_STEPS], ids=["one step", "two passes"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_train_as_one_process(
    model: LoadedModel, tmp_path: Path, shared_group: tuple[str, RankGroup], case: dict[str, Any], steps: dict[str, Any]
) -> None:
    """In the second job, one rank has all rows."""
    strategy, group = shared_group
    settings = case | steps | ({"lora": LORA} if strategy == "ddp" else {})
    alone, together = Learner(model, tmp_path / "alone"), Learner(model, tmp_path / "ranks", group=group)
    for job in range(JOBS):
        expected, got = (run(learner, job, few=job == 1, **settings) for learner in (alone, together))
        assert got.metrics.keys() == expected.metrics.keys()
        for name in ("loss", "grad_norm", "entropy"):
            assert got.metrics[name] == pytest.approx(expected.metrics[name], abs=TOLERANCE, rel=TOLERANCE), name
        assert difference(saved(got.checkpoint), saved(expected.checkpoint)) < TOLERANCE
        ours, theirs = (dict(v.module.named_parameters()) for v in (got, expected) if v.module is not None)
        assert difference(ours, theirs) < TOLERANCE


def test_ranks_train_adapters_of_a_real_model(tmp_path: Path, groups: list[RankGroup]) -> None:
    """Matrices of this size are summed in another order by ranks: weights are compared beside what was learned."""
    model = load_model(str(real_model()), "cpu")
    alone, together = Learner(model, tmp_path / "alone"), ranked(model, tmp_path / "ranks", groups)
    expected, got = (run(learner, 0, lora=LORA) for learner in (alone, together))
    for name in ("loss", "grad_norm"):
        assert got.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4, abs=1e-6), name
    learned, ours = (
        torch.cat([value.flatten() for name, value in sorted(saved(version.checkpoint).items()) if "lora_B" in name])
        for version in (expected, got)
    )
    assert learned.norm() > 0
    assert (ours - learned).norm() < 1e-2 * learned.norm()


def test_a_rank_without_rows(model: LoadedModel, tmp_path: Path, groups: list[RankGroup]) -> None:
    alone, together = Learner(model, tmp_path / "alone"), ranked(model, tmp_path / "ranks", groups)
    expected, got = run(alone, 0, few=True), run(together, 0, few=True)
    assert got.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=TOLERANCE)
    assert difference(saved(got.checkpoint), saved(expected.checkpoint)) < TOLERANCE


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_training_continues_with_another_number_of_ranks(
    model: LoadedModel, tmp_path: Path, groups: list[RankGroup], strategy: str
) -> None:
    """Two ranks, then one process, then three ranks; the checkpoint loads in transformers."""
    settings = {"lora": LORA} if strategy == "ddp" else {}
    alone = Learner(model, tmp_path / "alone")
    expected = [run(alone, job, **settings) for job in range(JOBS)][-1]
    run(ranked(model, tmp_path / "ranks", groups), 0, **settings)
    single = Learner(model, tmp_path / "ranks")
    single.resume()
    run(single, 1, **settings)
    got = run(ranked(model, tmp_path / "ranks", groups, processes=3), 2, **settings)
    assert got.version == JOBS
    assert difference(saved(got.checkpoint), saved(expected.checkpoint)) < TOLERANCE
    if strategy == "fsdp":
        loaded = AutoModelForCausalLM.from_pretrained(got.checkpoint)
        assert got.module is not None
        assert difference(dict(loaded.named_parameters()), dict(got.module.named_parameters())) == 0


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_fails_its_job_which_can_be_sent_again(
    model: LoadedModel, tmp_path: Path, groups: list[RankGroup], victim: int
) -> None:
    settings: dict[str, Any] = {"num_iterations": 4, "mini_batch_size": 2}
    alone = Learner(model, tmp_path / "alone")
    expected = [run(alone, job, **settings) for job in range(2)][-1]
    together = ranked(model, tmp_path / "ranks", groups)
    run(together, 0, **settings)
    of_job = TrainingSettings(learning_rate=1e-4, micro_batch_tokens=64, **settings)
    steps = together.run(of_job, rows_of(1), "job-1", "key-1")
    wait_until(lambda: (progress := next(steps)) is not None and progress.percent > 0)
    os.kill(rank_processes(tmp_path / "ranks/learner/order.json")[victim], signal.SIGKILL)
    with pytest.raises(JobFailed, match=rf"rank {victim} of 2 was ended by SIGKILL") as raised:
        for _ in steps:
            pass
    assert "the weights from before the job were restored" in str(raised.value)
    assert together.version == 1
    got = run(together, 1, **settings)
    assert difference(saved(got.checkpoint), saved(expected.checkpoint)) < TOLERANCE


def test_a_rank_that_is_stopped_fails_its_job_which_can_be_sent_again(
    model: LoadedModel, tmp_path: Path, groups: list[RankGroup]
) -> None:
    """Rank 0, which talks to the backend; the backend samples on meanwhile."""
    settings: dict[str, Any] = {"num_iterations": 4, "mini_batch_size": 2}
    together = ranked(model, tmp_path / "ranks", groups)
    of_job = TrainingSettings(learning_rate=1e-4, micro_batch_tokens=64, **settings)
    steps = together.run(of_job, rows_of(0), "job-0", "key-0")
    wait_until(lambda: (progress := next(steps)) is not None and progress.percent > 0)
    ranks = rank_processes(tmp_path / "ranks/learner/order.json")
    os.kill(ranks[0], signal.SIGSTOP)
    start, longest, problem = time.monotonic(), 0.0, None
    while problem is None:
        before = time.monotonic()
        try:
            next(steps)
        except JobFailed as error:
            problem = str(error)
        else:
            longest = max(longest, time.monotonic() - before)
    assert 50 < time.monotonic() - start < 90
    assert longest < 5
    assert re.search(rf"rank 0 of 2 \(process {ranks[0]} on .+\) has been silent for 60 s: ", problem)
    assert "the weights from before the job were restored" in problem
    wait_until(lambda: not any(map(psutil.pid_exists, ranks.values())))
    assert run(together, 0, **settings).version == 1


def test_ranks_wait_for_a_job_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    """Torch's limit is 10 minutes for GPUs and 30 for CPUs, and an epoch may take hours to collect; here it is 10 s."""
    script = tmp_path / "ranks.py"
    script.write_text(
        "import datetime, time, torch\n"
        "from insitu.integrations.torchrun.rank import ProcessGroup\n"
        "torch.distributed.init_process_group('gloo', timeout=datetime.timedelta(seconds=10))\n"
        "ranks = ProcessGroup(torch.device('cpu'), shards_weights=False)\n"
        "job = ranks.on_first(lambda: time.sleep(15) or 'a job')\n"
        "print(f'{ranks.index} {job}\\n', end='', flush=True)\n"
        "ranks.close()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "0 a job", "1 a job"]


async def test_ranks_train_all_weights_and_vllm_samples(
    model: LoadedModel, tmp_path: Path, groups: list[RankGroup]
) -> None:
    """The server reads the checkpoint of the ranks, and its log-probabilities are those of one process's weights."""
    groups.append(RankGroup(LearnerOptions(processes=2), model, tmp_path / "ranks"))
    learner = Learner(model, tmp_path / "ranks", group=groups[0], served_here=False)
    alone = Learner(model, tmp_path / "alone")
    request = GenerationRequest([1, 2, 3], SamplingParams(seed=0, max_tokens=8, temperature=0.0, ignore_eos=True))
    async with sampling(model, tmp_path) as parts:
        parts.folder_of = lambda weights: learner.folder(weights.version) if weights.version else Path(model.source)
        parts.load_version = lambda weights: learner.load_version(weights.version)
        parts.vllm.reads_weights = True
        queue = TrainingQueue(learner, parts.compute, parts.sampler, tmp_path / "ranks")
        for number in (1, 2):
            job = queue.submit(
                f"run/{number}", TrainingSettings(learning_rate=0.01, micro_batch_tokens=64), rows_of(number)
            )
            assert job.task is not None
            await job.task
            assert (job.state.status, job.state.policy_version) == ("completed", number), job.state.message
            (output,) = await parts.sampler.complete([request])
            assert output.version == number
            version = run(alone, number, learning_rate=0.01)
            assert version.module is not None
            ids = torch.tensor([[1, 2, 3, *(token.id for token in output.tokens)]])
            logprobs = torch.log_softmax(version.module(input_ids=ids).logits[0, 2:-1].float(), -1)
            expected = logprobs.gather(-1, ids[0, 3:, None])[:, 0].tolist()
            assert [token.logprob for token in output.tokens] == pytest.approx(expected, abs=1e-4)


def rank_processes(order: Path) -> dict[int, int]:
    """The process ids of the ranks that have read a file."""
    found = [p for p in psutil.process_iter(["cmdline", "environ"]) if str(order) in (p.info["cmdline"] or ())]
    return {int(p.info["environ"]["RANK"]): p.pid for p in found if "RANK" in (p.info["environ"] or {})}


def test_ranks_on_several_machines(
    model: LoadedModel, tmp_path: Path, groups: list[RankGroup], caplog: pytest.LogCaptureFixture
) -> None:
    """The second machine is this one; what it runs is the logged command, in the loop of the guide."""
    settings: dict[str, Any] = {"num_iterations": 4, "mini_batch_size": 2}
    alone = Learner(model, tmp_path / "alone")
    expected = [run(alone, job, **settings) for job in range(2)]
    options = LearnerOptions(processes=1, nodes=2, rendezvous=f"127.0.0.1:{free_port()}")
    groups.append(RankGroup(options, model, tmp_path / "ranks"))
    together = Learner(model, tmp_path / "ranks", group=groups[0])
    of_job = TrainingSettings(learning_rate=1e-4, micro_batch_tokens=64, **settings)
    steps = together.run(of_job, rows_of(0), "job-0", "key-0")
    wait_until(lambda: next(steps) is None and "training waits for machine 1 of 1; run there: " in caplog.text)
    command = caplog.text.splitlines()[-1].split("run there: ")[1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    other = subprocess.Popen(["bash", "-c", f"until {command}; do sleep 1; done"], env=os.environ | {"PATH": path})
    try:
        wait_until(lambda: (progress := next(steps)) is not None and progress.percent > 0)
        os.kill(rank_processes(tmp_path / "ranks/learner/order.json")[1], signal.SIGKILL)
        with pytest.raises(JobFailed, match="the weights from before the job were restored"):
            for _ in steps:
                pass
        assert together.version == 0
        for job in range(2):
            got = run(together, job, **settings)
            assert difference(saved(got.checkpoint), saved(expected[job].checkpoint)) < TOLERANCE
        groups[0].close()
        assert other.wait(30) == 0
    finally:
        other.kill()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def test_ranks_train_the_version_that_the_backend_has(
    model: LoadedModel, tmp_path: Path, groups: list[RankGroup]
) -> None:
    """Also if it could not read the weights of the last job, which is sent again, and for a new policy of a name."""
    alone = Learner(model, tmp_path / "alone")
    expected = [run(alone, job) for job in range(2)]
    together = ranked(model, tmp_path / "ranks", groups)

    class DamagedDisk:
        def train(self, folder: Path, *job: Any) -> Any:
            done = yield from groups[0].train(folder, *job)
            (folder / "checkpoints/step_000001/model.safetensors").write_bytes(b"")
            return done

        def close(self) -> None: ...

    together.group = DamagedDisk()
    with pytest.raises(BackendError):
        run(together, 0)
    together.group = groups[0]
    assert (together.version, together.saved.folder_of(1).exists()) == (0, False)
    for job in range(2):
        assert difference(saved(run(together, job).checkpoint), saved(expected[job].checkpoint)) < TOLERANCE
    learners = Learners(together)
    for _ in range(2):
        policy = learners.open("agent", tmp_path / "agent")
        assert difference(saved(run(policy, 0).checkpoint), saved(expected[0].checkpoint)) < TOLERANCE
        learners.close("agent")
        shutil.rmtree(tmp_path / "agent")


def test_a_failed_job_says_why_and_the_next_one_runs(
    model: LoadedModel, tmp_path: Path, groups: list[RankGroup]
) -> None:
    together = ranked(model, tmp_path / "ranks", groups)
    rows = rows_of(0)
    rows[3].advantages[:] = np.inf
    with pytest.raises(JobFailed, match=r"the loss is .*; the weights from before the job were restored"):
        for _ in together.run(TrainingSettings(), rows):
            pass
    assert run(together, 0).version == 1


def test_adapters_are_not_sharded(model: LoadedModel, tmp_path: Path, groups: list[RankGroup]) -> None:
    learner = ranked(model, tmp_path, groups, strategy="fsdp")
    with pytest.raises(
        JobFailed, match=r"learner\.strategy is fsdp, but LoRA adapters are trained; allowed: auto, ddp"
    ):
        run(learner, 0, lora=LORA)


def finetune(folder: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "insitu", "finetune", "--config_file", "config.yml", *options]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)  # type: ignore[call-overload]


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_with_two_processes_ends_as_one_with_one(tmp_path: Path, lora: bool) -> None:
    digits_project(tmp_path, rows=6)
    slow = ("-o", "trainer_adapters.backend.training.learning_rate", "1e-4")
    adapters = ("-o", "trainer_adapters.backend.training.lora", '{"rank": 4}') if lora else ()
    metrics = []
    for processes in ("1", "2"):
        options = ("-o", "trainer_adapters.backend.learner.processes", processes, *slow, *adapters)
        done = finetune(tmp_path, *options)
        _, err = done.communicate()
        assert done.returncode == 0, err
        metrics.append(read_lines(tmp_path / "run/training_metrics.jsonl"))
    for one, two in zip(*metrics, strict=True):
        assert one.keys() == two.keys()
        for name in ("loss", "grad_norm", "kl", "avg_reward", "logprob_gap"):
            assert two[name] == pytest.approx(one[name], abs=1e-5), name


@contextlib.contextmanager
def training_by_two(folder: Path) -> Iterator[tuple["subprocess.Popen[str]", dict[int, int]]]:
    """A run that has trained its first epoch, and the process ids of its ranks."""
    digits_project(folder, rows=6)
    options = ("-o", "trainer_adapters.backend.learner.processes", "2", "-o", "finetuning.num_epochs", "500")
    with finetune(folder, *options) as process:
        wait_until((folder / "run/training_metrics.jsonl").exists)
        ranks = rank_processes(folder / "run/backend/learner/order.json")
        assert len(ranks) == 2
        try:
            yield process, ranks
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("end", "stopped"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 0), (signal.SIGKILL, None), (signal.SIGKILL, 0), (signal.SIGKILL, 1)],
)
def test_no_rank_outlives_its_run(tmp_path: Path, end: signal.Signals, stopped: int | None) -> None:
    with training_by_two(tmp_path) as (process, ranks):
        if stopped is not None:
            os.kill(ranks[stopped], signal.SIGSTOP)
        process.send_signal(end)
        process.wait(60)
    deadline = time.monotonic() + 20
    wait_until(lambda: not any(map(psutil.pid_exists, ranks.values())) or time.monotonic() > deadline)
    assert not any(map(psutil.pid_exists, ranks.values()))


def test_a_run_names_the_rank_that_is_stopped(tmp_path: Path) -> None:
    with training_by_two(tmp_path) as (process, ranks):
        os.kill(ranks[1], signal.SIGSTOP)
        _, err = process.communicate(timeout=180)
        assert process.returncode == 1
        assert f"rank 1 of 2 (process {ranks[1]} on " in err
        assert "has been silent for 60 s" in err
        wait_until(lambda: not any(map(psutil.pid_exists, ranks.values())))


@pytest.mark.parametrize(
    ("learner", "problem"),
    [
        ('{"processes": 2, "gpus": [0]}', "gpus is [0]; 2 processes need as many different ones"),
        ('{"nodes": 2}', "nodes is 2 and rendezvous None; set both, or none on one machine"),
        ('{"rendezvous": "a:1"}', "nodes is 1 and rendezvous a:1; set both, or none on one machine"),
        ('{"nodes": 2, "rendezvous": "node0"}', "rendezvous is 'node0'; it must be HOST:PORT, such as node0:29400"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, learner: str, problem: str) -> None:
    digits_project(tmp_path)
    done = finetune(tmp_path, "-o", "trainer_adapters.backend.learner", learner)
    _, err = done.communicate()
    assert done.returncode == 2
    assert f"trainer_adapters.backend.learner: {problem}" in err
