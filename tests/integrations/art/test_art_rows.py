"""ART's groups as training rows: against what ART's own modules compute, and what clients of two releases sent."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import byte_tokenizer

from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.learner.losses import PolicyBatch, policy_loss, row_weights
from insitu.errors import RequestRefused
from insitu.integrations.art.server.rows import ArtBatch, build_batch
from insitu.integrations.art.server.settings import parse_plan
from insitu.integrations.art.server.trajectories import ArtGroup, ArtGroups, ArtModel, parse
from insitu.schemas.lora import LoRASettings
from insitu.schemas.training_jobs import KLSettings

DATA = Path(__file__).parents[2] / "data/art"
VECTORS = json.loads((DATA / "vectors.json").read_text())
RELEASES = {"0.5.4": True, "0.5.18": False}  # whether a legacy client
CASES = [
    pytest.param(release, case, id=f"{release}-{number}")
    for release in RELEASES
    for number, case in enumerate(VECTORS[release]["cases"])
]


def groups_of(data: list) -> list[ArtGroup]:
    return parse(ArtGroups, {"trajectory_groups": data}).trajectory_groups


def batch_of(data: list, max_length: int = 4096, **changes) -> ArtBatch:
    tokens = ChatTokenizer(byte_tokenizer())
    options = plan_of().options.model_copy(update=changes)
    return build_batch(groups_of(data), options, tokens.render_prompt, max_length, 320)


def recorded(release: str) -> list:
    """The groups of the first training request of a recorded session."""
    requests = json.loads((DATA / f"{release}.json").read_text())
    return next(e["body"]["trajectory_groups"] for e in requests if "trajectory_groups" in (e["body"] or {}))


def plan_of(config=None, dev_config=None, internal=None, *, legacy=False):
    model = ArtModel(name="m", project="p", config=internal or {}, base_path=None if legacy else ".art")
    return parse_plan(model, config or {}, dev_config or {})


@pytest.mark.parametrize(("release", "case"), CASES)
def test_rows_advantages_and_loss_are_those_of_art(release, case):
    """Compares one packed sequence, whose loss is a plain sum in ART, with the gradient by each trained token."""
    changes = {key: case[key] for key in ("scale_rewards", "advantage_balance")}
    rows = batch_of(VECTORS["trajectory_groups"], **changes).rows
    assert np.concatenate([row.token_ids[row.positions] for row in rows]).tolist() == case["token_ids"]
    advantages = np.concatenate([row.advantages for row in rows])
    np.testing.assert_allclose(advantages, case["advantages"], rtol=1e-5)

    settings = plan_of(dev_config=case["config"], legacy=RELEASES[release]).settings
    weights = row_weights([len(row.positions) for row in rows], [row.episode for row in rows], settings)
    new = torch.tensor(case["new_logprobs"], requires_grad=True)
    filled = torch.arange(max(len(row.positions) for row in rows)) < torch.tensor([[len(r.positions)] for r in rows])

    def spread(values) -> torch.Tensor:
        return torch.zeros(filled.shape).masked_scatter(filled, torch.as_tensor(values))

    sampled = spread(np.concatenate([row.rollout_logprobs for row in rows]))
    given = PolicyBatch(sampled, sampled, None, spread(advantages), filled, torch.tensor(weights))
    loss = policy_loss(spread(new), given, settings).loss
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-5)
    np.testing.assert_allclose(new.grad, case["gradient"], atol=1e-6)


def test_choices_are_trained_at_the_temperature_that_they_carry():
    """The backend's own carry it; those of other servers are raw, that is at 1."""
    groups = recorded("0.5.18")
    assert {row.temperature for row in batch_of(groups).rows} == {1.0}
    for trajectory in groups[0]["trajectories"]:
        for turn in trajectory["messages_and_choices"]:
            turn["logprobs_temperature"] = 1.5
    rows = batch_of(groups).rows
    assert {row.temperature for row in rows if row.episode.startswith("0/")} == {1.5}
    assert 1.0 in {row.temperature for row in rows}
    with pytest.raises(RequestRefused, match="logprobs_temperature"):
        batch_of([{"trajectories": [{"messages_and_choices": [{**turn, "logprobs_temperature": 0.0}]}]}])


def test_as_many_packed_sequences_as_art_makes():
    for release in RELEASES:
        for length, sequences in VECTORS[release]["sequences"].items():
            assert batch_of(VECTORS["trajectory_groups"], packed_length=int(length)).sequences == sequences


