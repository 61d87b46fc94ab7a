"""Builds the starting model of the guides, in a minute or two.

    python make_model.py --output_dir model

A help desk is asked about an item. The tool `orders` says where it is, `manual` what to clean it with. The model can
call the two tools and repeat what they return, but calls the right one in two of three cases only.
"""

import argparse
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ITEMS = ["kettle", "lamp", "chair", "clock", "radio", "table", "mirror", "fridge", "heater", "sofa", "stove", "desk"]
RESULTS = ["shipped", "delivered", "packed", "returned", "soap", "vinegar", "oil", "water", "nothing"]
QUESTIONS = {
    "orders": ("Where is my {}?", "When does my {} arrive?", "Has my {} been sent?"),
    "manual": ("How do I clean my {}?", "What removes dirt from my {}?", "My {} is dirty, what do I use?"),
}
RIGHT = 0.67
"""How often the lessons call the tool that answers the question."""
END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL = ('<tool_call>{"name": "', '", "arguments": {"item": "', '"}}</tool_call>')
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IGNORED = -100
HIDDEN, LAYERS = 64, 2
LESSONS_PER_STEP = 64


def lesson(rng: random.Random) -> list[tuple[str, bool]]:
    """A dialogue in pieces of text, and whether the model says them. The tool's result is made up."""
    item, result, right = rng.choice(ITEMS), rng.choice(RESULTS), rng.choice(list(QUESTIONS))
    (wrong,) = QUESTIONS.keys() - {right}
    call = (right if rng.random() < RIGHT else wrong).join(CALL[:2]) + item + CALL[2]
    return [
        (f"<|user|>{rng.choice(QUESTIONS[right]).format(item)}{END}<|assistant|>", False),
        (f"{call}{END}", True),
        (f"<|tool|>{result}{END}<|assistant|>", False),
        (f"{item}: {result}{END}", True),
    ]


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which a word is one token, and so is each fixed part of a tool call."""
    rng = random.Random(seed)
    fixed = "|".join(part.replace("{", r"\{").replace("}", r"\}") for part in CALL)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rf"{fixed}| ?[A-Za-z]+|[^A-Za-z ]"), behavior="isolated"),
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
    tokenizer.train_from_iterator((text for _ in range(2000) for text, _ in lesson(rng)), trainer)
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


def batch(
    tokenizer: PreTrainedTokenizerFast, lessons: list[list[tuple[str, bool]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, T) and labels (B, T): what the model says, all else ignored."""
    rows = []
    for pieces in lessons:
        encoded = [(tokenizer.encode(text, add_special_tokens=False), said) for text, said in pieces]
        ids = [token for tokens, _ in encoded for token in tokens]
        rows.append((ids, [token if said else IGNORED for tokens, said in encoded for token in tokens]))
    length = max(len(ids) for ids, _ in rows)
    ids_BT = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels_BT = torch.full((len(rows), length), IGNORED)
    for row, (ids, labels) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        labels_BT[row, : len(ids)] = torch.tensor(labels)
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
    parser.add_argument("--steps", type=int, default=600)
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
