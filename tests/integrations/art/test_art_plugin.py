"""The ART plugin as far as it goes without the client library: its blocks, its conversion, and its talk to a server."""

import asyncio
import re
import tomllib
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import orjson
import plain_parts  # noqa: F401 (registers the evaluator)
import pytest
from art_model import ArtModel, remote_to
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from processes import run, serving
from pydantic import ValidationError
from tiny_models import save_tiny_model

from insitu.advantages.credit import credit_by_function, credited_calls
from insitu.collect.conversations import main_conversation
from insitu.config import Config, load_config
from insitu.errors import BackendUnavailable, ConfigError, RequestRefused, TrajectoryError
from insitu.integrations.art.components import ARTTrainer, ARTTrajectoryBuilder
from insitu.integrations.art.config import ARTTrainerAdapterConfig, ARTTrainerConfig, ARTTrajectoryBuilderConfig
from insitu.integrations.art.conversion import art_trajectory, check_order
from insitu.integrations.art.remote_backend import known_metrics, mean_metrics
from insitu.plugin_api import Builder, FinetuneConfig, FinetuneRunConfig, register_trajectory_builder
from insitu.schemas.episodes import ModelCall
from insitu.schemas.finetuning import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection

BACKEND = {"ip": "localhost", "port": 7623}


def test_the_documented_blocks_and_their_defaults() -> None:
    assert ARTTrajectoryBuilderConfig().num_generations == 2
    assert {c.static_type() for c in (ARTTrajectoryBuilderConfig, ARTTrainerAdapterConfig, ARTTrainerConfig)} == {
        "openpipe_art_traj_builder",
        "openpipe_art_trainer_adapter",
        "openpipe_art_trainer",
    }
    config = ARTTrainerAdapterConfig.model_validate({"backend": BACKEND})
    defaults = config.backend.model_dump(exclude={"ip", "port"}, exclude_none=True)
    assert defaults == {
        "name": "trainer_run",
        "project": "trainer_project",
        "base_model": "Qwen/Qwen2.5-7B-Instruct",
        "api_key": "default",
        "delete_old_checkpoints": False,
        "lost_reply_timeout": 600.0,
        "read_timeout": 60.0,
        "retry_timeout": 600.0,
    }
    assert config.training.model_dump() == {"learning_rate": 5e-5, "beta": 0.0}
    assert "secret" not in repr(ARTTrainerAdapterConfig.model_validate({"backend": BACKEND | {"api_key": "secret"}}))
    assert ARTTrainerConfig.model_fields.keys() == {"type", "reward"}


def test_an_empty_block_has_its_defaults() -> None:
    given = {"backend": {**BACKEND, "init_args": None}, "training": None}
    config = ARTTrainerAdapterConfig.model_validate(given)
    assert config.training.learning_rate == 5e-5
    assert config.backend.init_args is None


class StrictBuilder(ARTTrajectoryBuilder):
    """As a package written for the toolkit derives it."""

    def __init__(self, trajectory_builder_config: ARTTrajectoryBuilderConfig) -> None:
        super().__init__(trajectory_builder_config=trajectory_builder_config)


class OwnTrainer(ARTTrainer):
    def __init__(self, trainer_config: ARTTrainerConfig, **kwargs: Any) -> None:
        super().__init__(trainer_config=trainer_config, **kwargs)


async def test_the_parts_are_made_of_their_configurations_alone(write: Any) -> None:
    made = StrictBuilder(ARTTrajectoryBuilderConfig())
    assert made.evaluation_runs == {}
    trainer = OwnTrainer(ARTTrainerConfig())
    assert trainer.run_id.startswith("art_run_")
    assert trainer._estimator.settings() == {"advantages": "computed by the ART server"}
    with pytest.raises(ConfigError, match="StrictBuilder is used outside a finetuning run: pass StrictBuilder"):
        await made.initialize(FinetuneConfig(run_configuration=FinetuneRunConfig(config_file="none.yml")))


async def test_in_a_factory_they_use_its_builder(write: Any) -> None:
    class StrictConfig(ARTTrajectoryBuilderConfig, name="strict_builder"):
        pass

    @register_trajectory_builder(config_type=StrictConfig)
    async def strict(config: StrictConfig, builder: Builder) -> AsyncIterator[StrictBuilder]:
        yield StrictBuilder(trajectory_builder_config=config)

    blocks = {"b": {"_type": "strict_builder"}}
    data = {"trajectory_builders": blocks, "eval": {"evaluators": {"r": {"_type": "judge"}}}}
    reward = {"finetuning": {"reward_function": {"name": "r"}}}
    async with Builder(load_config(write(data | reward))) as builder:
        assert (await builder.get_trajectory_builder("b"))._builder is builder
    async with Builder(load_config(write(data))) as builder:
        with pytest.raises(ConfigError, match=r"finetuning\.reward_function is missing"):
            await builder.get_trajectory_builder("b")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("backend.ip", None),
        ("backend.port", 0),
        ("backend.port", 65536),
        ("backend.name", ""),
        ("backend.project", ""),
        ("backend.init_args", {"max_seq_length": 0}),
        ("backend.engine_args", {"gpu_memory_utilization": 1.1}),
        ("backend.engine_args", {"tensor_parallel_size": 0}),
        ("training.learning_rate", -1e-6),
        ("training.beta", -0.1),
    ],
)
def test_bounds(where: str, value: Any) -> None:
    block, key = where.split(".")
    data: dict[str, Any] = {"backend": dict(BACKEND), "training": {}}
    data[block][key] = value
    with pytest.raises(ValidationError, match=key):
        ARTTrainerAdapterConfig.model_validate(data)


