"""The promises of docs/guides/threat-model.md that no other file tests: keys, pickles, model folders, paths, secrets.

`test_the_threat_model_names_its_tests` holds the page to its tests, here and in other files.
"""

import ast
import gc
import gzip
import html
import json
import re
import shutil
import subprocess
from base64 import b64encode, urlsafe_b64encode
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import processes
import pytest
import torch
import yaml
from factories import digits_project, model_client, read_lines, write_rows
from marks import slow_after
from processes import HANGS, forked_python
from pydantic import ConfigDict, SecretStr
from rich.table import Table
from safetensors.torch import load_file, save_file
from test_art_protocol import groups
from test_gateway import gateway_to
from tiny_backend import Served
from tiny_models import save_tiny_model

from insitu.backend import BackendOptions
from insitu.backend.model import load_model
from insitu.config import load_config
from insitu.config.resolved import resolved_config, without_secrets
from insitu.config.yaml_loader import parse_yaml
from insitu.errors import BackendError, ConfigError, RequestRefused
from insitu.plugin_api import Builder, FunctionBaseConfig, register_function
from insitu.remote.attempt_records import ServedPolicy
from insitu.remote.service import WorkflowService
from insitu.schemas.components import WORKFLOW
from insitu.schemas.finetuning import PolicyEndpoint
from insitu.wire.http_access import AccessPolicy
from insitu.wire.redaction import (
    is_secret_variable,
    notes_console,
    redact,
    redact_bytes,
    remember_environment,
    remember_secret,
    remember_settings,
    results_console,
)
from insitu.workflow.context import EpisodeScope
from insitu.workflow.llms import OpenAIConfig

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


# keys


