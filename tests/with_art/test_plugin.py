"""The ART plugin with the official client libraries: `nat finetune` in their environments, the backend in ours."""

import json
import re
import subprocess
import sys
import urllib.request

import pytest
from art_runs import (
    HERE,
    INSITU,
    QUESTION,
    ROOT,
    TURNS,
    backend,
    each_release,
    finetune,
    ids_of,
    serving,
    set_keys,
    turns_of,
    write_file,
)
from factories import read_lines
from tiny_models import byte_tokenizer
from tool_agent import LOOK
from wiretap import Wiretap


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


@each_release
def test_a_tool_calling_episode_arrives_whole(release, looker, tool_model, tmp_path):
    """Roles, ids, tools, finish reasons; and token for token what the backend has sampled."""
    address, samples = looker
    name = f"looker-{release}"
    with Wiretap(address) as tap:
        arguments = "init_args: {max_seq_length: 900}\n          engine_args: {gpu_memory_utilization: 0.9}"
        file = write_file(tmp_path, tap, name, tool_model.name, backend=arguments, training=", beta: 0.1")
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
    wanted = {"learning_rate": 1e-6} | ({"beta": 0.1} if release == "0.5.4" else {"kl_penalty_coef": 0.1})
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


@each_release
def test_what_no_server_has_received_is_submitted_until_one_has(release, looker, tool_model, tmp_path):
    """Without waiting for a step that nobody trains: `lost_reply_timeout` is longer than the test's."""
    address, _ = looker
    with Wiretap(address) as tap:
        tap.refuse = ("/_train_model", 4)
        done = finetune(release, write_file(tmp_path, tap, f"refused-by-proxy-{release}", tool_model.name))
        assert done.returncode == 0, done.stdout + done.stderr
        keys = [headers["Idempotency-Key"] for headers in tap.headers_of("/_train_model")]
    assert len(keys) == 6
    assert len({*keys[:5]}) == 1
    lines = [json.loads(line) for line in (tmp_path / "out/training_metrics.jsonl").read_text().splitlines()]
    assert [line["policy_version"] for line in lines] == [1, 2]


@each_release
def test_an_outage_of_the_server_costs_no_episode(release, looker, tool_model, tmp_path):
    address, _ = looker
    with Wiretap(address) as tap:
        tap.outage = ("/v1/chat/completions", 3)
        done = finetune(release, write_file(tmp_path, tap, f"away-{release}", tool_model.name))
        assert done.returncode == 0, done.stdout + done.stderr
        assert tap.outage is None
    lines = read_lines(tmp_path / "out/episodes.jsonl.gz")
    episodes = [line for line in lines if "outcome" in line]
    assert [(e["outcome"], e["error"]) for e in episodes] == [("ok", None)] * 24
    assert any(e["attempt"] > 0 for e in episodes)


NOT_FOR_THE_SERVER = ("training.kimi_k2_tau",)
"""What the client can send, and `insitu backend` refuses."""


@pytest.mark.parametrize(
    ("release", "key", "value", "problem"),
    [
        ("0.5.18", "training.beta", -0.1, "training.beta"),
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
def test_what_cannot_be_done_is_refused_by_name(release, key, value, problem, looker, tool_model, tmp_path):
    address, _ = looker
    with Wiretap(address) as tap:
        file = write_file(tmp_path, tap, f"refused-{release}", tool_model.name)
        done = finetune(release, file, *set_keys(**{f"trainer_adapters.art_adapter.{key}": json.dumps(value)}))
        assert done.returncode in (1, 2), done.stdout + done.stderr
        assert problem in done.stderr
        assert "Traceback" not in done.stderr
        trained = [body for body in tap.of("/_train_model") if key not in NOT_FOR_THE_SERVER]
    assert not trained


@each_release
def test_the_adapter_by_hand(release, looker, tool_model):
    """Made in Python, without a file: each submission of an unnumbered epoch trains, and a failure is one."""
    address, _ = looker
    python = ROOT / ".environments/art" / release / "bin" / "python"
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
    python = ROOT / ".environments/art" / release / "bin" / "python"
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
    """The response has begun when the loss is nan: the connection breaks, and nothing is trained again."""
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


@each_release
def test_a_workflow_service_whose_llm_is_openai(release, looker, tool_model, tmp_path):
    """Its requests go to the newest step, whose name changes with every training from release 0.5.10 on."""
    address, _ = looker
    name = f"served-{release}"
    with Wiretap(address) as tap:
        file = write_file(tmp_path, tap, name, tool_model.name)
        with serving(INSITU, "serve", "--config_file", file, "--port", "0") as service:
            done = finetune(release, file, "--endpoint", service)
        assert done.returncode == 0, done.stdout + done.stderr
    metrics = read_lines(tmp_path / "out/training_metrics.jsonl")
    assert [m["policy_version"] for m in metrics] == [1, 2]
    calls = [line for line in read_lines(tmp_path / "out/calls.jsonl.gz") if "model" in line]
    assert {call["policy_version"] for call in calls} == {0, 1}
