"""Hand-written llms that mean the model under training: found or refused before the first episode."""

from typing import Any

import pytest

from insitu.config import load_config
from insitu.errors import ConfigError
from insitu.plugin_api import Builder
from insitu.remote.attempt_records import ServedPolicy
from insitu.remote.hosted import _PolicyBuilder
from insitu.schemas.finetuning import PolicyEndpoint
from insitu.workflow.llms import check_model_names

BASE = "Qwen/Qwen2.5-3B-Instruct"
SERVED = "http://127.0.0.1:8000/v1"
HERE = {"base_url": "http://localhost:8000/v1", "api_key": "default"}
POLICY = PolicyEndpoint(SERVED, "my_training_run", "key of the adapter", 0, base_model=BASE)
RENAMED = PolicyEndpoint(SERVED, "my_run@0", "key", 0, lambda: "my_run@7", BASE)


def builder_of(write: Any, policy: PolicyEndpoint, target: str | None = None, **llms: Any) -> Builder:
    blocks = {name: {"_type": "openai", **block} for name, block in llms.items()}
    builder = Builder(load_config(write({"llms": blocks, "finetuning": {"target_model": target}})))
    builder.trained_policy = policy
    return builder


async def requested(builder: Builder, name: str) -> tuple[str, str, str | None]:
    """The address, the model and the current model that an llm asks for."""
    async with builder:
        llm = await builder.get_llm(name)
        current = llm.recorder.current_model
        return str(llm.client.base_url).rstrip("/"), llm.model, current and current()


@pytest.mark.parametrize("base_url", [HERE["base_url"], "http://elsewhere:9/v1"])
async def test_an_llm_named_like_the_base_model_is_the_model_trained_from_it(
    write: Any, base_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The toolkit's own basic configuration is like this."""
    builder = builder_of(write, POLICY, training_llm={"model_name": BASE, "base_url": base_url})
    check_model_names(builder)
    assert f"model_name is '{BASE}': its requests go to 'my_training_run' at {SERVED}, which is trained" in caplog.text
    assert await requested(builder, "training_llm") == (SERVED, "my_training_run", None)


async def test_an_llm_that_names_the_trained_model_is_left_as_it_is(write: Any) -> None:
    builder = builder_of(write, POLICY, player={"model_name": "my_training_run", **HERE})
    check_model_names(builder)
    assert (await requested(builder, "player"))[:2] == (HERE["base_url"], "my_training_run")


@pytest.mark.parametrize("model", ["my_run", "my_run@0", BASE])
async def test_a_name_that_changes_with_every_version_is_followed(write: Any, model: str) -> None:
    builder = builder_of(write, RENAMED, player={"model_name": model, **HERE})
    check_model_names(builder)
    assert await requested(builder, "player") == (SERVED, "my_run@0", "my_run@7")


async def test_another_model_of_the_same_server_is_refused(write: Any) -> None:
    builder = builder_of(write, POLICY, player={"model_name": "gpt-4", **HERE})
    message = (
        "llms.player.model_name is 'gpt-4', but 'my_training_run' at http://127.0.0.1:8000/v1 is trained: name that "
        "model, or use _type: policy"
    )
    with pytest.raises(ConfigError, match=message):
        check_model_names(builder)


async def test_a_model_behind_another_address_may_be_any(write: Any) -> None:
    builder = builder_of(write, POLICY, player={"model_name": "alias", "base_url": "http://proxy:8080/v1"})
    check_model_names(builder)
    assert (await requested(builder, "player"))[:2] == ("http://proxy:8080/v1", "alias")


async def test_a_frozen_opponent_is_not_taken_for_the_trained_model(write: Any) -> None:
    llms = {"player": {"model_name": "my_training_run", **HERE}, "opponent": {"model_name": BASE, **HERE}}
    with pytest.raises(
        ConfigError, match=r"llms\.opponent.*set finetuning.target_model to 'player' if opponent is not"
    ):
        check_model_names(builder_of(write, POLICY, **llms))
    builder = builder_of(write, POLICY, target="player", **llms)
    check_model_names(builder)
    assert (await requested(builder, "opponent"))[:2] == (HERE["base_url"], BASE)


async def test_a_service_knows_which_llms_the_trainer_trains(write: Any) -> None:
    """Its own file need not say so: an opponent that is the base model stays where it is."""
    llms = {name: {"_type": "openai", "model_name": BASE, **HERE} for name in ("player", "opponent")}
    policy = ServedPolicy.of(PolicyEndpoint(SERVED, "my_run", base_model=BASE), {"player"})
    builder = _PolicyBuilder(load_config(write({"llms": llms})), policy)
    assert (await requested(builder, "player"))[:2] == (SERVED, "my_run")
    builder = _PolicyBuilder(load_config(write({"llms": llms})), policy)
    assert (await requested(builder, "opponent"))[:2] == (HERE["base_url"], BASE)
