"""DPO, KTO and SFT jobs against TRL's trainers, and the losses against Liger's, on random batches to 1e-5.

Loss, gradient of every parameter, and metrics, of a policy that has moved away from its reference.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss, LigerFusedLinearKTOLoss
from tiny_models import byte_tokenizer, save_tiny_model
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from insitu.backend.learner.batches import Row
from insitu.backend.learner.learner import Learner, TrainedVersion
from insitu.backend.learner.losses import dpo_loss, kto_loss
from insitu.backend.model import LoadedModel, load_model
from insitu.schemas.training_jobs import DPOSettings, KTOSettings, TrainingSettings

pytestmark = pytest.mark.filterwarnings("ignore")  # of the other libraries, on themselves
TOLERANCE = 1e-5
Ids = list[int]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(save_tiny_model(tmp_path_factory.mktemp("model") / "llama")), "cpu")


def completions(seed: int, count: int) -> list[tuple[Ids, Ids, Ids]]:
    """Prompts, sorted as the backend sorts those of a KTO step, with two completions each."""
    rng = np.random.default_rng(seed)
    draw = lambda low, high: rng.integers(0, 256, int(rng.integers(low, high))).tolist()  # noqa: E731
    drawn = [(draw(2, 40), draw(1, 12), draw(1, 12)) for _ in range(count)]
    return sorted(drawn, key=lambda each: np.array(each[0], np.int32).tobytes())


def make_row(prompt: Ids, completion: Ids, **fields: Any) -> Row:
    tokens = np.array(prompt + completion, np.int32)
    return Row(tokens, np.arange(len(prompt), len(tokens), dtype=np.int32), **fields)


def run_job(learner: Learner, rows: list[Row], **settings: Any) -> TrainedVersion:
    steps = learner.run(TrainingSettings(**settings), rows)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def moved_learner(loaded: LoadedModel, folder: Path) -> tuple[Learner, PreTrainedModel]:
    """A learner after its first job, and its weights as a model."""
    learner = Learner(loaded, folder)
    rows = [make_row(prompt, good) for prompt, good, _ in completions(99, 12)]
    checkpoint = run_job(learner, rows, method="sft", learning_rate=1e-2, num_iterations=5).checkpoint
    return learner, AutoModelForCausalLM.from_pretrained(checkpoint)


def gradients_of_job(learner: Learner, rows: list[Row], **settings: Any) -> tuple[dict[str, Any], dict]:
    """The metrics of a job of one step, and the gradients of that step."""
    assert learner._state is not None
    trainable, gradients = learner._state.policy.trainable, {}

    def keep(*_: Any) -> None:
        gradients.update((name, parameter.grad.clone()) for name, parameter in trainable.items())

    with register_optimizer_step_pre_hook(keep):  # its gradients are dropped after it
        result = run_job(learner, rows, learning_rate=0.0, max_grad_norm=1e9, micro_batch_tokens=120, **settings)
    return result.metrics, gradients


def compare(module: PreTrainedModel, loss: torch.Tensor, metrics: dict[str, Any], gradients: dict) -> None:
    """Gradients relative to the largest of all parameters, of which many are nearly 0."""
    module.zero_grad()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
    theirs = {name: parameter.grad for name, parameter in module.named_parameters()}
    largest = max(gradient.abs().max() for gradient in theirs.values())
    assert gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (gradients[name] - gradient).abs().max() < TOLERANCE * max(1, largest), name


def last_metrics(trainer: Any) -> dict[str, float]:
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


VARIANTS = {
    "sigmoid": ({"loss_type": "sigmoid"}, {}),
    "hinge": ({"loss_type": "hinge"}, {}),
    "robust": ({"loss_type": "robust", "label_smoothing": 0.2}, {}),
    "ipo": ({"loss_type": "ipo"}, {"average_logprobs": True}),
    "averaged": ({"loss_type": "sigmoid_norm"}, {"loss_type": "sigmoid", "average_logprobs": True}),
    "sft": (
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 0.3]},
        {"loss_type": "sigmoid", "preference_loss_weight": 0.5, "sft_loss_weight": 0.3},
    ),
}
"""The settings of TRL, and what insitu's differ in."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_dpo_is_that_of_trl(loaded: LoadedModel, tmp_path: Path, variant: str) -> None:
    theirs, different = VARIANTS[variant]
    learner, policy = moved_learner(loaded, tmp_path / "ours")
    batch = completions(1, 6)
    trainer = DPOTrainer(
        policy,
        AutoModelForCausalLM.from_pretrained(loaded.source),
        DPOConfig(output_dir=str(tmp_path / "trl"), beta=0.3, use_cpu=True, bf16=False, report_to="none", **theirs),
        train_dataset=Dataset.from_dict({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}),
        processing_class=byte_tokenizer(),
    )
    examples = [{"prompt_ids": p, "chosen_ids": good, "rejected_ids": bad} for p, good, bad in batch]
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(examples))

    rows = [
        make_row(prompt, completion, pair=str(number), preferred=preferred)
        for number, (prompt, good, bad) in enumerate(batch)
        for completion, preferred in ((good, True), (bad, False))
    ]
    ours = {"beta": 0.3, **{k: v for k, v in theirs.items() if k != "loss_weights"}, **different}
    metrics, gradients = gradients_of_job(learner, rows, method="dpo", dpo=ours)
    compare(trainer.model, loss, metrics, gradients)
    expected = last_metrics(trainer)
    names = ["rewards/accuracies", "entropy"]
    if not different.get("average_logprobs"):  # TRL's rewards are sums all the same
        names += ["rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected"]
        assert abs(expected["rewards/margins"]) > 0.01
    assert {name: metrics[name] for name in names} == pytest.approx(
        {name: expected[name] for name in names}, rel=1e-4, abs=TOLERANCE
    )


