"""The episodes of a run as a table in a parquet file, with everything that was recorded."""

from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from insitu.collect.conversations import conversations
from insitu.disk.files import writing
from insitu.disk.json_files import dump_json, dump_lines
from insitu.errors import InsituError, needing
from insitu.runs.files import ADVANTAGES
from insitu.runs.records import call_records, episode_record
from insitu.runs.replay import StoredRun
from insitu.schemas.episodes import Episode

_COLUMNS = {
    **dict.fromkeys(("run", "episode"), "String"),
    "epoch": "Int64",
    "row_id": "String",
    **dict.fromkeys(("generation", "attempt"), "Int64"),
    **dict.fromkeys(("outcome", "reason", "error"), "String"),
    "output": "json",
    "reward": "Float64",
    "step_rewards": "Float64 list",
    "rewarded_functions": "String list",
    **dict.fromkeys(("scores", "reasoning"), "json"),
    "policy_versions": "Int64 list",
    **dict.fromkeys(("calls", "prompt_tokens", "sampled_tokens"), "Int64"),
    "seconds": "Float64",
    "failed_requests": "json",
    **dict.fromkeys(("source", "dropped"), "String"),
    **dict.fromkeys(("advantages", "sides", "conversations", "model_calls", "candidates", "rescores"), "json"),
}
"""Values whose shape differs between episodes are JSON."""
_PART_ROWS = 500
"""Episodes that are held in memory."""


def write_table(run: StoredRun, path: Path) -> int:
    """Writes the complete groups of a run; returns the number of episodes. Raises ConfigError without polars."""
    with needing("tables", "--format parquet"):
        import polars
    types = {name: _type(polars, kind) for name, kind in _COLUMNS.items()}
    records, written = _records(run), 0
    try:
        with writing(path), TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as folder:
            parts: list[Path] = []
            while lines := [*islice(records, _PART_ROWS)]:
                part = BytesIO()
                polars.read_ndjson(dump_lines(lines), schema=types).write_parquet(part)
                parts.append(Path(folder) / f"{len(parts)}.parquet")
                parts[-1].write_bytes(part.getbuffer())
                written += len(lines)
            if parts:  # polars cannot append to a file, but join files without reading them as a whole
                polars.scan_parquet(parts, low_memory=True).sink_parquet(path, row_group_size=_PART_ROWS)
    except polars.exceptions.PolarsError as error:
        raise InsituError(f"{path} cannot be written: {error}") from error
    return written


def _type(polars: Any, kind: str) -> Any:
    name, _, is_list = kind.partition(" ")
    inner = polars.String if name == "json" else getattr(polars, name)
    return polars.List(inner) if is_list else inner


def _records(run: StoredRun) -> Iterator[dict[str, Any]]:
    training = {line["episode"]: line for line in run.files.records(ADVANTAGES)}
    rescores: dict[str, list[Any]] = {}
    for (name, _), record in run.files.rescores().items():
        rescores.setdefault(name, []).append({k: v for k, v in record.items() if k != "episode"})
    run_id = run.files.settings().get("run_id")
    for episode in (episode for group in run.selected for episode in run.load(group)):
        name = episode.key.text()
        yield {"run": run_id, **_record(episode, training.get(name, {}), rescores.get(name, []))}


def _record(episode: Episode, training: dict[str, Any], rescores: list[Any]) -> dict[str, Any]:
    record = episode_record(episode) | {
        "dropped": training.get("dropped"),
        "advantages": training.get("advantages", {}),
        "sides": training.get("sides", []),
        "conversations": [[turn.message for turn in turns] for turns in conversations(episode.calls)],
        "model_calls": call_records(episode.key.text(), episode.calls),
        "rescores": rescores,
    }
    values = {name: record.get(name) for name in _COLUMNS if name != "run"}
    return {name: dump_json(value).decode() if _COLUMNS[name] == "json" else value for name, value in values.items()}
