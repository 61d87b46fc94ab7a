"""Trajectory builders that make messages of steps, as the documents describe, against the built-in adapters."""

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from art_model import ArtModel, remote_to
from factories import ROOT, sampled, write_rows
from openai.types.chat.chat_completion import Choice
from tiny_backend import Served

from insitu.advantages.estimator import training_rows
from insitu.collect.conversations import call_logprobs, main_conversation
from insitu.collect.recovery import recover_calls, recover_collection
from insitu.collect.shared_run import share
from insitu.config import load_config
from insitu.errors import TrajectoryError
from insitu.integrations.art.conversion import art_trajectory
from insitu.integrations.art.server.trajectories import ArtGroup, parse
from insitu.integrations.nat.base_parser import parse_to_openai_messages
from insitu.plugin_api import (
    Builder,
    EpisodeItem,
    EvalInput,
    EvalOutput,
    EvalOutputItem,
    EvaluatorBaseConfig,
    EvaluatorInfo,
    FinetuneConfig,
    FinetuneRunConfig,
    FunctionBaseConfig,
    LLMRef,
    Trajectory,
    TrajectoryBuilder,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
    register_evaluator,
    register_function,
)
from insitu.schemas.episodes import ModelCall
from insitu.training.episodes_builder import EpisodesBuilder, EpisodesBuilderConfig
from insitu.training.native.config import InsituAdapterConfig
from insitu.training.native.trainer_adapter import InsituTrainerAdapter

GENERATIONS = 3


class TalkerConfig(FunctionBaseConfig, name="talker"):
    llm: LLMRef