class Watched(str):
    """A token that may not be compared as text, which takes longer the more of it is right."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared with ==")

    __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = startswith = __eq__  # type: ignore[assignment]


@pytest.mark.parametrize("scheme", ["Bearer {}", "Basic {}"])
def test_a_token_is_compared_in_constant_time(scheme: str) -> None:
    policy = AccessPolicy(Watched("secret-token"), variable="X")
    right = {"Bearer {}": "secret-token", "Basic {}": "YW55OnNlY3JldC10b2tlbg=="}[scheme]
    policy.check({"authorization": scheme.format(right)})
    for wrong in ("", right[:-1], f"{right}x", "secret-tokem", "\xff", "\udcff"):
        with pytest.raises(RequestRefused, match="missing or wrong"):
            policy.check({"authorization": scheme.format(wrong)})


@pytest.fixture(scope="module")
def nodes() -> dict[Path, list[ast.AST]]:
    """The syntax of each source, which no collection of garbage visits."""
    gc.disable()
    found = {path: [*ast.walk(ast.parse(path.read_text()))] for path in SOURCES}
    gc.freeze()
    gc.enable()
    return found


@pytest.mark.check
def test_nothing_that_is_called_a_token_is_compared_as_text(nodes: dict[Path, list[ast.AST]]) -> None:
    secret = re.compile(r"(^|_)(token|secret|password|api_key|authorization|credentials)$")
    for path in SOURCES:
        for node in nodes[path]:
            if isinstance(node, ast.Compare) and any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
                sides = [node.left, *node.comparators]
                names = [getattr(side, "attr", getattr(side, "id", "")) for side in sides]
                assert not any(map(secret.search, names)), f"{path}, line {node.lineno}: {ast.unparse(node)}"


def wrong_headers(token: str) -> Iterator[dict[str, Any]]:
    yield {}
    for value in (f"Bearer {token}x", "Bearer", "Bearer -", f"Basic {token}", token, "Bearer \xff", "Basic \xff"):
        yield {"Authorization": value.encode("latin-1")}


def test_every_route_of_the_backend_needs_the_token(served: Served) -> None:
    """Also those of plugins to come: all that its OpenAPI document lists."""
    with httpx.Client(base_url=served.address, timeout=HANGS) as client:
        paths = client.get("/openapi.json", headers={"Authorization": f"Bearer {served.token}"}).json()["paths"]
        assert {"/v1/chat/completions", "/v1/train/jobs", "/_train_model", "/v1/preview/models"} <= paths.keys()
        for path, methods in paths.items():
            if path in ("/health", "/healthcheck"):
                continue
            for method in methods:
                for headers in wrong_headers(served.token):
                    answer = client.request(method, path.replace("{", "").replace("}", ""), headers=headers)
                    assert answer.status_code == 401, (method, path, headers)


async def test_every_route_of_the_workflow_service_needs_the_token(write: Any) -> None:
    config = load_config(write({"workflow": {"_type": "command", "command": ["true"], "llm": "m"}, "llms": LLMS}))
    access = AccessPolicy.of("127.0.0.1", "service-token", variable="X")
    service = WorkflowService(config, lambda _: nullcontext(), access)  # type: ignore[arg-type,return-value]
    async with service.listening("127.0.0.1", 0) as address, httpx.AsyncClient(base_url=address) as client:
        for method, path in (("GET", "/v1/episodes"), ("POST", "/v1/episodes"), ("POST", "/generate"), ("GET", "/x")):
            for headers in wrong_headers("service-token"):
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path, headers)


def test_the_backend_of_a_run_has_a_token(harmless: Path, tmp_path: Path) -> None:
    """Other users of the machine can connect to it. They can also read its command line, but not its environment."""
    digits_project(tmp_path, model=str(harmless / "model"))
    write_rows(tmp_path, [{"say": "hi", "hang": True}])
    with processes.start("-v", "finetune", "config.yml", folder=tmp_path) as run:
        run.wait_until(lambda: re.search(r"backend process (\d+) at (\S+)\n", run.errors))
        _, pid, address = re.findall(r"(backend process) (\d+) at (\S+)\n", run.errors)[0]
        assert [httpx.get(address + path).status_code for path in ("/health", "/v1/models")] == [200, 401]
        assert "token" not in Path(f"/proc/{pid}/cmdline").read_text()


async def test_the_gateway_looks_keys_up_by_their_hash(server: Any) -> None:
    async with gateway_to(model_client(server)) as gateway, httpx.AsyncClient() as client:
        with EpisodeScope() as scope, gateway.endpoint(scope) as endpoint:
            tables = [table for table in vars(gateway).values() if isinstance(table, dict)]
            assert not any(endpoint.key in table for table in tables)
            for key in (endpoint.key[:-1], f"{endpoint.key}x", endpoint.key.lower(), "%ff", "%00"):
                answer = await client.get(f"{gateway.address}/e/{key}/v1/models")
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unknown_episode")


def test_no_key_is_in_what_debuggers_and_logs_show_of_an_object() -> None:
    shown = [
        AccessPolicy("a-secret"),
        BackendOptions(model="m", token="a-secret"),
        PolicyEndpoint("http://h/v1", "m", "a-secret"),
        ServedPolicy(base_url="http://h/v1", model="m", api_key="a-secret"),
        OpenAIConfig(model_name="m", api_key=SecretStr("a-secret")),
    ]
    assert "a-secret" not in repr(shown)


# no pickles, no code

LLMS = {"m": {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:9/v1"}}
PICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
CODE = {"eval", "exec", "compile", "__import__"}


@pytest.mark.check
def test_no_source_reads_pickles_or_runs_text(nodes: dict[Path, list[ast.AST]]) -> None:
    for path in SOURCES:
        for node in nodes[path]:
            place = path, getattr(node, "lineno", 0)
            match node:
                case ast.Import(names=names):
                    assert not {name.name.partition(".")[0] for name in names} & PICKLING, place
                case ast.ImportFrom(module=str(module)):
                    assert module.partition(".")[0] not in PICKLING, place
                case ast.Call(func=func, keywords=keywords):
                    called = ast.unparse(func)
                    keys = {each.arg: ast.unparse(each.value) for each in keywords}
                    assert called not in ("torch.load", "np.load", "numpy.load", "os.system", "os.popen"), place
                    assert keys.get("shell") != "True", place
                    assert not {"allow_pickle", "weights_only"} & keys.keys(), place
                    assert called != "yaml.load" or ast.unparse(node.args[1]) == "_Loader", place
                    # workflow/functions.py: annotations of a plugin's functions, which are its own source
                    # learner/code.py: functions in the folder that `--allow_code` names
                    allowed = path.parts[-2:] in (("workflow", "functions.py"), ("learner", "code.py"))
                    assert called not in CODE or allowed, place
        assert "trust_remote_code" not in path.read_text() or path.name == "model_files.py", path


def test_the_yaml_loader_makes_plain_values_only() -> None:
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        parse_yaml("!!python/object/apply:os.getcwd []")


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and adapters for it in `adapter`."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "model")
    adapter = folder / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": "../model"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def set_in(file: Path, **keys: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def pickle_instead(folder: Path, trap: Path, name: str = "pytorch_model.bin") -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save({"weights": Trap(trap)}, folder / name)


def harmless_pickle(folder: Path, trap: Path) -> None:
    """One that libraries would read: it has tensors only."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def index_of(part: str) -> Any:
    def spoil(folder: Path, trap: Path) -> None:
        pickle_instead(folder, trap, "part.bin")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"w": part}}))

    return spoil


def chosen_file(folder: Path, trap: Path) -> None:
    set_in(folder / "config.json", transformers_weights="adapter_model.bin")
    torch.save({"weights": Trap(trap)}, folder / "adapter_model.bin")


