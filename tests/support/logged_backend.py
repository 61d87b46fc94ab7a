"""`insitu backend` that appends a JSON line per completed choice to a file: `logged_backend.py FILE --model ...`."""

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

import orjson

from insitu.backend import server
from insitu.backend.inference.engine import Engine
from insitu.backend.inference.sampler import LATEST, GenerationRequest, OutputDelta, WeightVersion
from insitu.cli import main

LOG = Path(sys.argv.pop(1))


class LoggedEngine(Engine):
    """Samples as its base does."""

    async def stream(
        self, requests: Sequence[GenerationRequest], weights: WeightVersion = LATEST, *, streamed: bool = True
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        deltas: list[list[OutputDelta]] = [[] for _ in requests]
        async with aclosing(super().stream(requests, weights, streamed=streamed)) as outputs:
            async for index, delta in outputs:
                deltas[index].append(delta)
                yield index, delta
        _write(requests, deltas, streamed)


def _write(requests: Sequence[GenerationRequest], deltas: Sequence[Sequence[OutputDelta]], streamed: bool) -> None:
    with LOG.open("ab") as file:
        for (prompt, params), parts in zip(requests, deltas, strict=True):
            tokens = [token for delta in parts for token in delta.tokens]
            line = {
                "prompt_token_ids": prompt,
                "token_ids": [token.id for token in tokens],
                "logprobs": [token.logprob for token in tokens],
                "version": parts[0].version,
                "seed": params.seed,
                "finish_reason": parts[-1].finish_reason,
                "streamed": streamed,
            }
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    LOG.touch()
    server.Engine = LoggedEngine  # type: ignore[misc]
    sys.argv.insert(1, "backend")
    main()