def test_bounds_of_the_builder() -> None:
    with pytest.raises(ValidationError, match="num_generations"):
        ARTTrajectoryBuilderConfig(num_generations=0)


def test_the_extra_can_be_installed_beside_adk() -> None:
    """openpipe-art 0.5.18 requires litellm<=1.82.0, with which `make test WITH=frameworks` has passed for ADK."""
    wanted = (Requirement(text) for text in requires("insitu") or ())
    (litellm,) = (r for r in wanted if r.name == "litellm" and r.marker and r.marker.evaluate({"extra": "adk"}))
    assert litellm.specifier.contains("1.82.0")


def test_the_extra_is_bounded_to_tested_releases() -> None:
    """The newest one ends it. From 0.5.20 on, Python 3.12 is needed."""
    root = Path(__file__).parents[3]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (art,) = (r for r in map(Requirement, extras["art"]) if r.name == "openpipe-art")
    environments = tomllib.loads((root / "tests/environments.toml").read_text())["environments"]
    tested = [name.removeprefix("art/") for name in environments if name.startswith("art/")]
    assert len(tested) == 3
    assert all(art.specifier.contains(release) for release in tested)
    assert not art.specifier.contains("0.5.24")


def test_without_the_library_the_command_says_what_to_install() -> None:
    file = Path(__file__).parents[3] / "examples/tic_tac_toe/art.yml"
    done = run("finetune", "--config_file", file)
    assert done.returncode == 2
    assert "pip install -e '.[art]'" in done.stderr
    assert "Traceback" not in done.stderr


USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
ASKED = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def call(index: int, messages: list[dict[str, Any]], answer: str | dict[str, Any], **more: Any) -> ModelCall:
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    ids = [100 * index + n for n in range(3)]
    known: dict[str, Any] = {"token_ids": ids, "logprobs": [-0.1 * n for n in range(3)], "finish_reason": "stop"}
    return ModelCall(index, "m", messages, message=message, prompt_token_ids=[1, 2], **known | more)


def trajectory(calls: list[ModelCall], trained: list[int] | None = None) -> Trajectory:
    return Trajectory(
        episode=main_conversation(calls),
        reward=0.5,
        id="r/1/7/0/0",
        metadata={"row_id": "7", "deep": [1]},
        calls=calls,
        trained_calls=list(range(len(calls))) if trained is None else trained,
    )


def sampled_ids(choice: dict[str, Any]) -> list[int]:
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])
    return [int(entry["token"].removeprefix("token_id:")) for entry in choice["logprobs"]["content"]]


def test_a_tool_dialogue_is_one_history() -> None:
    asking = {"role": "assistant", "content": None, "tool_calls": [ASKED]}
    seen = {"role": "tool", "tool_call_id": "c1", "content": "blue"}
    first = call(0, [USER], asking, tools=TOOLS, finish_reason="tool_calls")
    second = call(1, [USER, {**asking, "content": ""}, seen], "It is blue.", tools=TOOLS, finish_reason="length")
    made = art_trajectory(trajectory([first, second]))
    assert made["tools"] == TOOLS
    assert made["additional_histories"] == []
    assert made["reward"] == 0.5
    assert made["metadata"] == {"row_id": "7", "episode": "r/1/7/0/0"}
    user, one, tool, two = made["messages_and_choices"]
    assert (user, tool) == (USER, seen)
    assert one["message"]["tool_calls"] == [ASKED]
    assert (one["finish_reason"], two["finish_reason"]) == ("tool_calls", "length")
    assert (sampled_ids(one), sampled_ids(two)) == ([0, 1, 2], [100, 101, 102])
    assert [entry["logprob"] for entry in two["logprobs"]["content"]] == second.logprobs


