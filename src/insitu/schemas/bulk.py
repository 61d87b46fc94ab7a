"""Many objects made at once: an epoch's tokens, each with what ART says of it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Nothing made in here is garbage, and looking for some takes six times as long as making it.

    The collector is the process's: keep what is done in here short. What is counted (all but cycles) goes meanwhile.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
