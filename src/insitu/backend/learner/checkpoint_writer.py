"""Writes a checkpoint: rank 0 the model, all ranks the optimizer state."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from insitu.backend.learner.optimizer_file import write_optimizer
from insitu.backend.learner.optimizer_loop import TrainState
from insitu.disk.checkpoint_files import TrainingRecord, write_record
from insitu.disk.files import new_folder
from insitu.errors import JobFailed


def write_checkpoint(
    target: Path,
    state: TrainState,
    served: nn.Module | None,
    record: TrainingRecord,
    tokenizer_files: Mapping[str, bytes],
) -> None:
    """`served` has the weights to serve, on rank 0. Raises JobFailed on all ranks alike, and then leaves nothing."""
    ranks = state.ranks
    tensors: dict[str, Tensor] = {}
    for name, parameter in state.policy.trainable.items():
        tensors |= {f"{key}.{name}": value for key, value in state.optimizer.state[parameter].items()}
        if state.policy.loaded.dtype != torch.float32:
            tensors[f"weights.{name}"] = parameter.detach()

    def write_model() -> Path:
        draft = folder.enter_context(new_folder(target))
        assert served is not None
        state.policy.save(draft, served)
        for name, content in tokenizer_files.items():
            (draft / name).write_bytes(content)
        return draft

    try:
        with ExitStack() as folder:
            draft = ranks.on_first(write_model)
            write_optimizer(draft, tensors, ranks)
            ranks.on_first(lambda: write_record(draft, record))
            ranks.on_first(folder.close)
    except (OSError, SafetensorError) as error:
        reason = f"the checkpoint {target} cannot be written: {error}"
        raise JobFailed(f"{reason}; the weights from before the job were restored") from error