def test_other_dialogues_are_additional_histories_and_untrained_calls_context() -> None:
    said = {"role": "assistant", "content": "one"}
    first, second = call(0, [USER], "one"), call(1, [USER, said, USER], "two")
    beside = call(2, [{"role": "system", "content": "judge"}, USER], "three")
    made = art_trajectory(trajectory([first, second, beside], trained=[1, 2]))
    assert made["messages_and_choices"][:3] == [USER, said, USER]
    assert sampled_ids(made["messages_and_choices"][3]) == [100, 101, 102]
    (other,) = made["additional_histories"]
    assert sampled_ids(other["messages_and_choices"][-1]) == [200, 201, 202]


def test_answers_given_with_other_tools_are_a_history_of_their_own() -> None:
    first = call(0, [USER], "one", tools=TOOLS)
    second = call(1, [USER, {"role": "assistant", "content": "one"}, USER], "two")
    made = art_trajectory(trajectory([first, second]))
    histories = [made, *made["additional_histories"]]
    assert [history["tools"] for history in histories] == [None, TOOLS]
    assert ["message" in turn for turn in made["messages_and_choices"]] == [False, False, False, True]
    assert ["message" in turn for turn in histories[1]["messages_and_choices"]] == [False, True]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=12))
def test_each_trained_call_is_a_choice_exactly_once(plan: list[tuple[int, bool]]) -> None:
    """Three interleaved dialogues; every call continues its own."""
    histories: list[list[dict[str, Any]]] = [[{"role": "system", "content": str(n)}, USER] for n in range(3)]
    calls = []
    for index, (which, _) in enumerate(plan):
        calls.append(call(index, list(histories[which]), f"answer {index}"))
        histories[which] += [{"role": "assistant", "content": f"answer {index}"}, USER]
    trained = [index for index, (_, wanted) in enumerate(plan) if wanted]
    given = trajectory(calls, trained)
    if not trained:
        given.episode = []
        with pytest.raises(TrajectoryError, match="episode r/1/7/0/0 cannot be trained: none of its calls is trained"):
            art_trajectory(given)
        return
    made = art_trajectory(given)
    turns = [t for h in [made, *made["additional_histories"]] for t in h["messages_and_choices"]]
    found = sorted(sampled_ids(turn)[0] // 100 for turn in turns if "message" in turn)
    assert found == trained


def test_a_choice_says_what_it_was_sampled_from_where_that_is_known() -> None:
    known, unknown = call(0, [USER], "one"), call(1, [{"role": "user", "content": "else"}], "two")
    unknown.prompt_token_ids = None
    made = art_trajectory(trajectory([known, unknown]))
    (other,) = made["additional_histories"]
    assert made["messages_and_choices"][-1]["prompt_token_ids"] == known.prompt_token_ids
    assert "prompt_token_ids" not in other["messages_and_choices"][-1]


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    given = trajectory([call(0, [USER], "one")])
    given.reward = reward
    with pytest.raises(TrajectoryError, match=f"episode r/1/7/0/0: its reward is {reward}"):
        art_trajectory(given)


def item(role: str, content: str = "x", **more: Any) -> EpisodeItem:
    return EpisodeItem(role=EpisodeItemRole(role), content=content, **more)


def test_a_trajectory_built_by_hand_is_converted_item_by_item() -> None:
    entry = {"token": "token_id:5", "logprob": -0.5}
    items = [
        item("system"),
        item("environment", "a board"),
        item(
            "assistant", "a", logprobs={"content": [entry]}, metadata={"tool_calls": [ASKED], "finish_reason": "length"}
        ),
        item("tool", "seen", metadata={"tool_call_id": "c1"}),
        item("assistant", "known only as text", logprobs=[]),
        item("user"),
        item("assistant", "b", logprobs=[entry]),
    ]
    made = art_trajectory(Trajectory(episode=items, reward=1.0))
    system, board, one, tool, context, _, two = made["messages_and_choices"]
    assert (system["role"], board["role"]) == ("system", "user")
    assert (one["finish_reason"], one["message"]["tool_calls"]) == ("length", [ASKED])
    assert tool == {"role": "tool", "content": "seen", "tool_call_id": "c1"}
    assert context == {"role": "assistant", "content": "known only as text"}
    assert two["finish_reason"] == "stop"
    assert sampled_ids(one) == sampled_ids(two) == [5]


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        (["user", "assistant"], None),
        (["system", "user", "user", "assistant", "tool", "environment", "function", "assistant"], None),
        (["tool", "assistant"], "begins with a message of role tool"),
        (["user", "assistant", "user"], "ends with a message of role user"),
        (["user", "assistant", "assistant"], "messages 1 and 2 are both the assistant's"),
        ([], "is not a conversation"),
    ],
)
def test_order(roles: list[str], problem: str | None) -> None:
    items = [item(role, logprobs=[] if role == "assistant" else None) for role in roles]
    if problem is None:
        check_order(items)
    else:
        with pytest.raises(ValueError, match=re.escape(problem)):
            check_order(items, "e1")