@pytest.mark.parametrize("release", RELEASES)
def test_the_template_makes_the_prompt_that_was_sampled_from(release):
    """Roles, the tools, an assistant's calls and their results: token for token, where no choice carries its prompt."""
    groups = recorded(release)
    carried = batch_of(groups)
    stripped = json.loads(json.dumps(groups))
    for group in stripped:
        for trajectory in group["trajectories"]:
            for history in (trajectory, *trajectory["additional_histories"]):
                for message in history["messages_and_choices"]:
                    message.pop("prompt_token_ids", None)
    rendered = batch_of(stripped)
    assert len(carried.rows) == len(rendered.rows) > 6
    for ours, theirs in zip(rendered.rows, carried.rows, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.positions.tolist() == theirs.positions.tolist()


@pytest.mark.parametrize("release", RELEASES)
def test_a_tool_episode_is_trained_token_for_token(release):
    """Three choices in two histories of one episode; the assistant's own call between them is context."""
    trajectory = recorded(release)[1]["trajectories"][0]
    choices = [m for h in (trajectory, *trajectory["additional_histories"]) for m in h["messages_and_choices"]]
    choices = [message for message in choices if "finish_reason" in message]
    sampled = [int(t["token"].removeprefix("token_id:")) for c in choices for t in c["logprobs"]["content"]]
    logprobs = [t["logprob"] for c in choices for t in c["logprobs"]["content"]]
    rows = [row for row in batch_of(recorded(release)).rows if row.episode == "1/0"]
    assert np.concatenate([row.token_ids[row.positions] for row in rows]).tolist() == sampled
    np.testing.assert_allclose(np.concatenate([row.rollout_logprobs for row in rows]), logprobs, rtol=1e-6)
    context = bytes(ChatTokenizer(byte_tokenizer()).decode(rows[-2].token_ids.tolist()), "utf-8").decode()
    for part in (
        'Tools: {"type": "function"',
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}',
        "sunny",
    ):
        assert part in context


def test_what_is_left_out_is_counted():
    groups = VECTORS["trajectory_groups"]
    assert batch_of(groups).dropped == {"equal_rewards": 2}
    assert batch_of(groups).trainable_groups == 3
    lengths = [len(row.token_ids) for row in batch_of(groups).rows]
    short = batch_of(groups, max_length=60)
    assert short.dropped["too_long"] == sum(length > 60 for length in lengths) > 0
    assert [len(row.token_ids) for row in short.rows] == [length for length in lengths if length <= 60]
    bare = json.loads(json.dumps(groups[:1]))
    for trajectory in bare[0]["trajectories"]:
        trajectory["additional_histories"] = []
        for message in trajectory["messages_and_choices"]:
            message.pop("logprobs", None)
    assert batch_of(bare).dropped == {"no_logprobs": 3}
    assert batch_of(bare).sequences == 0
    assert batch_of(groups[:1], advantage_balance=1.0).dropped == {}
    alone = [{"trajectories": groups[0]["trajectories"][:1]}]
    assert batch_of(alone).dropped == {"equal_rewards": 1}


def test_plain_assistant_messages_are_context():
    spoken = json.loads(json.dumps(VECTORS["trajectory_groups"][:1]))
    for trajectory in spoken[0]["trajectories"]:
        trajectory["messages_and_choices"].insert(2, {"role": "assistant", "content": "hello"})
        trajectory["messages_and_choices"].insert(3, {"role": "user", "content": "so?"})
    changed, plain = batch_of(spoken).rows, batch_of(VECTORS["trajectory_groups"][:1]).rows
    assert [len(row.positions) for row in changed] == [len(row.positions) for row in plain]
    assert len(changed[0].token_ids) > len(plain[0].token_ids)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.update(reward="high"), "trajectory_groups.0.trajectories.0.reward: .* number .*'high'"),
        (lambda t: t["messages_and_choices"].append("hi"), "messages_and_choices.3: .* dictionary .*'hi'"),
        (lambda t: t["messages_and_choices"].append({"content": "hi"}), "3: .* not a message: role: Field required"),
        (
            lambda t: t["messages_and_choices"][1].update(content=[{"type": "image_url"}]),
            "choices.1: .* cannot be rendered: .* part of type 'image_url'",
        ),
        (lambda t: t["messages_and_choices"][2].update(token_ids=[1]), "1 token_ids and"),
        (
            lambda t: t["messages_and_choices"][2]["logprobs"]["content"][0].update(logprob=None),
            "messages_and_choices.2: .* token 0 has no logprob",
        ),
        (lambda t: t["messages_and_choices"][2].update(prompt_token_ids=[999]), "id 999; the vocabulary ends at 319"),
        (lambda t: t["messages_and_choices"][2].update(prompt_token_ids=[]), "there is no prompt before choice 2"),
    ],
    ids=["reward", "no-object", "no-role", "image", "lengths", "no-logprob", "vocabulary", "no-prompt"],
)  # fmt: skip
def test_what_cannot_be_read_is_named(change, complaint):
    groups = json.loads(json.dumps(VECTORS["trajectory_groups"][:1]))
    change(groups[0]["trajectories"][0])
    with pytest.raises(RequestRefused, match=complaint.replace("(", r"\(")):
        batch_of(groups)


