"""Trajectory builders that make messages of steps, as the documents describe, train through the official clients."""

import json
import re
import urllib.request

import pytest
from art_runs import HERE, ROOT, each_release, finetune, ids_of, turns_of, write_file
from wiretap import Wiretap

PAGE = (ROOT / "docs/guides/extend.md").read_text()
GUIDES = PAGE.partition("```python file=my_builder.py\n")[2].partition("```")[0]
DOCUMENTED = """
from my_plugin.my_trajectory_builder import MyTrajectoryBuilder, MyTrajectoryBuilderConfig
from nat.cli.register_workflow import register_trajectory_builder


@register_trajectory_builder(config_type=MyTrajectoryBuilderConfig)
async def my_trajectory_builder(config, builder):
    yield MyTrajectoryBuilder(trajectory_builder_config=config)
"""
"""Its package registers an agent, too, which needs LangChain."""
BUILDERS = {"conversations": GUIDES, "my_traj_builder": DOCUMENTED}
"""The `_type` of the builder of our extending guide and of one written for the toolkit -> the module they are in."""


@each_release
@pytest.mark.parametrize("builder", BUILDERS)
def test_their_episodes_are_trained_as_sampled(builder, release, looker, tool_model, tmp_path):
    address, samples = looker
    (tmp_path / "my_builder.py").write_text(BUILDERS[builder])
    name = f"{builder}-{release}"
    before = len(samples.read_text().splitlines()) if samples.exists() else 0
    with Wiretap(address) as tap:
        file = write_file(tmp_path, tap, name, tool_model.name)
        text = file.read_text().replace("[tool_agent]", "[tool_agent, my_builder]")
        file.write_text(re.sub(r"art_builder: \{.*\}", f"art_builder: {{_type: {builder}, num_generations: 4}}", text))
        done = finetune(release, file, PYTHONPATH=f"{HERE}:{ROOT / 'tests/support/doc_plugin/src'}")
        assert done.returncode == 0, done.stdout + done.stderr
        trainings = tap.of("/_train_model")
    assert len(trainings) == 2
    lines = [json.loads(line) for line in samples.read_text().splitlines()[before:]]
    sampled = [(line["prompt_token_ids"], line["token_ids"], line["logprobs"]) for line in lines]
    for training in trainings:
        trajectories = [t for group in training["trajectory_groups"] for t in group["trajectories"]]
        assert trajectories
        choices = [turn for turn in turns_of(training) if "message" in turn]
        assert len(choices) == 2 * len(trajectories)  # the call of the tool, and the answer
        for choice in choices:
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert (choice["prompt_token_ids"], [*ids_of(choice)], logprobs) in sampled
    with urllib.request.urlopen(f"{address}/art/jobs") as answer:
        jobs = [job for job in json.load(answer)["jobs"] if job["model"].endswith(f"/{name}")]
    assert [(job["status"], job["dropped"]) for job in jobs] == [("completed", {})] * 2