@register_function(config_type=TalkerConfig)
async def talker(config: TalkerConfig, builder: Builder) -> AsyncIterator[Any]:
    llm = await builder.get_llm(config.llm)

    async def talk(question: str) -> str:
        """Two calls, the second of which continues the first."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": "talk"}, {"role": "user", "content": question}]
        first = (await llm.complete(messages)).choices[0].message
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "go on"}]
        return str((await llm.complete(messages)).choices[0].message.content)

    yield talk


class CountedConfig(EvaluatorBaseConfig, name="counted"):
    """Gives each answer another score."""


@register_evaluator(config_type=CountedConfig)
async def counted(config: CountedConfig, builder: Builder) -> AsyncIterator[EvaluatorInfo]:
    numbers = itertools.count()

    async def evaluate(given: EvalInput) -> EvalOutput:
        items = [EvalOutputItem(id=item.id, score=float(2 ** next(numbers))) for item in given.eval_input_items]
        return EvalOutput(eval_output_items=items)

    yield EvaluatorInfo(config=config, evaluate_fn=evaluate)


class PlainConfig(TrajectoryBuilderConfig, name="plain_traj_builder"):
    num_generations: int = GENERATIONS


class PlainBuilder(TrajectoryBuilder):
    """The shortest builder that the documents allow: role, content and logprobs of each message."""

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        self.runs = [asyncio.create_task(self.run_eval()) for _ in range(GENERATIONS)]

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        groups: dict[str, list[Trajectory]] = {}
        for output in await asyncio.gather(*self.runs):
            scores = {item.id: item for item in output.evaluation_results[0][1].eval_output_items}
            for item in output.eval_input.eval_input_items:
                episode = [
                    EpisodeItem(role=m["role"], content=m["content"], logprobs=m.get("logprobs"))
                    for m in parse_to_openai_messages(item.trajectory)
                ]
                reward = await self.compute_reward(scores[item.id])
                groups.setdefault(str(item.id), []).append(Trajectory(episode=episode, reward=reward))
        return TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None: ...


def documented_builder() -> TrajectoryBuilder:
    """The builder of a package written for the toolkit."""
    sys.path.insert(0, str(ROOT / "tests/support/doc_plugin/src"))
    try:
        from my_plugin.my_trajectory_builder import MyTrajectoryBuilder, MyTrajectoryBuilderConfig
    finally:
        del sys.path[0]
    return MyTrajectoryBuilder(MyTrajectoryBuilderConfig(num_generations=GENERATIONS))


def guides_builder() -> TrajectoryBuilder:
    """The builder of the extending guide, from its text."""
    text = (ROOT / "docs/guides/extend.md").read_text()
    code = text.partition("```python file=my_builder.py\n")[2].partition("```")[0]
    names: dict[str, Any] = {"__name__": "my_builder"}  # as in the page, whose own test may have registered it
    exec(code, names)
    return names["Conversations"](names["ConversationsConfig"](num_generations=GENERATIONS))


BUILDERS = {
    "plain": lambda: PlainBuilder(PlainConfig()),
    "documented": documented_builder,
    "guide's": guides_builder,
    "built-in": lambda: EpisodesBuilder(EpisodesBuilderConfig(num_generations=GENERATIONS)),
}


@pytest.fixture(params=BUILDERS)
async def collection(
    request: pytest.FixtureRequest, served: Served, tmp_path: Path, write: Any
) -> TrajectoryCollection:
    """Episodes that a builder has collected from a real backend."""
    write_rows(tmp_path, ["red", "blue"])
    llm = {"_type": "openai", "model_name": "policy", "base_url": f"{served.address}/v1", "api_key": served.token}
    file = write(
        {
            "llms": {"player": {**llm, "max_tokens": 5}},
            "workflow": {"_type": "talker", "llm": "player"},
            "eval": {
                "general": {
                    "dataset": {"_type": "jsonl", "file_path": str(tmp_path / "rows.jsonl")},
                    "output_dir": str(tmp_path / "eval"),
                },
                "evaluators": {"score": {"_type": "counted"}},
            },
            "finetuning": {"reward_function": {"name": "score"}},
        }
    )
    asked = FinetuneRunConfig(config_file=file)
    async with Builder(load_config(file), request=asked) as builder:
        with share(builder):
            made = BUILDERS[request.param]()
            await made.initialize(builder.config.finetuning.model_copy(update={"run_configuration": asked}))
            await made.start_run(request.param)
            return await made.finalize(request.param)


@pytest.fixture
async def adapter(served: Served) -> AsyncIterator[InsituTrainerAdapter]:
    config = InsituAdapterConfig(url=served.address, api_key=served.token)
    adapter = InsituTrainerAdapter(config)
    await adapter.initialize(FinetuneConfig())
    yield adapter
    await adapter.close()


async def test_the_sampled_tokens_are_trained_by_the_insitu_adapter(
    collection: TrajectoryCollection, adapter: InsituTrainerAdapter, served: Served
) -> None:
    assert [len(group) for group in collection.trajectories] == [GENERATIONS] * 2
    rows = training_rows(recover_collection(collection))
    trained = {
        (
            tuple(row.token_ids[: row.loss_mask.index(1)]),
            tuple(p for p, m in zip(row.logprobs, row.loss_mask, strict=True) if m),
        )
        for row in rows
        if sum(row.loss_mask) <= 5
    }
    known = {(tuple(line["prompt_token_ids"]), tuple(line["logprobs"])) for line in served.samples()}
    assert trained <= known
    sampled_tokens = [len(line["token_ids"]) for line in served.samples()[-4 * GENERATIONS :]]
    assert sum(sum(row.loss_mask) for row in rows) == sum(sampled_tokens)
    before = await adapter.policy_endpoint()
    status = await adapter.wait_until_complete(await adapter.submit(collection))
    assert (status.status, status.metadata and status.metadata["tokens"]) == ("completed", sum(sampled_tokens))
    assert (await adapter.policy_endpoint()).version == (before.version or 0) + 1


async def test_and_over_arts_protocol(collection: TrajectoryCollection, served: Served) -> None:
    groups = [[art_trajectory(t) for t in group] for group in collection.trajectories]
    turns = [
        turn
        for group in groups
        for t in group
        for history in (t, *t["additional_histories"])
        for turn in history["messages_and_choices"]
    ]
    choices = [turn for turn in turns if "message" in turn]
    assert len(choices) == 4 * GENERATIONS
    assert all(Choice.model_validate(choice).logprobs for choice in choices)
    prompts = {tuple(line["prompt_token_ids"]) for line in served.samples()}
    assert {tuple(choice["prompt_token_ids"]) for choice in choices} <= prompts
    model = ArtModel(name="agent", project="p", base_model="model", base_path=".art", _internal_config=None)
    remote = remote_to(served.address, served.token)
    try:
        await remote.register(model)
        step = await model.step(remote)
        data = [orjson.Fragment(orjson.dumps({"trajectories": group})) for group in groups]
        lines = await model.train(remote, data, learning_rate=1e-4)
        assert not [name for name in lines[0] if "dropped" in name]
        assert await model.step(remote) == step + 1
    finally:
        await remote.close()


async def test_an_adapter_that_makes_choices_of_them_trains_the_sampled_prompts(
    collection: TrajectoryCollection, served: Served
) -> None:
    """The documented conversion: `Choice(index=0, logprobs=item.logprobs, message=..., finish_reason="stop")`."""

    def convert(item: EpisodeItem) -> dict[str, Any]:
        message = {"role": item.role.value, "content": item.content}
        if item.role != "assistant":
            return message
        return Choice(index=0, logprobs=item.logprobs, message=message, finish_reason="stop").model_dump()

    for group in collection.trajectories:
        for trajectory in group:
            turns = [convert(item) for item in trajectory.episode]
            group_read = parse(ArtGroup, {"trajectories": [{"messages_and_choices": turns, "reward": 1.0}]})
            choices = [m for m in group_read.trajectories[0].histories[0].messages if m.token_ids]
            known = [(line["prompt_token_ids"], line["token_ids"], line["logprobs"]) for line in served.samples()]
            assert len(choices) == 2
            assert all((c.prompt_token_ids, c.token_ids, c.logprobs) in known for c in choices)


# without a server

CALL = ModelCall(
    0,
    "policy",
    [{"role": "user", "content": "q"}],
    message={"role": "assistant", "content": "a"},
    prompt_token_ids=[1, 5],
    token_ids=[7, 2],
    logprobs=[-0.5, -0.25],
    finish_reason="length",
    policy_version=3,
    functions=("<workflow>", "player"),
)


def made_of(*items: EpisodeItem) -> Trajectory:
    return Trajectory(episode=[*items], reward=1.0)


def answer(logprobs: Any, **metadata: Any) -> EpisodeItem:
    return EpisodeItem(role="assistant", content="a", logprobs=logprobs, metadata=metadata)


QUESTION = EpisodeItem(role="user", content="q")
TEXTS = {"content": [{"token": "a", "logprob": -0.5}]}
IDS = {"content": [{"token": "token_id:7", "logprob": -0.5}]}


@pytest.mark.parametrize("through", [lambda x: x, lambda x: orjson.loads(orjson.dumps(x))], ids=["as is", "as JSON"])
def test_the_call_behind_a_message_is_found_again(through: Any) -> None:
    given = made_of(QUESTION, answer(through(call_logprobs(CALL))))
    assert recover_calls(given).calls == [CALL]
    assert recover_calls(given).trained_calls == [0]
    captured = given.model_copy(update={"calls": [CALL]})
    assert recover_calls(captured) is captured


@pytest.mark.parametrize("call", [CALL, None])
def test_the_logprobs_of_any_message_make_a_choice(call: ModelCall | None) -> None:
    message = {"role": "assistant", "content": "a"}
    choice = Choice(index=0, logprobs=call_logprobs(call), message=message, finish_reason="stop")
    entries = choice.logprobs.content if choice.logprobs is not None else None
    assert [entry.logprob for entry in entries or ()] == ([] if call is None else CALL.logprobs)
    (_, item) = main_conversation([CALL])
    assert sampled(item.logprobs) == CALL.logprobs


@pytest.mark.parametrize(
    ("items", "of_art"),
    [
        ([QUESTION], True),
        ([QUESTION, answer({})], True),
        ([QUESTION, answer([-0.5])], True),
        ([QUESTION, answer(TEXTS)], False),  # ART renders prompts, and may find the ids of a text
        ([QUESTION, answer(IDS)], False),
        ([QUESTION, answer([-0.5], token_ids=[7])], False),
    ],
)
async def test_what_cannot_be_trained_is_refused(
    items: list[EpisodeItem], of_art: bool, adapter: InsituTrainerAdapter
) -> None:
    group = [made_of(*items), made_of(*items)]
    problem, reason = (
        "run r: 2 of 2 trajectories cannot be trained; the first one",
        "none of its calls is trained, or its",
    )
    with pytest.raises(TrajectoryError, match=f"^{problem}: {reason}"):
        await adapter.submit(TrajectoryCollection(trajectories=[group], run_id="r"))
    if of_art:
        with pytest.raises(TrajectoryError, match=f"^the episode cannot be trained: {reason}"):
            art_trajectory(group[0])


async def test_some_that_cannot_be_trained_are_a_warning(
    adapter: InsituTrainerAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = made_of(QUESTION, answer(call_logprobs(CALL))), made_of(QUESTION, answer({}))
    group = [good, good.model_copy(update={"reward": 0.0}), bad]
    ref = await adapter.submit(TrajectoryCollection(trajectories=[group], run_id="some"))
    assert (await adapter.wait_until_complete(ref)).status == "completed"
    assert (
        "run some: 1 of 3 trajectories cannot be trained; the first one: none of its calls is trained, or"
        in caplog.text
    )


def test_content_of_an_item_may_be_missing_or_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert EpisodeItem(role="assistant", content=None, logprobs={}).content == ""
    assert EpisodeItem(role="user", content=parts).content == "a"


def test_candidates_of_one_request_keep_their_own_tokens(steps_of_two: list[Any]) -> None:
    from insitu.integrations.nat.base_parser import parse_calls

    assert [call.token_ids for call in parse_calls(steps_of_two)] == [[7], [8]]


@pytest.fixture
def steps_of_two() -> list[Any]:
    from insitu.schemas.steps import IntermediateStep, IntermediateStepPayload

    question, texts = [{"role": "user", "content": "q"}], ["a", "b"]
    choices = [{"token_ids": [7 + n], "logprobs": [-1.0]} for n in range(2)]
    metadata = {
        "chat_inputs": question,
        "chat_responses": [{"role": "assistant", "content": text} for text in texts],
        **choices[0],
        "choices": choices,
    }
    return [IntermediateStep(payload=IntermediateStepPayload(event_type="LLM_END", UUID="1", metadata=metadata))]