def code_beside(folder: Path, trap: Path, **keys: Any) -> None:
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(trap)!r}).touch()\nclass Evil: pass\n")
    set_in(folder / "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}, **keys)


def tokenizer_code(folder: Path, trap: Path) -> None:
    code_beside(folder, trap)
    file = folder / "tokenizer_config.json"
    set_in(file, auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, tokenizer_class="Evil")


def template_names(folder: Path, trap: Path) -> None:
    templates = [{"name": name, "template": "x"} for name in ("default", f"../../../../../../..{trap}")]
    (folder / "chat_template.jinja").unlink()
    set_in(folder / "tokenizer_config.json", chat_template=templates)


def adapter_with(**keys: Any) -> Any:
    def spoil(folder: Path, trap: Path) -> None:
        torch.save({"weights": Trap(trap)}, folder / "adapter_model.bin")
        set_in(folder / "adapter_config.json", **keys)

    return spoil


@pytest.mark.parametrize(
    ("kind", "spoil", "said"),
    [
        ("model", pickle_instead, "has pytorch_model.bin but no model.safetensors: pickled weights are not read"),
        ("model", harmless_pickle, "has pytorch_model.bin but no model.safetensors: pickled weights are not read"),
        ("model", index_of("part.bin"), "names 'part.bin'; allowed: .safetensors files in the same folder"),
        ("model", index_of("../x.safetensors"), "names '../x.safetensors'; allowed: .safetensors files in the same"),
        ("model", chosen_file, "names 'adapter_model.bin'; allowed: .safetensors files"),
        ("model", lambda f, t: code_beside(f, t, model_type="novel"), "needs Python code of its repository"),
        ("model", tokenizer_code, "needs Python code of its repository (auto_map), which is never run"),
        ("model", template_names, "has a chat template whose name '../.."),
        ("adapter", adapter_with(), "has adapter_model.bin but no adapter_model.safetensors: pickled weights are not"),
        ("adapter", adapter_with(megatron_config={"a": 1}, megatron_core="evil"), "megatron_config is set, for which"),
        (
            "adapter",
            adapter_with(peft_type="PROMPT_TUNING", tokenizer_kwargs={"trust_remote_code": True}),
            "peft_type is 'PROMPT_TUNING'; allowed: 'LORA'",
        ),
    ],
)
def test_model_folders_that_could_run_code_are_refused(
    harmless: Path, tmp_path: Path, kind: str, spoil: Any, said: str
) -> None:
    folder, trap = tmp_path / "models" / kind, tmp_path / "trap"
    shutil.copytree(harmless, tmp_path / "models")
    spoil(folder, trap)
    with pytest.raises(BackendError) as raised:
        load_model(str(folder), "cpu")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not trap.exists()


def test_a_pattern_of_an_adapter_that_takes_for_ever_is_refused(harmless: Path, tmp_path: Path) -> None:
    """It would be matched in the server's process, which could do nothing else."""
    shutil.copytree(harmless, tmp_path / "models")
    set_in(tmp_path / "models/adapter/adapter_config.json", target_modules="((\\w|\\.)+)+!")
    save_file({}, tmp_path / "models/adapter/adapter_model.safetensors")
    with pytest.raises(BackendError, match=r"adapter_config.json: a pattern takes more than 2 s to match: \(\("):
        load_model(str(tmp_path / "models/adapter"), "cpu")


TEMPLATE = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}x"


IMPATIENT = """
from insitu.cli import main
from insitu.wire import http_server

http_server.PARSE_SECONDS = 1.0  # instead of 10
main()
"""


def test_a_chat_template_that_loops_stops_its_own_request_only(harmless: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(harmless / "model", tmp_path / "model"))
    ordinary = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("{% if messages[0].content == 'loop' %}" + TEMPLATE + "{% else %}")
    with (folder / "chat_template.jinja").open("a") as file:
        file.write(ordinary + "{% endif %}")
    (tmp_path / "backend.py").write_text(IMPATIENT)
    options = ["--model", folder, "--port", 0, "--output_dir", tmp_path / "out", "--threads", 1]
    with (
        processes.serving(tmp_path / "backend.py", "backend", *options) as (_, address),
        httpx.Client(base_url=address, timeout=HANGS) as client,
    ):

        def say(text: str) -> httpx.Response:
            body = {"model": "policy", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
            return client.post("/v1/chat/completions", json=body)

        with ThreadPoolExecutor() as threads:
            looping = threads.submit(say, "loop")
            answered = 0
            while not looping.done():
                assert (client.get("/health").status_code, say("hi").status_code) == (200, 200)
                answered += 1
        assert answered > 2
        assert looping.result().status_code == 400
        assert "the chat template cannot render these messages: it has not ended within 1 s" in looping.result().text
        long = say("0123456789" * 180_000)  # tokenizing it takes more than 1 s, on most machines
        assert long.status_code == 400
        assert long.json()["error"]["code"] in ("too_slow", "context_length_exceeded")


@pytest.mark.parametrize("spoil", [code_beside, pickle_instead], ids=["code", "pickle"])
def test_code_and_pickles_beside_a_model_are_ignored(harmless: Path, tmp_path: Path, spoil: Any) -> None:
    folder = Path(shutil.copytree(harmless / "model", tmp_path / "model"))
    spoil(folder, tmp_path / "trap")
    shutil.copy(harmless / "model/model.safetensors", folder)
    load_model(str(folder), "cpu")
    assert not (tmp_path / "trap").exists()


def test_the_backend_does_not_ask_whether_to_run_code(harmless: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(harmless / "model", tmp_path / "model"))
    code_beside(folder, tmp_path / "trap", model_type="novel")
    command = [forked_python(), "-m", "insitu", "backend", "--model", folder, "--port", "0"]
    done = subprocess.run(command, input="y\n" * 9, capture_output=True, text=True, timeout=HANGS, cwd=tmp_path)
    assert done.returncode == 1
    assert "needs Python code of its repository" in done.stderr
    assert "[y/N]" not in done.stdout + done.stderr
    assert not (tmp_path / "trap").exists()


# paths

HOSTILE_NAMES = [
    *("..", ".", "", "/", "../..", "../../../../tmp/x", "/etc/passwd", "a/../../b", "..%2f..%2fx", "\0", "a\0b", "~"),
    *("x" * 300, "\u00e9" * 100, "\\..\\x", "C:\\x", ".hidden", "-rf", "a\nb", "\ud83d", "{0}", "$HOME", "con"),
]


def test_names_of_art_models_stay_in_their_folder(harmless: Path, tmp_path: Path) -> None:
    """Each name as entity, project and name; what is written and deleted is below the output folder."""
    outside = tmp_path / "victim.txt"
    outside.write_text("kept")
    options = {"model": harmless / "model", "port": 0, "output_dir": tmp_path / "out", "threads": 1}
    arguments = [part for key, value in options.items() for part in (f"--{key}", value)]
    headers = {"Content-Type": "application/json"}
    statuses = set()
    with processes.serving("backend", *arguments, folder=tmp_path) as (_, address):
        with httpx.Client(base_url=address, timeout=HANGS, headers=headers) as client:
            for name in HOSTILE_NAMES:
                for key in ("entity", "project", "name"):
                    model = {"name": "n", "project": "p", "entity": "e", "base_model": "model"} | {key: name}
                    log = json.dumps({"model": model, "trajectory_groups": groups()[:1], "split": name})
                    answer = client.post("/_log", content=log)
                    statuses.add(answer.status_code)
                    assert answer.status_code < 500, (key, name, answer.text)
                    made = client.post("/v1/preview/models", content=json.dumps(model))
                    if made.status_code == 200:
                        client.delete(f"/v1/preview/models/{made.json()['id']}")
                client.get(f"/v1/train/jobs/{'%2e%2e%2f' * 3}x")
                client.post("/v1/chat/completions", content=json.dumps({"model": f"policy@{name}", "messages": []}))
    assert statuses == {200, 400, 422}
    assert outside.read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "victim.txt"}
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {".lock", "art"}
    assert all(len(path.relative_to(tmp_path / "out/art").parts) <= 4 for path in (tmp_path / "out/art").rglob("*"))


