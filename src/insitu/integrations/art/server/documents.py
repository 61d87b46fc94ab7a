"""Request bodies of ART's protocols as the OpenAPI document describes them; `trajectories` parses them.

The models do not validate: clients of different releases send different keys, which the parser accepts or names.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

_MORE_KEYS = ConfigDict(extra="allow")


class ArtModelBody(BaseModel):
    """A model in training."""

    model_config = _MORE_KEYS

    name: str
    project: str
    entity: str | None = None
    base_model: str | None = None
    trainable: bool = True
    config: dict[str, Any] | None = Field(default=None, alias="_internal_config")


class ArtTrajectoryBody(BaseModel):
    """A conversation with its reward: messages, and choices as they were sampled."""

    model_config = _MORE_KEYS

    messages_and_choices: list[dict[str, Any]]
    reward: float = 0.0
    metrics: dict[str, float] = {}
    tools: list[dict[str, Any]] | None = None


class ArtGroupBody(BaseModel):
    """Trajectories that are compared with one another."""

    model_config = _MORE_KEYS

    trajectories: list[ArtTrajectoryBody]


class ArtModelRequest(BaseModel):
    model: ArtModelBody
    config: dict[str, Any] | None = None


class ArtTrainRequest(BaseModel):
    model: ArtModelBody
    trajectory_groups: list[ArtGroupBody]
    config: dict[str, Any] = {}
    dev_config: dict[str, Any] = {}


class ArtLogRequest(BaseModel):
    model: ArtModelBody
    trajectory_groups: list[ArtGroupBody]
    split: str = "val"


class ArtKeepRequest(BaseModel):
    model: ArtModelBody
    steps_to_keep: list[int]


class ServerlessStepsRequest(BaseModel):
    steps: list[int]


class ServerlessLogRequest(BaseModel):
    trajectory_groups: list[ArtGroupBody]
    split: str = "val"


class ServerlessTrainRequest(BaseModel):
    model_id: str
    trajectory_groups: list[ArtGroupBody]
    experimental_config: dict[str, Any] = {}
