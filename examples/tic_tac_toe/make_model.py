"""Builds the starting model: a tokenizer and a small Llama that knows the format and the free squares, and no tactics.

    python make_model.py --output_dir model

It is taught on random positions with a random free square as the answer, so it plays as well as chance does.
"""

import argparse
import random
from pathlib import Path

import torch
from tic_tac_toe.board import EMPTY, free_squares, is_over, place, to_move
from tic_tac_toe.prompts import ask, ask_again, problem, write
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IGNORED = -100
HIDDEN, LAYERS = 64, 3
LESSONS_PER_STEP = 128

Dialogue = list[dict[str, str]]


def random_position(rng: random.Random) -> str:
    """An unfinished board after a random number of random moves."""
    while True:
        board = EMPTY
        for _ in range(rng.randrange(9)):
            if not is_over(board):
                board = place(board, rng.choice(free_squares(board)))
        if not is_over(board):
            return board


def lesson(rng: random.Random) -> Dialogue:
    """A question and a random legal answer to it; in one of six an answer that cannot be used comes first."""
    board = random_position(rng)
    dialogue = [{"role": "user", "content": ask(board, to_move(board))}]
    if rng.random() < 1 / 6:
        taken = [square for square in range(9) if square not in free_squares(board)]
        square = rng.choice([*taken, None])
        wrong = "" if square is None else write(square)
        dialogue += [
            {"role": "assistant", "content": wrong},
            {"role": "user", "content": ask_again(problem(board, square) or "")},
        ]
    return [*dialogue, {"role": "assistant", "content": write(rng.choice(free_squares(board)))}]


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which a line of three squares is one token, and a square on its own another."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" [XO1-9]{3}| ?[XO1-9](?![A-Za-z])"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=2,
        special_tokens=[END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((m["content"] for _ in range(2000) for m in lesson(rng)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Weights drawn four times wider than the library's default, with which so small a model learns far faster."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=4 * HIDDEN,
            num_hidden_layers=LAYERS,
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


def batch(tokenizer: PreTrainedTokenizerFast, dialogues: list[Dialogue]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, T) and labels (B, T): the last answer of each dialogue, all else ignored."""
    prompts = tokenizer.apply_chat_template([d[:-1] for d in dialogues], add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template(dialogues)["input_ids"]
    length = max(map(len, whole))
    ids_BT = torch.full((len(whole), length), tokenizer.pad_token_id)
    labels_BT = torch.full((len(whole), length), IGNORED)
    for row, (prompt, tokens) in enumerate(zip(prompts, whole, strict=True)):
        ids_BT[row, : len(tokens)] = torch.tensor(tokens)
        labels_BT[row, len(prompt) : len(tokens)] = torch.tensor(tokens[len(prompt) :])
    return ids_BT, labels_BT


def teach(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> None:
    rng = random.Random(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        ids_BT, labels_BT = batch(tokenizer, [lesson(rng) for _ in range(LESSONS_PER_STEP)])
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    tokenizer = build_tokenizer(args.seed)
    model = build_model(tokenizer, args.seed)
    teach(model, tokenizer, args.steps, args.seed)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
