"""A running `insitu backend` with a tiny model, for tests of whole runs: `with tiny_backend(folder) as served`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import LOGGED_BACKEND, serving
from tiny_models import save_tiny_model


class Served:
    """A backend's address, its token, and the log of what it has sampled."""

    token = "t"

    def __init__(self, address: str, log: Path) -> None:
        self.address = address
        self._log = log

    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]


@contextmanager
def tiny_backend(folder: Path) -> Iterator[Served]:
    model = save_tiny_model(folder / "model")
    log = folder / "log"
    options = {"model": model, "port": 0, "token": Served.token, "output_dir": folder / "out"}
    with serving(LOGGED_BACKEND, log, *(t for k, v in options.items() for t in (f"--{k}", v))) as (_, address):
        yield Served(address, log)
