"""Agent frameworks: one module each, with `make_llm(llm)`, which returns the framework's model object.

In: our model object. Out: theirs, whose calls are recorded. `insitu.agents.frameworks` has what they share, and
`ModelSteps` here is for those that report model calls with callbacks; read `openai` first.
"""

from typing import Any

from insitu.agents.frameworks import RunSteps
from insitu.schemas.steps import IntermediateStepType, TraceMetadata


class ModelSteps(RunSteps):
    """Reports the model calls of a framework."""

    types = IntermediateStepType.LLM_START, IntermediateStepType.LLM_END

    def start(self, run_id: object, name: str | None, prompt: Any, **metadata: Any) -> None:
        """The prompt is repeated in LLM_END."""
        self._start(run_id, name, prompt, TraceMetadata.model_construct(**metadata) if metadata else None)

    def end(
        self,
        run_id: object,
        output: str | None = None,
        responses: Any = None,
        error: str | None = None,
        payload: Any = None,
        **others: Any,
    ) -> None:
        """Pushes the framework's response objects, or the error. Ignores calls without a start."""
        self._end(run_id, error, {"chat_responses": responses}, {"output": output, "payload": payload}, **others)