def test_names_with_slashes_are_not_those_of_another_model(harmless: Path, tmp_path: Path) -> None:
    """`a/b`, `c` and `a`, `b/c` were the same model for the server, in two folders."""
    options = ["--model", harmless / "model", "--port", 0, "--output_dir", tmp_path, "--threads", 1]
    with processes.serving("backend", *options) as (_, address):
        model = {"name": "n", "base_model": "model"}
        bodies = [model | {"entity": e, "project": p} for e, p in (("a/b", "c"), ("a", "b/c"))]
        answers = [httpx.post(f"{address}/v1/preview/models", json=body, timeout=HANGS) for body in bodies]
    assert [answer.status_code for answer in answers] == [200, 409]
    assert "('a/b', 'c', 'n')" in answers[1].json()["error"]["message"]


@pytest.mark.parametrize("name", ["../score", "/tmp/score", "a/b", "..", "a\0b", "x" * 250, "a\\b", "workflow"])
def test_an_evaluator_whose_file_would_be_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    digits_project(tmp_path)
    config = yaml.safe_load((tmp_path / "config.yml").read_text())
    config["eval"]["evaluators"][name] = {"_type": "digits"}
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "config.yml")
    assert f"eval.evaluators: {name!r:.80}" in str(raised.value)


# secrets

VALUES = {
    name: f"sk-{name.lower()}-7f3a'9c/e21@b"
    for name in ("BACKEND", "JUDGE", "JUDGE_URL", "SEARCH", "LOGIN", "UNRELATED", "UPSTREAM", "SERVE")
}
"""Recognisable, and quoted in JSON, in Python and in URLs."""


def leaks(text: bytes | str) -> list[str]:
    """The names of secrets in a text, in any form."""
    data = text.encode(errors="replace") if isinstance(text, str) else text
    return [name for name in VALUES if f"sk-{name.lower()}-7f3a".encode() in data]


def check_no_leaks(folder: Path, out: str, err: str) -> None:
    for stream in (out, err):
        assert not leaks(stream), next(line for line in stream.splitlines() if leaks(line))
        assert not leaks("".join(stream.split())), "a secret was wrapped"
    inputs = {folder / name for name in ("config.yml", "rows.jsonl")}
    for path in set(folder.rglob("*")) - inputs:
        if path.is_file() and path.suffix not in (".safetensors", ".py"):
            assert not leaks(path.read_bytes()), path


def leaky_project(folder: Path, address: str, **adapter: Any) -> None:
    """A run whose secrets come from the environment by `${NAME}`, in each kind of key and in URLs."""
    digits_project(folder, plugin="leaky_plugin", **adapter)
    (folder / "leaky_plugin.py").write_text((ROOT / "tests/support/leaky_plugin.py").read_text())
    file = folder / "config.yml"
    config = yaml.safe_load(file.read_text())
    host = address.partition("://")[2]
    config["general"]["plugins"].append("digits_plugin")
    config["llms"]["judge"] = {"_type": "openai", "model_name": "policy", "api_key": "${JUDGE}", "max_retries": 0}
    config["llms"]["judge"] |= {"base_url": f"http://any:${{QUOTED_URL}}@{host}/v1", "max_tokens": 2}
    login = {"password": "${LOGIN}"}
    config["workflow"] = {"_type": "leaky", "llm": "player", "judge": "judge", "login": login}
    config["workflow"]["search_api_key"] = "${SEARCH}"
    config["finetuning"]["num_epochs"] = 1
    file.write_text(yaml.safe_dump(config))
    write_rows(folder, [{"say": "hi"}, {"say": "fail"}])


