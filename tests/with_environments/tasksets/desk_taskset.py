"""Several turns: the help desk of `insitu init`, whose tools are a server over MCP."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["DeskTaskset"]

ORDERS = {"kettle": "shipped", "lamp": "packed", "chair": "delivered", "clock": "returned"}
MANUAL = {"kettle": "vinegar", "lamp": "water", "chair": "soap", "clock": "oil"}
QUESTIONS = {"Where is my {}?": ORDERS, "How do I clean my {}?": MANUAL}


class DeskTools(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def orders(self, item: str) -> str:
        """Tells where an item that was ordered is."""
        return ORDERS.get(item, "nothing")

    @vf.tool
    async def manual(self, item: str) -> str:
        """Tells what an item is cleaned with."""
        return MANUAL.get(item, "nothing")


class DeskData(vf.TaskData):
    answer: str


class DeskTask(vf.Task[DeskData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def asked(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class DeskTaskset(vf.Taskset[DeskTask, vf.TasksetConfig]):
    def load(self) -> Iterator[DeskTask]:
        for question, answers in QUESTIONS.items():
            for item, answer in answers.items():
                data = DeskData(prompt=question.format(item), answer=f"{item}: {answer}")
                yield DeskTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [DeskTools(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    DeskTools.run()
