"""Fixtures that several test files use."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of `tmp_path`: text as it is, a list as JSON lines, a mapping as YAML; gives its path."""

    def to_file(data: Any, name: str = "config.yml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, str):
            path.write_text(data)
        elif isinstance(data, list):
            path.write_text("".join(json.dumps(row) + "\n" for row in data))
        else:
            path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    return to_file
