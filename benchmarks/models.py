"""The randomly initialised Qwen2 models that benchmarks train and sample, with a tokenizer made on the spot."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True)
class Scale:
    """What is measured with: `tokens` of an episode, prompt included; `requests` sampled for the rates.

    `lora`: trains adapters instead of all weights; `checkpointing`: recomputes activations in the backward pass.
    """

    sizes: dict[str, Any]
    dtype: str
    tokens: int
    requests: int
    lora: bool = False
    checkpointing: bool = False


LARGE = Scale(
    {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "bfloat16",
    tokens=512,
    requests=64,
)
LARGEST = Scale(
    {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "bfloat16",
    tokens=512,
    requests=64,
    lora=True,
    checkpointing=True,
)
"""7 B parameters."""
SMALL = Scale(
    {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "float32",
    tokens=96,
    requests=64,
)


def make_model(folder: Path, scale: Scale) -> Path:
    """Random weights, and a tokenizer that has a word for every entry of the vocabulary."""
    size = scale.sizes["vocab_size"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"word{number}" for number in range(size - len(alphabet) - 1)), "<|end|>"]
    tokenizer = Tokenizer(BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    limits = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": None}
    config = Qwen2Config(**(limits | scale.sizes), eos_token_id=fast.eos_token_id, pad_token_id=fast.eos_token_id)
    # Made where and in the dtype it is used: 7 B parameters take 28 GB in float32, and minutes on a CPU.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        Qwen2ForCausalLM._from_config(config, dtype=getattr(torch, scale.dtype)).save_pretrained(folder)
    return folder
