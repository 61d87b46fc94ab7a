"""GRPO by TRL on the task of examples/real_model, with the settings of a case of `real_runs.py`; prints a line of JSON.

python benchmarks/real_trl.py CASE SETTINGS    both as JSON; SETTINGS is the file of the case
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent.parent / "examples/real_model"))
import agent

EXAMPLE = Path(agent.__file__).parent
BATCH = 8


def read(name: str) -> list[dict[str, Any]]:
    """Prompts and answers of the rows of a file."""
    rows = [json.loads(line) for line in (EXAMPLE / name).read_text().splitlines()]
    start = [{"role": "system", "content": agent.TASK}, *agent.EXAMPLE]
    return [{"prompt": [*start, {"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]


def rewards(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    pairs = zip(completions, answer, strict=True)
    return [float(each[0]["content"].strip() == expected) for each, expected in pairs]


class HeldOut(TrainerCallback):
    """Scores the held-out rows after each epoch, as the run of insitu does; the time for it does not count."""

    def __init__(self, tokenizer: Any, rows: list[dict[str, Any]], sampling: dict[str, Any], interval: int) -> None:
        self.tokenizer, self.rows, self.sampling, self.interval = tokenizer, rows, sampling, interval
        self.away = 0.0
        self.points: list[list[float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self.rows or state.global_step % self.interval:
            return
        began = time.time()
        self.points.append([began - self.away, self.score(model)])
        self.away += time.time() - began

    @torch.inference_mode()
    def score(self, model: Any) -> float:
        template = {"add_generation_prompt": True, "tokenize": False}
        texts = [self.tokenizer.apply_chat_template(row["prompt"], **template) for row in self.rows]
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        trained = model.training
        ids = model.eval().generate(
            **inputs.to(model.device),
            do_sample=True,
            temperature=self.sampling["temperature"],
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.sampling["max_tokens"],
            pad_token_id=self.tokenizer.pad_token_id,
        )
        model.train(trained)
        answers = self.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return sum(given.strip() == row["answer"] for given, row in zip(answers, self.rows, strict=True)) / len(answers)


def train(case: dict[str, Any], settings: dict[str, Any], folder: str) -> list[list[float]]:
    """Seconds since the epoch, without those of scoring, and held-out score after each epoch."""
    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    sampling, training = settings["llms"]["reader"], settings["trainer_adapters"]["backend"]["training"]
    generations = settings["trajectory_builders"]["episodes"]["num_generations"]
    samples = case["rows"] * generations
    steps = samples // training["mini_batch_size"]
    config = GRPOConfig(
        output_dir=folder,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=training["mini_batch_size"] // BATCH,
        steps_per_generation=samples // BATCH,
        num_generations=generations,
        max_completion_length=sampling["max_tokens"],
        max_steps=case["epochs"] * steps,
        learning_rate=training["learning_rate"],
        lr_scheduler_type="constant",
        temperature=sampling["temperature"],
        loss_type="dapo",
        beta=0.0,
        seed=case["seed"],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    adapters = None
    if lora := training.get("lora"):
        shape = {"r": lora["rank"], "lora_alpha": lora["alpha"]}
        adapters = LoraConfig(**shape, target_modules="all-linear", task_type="CAUSAL_LM")
    held_out = HeldOut(tokenizer, read("held_out.jsonl") if case["scored"] else [], sampling, steps)
    trainer = GRPOTrainer(
        model=case["model"],
        args=config,
        reward_funcs=[rewards],
        train_dataset=Dataset.from_list(read("train.jsonl")),
        processing_class=tokenizer,
        peft_config=adapters,
        callbacks=[held_out],
    )
    trainer.train()
    return held_out.points


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print("\n" + json.dumps(train(json.loads(sys.argv[1]), json.loads(sys.argv[2]), name)), flush=True)
