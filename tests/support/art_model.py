"""ART's half of its backend protocol, without ART: a client of its servers, and models that call it as ART's do."""

from types import SimpleNamespace
from typing import Any

from insitu.integrations.art.remote_backend import remote_backend


def remote_to(address: str, key: str = "default", read_timeout: float = 60.0, retry_timeout: float = 600.0) -> Any:
    return remote_backend(SimpleNamespace(Backend=object), address, key, read_timeout, retry_timeout)


class ArtModel(dict[str, Any]):
    """A model or a configuration of ART's: something that dumps itself."""

    @property
    def name(self) -> str:
        return str(self["name"])

    def safe_model_dump(self) -> dict[str, Any]:
        return self

    model_dump = safe_model_dump

    async def step(self, backend: Any) -> int:
        return await backend._get_step(self)

    async def prepare(self, backend: Any) -> tuple[str, str]:
        return await backend._prepare_backend_for_training(self, None)

    async def log(self, backend: Any) -> None:
        await backend._log(self, [])

    async def delete_checkpoints(self, backend: Any, steps_to_keep: list[int]) -> None:
        await backend._delete_checkpoint_files(self, steps_to_keep)

    def inference_name(self, backend: Any, step: int | None = None) -> str:
        return backend._model_inference_name(self, step)

    async def train(
        self, backend: Any, groups: Any = (), dev: Any = None, key: str | None = None, **config: Any
    ) -> list[dict[str, float]]:
        """The metrics of each gradient step; `dev` are ART's experimental settings."""
        steps = backend._train_model(self, groups, ArtModel(config), dev or {}, idempotency_key=key)
        return [metrics async for metrics in steps]
