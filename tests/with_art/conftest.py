"""A model and a backend that all tests of the plugin share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from art_runs import QUESTION, TURNS, backend
from model_families import tiny_config
from tiny_models import byte_tokenizer
from tool_agent import LOOK
from transformers import LlamaForCausalLM


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory) -> Path:
    """A tiny model that has learnt one dialogue by heart: it calls the tool, reads its result and answers."""
    folder = tmp_path_factory.mktemp("model") / "looker"
    tokenizer = byte_tokenizer()
    asked = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(asked, tools=[LOOK], add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer.encode(prompt + "".join(TURNS), add_special_tokens=False)])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config(hidden_size=64, max_position_embeddings=1024))
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for _ in range(400):
            loss = model(ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if loss < 0.01:
                break
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def looker(tool_model, tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """The address of a backend that serves it, and the log of what it has sampled."""
    folder = tmp_path_factory.mktemp("backend")
    with backend(tool_model, folder, log=folder / "samples.jsonl") as address:
        yield address, folder / "samples.jsonl"
