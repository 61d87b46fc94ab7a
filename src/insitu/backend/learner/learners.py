"""The learners of a backend: one per policy, all of one loaded model."""

from pathlib import Path
from typing import Any

from torch import nn

from insitu.backend.inference.sampler import WeightVersion
from insitu.backend.learner.code import NO_CODE, CodeFolder
from insitu.backend.learner.learner import Learner
from insitu.backend.learner.ranks import TrainsJobs
from insitu.backend.model import LoadedModel
from insitu.errors import BackendError, RequestRefused
from insitu.schemas.training_jobs import LoRASettings


class Learners:
    """One learner per policy; all start from the loaded model. `default` is the backend's own policy, named ""."""

    def __init__(
        self,
        loaded: LoadedModel,
        output_dir: Path,
        lora: LoRASettings | None = None,
        group: TrainsJobs | None = None,
        *,
        served_here: bool = True,
        code: CodeFolder = NO_CODE,
    ) -> None:
        self._options: dict[str, Any] = {"lora": lora, "group": group, "served_here": served_here, "code": code}
        self.default = Learner(loaded, output_dir, **self._options)
        self.default.resume()
        if lora is not None and self.default.lora is None:
            raise BackendError(f"lora_rank is {lora.rank}, but all weights of {loaded.source} were trained so far")
        self._loaded = loaded
        self._learners = {"": self.default}

    def open(self, policy_name: str, folder: Path) -> Learner:
        """The policy's learner, resumed from the checkpoints in `folder`. Runs in the compute thread."""
        if policy_name not in self._learners:
            learner = Learner(self._loaded, folder, policy_name, **self._options)
            learner.resume()
            self._learners[policy_name] = learner
        return self._learners[policy_name]

    def close(self, policy_name: str) -> None:
        del self._learners[policy_name]

    def load_version(self, weights: WeightVersion) -> nn.Module:
        """Raises RequestRefused if the policy or the version does not exist."""
        learner, version = self._find(weights)
        return learner.load_version(version)

    def folder(self, weights: WeightVersion) -> Path:
        """The files of weights; those of version 0 are the loaded model's. Raises like `load_version`."""
        learner, version = self._find(weights)
        return learner.folder(version) if version else Path(self._loaded.source)

    def _find(self, weights: WeightVersion) -> tuple[Learner, int]:
        learner = self._learners.get(weights.policy)
        if learner is None:
            problem = f"the model {weights.policy} was deleted"
            raise RequestRefused(problem, status=404, param="model", code="model_not_found")
        return learner, learner.version if weights.version is None else weights.version