@pytest.mark.parametrize("seed", [2, 3])
def test_kto_is_that_of_trl(loaded: LoadedModel, tmp_path: Path, seed: int) -> None:
    learner, policy = moved_learner(loaded, tmp_path / "ours")
    rng = np.random.default_rng(seed)
    batch = [(prompt, completion, bool(rng.random() < 0.6)) for prompt, completion, _ in completions(seed, 8)]
    weights = {"beta": 0.4, "desirable_weight": 1.2, "undesirable_weight": 0.7}
    trainer = KTOTrainer(
        policy,
        AutoModelForCausalLM.from_pretrained(loaded.source),
        KTOConfig(
            output_dir=str(tmp_path / "trl"),
            use_cpu=True,
            bf16=False,
            report_to="none",
            train_sampling_strategy="sequential",
            **weights,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 2, "completion": ["b"] * 2, "label": [True, False]}),
        processing_class=byte_tokenizer(),
    )
    examples = [
        {"prompt_ids": p, "completion_ids": c, "KL_completion_ids": batch[n - 1][1], "label": label}
        for n, (p, c, label) in enumerate(batch)
    ]
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
    rows = [make_row(p, c, episode=str(n), preferred=label) for n, (p, c, label) in enumerate(batch)]
    metrics, gradients = gradients_of_job(learner, rows, method="kto", kto=weights)
    compare(trainer.model, loss, metrics, gradients)
    expected = last_metrics(trainer)
    names = ["kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected"]
    assert {name: metrics[name] for name in names} == pytest.approx(
        {name: expected[name] for name in names}, rel=1e-4, abs=TOLERANCE
    )


def random_head(seed: int, rows: int) -> Iterator[torch.Tensor]:
    """Hidden states and LM head of policy and reference, and targets with a random number of prompt tokens."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(rows, 12, 16), (50, 16), (rows, 12, 16), (50, 16)]
    for size in sizes:
        yield torch.randn(size, generator=generator)
    targets = torch.randint(0, 50, (rows, 12), generator=generator)
    yield targets.masked_fill(torch.arange(12) < torch.randint(0, 11, (rows, 1), generator=generator), -100)


def sums(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, *, average: bool = False) -> torch.Tensor:
    mask = targets != -100
    logprobs = (hidden @ head.T).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    total = torch.where(mask, logprobs, 0.0).sum(1)
    return total / mask.sum(1) if average else total


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "settings",
    [
        DPOSettings(beta=0.1),
        DPOSettings(beta=0.4, average_logprobs=True),
        DPOSettings(beta=0.3, loss_type="hinge"),
        DPOSettings(beta=0.2, loss_type="robust", label_smoothing=0.1),
    ],
    ids=["sigmoid", "averaged", "hinge", "robust"],
)
def test_dpo_is_that_of_liger(settings: DPOSettings, seed: int) -> None:
    hidden, head, ref_hidden, ref_head, targets = random_head(seed, rows=8)
    hidden.requires_grad_()
    head.requires_grad_()
    liger = LigerFusedLinearDPOLoss(
        beta=settings.beta,
        compute_nll_loss=False,
        compiled=False,
        use_ref_model=True,
        average_log_prob=settings.average_logprobs,
        loss_type=settings.loss_type,
        label_smoothing=settings.label_smoothing,
    )
    theirs, _ = liger(head, hidden, targets, ref_input=ref_hidden, ref_weight=ref_head)
    average = settings.average_logprobs
    ratios = sums(hidden, head, targets, average=average) - sums(ref_hidden, ref_head, targets, average=average)
    agree(dpo_loss(*ratios.chunk(2), settings).mean(), theirs, [hidden, head])


@pytest.mark.parametrize("seed", range(3))
def test_kto_is_that_of_liger(seed: int) -> None:
    settings = KTOSettings(beta=0.2)
    hidden, head, ref_hidden, ref_head, targets = random_head(seed, rows=8)
    hidden.requires_grad_()
    head.requires_grad_()
    is_desirable = torch.arange(8) % 3 > 0
    kl = torch.tensor(0.7)
    liger = LigerFusedLinearKTOLoss(beta=settings.beta, compiled=False, use_ref_model=True)
    theirs, *_ = liger(
        hidden, head, targets, preference_labels=is_desirable, ref_input=ref_hidden, ref_weight=ref_head, kl=kl
    )
    ratios = sums(hidden, head, targets) - sums(ref_hidden, ref_head, targets)
    agree(kto_loss(ratios, is_desirable, kl, settings).mean(), theirs, [hidden, head])


def agree(ours: torch.Tensor, theirs: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    assert math.isclose(ours.item(), theirs.item(), rel_tol=TOLERANCE)
    gradients = [torch.autograd.grad(loss, inputs, retain_graph=True) for loss in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=TOLERANCE, atol=TOLERANCE)
