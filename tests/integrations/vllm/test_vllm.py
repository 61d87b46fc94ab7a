"""Sampling by vLLM, as far as no vLLM is needed: options, refusals, routing, processes."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
from factories import MODEL, ROOT
from processes import run, wait_until
from pydantic import ValidationError

from insitu.backend.inference.sampler import Completion, SamplingParams
from insitu.backend.inference.structured import Grammar
from insitu.errors import BackendError
from insitu.integrations.vllm.fleet import AFFINITY, BLOCK, PrefixRouter
from insitu.integrations.vllm.replica import request_body, sampled_tokens
from insitu.integrations.vllm.servers import visible_devices
from insitu.training.native.config import InsituAdapterConfig
from insitu.wire.child_process import ChildProcess, describe_exit, last_lines

ADDRESS = "http://10.0.0.7:8000"


@pytest.mark.parametrize(
    ("sampler", "problem"),
    [
        ({"gpus": [0]}, "gpus: allowed with _type: vllm only"),
        ({"_type": "embedded", "addresses": [ADDRESS]}, "addresses: allowed with _type: vllm only"),
        ({"_type": "vlm"}, "Input should be 'embedded' or 'vllm'"),
        ({"_type": "vllm", "gpu": [0]}, "Extra inputs are not permitted"),
        ({"_type": "vllm", "gpus": [0, 1, 2], "tensor_parallel": 2}, "gpus is [0, 1, 2]; allowed: different ones, a m"),
        ({"_type": "vllm", "gpus": [1, 1]}, "gpus is [1, 1]; allowed: different ones"),
        ({"_type": "vllm", "addresses": ["10.0.0.7:8000"]}, "addresses has '10.0.0.7:8000'; each must begin with http"),
        ({"_type": "vllm", "addresses": [ADDRESS, ADDRESS]}, "addresses has the same address twice"),
        ({"_type": "vllm", "addresses": [ADDRESS], "args": {"x": 1}}, "args: allowed without addresses only"),
        ({"_type": "vllm", "addresses": [ADDRESS], "python": "x"}, "python: allowed without addresses only"),
        ({"_type": "vllm", "api_key": "k"}, "api_key: allowed with addresses only"),
        ({"_type": "vllm", "args": {"served_model_name": "x"}}, "args has served_model_name, which the backend sets"),
    ],
)
def test_what_the_sampler_block_refuses(sampler: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as raised:
        InsituAdapterConfig.model_validate({"model": "m", "sampler": sampler})
    assert problem in str(raised.value)


def test_a_running_backend_has_its_own_sampler() -> None:
    with pytest.raises(ValidationError, match="sampler: allowed with model only"):
        InsituAdapterConfig.model_validate({"url": "http://h:1", "sampler": {"_type": "vllm"}})


class _NotVllm(BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, Any]]

    def do_GET(self) -> None:
        status, body = self.answers.get(self.path, (404, {"detail": "Not Found"}))
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def answers() -> Iterator[tuple[str, dict[str, tuple[int, Any]]]]:
    """The address of an HTTP server, and what it answers by path."""
    by_path: dict[str, tuple[int, Any]] = {}
    handler = type("Handler", (_NotVllm,), {"answers": by_path})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", by_path
        server.shutdown()


def models(length: int) -> dict[str, Any]:
    return {"data": [{"id": "m", "parent": None, "max_model_len": length, "root": "m"}]}


VERSION = (200, {"version": "0.32.0"})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, 'is not a vLLM server: GET /version is answered with 404 and b\'{"detail": "Not Found"}\''),
        ({"/version": (200, ["no"])}, "is not a vLLM server: GET /version is answered with 200 and"),
        (
            {"/version": VERSION, "/v1/models": (401, {"error": "Unauthorized"})},
            "needs its API key: set api_key, or INSI",
        ),
        (
            {"/version": VERSION, "/v1/models": (200, models(100))},
            "allows 100 tokens of prompt and completion, but this model 256: start it with --max-model-len 256",
        ),
        (
            {"/version": VERSION, "/v1/models": (200, models(256))},
            "cannot return token ids: start it with --enable-scale-out",
        ),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_at_start(
    answers: tuple[str, dict[str, Any]], given: dict[str, Any], problem: str
) -> None:
    address, by_path = answers
    by_path.update(given)
    done = run("backend", "--model", MODEL, "--port", 0, "--sampler", "vllm", "--sampler_addresses", address)
    assert done.returncode == 1
    assert f"insitu backend: sampler: the server at {address} {problem}" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_without_a_server_is_refused_at_start() -> None:
    address = "http://127.0.0.1:9"
    done = run("backend", "--model", MODEL, "--port", 0, "--sampler", "vllm", "--sampler_addresses", address)
    assert done.returncode == 1
    assert f"sampler: no answer from the server at {address}: ClientConnectorError" in done.stderr


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--sampler_gpus", "0"), "sampler: gpus: allowed with _type: vllm only"),
        (("--sampler", "vllm"), "sampler: vllm is not installed in the Python of the backend (pip install -e"),
        (("--sampler", "vllm", "--sampler_python", sys.executable), f"sampler.python: {sys.executable} has no vllm"),
        (("--sampler", "vllm", "--sampler_python", "/no/python"), "sampler.python: /no/python cannot be run: "),
    ],
)
def test_options_of_the_command_that_do_not_fit(options: tuple[str, ...], problem: str) -> None:
    done = run("backend", "--model", MODEL, "--port", 0, *options)
    assert done.returncode == 1
    assert f"insitu backend: {problem}" in done.stderr


def test_arguments_of_vllm_are_a_json_object() -> None:
    done = run("backend", "--model", MODEL, "--sampler", "vllm", "--sampler_args", "[1]")
    assert done.returncode == 2
    assert "'[1]'; give a JSON object such as" in done.stderr


@pytest.mark.parametrize(
    ("visible", "devices"), [(None, "1,2"), ("4,5,6,7", "5,6"), ("GPU-a, GPU-b,GPU-c", "GPU-b,GPU-c")]
)
def test_gpus_are_numbered_as_by_torch(visible: str | None, devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among those that this process may use, such as those of its Slurm job."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_devices([1, 2]) == devices


def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(BackendError, match=r"sampler.gpus is \[1, 2\], but 2 GPUs are visible \(CUDA_VISIBLE_DEVICES"):
        visible_devices([1, 2])


def test_nothing_imports_vllm() -> None:
    sources = [*(ROOT / "src").rglob("*.py")]
    assert not [path for path in sources if re.search(r"^\s*(from|import) vllm\b", path.read_text(), re.MULTILINE)]


def test_calls_of_an_episode_go_to_the_same_server_until_it_has_much_more_to_do() -> None:
    router: PrefixRouter[str] = PrefixRouter()
    system = list(range(2 * BLOCK))
    first, second = [*system, *range(100, 100 + BLOCK)], [*system, *range(200, 200 + BLOCK)]
    assert router.choose(first, {"a": 0, "b": 1}) == "a"
    assert router.choose(second, {"a": AFFINITY + 1, "b": 0}) == "b"
    for _ in range(3):
        first, second = [*first, *range(50)], [*second, *range(50)]
        assert router.choose(first, {"a": AFFINITY, "b": 0}) == "a"
        assert router.choose(second, {"a": 0, "b": AFFINITY}) == "b"
    assert router.choose(first, {"a": AFFINITY + 1, "b": 0}) == "b"
    assert router.choose(second, {"a": 3}) == "a"


def test_what_is_asked_of_vllm() -> None:
    params = SamplingParams(2**64 - 1, 5, temperature=1e-6, top_p=0.5, stop=("x",), min_tokens=9, top_logprobs=20)
    body = request_body("m", Completion([1, 2], params), frozenset({7, 3}), stream=True)
    assert body["token_ids"] == [1, 2]
    assert body["sampling_params"] == {
        "seed": 2**63 - 1,
        "max_tokens": 5,
        "min_tokens": 5,
        "temperature": 0.0,
        "top_p": 0.5,
        "ignore_eos": True,
        "stop_token_ids": [3, 7],
        "logprobs": 21,
        "detokenize": False,
    }
    grammar = Grammar("json", '{"type": "object"}')
    shaping: dict[str, Any] = {"top_k": 3, "min_p": 0.1, "bad_words": ("a",), "repetition_penalty": 1.5}
    shaped = SamplingParams(1, 5, logit_bias=((7, -1.0),), stop_token_ids=frozenset({9}), grammar=grammar, **shaping)
    asked = request_body("m", Completion([1], shaped), frozenset({7}), stream=False)["sampling_params"]
    assert asked["stop_token_ids"] == [7, 9]
    assert {key: asked[key] for key in shaping} == shaping
    assert (asked["logit_bias"], asked["structured_outputs"]) == ({"7": -1.0}, {"json": {"type": "object"}})
    assert not {"presence_penalty", "frequency_penalty"} & asked.keys()
    ignoring = SamplingParams(1, 5, ignore_eos=True)
    assert (
        request_body("m", Completion([1], ignoring), frozenset({7}), stream=False)["sampling_params"]["stop_token_ids"]
        == []
    )


def test_top_logprobs_are_the_most_likely_tokens_wherever_the_sampled_one_ranks() -> None:
    ranked = [(128, -5.36, 47), (25, -4.26, 1), (210, -4.34, 2)]
    entries = [{"token_id": i, "logprob": p, "rank": r} for i, p, r in ranked]
    choice = {"token_ids": [128], "logprobs": {"content": [{**entries[0], "top_logprobs": entries}]}}
    (token,) = sampled_tokens(choice, 2)
    assert (token.id, token.logprob, token.top) == (128, -5.36, [(25, -4.26), (210, -4.34)])


def test_a_bound_command_ends_with_its_parent_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The parent is killed; the command has a child."""
    sleeper = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    script = f"""if True:
        import os, sys, time
        from pathlib import Path
        from insitu.wire.child_process import ChildProcess
        code = {sleeper!r} + "; print('up', flush=True); time.sleep(600)"
        ChildProcess([sys.executable, "-c", code], Path("log"), os.environ, bound=True)
        time.sleep(600)"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path) as parent:
        wait_until(lambda: (tmp_path / "log").exists() and "up" in (tmp_path / "log").read_text())
        family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) == 3
        parent.kill()
    wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family))


@pytest.mark.parametrize(
    ("code", "words"), [(3, "ended with exit code 3"), (-9, "was ended by SIGKILL"), (-40, "was ended by signal 40")]
)
def test_how_a_command_ended_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_how_a_command_ended_and_what_it_printed_last(tmp_path: Path) -> None:
    code = "import os; print('one'); print('two', flush=True); os.kill(os.getpid(), 9)"
    process = ChildProcess([sys.executable, "-c", code], tmp_path / "log", os.environ, bound=True)
    process.wait(60)
    assert process.ended
    assert process.outcome() == f"was ended by {signal.SIGKILL.name}"
    assert process.end_of_log() == f"the end of its log ({tmp_path / 'log'}):\n  one\n  two"
    process.kill()
    again = ChildProcess([sys.executable, "-c", "print('three')"], tmp_path / "log", os.environ, append=True)
    again.wait(60)
    assert again.output() == "three\n"
    assert again.end_of_log() == f"the end of its log ({tmp_path / 'log'}):\n  three"
    assert last_lines(again.log) == ["one", "two", "three"]
    assert last_lines(tmp_path / "none") == []


def test_a_log_on_a_full_disk_says_so(tmp_path: Path) -> None:
    """A command there cannot say itself why it ends."""
    code = """
import os, sys
from pathlib import Path
from insitu.wire.child_process import ChildProcess
process = ChildProcess([sys.executable, "-c", "print('.' * 2**20)"], Path("log"), os.environ)
process.wait(60)
print(process.end_of_log()[-60:])
"""
    (tmp_path / "code.py").write_text(code)
    (tmp_path / "disk").mkdir()
    inside = f"mount -t tmpfs -o size=64k none disk && cd disk && {sys.executable} ../code.py"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", inside], cwd=tmp_path, capture_output=True, text=True)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    assert done.stdout.endswith("\n  (0 bytes are free on the disk of this log)\n"), done


async def test_a_command_that_ignores_sigterm_is_killed_after_a_while(tmp_path: Path) -> None:
    code = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    process = ChildProcess([sys.executable, "-c", code], tmp_path / "log", os.environ)
    await asyncio.to_thread(wait_until, lambda: "up" in process.output())
    await process.end(0.1)
    assert not process.ended
    await process.stop(0.1)
    assert process.code == -signal.SIGKILL