def test_metrics_go_by_our_names_and_keep_the_servers() -> None:
    lines = [{"loss/train": 1.0, "loss/entropy": 2.0}, {"loss/train": 3.0, "data/step_num_gradient_steps": 2}]
    metrics = known_metrics(mean_metrics(lines))
    assert (metrics["loss"], metrics["entropy"], metrics["steps"], metrics["loss/train"]) == (2.0, 2.0, 2, 2.0)
    assert known_metrics({"policy_loss": 0.5, "kl_div": 0.1}) == {
        "policy_loss": 0.5,
        "kl_div": 0.1,
        "loss": 0.5,
        "kl": 0.1,
    }


def test_which_calls_are_trained_is_known_and_their_advantages_are_the_servers() -> None:
    def group(*rewards: float) -> list[Trajectory]:
        made = [
            trajectory([call(0, [USER], "a"), call(1, [{"role": "user", "content": "?"}], "b")], [1]) for _ in rewards
        ]
        return [t.model_copy(update={"reward": reward}) for t, reward in zip(made, rewards, strict=True)]

    groups = [group(0.0, 1.0, 1.0), group(0.5, 0.5), group(1.0)]
    groups[0][2].episode = groups[0][2].episode[:1]  # no answer
    collection = TrajectoryCollection(trajectories=groups, run_id="r", dropped={"timeout": 1})
    collection, advantages, _ = ARTTrainer(ARTTrainerConfig(), Builder(Config())).select(collection)
    assert advantages == [(t, {1: None}) for t in groups[0][:2]]
    assert collection.trajectories == [groups[0][:2]]
    assert collection.dropped == {"timeout": 1, "episode_order": 1, "no_variance": 2, "single_member": 1}
    assert credit_by_function(credited_calls(advantages, ["<workflow>"])) == {}
    assert [t.rows for t in groups[0]] == [[], [], []]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    with serving("backend", "--model", model, "--port", "0", "--threads", "1") as (_, address):
        yield address


async def test_the_remote_backend_trains_and_is_told_why_not(address: str) -> None:
    model = ArtModel(
        {"name": "agent", "project": "p", "base_model": "tiny", "base_path": ".art", "_internal_config": None}
    )
    remote = remote_to(address, "default")
    try:
        await remote.check_health(retried=False)
        await remote.register(model)
        base_url, key = await model.prepare(remote)
        assert (base_url, key) == (f"{address}/v1", "default")
        assert model.inference_name(remote) == "agent"
        assert model.inference_name(remote, 3) == "agent@3"
        turns = [trajectory([call(0, [USER], "a")]), trajectory([call(0, [USER], "b")])]
        turns[1].reward = 1.5
        group = orjson.Fragment(orjson.dumps({"trajectories": [art_trajectory(t) for t in turns]}))
        lines = await model.train(remote, [group], {"ppo": True}, learning_rate=1e-4)
        assert mean_metrics(lines)["num_gradient_steps"] == len(lines) == 1
        assert await model.step(remote) == 1
        for _ in range(2):  # the same job, sent again
            assert await model.train(remote, [group], key="run/1", learning_rate=1e-4)
        assert await model.step(remote) == 2
        await model.delete_checkpoints(remote, [2])
        assert "agent@1" not in await remote.refresh_served_names()
        with pytest.raises(RequestRefused, match="kimi_k2_tau"):
            await model.train(remote, [group], {"kimi_k2_tau": 1.0}, learning_rate=1e-4)
        with pytest.raises(RequestRefused, match="gpt-4"):
            await remote.register(
                ArtModel({"name": "other", "project": "p", "base_model": "gpt-4", "base_path": ".art"})
            )
    finally:
        await remote.close()


async def test_nobody_there_and_a_server_that_is_something_else() -> None:
    nobody = remote_to("http://127.0.0.1:9", "default")
    with pytest.raises(BackendUnavailable, match=r"no answer from the ART server at http://127\.0\.0\.1:9"):
        await nobody.check_health(retried=False)
    with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1:9"):
        await nobody.register(ArtModel({"name": "a"}))
    await nobody.close()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\nConnection: close\r\n\r\nnope")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        other = remote_to(f"http://127.0.0.1:{port}", "default")
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(RequestRefused, match=f"^{url}/healthcheck returned 404, {url}/health returned 404$"):
            await other.check_health(retried=False)
        await other.close()


@pytest.mark.parametrize(
    ("announced", "reached"),
    [
        ("http://0.0.0.0:8000/v1", "http://gpu.example:8000/v1"),
        ("http://localhost:8000/v1", "http://gpu.example:8000/v1"),
        ("https://models.example/v1", "https://models.example/v1"),
    ],
)
def test_the_address_of_inference_is_one_that_can_be_reached(announced: str, reached: str) -> None:
    assert remote_to("http://gpu.example:7623", "x")._reachable_url(announced) == reached
