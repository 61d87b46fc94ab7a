"""Agent frameworks: one module each, with `make_llm(llm)`, which returns the framework's model object.

In: our model object. Out: theirs, whose calls are recorded. `insitu.agents.frameworks` has what they share, and
`ModelSteps` here is for those that report model calls with callbacks; read `openai` first.
"""

from typing import Any

from insitu.agents.frameworks import push
from insitu.schemas.steps import IntermediateStepType, StreamEventData, TraceMetadata
from insitu.workflow.context import EpisodeScope, current_scope


class ModelSteps:
    """Reports the model calls of a framework as steps of the episode they started in. Run ids are globally unique."""

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._open: dict[str, tuple[EpisodeScope, Any]] = {}

    def start(self, run_id: object, name: str | None, prompt: Any, **metadata: Any) -> None:
        """Pushes LLM_START. The prompt is repeated in LLM_END."""
        scope = current_scope()
        if scope is not None:
            self._open[str(run_id)] = scope, prompt
            fields = TraceMetadata.model_construct(**metadata) if metadata else None
            data = StreamEventData(input=prompt)
            push(self._framework, IntermediateStepType.LLM_START, run_id, name, data, scope, metadata=fields)

    def end(
        self,
        run_id: object,
        name: str | None = None,
        output: str | None = None,
        responses: Any = None,
        error: str | None = None,
        **others: Any,
    ) -> None:
        """Pushes LLM_END with the framework's response objects, or the error. Ignores calls without a start."""
        scope, prompt = self._open.pop(str(run_id), (None, None))
        if scope is not None:
            metadata: Any = {"error": error}
            if error is None:
                metadata = TraceMetadata.model_construct(chat_responses=responses)
            data = StreamEventData(input=prompt, output=output, payload=others.pop("payload", None))
            push(self._framework, IntermediateStepType.LLM_END, run_id, name, data, scope, metadata=metadata, **others)
