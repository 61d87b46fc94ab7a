"""GRPO by TRL on the task of `real_task.py`, with the settings of a case of `real_runs.py`; prints a line of JSON.

python benchmarks/real_trl.py '{"model": ..., "epochs": 6, ...}'
"""

import json
import sys
import tempfile
import time
from typing import Any

import learner
import real_task
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def rewards(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [real_task.score(each[0]["content"], expected) for each, expected in zip(completions, answer, strict=True)]


class HeldOut(TrainerCallback):
    """Scores the held-out rows after each step, as the run of insitu does; the time for it does not count."""

    def __init__(self, tokenizer: Any, rows: list[dict[str, Any]]) -> None:
        self.tokenizer, self.rows = tokenizer, rows
        self.away = 0.0
        self.points: list[list[float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        began = time.time()
        seconds = began - self.away
        if self.rows:
            self.points.append([seconds, self.score(model)])
        self.away += time.time() - began

    @torch.inference_mode()
    def score(self, model: Any) -> float:
        template = {"add_generation_prompt": True, "tokenize": False}
        texts = [
            self.tokenizer.apply_chat_template(real_task.messages(row["question"]), **template) for row in self.rows
        ]
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        trained = model.training
        ids = model.eval().generate(
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=real_task.MAX_TOKENS,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        model.train(trained)
        answers = self.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        scores = [real_task.score(given, row["answer"]) for given, row in zip(answers, self.rows, strict=True)]
        return sum(scores) / len(scores)


def train(case: dict[str, Any], folder: str) -> list[list[float]]:
    """Seconds since the epoch, without those of scoring, and held-out score after each step."""
    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = [{"prompt": real_task.messages(row["question"]), "answer": row["answer"]} for row in case["rows"]]
    config = GRPOConfig(
        output_dir=folder,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=case["generations"],
        gradient_accumulation_steps=len(rows),
        num_generations=case["generations"],
        max_completion_length=real_task.MAX_TOKENS,
        max_steps=case["epochs"],
        learning_rate=case["learning_rate"],
        lr_scheduler_type="constant",
        temperature=1.0,
        loss_type="dapo",
        beta=0.0,
        seed=case["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    rank = learner.LORA_RANK
    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    held_out = HeldOut(tokenizer, case["held_out"])
    trainer = GRPOTrainer(
        model=case["model"],
        args=config,
        reward_funcs=[rewards],
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=adapters if case["lora"] else None,
        callbacks=[held_out],
    )
    trainer.train()
    return held_out.points


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print("\n" + json.dumps(train(json.loads(sys.argv[1]), name)), flush=True)