def variables(**more: str) -> dict[str, str]:
    """`COLUMNS` is so small that secrets would be wrapped."""
    fixed = {"UNRELATED_TOKEN": VALUES["UNRELATED"], "PYTHONWARNINGS": "error", "COLUMNS": "20"}
    return VALUES | fixed | more


@pytest.mark.parametrize("how", slow_after(1, ["api_key", "url", "wrong", "gone"]))
def test_no_secret_is_printed_logged_or_written(harmless: Path, tmp_path: Path, how: str) -> None:
    """A run with a workflow that leaks them all, at the level of logs that shows everything; also one that fails."""
    token = httpx.URL(f"http://any:{VALUES['BACKEND'].replace('/', '%2F').replace('@', '%40')}@h").userinfo.decode()
    backend = {"BACKEND_URL_TOKEN": token.partition(":")[2], "INSITU_BACKEND_TOKEN": VALUES["BACKEND"]}
    given = variables(QUOTED_URL=backend["BACKEND_URL_TOKEN"])
    options = ("--model", harmless / "model", "--port", 0, "--threads", 1)
    with processes.serving("backend", *options, **backend) as (_, address):
        host = address.partition("://")[2]
        adapter = {
            "api_key": {"url": address, "api_key": "${BACKEND}"},
            "url": {"url": f"http://any:${{QUOTED_URL}}@{host}"},
            "wrong": {"url": address, "api_key": "${SEARCH}"},
            "gone": {"url": "http://any:${QUOTED_URL}@127.0.0.1:9"},
        }[how]
        leaky_project(tmp_path, address, **adapter)
        arguments = ("-vv", "finetune", "--config_file", "config.yml")
        done = processes.run(*arguments, folder=tmp_path, **given)
    assert done.returncode == (0 if how in ("api_key", "url") else 1), done.stderr[-3000:]
    check_no_leaks(tmp_path, done.stdout, done.stderr)
    if done.returncode == 0:
        episodes = gzip.decompress((tmp_path / "run/episodes.jsonl.gz").read_bytes()).decode()
        assert re.search(r"no access with \[.{1,3}\*\*\*.{1,6}http://any:\*\*\*@127", episodes), episodes
        assert "asking with [" in done.stdout


def test_no_secret_leaves_the_gateway_or_a_service(tmp_path: Path) -> None:
    """A program whose model's server is gone, in a run and behind `insitu serve`."""
    quoted = VALUES["UPSTREAM"].replace("/", "%2F").replace("@", "%40")
    gone = "http://any:${QUOTED_URL}@127.0.0.1:9/v1"
    ask = "curl -s -H content-type:application/json $OPENAI_BASE_URL/chat/completions"
    config = {
        "llms": {"m": {"_type": "openai", "model_name": "m", "base_url": gone, "api_key": "${JUDGE}"}},
        "workflow": {
            "_type": "command",
            "command": ["sh", "-c", f"{ask} -d @- >&2; echo $SEARCH_API_KEY >&2; exit 1"],
            "stdin": "input",
            "llm": "m",
            "env": {"SEARCH_API_KEY": "${SEARCH}"},
            "elsewhere": {"base_url": gone, "api_key": "${LOGIN}"},
        },
    }
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    given = variables(QUOTED_URL=quoted, INSITU_SERVE_TOKEN=VALUES["SERVE"])
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    for model in ("m", "other"):
        arguments = ("-vv", "run", "config.yml", "--input", body.replace('"m"', f'"{model}"'))
        done = processes.run(*arguments, folder=tmp_path, **given)
        assert done.returncode == 1
        assert "ended with exit code 1" in done.stderr
        check_no_leaks(tmp_path, done.stdout, done.stderr)
    with processes.start("-vv", "serve", "config.yml", "--port", 0, folder=tmp_path, **given) as process:
        address = process.stdout.readline().split()[-1]
        headers = {"Authorization": f"Bearer {VALUES['SERVE']}"}
        answer = httpx.post(f"{address}/generate", json={"input": body}, headers=headers, timeout=HANGS)
        assert answer.status_code == 502
        assert "***" in answer.text
        process.terminate()
        out, err = process.communicate(HANGS)
    check_no_leaks(tmp_path, out + answer.text, err)


