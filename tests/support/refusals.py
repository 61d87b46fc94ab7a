"""What `insitu finetune` refuses before it starts anything, asked in this process."""

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest

from insitu.errors import ConfigError
from insitu.schemas.finetuning import FinetuneRunConfig
from insitu.training.runtime import check_run


def refusal(folder: Path, *overrides: Any, file: str = "config.yml", **options: Any) -> str:
    """The message for a file with these overrides (`"-o", KEY, VALUE, ...`) and options; the command exits with 2.

    The project's plugins are those of `tests/support`.
    """
    assert [*overrides[::3]] == ["-o"] * len(overrides[::3])
    values = [(str(key), str(value)) for key, value in zip(overrides[1::3], overrides[2::3], strict=True)]
    request = FinetuneRunConfig(config_file=Path(file), override=values, **options)
    path, before = [*sys.path], {*folder.iterdir()} | {folder / "__pycache__"}
    try:
        with contextlib.chdir(folder), pytest.raises(ConfigError) as refused:
            asyncio.run(check_run(request))
    finally:
        sys.path[:] = path
    assert {*folder.iterdir()} <= before
    return str(refused.value)
