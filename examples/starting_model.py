"""What the `make_model.py` of the examples share: a tokenizer, a small Llama, and lessons that teach it."""

import argparse
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
IGNORED = -100
HIDDEN = 64

Row = tuple[list[int], list[int]]
"""Token ids and labels of a lesson; a label is its token id where the model speaks, otherwise `IGNORED`."""


def build_tokenizer(
    texts: Iterable[str], pattern: str, roles: tuple[str, ...], chat_template: str
) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on `texts`; no token crosses the border of a match of `pattern`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=2,
        special_tokens=[END, *roles],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=list(roles),
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, layers: int, seed: int) -> LlamaForCausalLM:
    """Weights drawn four times wider than the library's default, with which so small a model learns far faster."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=4 * HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            initializer_range=0.08,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def padded(rows: list[Row], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, T) and labels (B, T)."""
    length = max(len(ids) for ids, _ in rows)
    ids_BT = torch.full((len(rows), length), pad_id)
    labels_BT = torch.full((len(rows), length), IGNORED)
    for row, (ids, labels) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        labels_BT[row, : len(labels)] = torch.tensor(labels)
    return ids_BT, labels_BT


def teach(
    model: LlamaForCausalLM, pad_id: int, lessons: Callable[[random.Random], list[Row]], steps: int, seed: int
) -> None:
    """Trains on the labels of `lessons(rng)`, a new batch for each step."""
    rng = random.Random(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        ids_BT, labels_BT = padded(lessons(rng), pad_id)
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")


def make_model(
    description: str | None,
    folder: Path,
    steps: int,
    layers: int,
    tokenizer_of: Callable[[int], PreTrainedTokenizerFast],
    lessons: Callable[[PreTrainedTokenizerFast, random.Random], list[Row]],
) -> None:
    """The command: builds, teaches and saves the model. `folder` and `steps` are defaults of its options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=folder)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the order of summation must not depend on the machine
    tokenizer = tokenizer_of(args.seed)
    model = build_model(tokenizer, layers, args.seed)
    teach(model, tokenizer.pad_token_id, lambda rng: lessons(tokenizer, rng), args.steps, args.seed)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
