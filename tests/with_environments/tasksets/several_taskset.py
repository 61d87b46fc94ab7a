"""Several rewards with weights, metrics and rewards of each turn, in a conversation that the task ends; without end."""

import os
from collections.abc import Iterator
from itertools import count

import verifiers.v1 as vf

__all__ = ["SeveralTaskset"]


class SeveralTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return 1 / (1 + len(trace.last_reply))

    @vf.reward(weight=2.0)
    async def letters(self, trace: vf.Trace) -> float:
        said = trace.last_reply
        return sum(letter.isalpha() for letter in said) / max(len(said), 1)

    @vf.metric
    async def spaces(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.count(" "))

    @vf.metric
    async def process(self, trace: vf.Trace) -> float:
        return float(os.getpid())

    async def finalize(self, trace: vf.Trace) -> None:
        trace.info["step_rewards"] = [float(len(message.content or "")) for message in trace.assistant_messages]


class SeveralTaskset(vf.Taskset[SeveralTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[SeveralTask]:
        for number in count():
            prompt = [vf.UserMessage(content=f"Say something {number}")]
            yield SeveralTask(vf.TaskData(prompt=prompt, system_prompt="Be brief."), self.config.task)