@pytest.fixture
def no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process knows no secrets, and after the test those that it knew before."""
    monkeypatch.setattr("insitu.wire.redaction._secrets", {})


@pytest.mark.usefixtures("no_secrets")
def test_what_counts_as_a_secret() -> None:
    remember_settings(
        {
            "llms": {"a": {"api_key": 'quoted"key\\', "model_name": "policy-7b"}},
            "workflow": {"headers": {"Authorization": "Bearer header-token"}, "url": "https://u:pass%2Fword@h/?a=b"},
            "list": [{"hf_token": "hf_listed"}, {"url": "https://h/?x=1&api_key=in-the-query&y=2"}],
            "dataset": {"id_key": "identifier", "stop_token": "<|im_end|>"},
            "short": {"password": "secret"},
        }
    )
    remember_environment({"HOST_KEY_CHECKING": "disabled", "KEY_FILE": "/etc/keyfile", "HF_TOKEN": "hf_from_env"})
    remember_environment({"https_proxy": "http://me:proxy-password@proxy", "SORT_KEY": "created_at"})
    remember_environment({"SECRET_SORT_KEY": "sorted_secret", "CACHE_KEY": "cached-7Q", "MY_KEY": "keyed_secret"})
    remember_settings({"env": {"DYNAMO_PARTITION_KEY": "created_at", "API_KEY": "its_own_secret"}})
    shown = "created_at disabled /etc/keyfile policy-7b identifier <|im_end|> secret Bearer https://u:"
    assert redact(shown) == shown
    for secret in (
        "header-token",
        "pass%2Fword",
        "pass/word",
        "hf_listed",
        "in-the-query",
        "hf_from_env",
        "sorted_secret",
        "cached-7Q",
        "keyed_secret",
        "its_own_secret",
        "proxy-password",
        'quoted"key\\',
    ):
        assert redact(f"<{secret}>") == "<***>"
        assert redact_bytes(json.dumps([secret]).encode()) == b'["***"]'
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "api_key", "AUTH_COOKIE"):
        assert is_secret_variable(name, "x")
    for name in ("PATH", "MONKEY", "TOKENIZERS_PARALLELISM", "KEYBOARD", "PWD"):
        assert not is_secret_variable(name, "x")


class AnyKeysConfig(FunctionBaseConfig, name="any_keys"):
    model_config = ConfigDict(extra="allow")


@register_function(config_type=AnyKeysConfig)
async def any_keys(config: AnyKeysConfig, builder: Builder) -> AsyncIterator[None]:
    yield


SECRETS = (
    "plain-token-123",
    'quo"te\\and-back',
    'it\'s-"both"',
    "pässwörd-ünï",
    "two words & more",
    "päth/w+rd=?&x",
    " of-a-file\n",
    "-----BEGIN KEY-----\nMIGHAgEAMBMGByqGSM49\nAgEGCCqGSM49AwEHBG0w\n",
    "not-utf8-\udcff\udc00",
)


def encodings(secret: str) -> dict[str, str]:
    """Texts that hold a secret, as libraries write them."""
    data = secret.encode(errors="surrogatepass")
    once = json.dumps({"key": secret})
    texts = {
        "text": f"<{secret}>",
        "stripped": f"<{secret.strip()}>",
        "JSON": once,
        "JSON in UTF-8": json.dumps({"key": secret}, ensure_ascii=False),
        "JSON in JSON": json.dumps({"arguments": once}),
        "repr": repr([secret]),
        "ascii": ascii([secret]),
        "JSON of repr": json.dumps(repr(secret)),
        "bytes": repr(data),
        "HTML": html.escape(secret),
        "query": urlencode({"key": data}),
        "path": quote(data),
        "lower case": re.sub("%..", lambda code: code[0].lower(), quote(data, safe="")),
        "base64": b64encode(data).decode(),
        "URL-safe base64": urlsafe_b64encode(data).decode(),
    }
    texts |= {f"Basic {n}": b64encode(b"u" * n + b":" + data + b"\n").decode() for n in range(1, 4)}
    if secret.isprintable():
        texts["httpx"] = httpx.URL("http://h").copy_with(username="u", password=secret).userinfo.decode()
    return texts


@pytest.mark.usefixtures("no_secrets")
@pytest.mark.parametrize("secret", SECRETS, ids=ascii)
def test_a_secret_is_recognised_however_it_is_encoded(secret: str) -> None:
    assert remember_secret(secret)
    for how, text in encodings(secret).items():
        assert "***" in redact(text), (how, text)
        left = SequenceMatcher(None, redact(text), text, autojunk=False).find_longest_match().size
        assert left <= len(text) - len(secret.strip()) + 3, (how, redact(text))
        assert b"***" in redact_bytes(text.encode(errors="surrogatepass")), how


@pytest.mark.usefixtures("no_secrets")
def test_each_line_of_a_key_is_a_secret() -> None:
    remember_secret(SECRETS[-2])
    assert redact("1:   MIGHAgEAMBMGByqGSM49\n2:   AgEGCCqGSM49AwEHBG0w\n3: END") == "1:   ***\n2:   ***\n3: END"


@pytest.mark.usefixtures("no_secrets")
def test_a_secret_is_recognised_before_a_table_wraps_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    remember_secret("sk-0123456789-of-two-lines")
    table = Table()
    table.add_column("with sk-0123456789-of-two-lines")
    table.add_row("in sk-0123456789-of-two-lines")
    for console in (results_console(), notes_console()):
        console.print(table)
        console.print("also sk-0123456789-of-two-lines")
    out, err = capsys.readouterr()
    assert out == err
    assert out.count("***") == 3
    assert "012" not in out


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"api_key": "ab-12"}, "functions.m.api_key"),
        ({"api_key": 12345678}, "functions.m.api_key"),
        ({"api_key": "87654321"}, "functions.m.api_key"),
        ({"credentials": {"user": "me", "codes": [4711]}}, "functions.m.credentials.codes.0"),
        ({"base_url": "http://me:pw-1@host/v1"}, "functions.m.base_url"),
        ({"base_url": "http://host/v1?token=12"}, "functions.m.base_url"),
        ({"api_key": "none"}, None),
        ({"api_key": "long-enough-1"}, None),
        ({"use_secrets": True, "api_key": ""}, None),
    ],
)
def test_a_secret_that_cannot_be_recognised_is_hidden_by_its_key(
    write: Any, caplog: pytest.LogCaptureFixture, block: dict[str, Any], named: str | None
) -> None:
    config = load_config(write({"functions": {"m": {"_type": "any_keys", **block}}}))
    shown = resolved_config(config)["functions"]["m"]
    for secret in ("ab-12", "12345678", "87654321", "4711", "pw-1", "token=12", "none", "long-enough-1"):
        assert secret not in str(shown)
    assert shown.get("use_secrets") in (True, None)
    warnings = [record.getMessage() for record in caplog.records]
    if named is None:
        assert warnings == []
    else:
        (warning,) = warnings
        problem = "a secret that is a number or shorter than 8 characters is hidden only where settings are shown"
        assert f"config.yml: {named}: {problem}" in warning


@pytest.mark.usefixtures("no_secrets")
@pytest.mark.parametrize("key", ["env", "headers", "env_vars", "default_headers"])
def test_what_goes_to_another_program_is_secret_whatever_its_key(
    write: Any, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    sent = {
        "GITHUB_TOKEN": "ghp_0123456789abcdef",
        "Private-Token": "glpat-0123456789",
        "Ocp-Apim-Subscription-Key": "0f1e2d3c4b5a69788796a5b4c3d2e1f0",
        "Proxy": "Token abc-0123456789",
        "PIN": "47-11",
        "MODE": "production",
        "Accept": "application/json",
        "NAMED": "${HOME}",
    }
    config = load_config(write({"functions": {"m": {"_type": "any_keys", "deeper": {key: sent}}}}))
    assert set(resolved_config(config)["functions"]["m"]["deeper"][key].values()) == {"***"}
    assert without_secrets({key: sent})[key]["NAMED"] == "${HOME}"
    assert redact("production application/json 47-11") == "production application/json 47-11"
    for secret in (*[*sent.values()][:3], "abc-0123456789"):
        assert redact(f"<{secret}>") == "<***>"
    assert not caplog.records
    write({"workflow": {"_type": "command", "command": ["true"], "llm": "m", "env": {"PIN": 4711}}, "llms": LLMS})
    with pytest.raises(ConfigError, match=r"workflow\.env\.PIN") as raised:
        load_config(write({"workflow": {"_type": "command", "command": ["x"], "llm": "m", "env": {"PIN": 4711}}}))
    assert "4711" not in str(raised.value)


@pytest.mark.parametrize("kind", slow_after(1, ["command", "http"]))
def test_what_goes_to_another_program_is_in_no_file_of_a_run(harmless: Path, tmp_path: Path, kind: str) -> None:
    digits_project(tmp_path, model=str(harmless / "model"))
    config = yaml.safe_load((tmp_path / "config.yml").read_text())
    key, block = {
        "command": ("env", {"command": ["sh", "-c", "echo $PLAIN; echo $PLAIN >&2; exit $STATUS"]}),
        "http": ("headers", {"url": "http://127.0.0.1:9/"}),
    }[kind]
    config["workflow"] = {"_type": kind, "llm": "player", key: {"PLAIN": VALUES["SEARCH"], "STATUS": "0"}, **block}
    config["finetuning"]["num_epochs"] = 1
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    write_rows(tmp_path, [{"say": "hi"}])
    done = processes.run("-vv", "finetune", "--config_file", "config.yml", folder=tmp_path)
    shown = processes.run("runs", "show", "run", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert (tmp_path / "run/run.json").is_file()
    check_no_leaks(tmp_path, done.stdout + shown.stdout, done.stderr + shown.stderr)


@pytest.mark.slow
def test_ordinary_words_that_go_to_another_program_are_not_hidden(harmless: Path, tmp_path: Path) -> None:
    """Nor names of models, which are in many texts; where the settings are shown, they are hidden."""
    words = {"MODEL": "Qwen/Qwen2.5-0.5B-Instruct", "MODE": "production", "SHOP": "https://shop.example/v1/2024-07-18"}
    digits_project(tmp_path, model=str(harmless / "model"))
    config = yaml.safe_load((tmp_path / "config.yml").read_text())
    env = {**words, "PLAIN": VALUES["SEARCH"], "SESSION_KEY": "horsebatterystaple"}
    script = 'echo "|$MODEL $MODE $SHOP $PLAIN $SESSION_KEY"'
    config["workflow"] = {"_type": "command", "llm": "player", "env": env, "command": ["sh", "-c", script]}
    config["finetuning"]["num_epochs"] = 1
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    write_rows(tmp_path, [{"say": "hi"}])
    processes.run("finetune", "--config_file", "config.yml", folder=tmp_path)
    episode = read_lines(tmp_path / "run/episodes.jsonl.gz")[1]
    assert episode["output"] == "|" + " ".join([*words.values(), "***", "***"])
    settings = json.loads((tmp_path / "run/run.json").read_text())["config"]
    assert settings["functions"][WORKFLOW]["env"] == dict.fromkeys(env, "***")
    shown = processes.run("runs", "show", "run", folder=tmp_path)
    assert not [word for word in (*words.values(), "horsebattery") if word in shown.stdout]


@pytest.mark.usefixtures("no_secrets")
@pytest.mark.parametrize(
    "block",
    [
        {"env": {"DB_PASS": "correct-horse-battery"}},
        {"env": {"PGPASS": "correct-horse-battery"}},
        {"env": {"JWT": "correct-horse-battery"}},
        {"env": {"STORE_CONNECTION_STRING": "Server=db;Password=correct-horse-battery;"}},
        {"env": ["DB_PASSWORD=correct-horse-battery"]},
        {"env": [{"name": "DB_PASSWORD", "value": "correct-horse-battery"}]},
        {"headers": {"X-Auth": "Custom correct-horse-battery"}},
    ],
)
def test_a_variable_with_a_secret_name_is_hidden_in_all_texts(block: dict[str, Any]) -> None:
    remember_settings(block)
    assert redact("it said correct-horse-battery.") == "it said ***."


@pytest.mark.usefixtures("no_secrets")
@pytest.mark.parametrize(
    ("value", "hidden"),
    [
        ("qwen2.5-0.5b-instruct", False),
        ("claude-3-5-sonnet-20241022", False),
        ("/data/models/9f8e7d6c5b4a3f2e1d", False),
        ("https://models.example/9f8e7d6c5b4a3f2e1d", True),
        ("antidisestablishmentarianism", False),
        ("a1b2c3d4e5f", False),
        ("a1b2c3d4e5f6", True),
        ("sk-proj-abcdef123456", True),
        ("3f2b8c1d-9e4f-4a6b-8c2d-1e5f7a9b3c4d", True),
        ("Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0", True),
        ("https://me:a1b2c3d4e5f6@models.example/", True),
        ("https://hooks.slack.com/services/T0123/B0123/k9Xz8Lq2Vb7Wn4Pt", True),
        ("Endpoint=sb://my.servicebus.windows.net/;SharedAccessKey=k9Xz8Lq2Vb/7Wn4Pt+Rm5cQw=", True),
        ("--api-key=sk9Xz8Lq2Vb7Wn4Pt", True),
        ("glpat-abcdefghijklmnop", True),
        ("/k9Xz8Lq2Vb7Wn4PtRm5cQw==", True),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", False),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", False),
        ("2024-01-01T00:00:00Z", False),
    ],
)
def test_what_looks_like_a_secret_among_values_for_another_program(value: str, hidden: bool) -> None:
    remember_settings({"env": {"ANY": value}})
    assert ("***" in redact(f"it said {value}.")) is hidden


@pytest.mark.slow
def test_a_run_may_keep_no_token_ids(harmless: Path, tmp_path: Path) -> None:
    """They decode to what is hidden in texts. It trains as without."""
    trained = []
    for redacted in ([], ["token_ids"]):
        folder = tmp_path / str(len(redacted))
        folder.mkdir()
        digits_project(folder, model=str(harmless / "model"))
        config = yaml.safe_load((folder / "config.yml").read_text())
        config["finetuning"] |= {"redact": redacted, "num_epochs": 1}
        (folder / "config.yml").write_text(yaml.safe_dump(config))
        write_rows(folder, [{"say": "hi"}, {"say": "ho"}])
        done = processes.run("finetune", "--config_file", "config.yml", folder=folder)
        assert done.returncode == 0, done.stderr
        calls = [
            json.loads(line) for line in gzip.decompress((folder / "run/calls.jsonl.gz").read_bytes()).splitlines()
        ]
        kept = {name for call in calls for name in ("token_ids", "prompt_token_ids") if call.get(name) is not None}
        assert kept == (set() if redacted else {"token_ids", "prompt_token_ids"})
        trained.append(load_file(next((folder / "run").glob("backend/checkpoints/*1/*model.safetensors"))))
        shown = processes.run("trajectories", "show", "run", folder=folder)
        assert shown.returncode == 0, shown.stderr
    first, second = trained
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_error_in_the_file_does_not_show_a_short_password(write: Any) -> None:
    block = {"_type": "openai", "model_name": "m", "timeout": "http://me:pw-1@host"}
    with pytest.raises(ConfigError, match=r"llms\.m\.timeout: .*got 'http://me:\*\*\*@host'"):
        load_config(write({"llms": {"m": block}}))


# the page


def test_the_threat_model_names_its_tests() -> None:
    """Every promise of the page has a test, and each of these tests exists."""
    page = (ROOT / "docs/guides/threat-model.md").read_text()
    rows = re.findall(r"^\| (?!promise|---)(.+?) \| (.+?) \|$", page.partition("## What is promised")[2], re.M)
    assert len(rows) > 15
    for promise, tests in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert named, promise
        for file, test in named:
            assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.M), (file, test)


@pytest.mark.usefixtures("no_secrets")
def test_a_number_is_not_redacted() -> None:
    """It may be a part of a logprob in a file, which would no longer be JSON."""
    remember_environment({"RELEASE_KEY": "20261122", "OTHER_KEY": "2026-11-22x"})
    assert redact('{"logprob": -0.20261122, "at": "2026-11-22x"}') == '{"logprob": -0.20261122, "at": "***"}'
