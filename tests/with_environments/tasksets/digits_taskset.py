"""A single turn: the more of the answer is digits, the better."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["DigitsTaskset"]


class DigitsData(vf.TaskData):
    answer: str


class DigitsTask(vf.Task[DigitsData]):
    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        said = trace.last_reply
        return sum(letter.isdigit() for letter in said) / len(said) if said else 0.0


class DigitsConfig(vf.TasksetConfig):
    count: int = 8
    prompt: str = "Count to {}"


class DigitsTaskset(vf.Taskset[DigitsTask, DigitsConfig]):
    def load(self) -> Iterator[DigitsTask]:
        for number in range(self.config.count):
            yield DigitsTask(DigitsData(prompt=self.config.prompt.format(number), answer=str(number)), self.config.task)
