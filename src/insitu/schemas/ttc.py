"""Test-time compute: the candidates a search passes on, and the kinds of strategy that work on them.

TTCItem(input="Your move?", output="b2", score=0.8)
"""

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict


class StageTypeEnum(StrEnum):
    """What a strategy does with candidates."""

    SEARCH = "search"
    EDITING = "editing"
    SCORING = "scoring"
    SELECTION = "selection"
    CUSTOM = "custom"


class PipelineTypeEnum(StrEnum):
    """What the candidates are candidates for."""

    PLANNING = "planning"
    TOOL_USE = "tool_use"
    AGENT_EXECUTION = "agent_execution"
    CUSTOM = "custom"


class TTCItem(BaseModel):
    """One candidate; unknown keys are kept."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    input: Any = None
    output: Any = None
    plan: Any = None
    feedback: str | None = None
    score: float | None = None
    metadata: dict[str, Any] | None = None
    name: str | None = None
