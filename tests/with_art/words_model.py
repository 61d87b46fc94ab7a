"""A tiny model that speaks in whole words, for tasks that are learnt in a few steps."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["yes", "no", "maybe", "or", "say", "user", "assistant", "<|end|>", "<|unknown|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def save_words_model(folder: Path) -> Path:
    """Freshly initialised: each word is about as likely as any other."""
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<|unknown|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>", unk_token="<|unknown|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
