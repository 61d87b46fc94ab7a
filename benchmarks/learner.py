"""One GRPO step of insitu and of TRL, in turn, each in a process of its own, on equal rows; the losses must agree.

    python benchmarks/learner.py             the table
    python benchmarks/run.py learner         the same into RESULTS.md

The steps are taken by a Python that has TRL. A process is this script with a case as JSON; it takes a step for each
line of its standard input.
"""

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import memory
import numpy as np
import torch
from models import Scale, make_model

ROUNDS = 3
GROUPS, GENERATIONS = 8, 8
SCALE = Scale(
    {
        "vocab_size": 4096,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 7,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "float32",
    tokens=96,
    requests=64,
)
LEARNING_RATE = 1e-5
LORA_RANK = 16
OF_TRL = Path(__file__).parent.parent / ".environments/preferences/bin/python"
HOW_TO_GET_TRL = "python scripts/test_with.py --install preferences"
OUT_OF_MEMORY = "out of memory"


class Shape(NamedTuple):
    """Tokens of a group's prompt, the fewest and most of a sampled turn, turns, and the tokens of the tool between."""

    prompt: int
    shortest: int
    longest: int
    turns: int = 1
    tool: int = 0


SHAPES = {
    "mixed lengths": Shape(32, 16, 224),
    "shared prompts": Shape(256, 32, 96),
    "four turns": Shape(128, 64, 64, turns=4, tool=64),
}


@dataclass(frozen=True)
class Case:
    """What a process trains: a side ("insitu" or "TRL"), the folder of a model and its dtype, and rows of a shape."""

    side: str
    model: str
    shape: Sequence[int]
    dtype: str = "float32"
    lora: bool = False
    checkpointing: bool = False
    groups: int = GROUPS
    trl_batch: int = 8
    """Rows of TRL's micro-batches."""


class Sample(NamedTuple):
    """A row: its tokens, which of them after the prompt are trained, and its advantage."""

    prompt: np.ndarray
    completion: np.ndarray
    trained: np.ndarray
    advantage: float


def samples(shape: Shape, groups: int = GROUPS) -> list[Sample]:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(groups):
        prompt = rng.integers(0, 256, shape.prompt)
        for _ in range(GENERATIONS):
            parts = []
            for _ in range(shape.turns):
                parts.append(np.ones(rng.integers(shape.shortest, shape.longest + 1), bool))
                parts.append(np.zeros(shape.tool, bool))
            trained = np.concatenate(parts[:-1] if shape.tool else parts)
            rows.append(Sample(prompt, rng.integers(0, 256, len(trained)), trained, float(rng.normal())))
    return rows


def training_rows(rows: list[Sample]) -> list[Any]:
    from insitu.backend.learner.batches import Row

    converted = []
    for number, (prompt, completion, trained, advantage) in enumerate(rows):
        positions = np.flatnonzero(trained) + len(prompt)
        zeros, advantages = np.zeros(len(positions), np.float32), np.full(len(positions), advantage, np.float32)
        tokens = np.concatenate([prompt, completion]).astype(np.int32)
        converted.append(Row(tokens, positions, zeros, advantages, episode=str(number)))
    return converted


def insitu_step(case: Case, rows: list[Sample], folder: Path) -> Callable[[], dict[str, Any]]:
    from insitu.backend.learner.learner import Learner
    from insitu.backend.model import load_model
    from insitu.schemas.training_jobs import TrainingSettings

    adapters = {"rank": LORA_RANK, "alpha": 2 * LORA_RANK} if case.lora else None
    # `auto` would pad on a GPU.
    options = {"lora": adapters, "gradient_checkpointing": case.checkpointing, "attention": "packed"}
    settings = TrainingSettings(learning_rate=LEARNING_RATE, **options)
    learner = Learner(load_model(case.model, dtype=case.dtype), folder)
    converted = training_rows(rows)

    def step() -> dict[str, Any]:
        steps = learner.run(settings, converted)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                metrics = dict(end.value.metrics)
                return metrics | {"unsaved_seconds": metrics["seconds"]}

    return step


def trl_step(case: Case, rows: list[Sample], folder: Path) -> Callable[[], dict[str, Any]]:
    """TRL's loss and optimizer on a generation batch as it pads and splits it; no sampling and no reference."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import pad, split_tensor_dict

    batches = len(rows) // case.trl_batch
    on_gpu, half = torch.cuda.is_available(), case.dtype == "bfloat16"
    config = GRPOConfig(
        output_dir=str(folder),
        model_init_kwargs={"dtype": case.dtype if case.lora else "float32"},
        per_device_train_batch_size=case.trl_batch,
        gradient_accumulation_steps=batches,
        num_generations=GENERATIONS,
        learning_rate=LEARNING_RATE,
        loss_type="dapo",
        beta=0.0,
        use_cpu=not on_gpu,
        bf16=half,
        gradient_checkpointing=case.checkpointing,
        report_to=[],
        save_strategy="no",
    )
    adapters = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model=case.model,
        args=config,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        train_dataset=Dataset.from_list([{"prompt": "x"}] * len(rows)),
        processing_class=AutoTokenizer.from_pretrained(case.model),
        peft_config=adapters if case.lora else None,
    )
    model = trainer.model.to(trainer.accelerator.device).train()
    optimizer = trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = batches
    tensors = {
        "prompt_ids": [torch.tensor(row.prompt) for row in rows],
        "prompt_mask": [torch.ones(len(row.prompt), dtype=torch.long) for row in rows],
        "completion_ids": [torch.tensor(row.completion) for row in rows],
        "completion_mask": [torch.ones(len(row.completion), dtype=torch.long) for row in rows],
        "tool_mask": [torch.tensor(row.trained).long() for row in rows],
    }
    batch = {
        name: pad(values, padding_value=0, padding_side="left" if "prompt" in name else "right")
        for name, values in tensors.items()
    }
    batch["advantages"] = torch.tensor([row.advantage for row in rows])
    device = trainer.accelerator.device
    batch = {name: values.to(device) for name, values in batch.items()}
    trained_tokens = torch.tensor(sum(int(row.trained.sum()) for row in rows), device=device)

    def step() -> dict[str, Any]:
        total = 0.0
        for part in split_tensor_dict(batch, batches):
            with trainer.accelerator.autocast():
                loss = trainer.compute_loss(model, part | {"num_items_in_batch": trained_tokens})
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": total, "grad_norm": norm.item()}

    return step


def serve(make: Callable[[], Callable[[], dict[str, Any]]]) -> None:
    """Makes the step at the first line of standard input and takes it at each, for `Side`.

    `unsaved_seconds` are those without the checkpoint, which TRL's step does not write.
    """
    step = None
    for _ in sys.stdin:
        try:
            step = step or make()
            synchronise(reset=True)
            wall, processor = time.perf_counter(), time.process_time()
            metrics = step()
            synchronise()
        except torch.OutOfMemoryError:
            metrics, step = {"error": OUT_OF_MEMORY}, None
            print("\n" + json.dumps(metrics), flush=True)
            return
        seconds = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - processor}
        measured = {"unsaved_seconds": seconds["seconds"]} | metrics | seconds | {"peak": peak()}
        print("\n" + json.dumps(measured), flush=True)


def serve_case(case: Case) -> None:
    rows = samples(Shape(*case.shape), case.groups)
    make = {"insitu": insitu_step, "TRL": trl_step}[case.side]
    with tempfile.TemporaryDirectory() as folder:
        serve(lambda: make(case, rows, Path(folder)))


def synchronise(*, reset: bool = False) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()


def peak() -> int:
    """In bytes: allocated on the GPU since the count was reset, or what this process ever held."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else memory.peak()


class Side:
    """A process that takes steps, in the same Python as the other's: `script` with a case, which calls `serve`."""

    def __init__(self, case: Any, python: str, script: str = __file__) -> None:
        command = [python, script, json.dumps(asdict(case))]
        environment = dict(os.environ)
        if case.side == "insitu":
            from insitu.backend import configure_math_libraries

            configure_math_libraries(environment)  # as `insitu backend` does, before torch is loaded
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.steps = [self.step()]
        """The first has the loss of the same weights; it is not timed."""

    @property
    def error(self) -> str:
        return next((step["error"] for step in self.steps if "error" in step), "")

    def step(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended, and its output says why
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        line = next((line for line in self.process.stdout if line.startswith("{")), None)
        if line is not None:
            return dict(json.loads(line))
        if self.process.wait() == -9:  # by the kernel, for its memory
            return {"error": OUT_OF_MEMORY}
        raise RuntimeError(f"{self.process.args!r}: ended with exit code {self.process.returncode}")

    def take(self) -> None:
        if not self.error:
            self.steps.append(self.step())

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()

    def median(self, name: str) -> float:
        return statistics.median(step[name] for step in self.steps[1:])


def python_with_trl() -> str | None:
    """This Python if it has TRL, otherwise that of `.environments/preferences`, if there is one."""
    if importlib.util.find_spec("trl"):
        return sys.executable
    return str(OF_TRL) if OF_TRL.exists() else None


def in_turn(cases: Sequence[Any], python: str, rounds: int, script: str = __file__) -> Iterator[Side]:
    """Steps in turn; on a GPU one side after the other, as its memory may not hold both."""
    together = [[case] for case in cases] if torch.cuda.is_available() else [cases]
    for part in together:
        sides = [Side(case, python, script) for case in part]
        for _ in range(rounds):
            for side in sides:
                side.take()
        for side in sides:
            side.close()
        yield from sides


def compare(model: str, shape: str, trained: str, python: str) -> str:
    """A row of the table."""
    sides = [("insitu", "float32"), ("TRL", "float32"), ("insitu", "bfloat16")]
    cases = [Case(side, model, SHAPES[shape], dtype, lora=trained == "LoRA") for side, dtype in sides]
    ours, trl, halved = in_turn(cases, python, ROUNDS)
    difference = abs(ours.steps[0]["loss"] - trl.steps[0]["loss"])
    assert difference < 1e-4, (shape, ours.steps[0]["loss"], trl.steps[0]["loss"])
    norms = [side.steps[0]["grad_norm"] for side in (ours, trl)]
    assert trained == "LoRA" or abs(norms[0] - norms[1]) < 1e-4 * norms[1], norms  # adapters start at random
    seconds = trl.median("unsaved_seconds")
    metrics = ours.steps[-1]
    return (
        f"| {shape} | {trained} | {seconds:.1f} s | {ours.median('unsaved_seconds'):.1f} s | "
        f"{seconds / ours.median('unsaved_seconds'):.2f} | {trl.median('cpu') / ours.median('cpu'):.2f} | "
        f"{seconds / halved.median('unsaved_seconds'):.2f} | "
        f"{trl.steps[-1]['peak'] / 1e9:.2f} | {ours.steps[-1]['peak'] / 1e9:.2f} | "
        f"{metrics.get('computed_tokens', 0)} of {metrics.get('row_tokens', 0)} | {difference:.0e} |"
    )


def report() -> str:
    """The section `learner` of RESULTS.md."""
    python = python_with_trl()
    if python is None:
        raise SystemExit(f"{OF_TRL} does not exist; the benchmark needs TRL, which this installs: {HOW_TO_GET_TRL}")
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model(Path(folder), SCALE))
        rows = [compare(model, shape, trained, python) for trained in ("all weights", "LoRA") for shape in SHAPES]
    table = "\n".join(rows)
    return f"""## One GRPO step beside TRL

{GROUPS} groups of {GENERATIONS} rows, 16 M parameters in float32, no KL penalty; each side in a process of its own, in
turn, medians of {ROUNDS}. TRL pads a generation batch and splits it into batches of 8 rows. The shapes: prompts of 32
tokens and completions of 16 to 224; prompts of 256 and completions of 32 to 96; prompts of 128 and four turns of 64
tokens with 64 of a tool in between. The ratios are TRL's seconds by ours, in float32 and with `dtype: bfloat16` on our
side; no checkpoint is written in them, but the CPU time counts insitu's. Norms of gradients are equal to 1e-4. Peak
memory is of the whole process, in GB.

| shape | trained | TRL | insitu | ratio | CPU time | bfloat16 | TRL's memory | insitu's | computed tokens | losses by |
|---|---|---|---|---|---|---|---|---|---|---|
{table}"""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve_case(Case(**json.loads(sys.argv[1])))
    else:
        print(report())
