"""Real vLLM servers on the CPU, and the starting model of tic-tac-toe in a shape that vLLM can run there."""

import json
import os
import random
import re
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

from processes import wait_until

from insitu.wire.child_process import ChildProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CPU = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "64", "--max-model-len", "256")
ADAPTERS = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
PROCESSED = ("--logprobs-mode", "processed_logprobs")
COMPLETE = (*CPU, *ADAPTERS, *PROCESSED, "--enable-scale-out", "--max-logprobs", "21")
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
TAUGHT_STEPS = 80


class VllmServer:
    """A vLLM server that can be killed and started again at the same address."""

    def __init__(self, folder: Path, model: Path, flags: tuple[str, ...], variables: dict[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        place = ("--model", str(model), "--served-model-name", "base", "--host", "127.0.0.1", "--port", str(self.port))
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *place, *flags]
        self._environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **variables}
        self._log = folder / f"vllm-{self.port}.log"
        self.start()

    def start(self) -> None:
        self._process = ChildProcess(self._command, self._log, self._environment, bound=True)

    def wait(self) -> None:
        """Until it responds; fails with the end of its log if it has ended."""
        wait_until(lambda: self._process.ended or self._responds())
        assert not self._process.ended, f"vLLM {self._process.outcome()}: {self._process.end_of_log()}"

    def kill(self) -> None:
        self._process.kill()

    def num_completed(self) -> int:
        """Completions since it was started."""
        with urllib.request.urlopen(f"{self.address}/metrics") as response:
            found = re.findall(r"^vllm:request_success_total\{.*\} ([\d.e+]+)$", response.read().decode(), re.M)
        return int(sum(map(float, found)))

    def models(self) -> list[str]:
        with urllib.request.urlopen(f"{self.address}/v1/models") as response:
            return [each["id"] for each in json.load(response)["data"]]

    def _responds(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health"):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False


def save_player(folder: Path, tied: bool = False) -> Path:
    """The example's starting model with heads of 32 dimensions: vLLM's CPU kernels take no smaller ones.

    Not `tied`: vLLM 0.32 on a CPU does not replace the output layer of models with tied embeddings.
    """
    sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "tic_tac_toe")]
    import make_model
    import starting_model
    import torch
    from transformers import LlamaForCausalLM

    tokenizer = make_model.tokenizer_of(0)
    config = starting_model.build_model(tokenizer, make_model.LAYERS, 0).config
    config.num_attention_heads = config.num_key_value_heads = 2
    config.head_dim = starting_model.HIDDEN // 2
    config.tie_word_embeddings = tied
    torch.set_num_threads(1)  # the cores are shared with others
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)

    def lessons(rng: random.Random) -> list[starting_model.Row]:
        return make_model.lessons(tokenizer, rng)

    starting_model.teach(model, tokenizer.pad_token_id, lessons, TAUGHT_STEPS, 0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