def test_defaults_of_legacy_and_later_clients():
    old, new = plan_of(legacy=True).settings, plan_of().settings
    assert (old.objective, old.clip_low, old.clip_high) == ("clip", 0.2, 0.2)
    assert (new.objective, new.cispo_floor, new.cispo_cap) == ("cispo", 0.0, 5.0)
    for settings in (old, new):
        assert (settings.learning_rate, settings.betas) == (5e-6, (0.9, 0.99))
        assert (settings.weight_decay, settings.max_grad_norm) == (0.1, 0.1)
        assert (settings.loss_agg_mode, settings.old_logprobs, settings.lora) == ("sequence", "rollout", None)


def test_what_is_asked_arrives():
    dev = {
        "ppo": True,
        "epsilon": 0.1,
        "epsilon_high": 0.4,
        "importance_sampling_level": "sequence",
        "precalculate_logprobs": True,
        "truncated_importance_sampling": 2.0,
        "scale_rewards": False,
        "advantage_balance": -0.5,
        "packed_sequence_length": 512,
        "plot_tensors": True,
        "kimi_k2_tau": None,
    }
    internal = {
        "init_args": {"max_seq_length": 900, "load_in_4bit": True},
        "engine_args": {"tensor_parallel_size": 2},
        "peft_args": {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj"], "random_state": 7, "bias": "none"},
        "trainer_args": {
            "adam_beta1": 0.8,
            "adam_beta2": 0.95,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "beta": None,
            "optim": "paged_adamw_8bit",
        },
        "chat_template_kwargs": {"enable_thinking": False},
    }
    plan = plan_of({"learning_rate": 1e-3, "beta": 0.3}, dev, internal, legacy=True)
    settings = plan.settings
    assert (settings.clip_low, settings.clip_high, settings.importance_sampling_level) == (0.1, 0.4, "sequence")
    assert (settings.old_logprobs, settings.truncated_importance) == ("recomputed", 2.0)
    assert (settings.learning_rate, settings.kl.beta, settings.kl.estimator) == (1e-3, 0.3, "k3")
    assert (settings.betas, settings.weight_decay, settings.max_grad_norm) == ((0.8, 0.95), 0.0, 1.0)
    assert settings.lora == LoRASettings(rank=4, alpha=12, target_modules=["q_proj"])
    assert settings.seed == 7
    options = plan.options
    assert (options.scale_rewards, options.advantage_balance) == (False, -0.5)
    assert (options.max_length, options.packed_length) == (900, 512)
    assert options.template_kwargs == {"enable_thinking": False}
    assert plan.ignored == ("engine_args.tensor_parallel_size", "init_args.load_in_4bit", "plot_tensors")


def test_the_kl_penalty_of_each_release():
    """A term of the loss up to 0.5.16; later ones shape the advantages, from the weights that training started from."""
    assert plan_of({"beta": 0.1}).settings.kl == KLSettings(beta=0.1, estimator="k3")
    shaped = KLSettings(beta=0.1, estimator="k1", in_reward=True)
    newest = {"kl_penalty_reference_step": 0, "kl_penalty_source": "sample", "kl_penalty_step_lag": None}
    for dev in ({}, newest):
        plan = plan_of({"kl_penalty_coef": 0.1, "optimizer_save_interval": 5, "final_training_step": None}, dev)
        assert plan.settings.kl == shaped
        assert plan.settings.reference == "initial"


def test_the_losses_that_newer_clients_name():
    """They send the older key too, with the same meaning."""
    assert plan_of(dev_config={"loss_fn": "ppo"}).settings.objective == "clip"
    assert plan_of(dev_config={"loss_fn": "cispo", "ppo": False}).settings.objective == "cispo"


def test_a_null_bound_is_the_other_one():
    assert plan_of(dev_config={"epsilon": 2.0, "epsilon_high": None}).settings.cispo_cap == 3.0
    assert plan_of(dev_config={"epsilon": 2.0}).settings.cispo_cap == 5.0


@pytest.mark.parametrize(
    ("config", "dev", "internal", "named"),
    [
        ({"kl_penalty_coef": 0.1, "beta": 0.1}, {}, {}, r"kl_penalty_coef is 0\.1; allowed: 0 with beta"),
        ({"kl_penalty_coef": 0.1}, {"kl_penalty_step_lag": 2}, {}, "kl_penalty_step_lag is 2"),
        ({"kl_penalty_coef": 0.1}, {"kl_penalty_reference_step": 3}, {}, "kl_penalty_reference_step is 3; allowed: 0"),
        ({"kl_penalty_coef": -0.1}, {}, {}, "kl_penalty_coef is -0.1"),
        ({}, {"loss_fn": "dro"}, {}, "loss_fn is 'dro'"),
        ({"learning_rat": 1}, {}, {}, "learning_rat is not a training setting"),
        ({"learning_rate": "fast"}, {}, {}, "learning_rate is 'fast'"),
        ({"learning_rate": True}, {}, {}, "learning_rate is True"),
        ({"beta": -1.0}, {}, {}, "beta is -1.0"),
        ({}, {"importance_sampling_level": "average"}, {}, "importance_sampling_level is 'average'"),
        ({}, {"kimi_k2_tau": 0.1}, {}, "kimi_k2_tau"),
        ({}, {"mask_prob_ratio": True}, {}, "mask_prob_ratio"),
        ({}, {"max_negative_advantage_importance_sampling_weight": 2.0}, {}, "max_negative_advantage"),
        ({}, {"num_trajectories_learning_rate_multiplier_power": 0.5}, {}, "multiplier_power"),
        ({}, {"scale_learning_rate_by_reward_std_dev": True}, {}, "scale_learning_rate_by_reward_std_dev"),
        ({}, {"allow_training_without_logprobs": True}, {}, "allow_training_without_logprobs"),
        ({}, {"truncated_importance_sampling": 2.0}, {}, "precalculate_logprobs: true"),
        ({}, {"advantage_balance": 2.0}, {}, "advantage_balance is 2.0; allowed: from -1 to 1"),
        ({}, {"ppo": True, "epsilon": 1.5}, {}, "epsilon is 1.5"),
        ({}, {"moe_routing_replay_path": "x"}, {}, "moe_routing_replay_path"),
        ({}, {}, {"trainer_args": {"gradient_accumulation_steps": 4}}, "trainer_args.gradient_accumulation_steps is 4"),
        ({}, {}, {"trainer_args": {"optim": "sgd"}}, "trainer_args.optim is 'sgd'"),
        ({}, {}, {"peft_args": {"use_rslora": True}}, "peft_args.use_rslora"),
        ({}, {}, {"peft_args": {"r": 0}}, "peft_args"),
        ({}, {}, {"init_args": [1]}, "init_args"),
        ({}, {}, {"chat_template": "{{ x }}"}, "chat_template"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_as_asked_is_refused_by_name(config, dev, internal, named):
    with pytest.raises(RequestRefused, match=named):
        plan_of(config, dev, internal)


def test_models_of_legacy_and_later_clients():
    """Clients from 0.5.9 on send a base_path; nulls are absent."""
    sent = {"name": "a", "project": "p", "base_model": "b", "entity": None, "_internal_config": {"peft_args": None}}
    model = parse(ArtModel, sent)
    assert (model.identity, model.base, model.config, model.legacy) == (("insitu", "p", "a"), "b", {}, True)
    assert parse(ArtModel, sent | {"base_path": ".art"}).legacy is False
    with pytest.raises(RequestRefused, match="name: Field required"):
        parse(ArtModel, {"project": "p"})


def test_logprobs_of_another_type_are_refused() -> None:
    choice = {"finish_reason": "stop", "message": {"role": "assistant", "content": ""}, "logprobs": {"content": 1.0}}
    with pytest.raises(RequestRefused, match=r"logprobs\.content: .* list .*1\.0"):
        groups_of([{"trajectories": [{"messages_and_choices": [choice]}]}])
