"""The example in JavaScript, on the official `openai` package of npm, is trained with its own file and rows."""

import sys
from pathlib import Path

import pytest
from harness import ROOT, check_sampled, finetune

FILE = ROOT / "examples/javascript/agent.yml"


@pytest.mark.parametrize("stream", [False, True])
def test_the_example_in_javascript_is_trained(stream: bool, model: Path, tmp_path: Path) -> None:
    def arguments(address: str) -> list[str]:
        """The file with a small model, some of whose answers are wrong."""
        values = {
            "trainer_adapters.backend.model": "null",
            "trainer_adapters.backend.url": address,
            "finetuning.num_epochs": "1",
        }
        if stream:
            values["workflow.command"] = "[node, agent.mjs, --stream]"
        return [str(FILE), *(word for key, value in values.items() for word in ("-o", key, value))]

    left = finetune(sys.executable, model, tmp_path, "runs/javascript", arguments)
    check_sampled(left, stream, rehearsed=len(left.log) - len(left.every_call))
    assert 1 <= len(left.log) - len(left.every_call) <= 3
    assert [episode["outcome"] for episode in left.episodes] == ["ok"] * 16
    for episode in left.episodes:
        colour = {"sky": "blue", "grass": "green"}[episode["row_id"]]
        assert episode["reward"] == float(colour in episode["output"])
    used_the_tool = [calls for calls in left.calls.values() if len(calls) == 2]
    assert used_the_tool
    for first, second in used_the_tool:
        said = first.prompt_token_ids + first.token_ids
        assert second.prompt_token_ids[: len(said)] == said
    assert left.epoch["policy_version"] == left.served_version == 1
    assert left.epoch["tokens"] > 0
    assert left.epoch["grad_norm"] > 0
