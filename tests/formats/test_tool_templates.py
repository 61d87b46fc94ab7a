"""Requests with tools, to a model whose chat template leaves them out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from factories import digits_project
from marks import slow_after
from message_formats import ALL_FAMILIES, TOOLS
from processes import run_project, serving
from tiny_models import save_tiny_model

from insitu.agents.python import mentions_tools
from insitu.config import load_config
from insitu.formats.parser import MessageFormats
from insitu.formats.registry import renders_tools

TOKEN = "t"
PLAIN = "{# no tools #}{% for m in messages %}{{ 'tools: none' }}{{ m.content }}{% endfor %}"
HELLO = [{"role": "user", "content": "Hi"}]
PROBLEM = "the chat template of plain has no tools; set chat_template to a file with a template that shows them"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("plain") / "plain", max_position_embeddings=1024)
    (folder / "chat_template.jinja").write_text(PLAIN)
    return folder


@pytest.fixture(scope="module")
def address(plain: Path) -> Iterator[str]:
    with serving("backend", "--model", plain, "--port", 0, "--token", TOKEN, "--threads", 1) as (_, address):
        yield address


def post(address: str, path: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return httpx.post(f"{address}/v1/{path}", json={"model": "policy", **body}, headers=headers, timeout=60)


@pytest.mark.parametrize(
    "more", slow_after(2, [{}, {"tool_format": "hermes"}, {"tool_choice": "required"}, {"stream": True}])
)
def test_tools_that_the_prompt_would_not_have_are_refused(address: str, more: dict[str, Any]) -> None:
    response = post(address, "chat/completions", messages=HELLO, tools=TOOLS, max_tokens=2, **more)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "no_tool_template", "tools")
    assert PROBLEM in error["message"]


def test_tools_that_are_not_shown_anyway_are_not_refused(address: str) -> None:
    options: dict[str, Any] = {"messages": HELLO, "max_tokens": 2}
    for more in ({"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {}):
        assert post(address, "chat/completions", **options, **more).status_code == 200
    assert httpx.get(f"{address}/health", headers={"Authorization": f"Bearer {TOKEN}"}).json()["tool_format"] == "none"


def test_a_template_that_is_given_shows_them(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "hermes.jinja").write_text(ALL_FAMILIES["hermes"].source)
    options = ("--port", 0, "--token", TOKEN, "--threads", 1, "--chat_template", tmp_path / "hermes.jinja")
    with serving("backend", "--model", plain, *options) as (_, address):
        response = post(address, "chat/completions", messages=HELLO, tools=TOOLS, max_tokens=2)
        assert response.status_code == 200


def test_validate_warns_if_the_agent_mentions_tools(plain: Path, tmp_path: Path) -> None:
    project = digits_project(tmp_path, rows=4, model=str(plain))
    file = project / "config.yml"
    config = yaml.safe_load(file.read_text())
    config["workflow"] = {"_type": "python", "function": "asking_agent:answer", "model": "player"}
    file.write_text(yaml.safe_dump(config))
    agent = "async def answer(question, model):\n    return await model.ask(question)\n"
    (tmp_path / "asking_agent.py").write_text(agent)
    assert run_project(project, command="validate")[0::2] == (0, "")
    others = "\nasync def other(question, model):\n    return await model.ask(question, tools=[])  # tools\n"
    (tmp_path / "asking_agent.py").write_text(agent + others)
    assert not mentions_tools(load_config(file))
    (tmp_path / "asking_agent.py").write_text(agent.replace("(question)", "(question, tools=[])"))
    code, _, said = run_project(project, command="validate")
    assert code == 0
    assert f"{PROBLEM}; requests with tools will be refused".replace("of plain", f"of {plain}") in said
    (tmp_path / "hermes.jinja").write_text(ALL_FAMILIES["hermes"].source)
    given = ("-o", "trainer_adapters.backend.chat_template", "hermes.jinja")
    assert run_project(project, *given, command="validate")[0::2] == (0, "")


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_templates_of_families_with_tools_have_them(name: str) -> None:
    assert renders_tools(ALL_FAMILIES[name].source)


@pytest.mark.parametrize(
    ("template", "has"),
    [
        (PLAIN, False),
        ("tools{{ message.tools_of }}{{ builtin_tools }}", False),
        (r"{{ 'it\'s \"tools' }}", False),
        ("{% set x = {'a': 1} if tools else {} %}", True),
        ("{{ 'Tools: ' ~ (tools | tojson) }}", True),
        ("{%- for tool in\n tools -%}{{ tool }}{% endfor %}", True),
    ],
)
def test_a_template_has_tools_if_its_code_names_them(template: str, has: bool) -> None:
    assert renders_tools(template) is has
    assert (MessageFormats.of(template).tools == "none") is not has
