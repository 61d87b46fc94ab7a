"""The ART plugin with the official client libraries: `nat finetune` in their environments, the backend in ours."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny_models import byte_tokenizer, tiny_config
from tool_agent import LOOK
from transformers import LlamaForCausalLM
from wiretap import Wiretap

HERE = Path(__file__).parent
ROOT = HERE.parent
RELEASES = ("0.5.4", "0.5.18")
each_release = pytest.mark.parametrize("release", RELEASES)


@contextmanager
def backend(model: Path, folder: Path, *options: str) -> Iterator[str]:
    command = [Path(sys.executable).with_name("insitu"), "backend", "--model", model, "--port", "0"]
    with subprocess.Popen([*command, "--output_dir", folder, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            ready = re.search(r"ready at (\S+)", process.stdout.readline())
            assert ready, "the backend did not start"
            yield ready[1]
        finally:
            process.terminate()


def finetune(release: str, file: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    nat = ROOT / ".venv-art" / release / "bin" / "nat"
    return subprocess.run(
        [nat, "finetune", "--config_file", file, *options],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"PYTHONPATH": str(HERE), "WANDB_MODE": "offline", "WEAVE_DISABLED": "true"} | env,
    )


def set_keys(**values: object) -> list[str]:
    return [part for key, value in values.items() for part in ("-o", key.replace("__", "."), str(value))]


@each_release
def test_tic_tac_toe_is_learnt_over_arts_protocol(release, tmp_path):
    """Held-out games: 0.60 at most before, 0.70 at least after, with what the example's file says."""
    out = tmp_path / "out"
    with backend(ROOT / "examples/tic_tac_toe/model", tmp_path / "backend") as address:
        port = address.rpartition(":")[2]
        file = ROOT / "examples/tic_tac_toe/art.yml"
        done = finetune(release, file, "-o", "finetuning.output_dir", str(out), ART_PORT=port)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    history = json.loads((out / "validation_history.json").read_text())
    assert history[0]["avg_reward"] <= 0.60
    assert history[-1]["avg_reward"] >= 0.70
    lines = [json.loads(line) for line in (out / "training_metrics.jsonl").read_text().splitlines()]
    assert [line["policy_version"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(line["run_id"].startswith("art_run_") and len(line["run_id"]) == 16 for line in lines)
    assert {"loss", "entropy", "grad_norm", "tokens", "steps"} <= lines[0].keys()


QUESTION = "What colour is the sky?"
TURNS = (
    '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call><|im_end|>',
    "\n<|im_start|>tool\nblue<|im_end|>\n<|im_start|>assistant\n",
    "It is blue.<|im_end|>",
)


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def looker(tool_model, tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """The address of a backend that serves it, and the log of what it has sampled."""
    folder = tmp_path_factory.mktemp("backend")
    with backend(tool_model, folder, "--log_samples", str(folder / "samples.jsonl")) as address:
        yield address, folder / "samples.jsonl"


def write_file(folder: Path, tap: Wiretap, name: str, base_model: str, **more: str) -> Path:
    """The documented YAML, its names and address adapted; `more` are further lines of some blocks."""
    (folder / "rows.json").write_text(json.dumps([{"id": n, "question": QUESTION} for n in range(3)]))
    port = tap.address.rpartition(":")[2]
    text = f"""
    general: {{plugins: [tool_agent]}}
    llms:
      training_llm:
        _type: openai
        model_name: {name}
        base_url: {tap.address}/v1
        api_key: default
        temperature: 0.0
        max_tokens: 80
    workflow: {{_type: tool_agent, llm: training_llm}}
    eval:
      general:
        max_concurrency: 16
        output_dir: {folder}/eval
        dataset: {{_type: json, file_path: {folder}/rows.json}}
      evaluators:
        my_reward: {{_type: odd_seed}}
    trajectory_builders:
      art_builder: {{_type: openpipe_art_traj_builder, num_generations: 4}}
    trainer_adapters:
      art_adapter:
        _type: openpipe_art_trainer_adapter
        backend:
          ip: localhost
          port: {port}
          name: {name}
          project: my_project
          base_model: {base_model}
          api_key: default
          {more.get("backend", "")}
        training: {{learning_rate: 1e-6{more.get("training", "")}}}
    trainers:
      art_trainer: {{_type: openpipe_art_trainer}}
    finetuning:
      enabled: true
      trainer: art_trainer
      trajectory_builder: art_builder
      trainer_adapter: art_adapter
      reward_function: {{name: my_reward}}
      num_epochs: 2
      output_dir: {folder}/out
    """
    file = folder / "art.yml"
    file.write_text("\n".join(line[4:] for line in text.splitlines()))
    return file


@each_release
def test_a_tool_calling_episode_arrives_whole(release, looker, tool_model, tmp_path):
    """Roles, ids, tools, finish reasons; and token for token what the backend has sampled."""
    address, samples = looker
    name = f"looker-{release}"
    with Wiretap(address) as tap:
        arguments = "init_args: {max_seq_length: 900}\n          engine_args: {gpu_memory_utilization: 0.9}"
        more = ", beta: 0.1" if release == "0.5.4" else ", beta: 0.0, kl_penalty_coef: 0.0"
        file = write_file(tmp_path, tap, name, tool_model.name, backend=arguments, training=more)
        done = finetune(release, file)
        assert done.returncode == 0, done.stdout + done.stderr
        trainings = tap.of("/_train_model")
        (prepared,) = tap.of("/_prepare_backend_for_training")
        with urllib.request.urlopen(f"{address}/art/jobs") as answer:
            jobs = [job for job in json.load(answer)["jobs"] if job["model"].endswith(f"/{name}")]
        assert all(headers["Authorization"] == "Bearer default" for headers in tap.headers_of("/_train_model"))
    assert prepared["model"]["_internal_config"]["init_args"] == {"max_seq_length": 900}
    assert prepared["model"]["_internal_config"]["engine_args"] == {"gpu_memory_utilization": 0.9}
    assert len(trainings) == 2
    wanted = {"learning_rate": 1e-6} | ({"beta": 0.1} if release == "0.5.4" else {"kl_penalty_coef": 0.0})
    assert trainings[0]["config"].items() >= wanted.items()
    assert trainings[0]["model"]["name"] == name
    sampled = [json.loads(line) for line in samples.read_text().splitlines()]
    known = {tuple(line["token_ids"]): line["logprobs"] for line in reversed(sampled)}  # the first: before any training
    tokenizer = byte_tokenizer()
    assert {job["status"] for job in jobs} == {"completed"}
    assert {job["metrics"]["learning_rate"] for job in jobs} == {1e-6}
    trajectories = [t for group in trainings[0]["trajectory_groups"] for t in group["trajectories"]]
    assert len(trajectories) == 12 - 4 * done.stdout.count("no_variance")
    for trajectory in trajectories:
        assert json.dumps(trajectory["tools"]) == json.dumps([LOOK])  # in this order: templates print it
        assert trajectory["additional_histories"] == []
        user, call, result, answer = trajectory["messages_and_choices"]
        assert user == {"role": "user", "content": QUESTION}
        assert call["finish_reason"] == "tool_calls"
        (asked,) = call["message"]["tool_calls"]
        assert asked["function"]["name"] == "look"
        assert json.loads(asked["function"]["arguments"]) == {"at": "sky"}
        assert result == {"role": "tool", "tool_call_id": asked["id"], "name": "look", "content": "blue"}
        assert (answer["finish_reason"], answer["message"]["content"]) == ("stop", "It is blue.")
        for choice, text in ((call, TURNS[0]), (answer, TURNS[2])):
            entries, ids = choice["logprobs"]["content"], ids_of(choice)
            assert ids == tuple(tokenizer.encode(text, add_special_tokens=False))
            assert [entry["logprob"] for entry in entries] == pytest.approx(known[ids], abs=1e-6)
    _, *weighed = [json.loads(line) for line in (tmp_path / "out/advantages.jsonl").read_text().splitlines()]
    assert all(w["advantages"] == ({} if w["dropped"] else {"0": None, "1": None}) for w in weighed)
    show = [sys.executable, "-m", "insitu", "trajectories", "show", tmp_path / "out"]
    listed = subprocess.run([*show, "--epoch", "1"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.endswith("  sent") for line in listed].count(True) == len(trajectories)
    trained = len(trajectories) * sum(len(tokenizer.encode(TURNS[n], add_special_tokens=False)) for n in (0, 2))
    assert min(jobs, key=lambda job: job["policy_version"])["metrics"]["tokens"] == trained


@each_release
def test_a_server_of_arts_own_kind(release, looker, tool_model, tmp_path):
    """One that serves the model by its step alone: the llm follows, and what was sampled is taken from the logprobs."""
    address, _ = looker
    name = f"plain-{release}"
    with Wiretap(address) as tap:
        tap.plain = name
        file = write_file(tmp_path, tap, name, tool_model.name)
        text = file.read_text()
        fixed = re.search(r"_type: openai\n.*?(?= +temperature)", text, re.DOTALL)[0]
        file.write_text(text.replace(fixed, "_type: policy\n"))
        done = finetune(release, file, "-o", "finetuning.target_model", f"{name}@0")
        assert done.returncode == 0, done.stdout + done.stderr
        asked = [body["model"] for body in tap.of("/v1/chat/completions")][2:]  # after the rehearsed episode's two
        trainings = tap.of("/_train_model")
    assert asked == [f"{name}@0"] * (len(asked) // 2) + [f"{name}@1"] * (len(asked) // 2)
    assert len(trainings) == 2
    choices = [turn for turn in turns_of(trainings[0]) if "message" in turn]
    assert choices
    assert not any("prompt_token_ids" in choice for choice in choices)
    tokenizer = byte_tokenizer()
    sampled = {tuple(tokenizer.encode(TURNS[n], add_special_tokens=False)) for n in (0, 2)}
    assert {ids_of(choice) for choice in choices} == sampled


def turns_of(training: dict) -> list[dict]:
    trajectories = [t for group in training["trajectory_groups"] for t in group["trajectories"]]
    return [turn for t in trajectories for turn in t["messages_and_choices"]]


def ids_of(choice: dict) -> tuple[int, ...]:
    return tuple(int(entry["token"].removeprefix("token_id:")) for entry in choice["logprobs"]["content"])


@each_release
def test_what_has_trained_is_not_trained_again(release, looker, tool_model, tmp_path):
    """The answer to the first training is lost after the server has trained: the step tells, and the run goes on."""
    address, _ = looker
    with Wiretap(address) as tap:
        tap.lose = "/_train_model"
        done = finetune(release, write_file(tmp_path, tap, f"lost-{release}", tool_model.name))
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(tap.of("/_train_model")) == 2  # one for each epoch
    lines = [json.loads(line) for line in (tmp_path / "out/training_metrics.jsonl").read_text().splitlines()]
    assert [line["policy_version"] for line in lines] == [1, 2]


NOT_FOR_THE_SERVER = ("training.kimi_k2_tau", "training.kl_penalty_coef")
"""What the client can send, and `insitu backend` refuses."""


@pytest.mark.parametrize(
    ("release", "key", "value", "told"),
    [
        ("0.5.18", "training.beta", 0.1, "0.5.18 has no such option; set training.kl_penalty_coef for ART"),
        ("0.5.18", "training.kl_penalty_coef", 0.1, "set beta, which adds a KL penalty to the loss (a key of open"),
        ("0.5.4", "training.kl_penalty_coef", 0.1, "openpipe-art 0.5.4 has no such option; set training.beta"),
        ("0.5.18", "training.learning_rat", 0.1, "did you mean 'learning_rate'"),
        ("0.5.4", "backend.init_args.max_seq_len", 9, "did you mean 'max_seq_length'"),
        ("0.5.18", "backend.engine_args.tensor_parallel", 2, "did you mean 'tensor_parallel_size'"),
        ("0.5.4", "backend.server_config.server_arg", {}, "did you mean 'server_args'"),
        ("0.5.18", "training.kimi_k2_tau", 0.5, "kimi_k2_tau is 0.5"),
        ("0.5.4", "backend.base_model", "gpt-4", "gpt-4"),
        ("0.5.18", "backend.port", 9, "no answer from the ART server"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(release, key, value, told, looker, tool_model, tmp_path):
    address, _ = looker
    with Wiretap(address) as tap:
        file = write_file(tmp_path, tap, f"refused-{release}", tool_model.name)
        done = finetune(release, file, *set_keys(**{f"trainer_adapters.art_adapter.{key}": json.dumps(value)}))
        assert done.returncode in (1, 2), done.stdout + done.stderr
        assert told in done.stderr
        assert "Traceback" not in done.stderr
        trained = [body for body in tap.of("/_train_model") if key not in NOT_FOR_THE_SERVER]
    assert not trained


@each_release
def test_the_adapter_by_hand(release, looker, tool_model):
    """Made in Python, without a file: each submission of an unnumbered epoch trains, and a failure is one."""
    address, _ = looker
    python = ROOT / ".venv-art" / release / "bin" / "python"
    port = address.rpartition(":")[2]
    command = [python, "-W", "error::ResourceWarning", HERE / "by_hand.py", port, f"hand-{release}", tool_model.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "never retrieved" not in done.stderr
    first, again, other, untrained, by_run = map(json.loads, done.stdout.splitlines()[-5:])
    assert (first["status"], first["step"]) == (again["status"], again["step"]) == ("completed", 1)
    assert (other["status"], other["step"]) == ("completed", 2)
    assert untrained["status"] == "failed"
    assert "2 x no_logprobs" in untrained["message"]
    assert by_run == other


@each_release
def test_submissions_at_once_again_and_from_elsewhere(release, looker, tool_model):
    address, _ = looker
    name = f"odd-{release}"
    python = ROOT / ".venv-art" / release / "bin" / "python"
    command = [python, HERE / "odd_submissions.py", address.rpartition(":")[2], name, tool_model.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [json.loads(line)["step"] for line in lines if line.startswith("{")] == [1, 2, 1, 2, 3, 4, 5, 6]
    (refused, _) = [line for line in lines if line.startswith("refused")]
    assert "function.arguments" in refused
    with urllib.request.urlopen(f"{address}/v1/models") as answer:
        names = {model["id"] for model in json.load(answer)["data"]}
    best = f"{name}-best"
    assert {n for n in names if n.partition("@")[0] == best} == {best, *(f"{best}@{step}" for step in (0, 2, 5, 6))}


def test_a_training_that_fails_on_the_way_is_told_by_its_cause(looker, tool_model, tmp_path):
    """Its answer has begun when the loss is nan: the connection breaks, and nothing is waited for or trained again."""
    address, _ = looker
    with Wiretap(address) as tap:
        more = ", packed_sequence_length: 16"
        file = write_file(tmp_path, tap, "nan", tool_model.name, training=more)
        done = finetune("0.5.18", file, *set_keys(trainer_adapters__art_adapter__training__learning_rate="1e30"))
        assert done.returncode == 1, done.stdout + done.stderr
        assert len(tap.of("/_train_model")) == 1
    assert "epoch 1: training job" in done.stderr
    assert "nan" in done.stderr


@each_release
def test_a_server_that_has_lost_the_model_ends_the_run(release, looker, tool_model, tmp_path):
    """Started again in another folder within the third epoch: an earlier step is not taken for a training."""
    address, _ = looker
    with backend(tool_model, tmp_path / "other") as fresh, Wiretap(address) as tap:
        tap.then = ("/_train_model", fresh)
        file = write_file(tmp_path, tap, f"forgotten-{release}", tool_model.name)
        done = finetune(release, file, "-o", "finetuning.num_epochs", "3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the ART server has lost its checkpoints" in done.stderr


@each_release
def test_old_checkpoints_go(release, looker, tool_model, tmp_path):
    address, samples = looker
    with Wiretap(address) as tap:
        name = f"kept-{release}"
        file = write_file(tmp_path, tap, name, tool_model.name, backend="delete_old_checkpoints: true")
        done = finetune(release, file, "-o", "finetuning.num_epochs", "5")
        assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = samples.parent.glob(f"art/*/my_project/{name}/checkpoints")
    steps = sorted(int(path.name.removeprefix("step_")) for path in folder.iterdir() if path.is_dir())
    assert steps[-2:] == [4, 5]  # deleted before each training: the fourth was the latest then
    assert len(steps) <= 3
