"""Two vLLM servers with the same model, for all tests; they take more than a minute to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_server import COMPLETE, DEVELOPMENT, VllmServer, save_player


@pytest.fixture(scope="session")
def player(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_player(tmp_path_factory.mktemp("player"))


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory, player: Path) -> Iterator[list[VllmServer]]:
    folder = tmp_path_factory.mktemp("vllm")
    servers = [VllmServer(folder, player, COMPLETE, DEVELOPMENT) for _ in range(2)]
    try:
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()
