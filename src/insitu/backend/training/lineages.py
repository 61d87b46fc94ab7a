"""The lines of weights that one loaded model begins: the backend's own, and others of their own names."""

from pathlib import Path

from torch import nn

from insitu.backend.inference.engine import Weights
from insitu.backend.model import LoadedModel
from insitu.backend.training.learner import Learner
from insitu.errors import RequestRefused
from insitu.schemas.training_jobs import LoRASettings


class Lineages:
    """A learner for each; the backend's own has the name ""."""

    def __init__(self, loaded: LoadedModel, output_dir: Path, lora: LoRASettings | None = None) -> None:
        self.own = Learner(loaded, output_dir, lora=lora)
        self._loaded = loaded
        self._lora = lora
        self._learners = {"": self.own}

    def open(self, name: str, folder: Path) -> Learner:
        """The lineage of this name, which goes on from the checkpoints in its folder; for the compute thread."""
        if name not in self._learners:
            learner = Learner(self._loaded, folder, name, self._lora)
            learner.resume()
            self._learners[name] = learner
        return self._learners[name]

    def close(self, name: str) -> None:
        del self._learners[name]

    def module_at(self, weights: Weights) -> nn.Module:
        """Their module, from a checkpoint where it must be. Raises RequestRefused where there is none."""
        learner = self._learners.get(weights.lineage)
        if learner is None:
            raise RequestRefused(
                f"the model {weights.lineage} was deleted", status=404, param="model", code="model_not_found"
            )
        return learner.module_at(learner.version if weights.version is None else weights.version)
