"""Decides whether two run directories hold the same run: equal files, whenever and wherever they were written."""

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

TIMES = {"time", "timestamp", "started", "ended", "seconds", "seconds_ahead"}
"""Keys whose values differ between runs."""
CACHES = (".lock", ".index.sqlite*")
"""Files that a run need not have."""
UNREAD = ("*.log", "*.png", "*.alive")
"""Files that only have to exist in both."""
IDENTITY = ("event", "run", "id", "epoch", "group", "row_id", "evaluator", "index")
"""Keys that, with `episode`, say what a line is about."""
RANDOM = {
    r"insitu_run_[0-9a-f]{8}\b": "<other run>",
    r"\bjob-[0-9a-f]{32}\b": "<job>",
    r"\bcall_[0-9a-f]{24}\b": "<tool call>",
}
"""Ids that differ between runs, besides that of the run itself."""
SHOWN = 100
"""Characters of a value in a message."""
MISSING = object()


def differences(one: Path, other: Path, new_keys: Set[str] = frozenset()) -> list[str]:
    """Returns what differs, as `file: line: key: value in one, value in other`; nothing if the runs are equal.

    Lines are compared by their episode, in any order. Times, run ids, job ids, ids of tool calls, the paths of the run
    and of its project, and positions in files are not compared. `new_keys` are keys that only one of them has, or
    names of files.
    """
    first, second = _Run(one, new_keys), _Run(other, new_keys)
    lines: list[str] = []
    for name in sorted(first.files.keys() | second.files.keys()):
        if name not in first.files or name not in second.files:
            lines.append(f"{name}: only in {'one' if name in first.files else 'other'}")
        elif not any(Path(name).match(pattern) for pattern in UNREAD):
            lines += compare_values(f"{name}: ", first.read(name), second.read(name))
    return lines


class _Run:
    """The files of a run directory, with placeholders for what differs between runs."""

    def __init__(self, folder: Path, new_keys: Set[str]) -> None:
        self._folder, self._new_keys = folder, new_keys
        settings = json.loads((folder / "run.json").read_text())
        project = Path(settings.get("source") or folder).parent
        self._output_dir = settings.get("config", {}).get("finetuning", {}).get("output_dir")
        places = {folder.resolve(): "<run>", folder.absolute(): "<run>", folder.resolve().parent: "<project>"}
        if project.is_absolute():
            places = {project: "<project>", project / (self._output_dir or ""): "<run>"} | places
        longest_first = sorted(places.items(), key=lambda place: -len(str(place[0])))
        self._replaced = [(rf"\b{re.escape(settings['run_id'])}\b", "<run>"), *RANDOM.items()]
        self._replaced += [(rf"{re.escape(str(path))}(?![\w-]|\.\w)", text) for path, text in longest_first]
        self.files = {self._name(path): path for path in folder.rglob("*") if path.is_file() and self._counts(path)}

    def _counts(self, path: Path) -> bool:
        return path.name not in self._new_keys and not any(path.match(pattern) for pattern in CACHES)

    def _name(self, path: Path) -> str:
        """The path in the run directory; for a job, whose file is named after its id, with the key of the job."""
        name = path.relative_to(self._folder)
        if name.match("jobs/job-*.json"):
            name = name.with_name(f"{self._json(path.read_bytes())['key'].replace('/', ' ')}.json")
        return str(name)

    def read(self, name: str) -> Any:
        """The content, with placeholders: lines by what they are about, tensors by name."""
        path = self.files[name]
        data = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
        if path.suffix == ".json":
            return self._json(data)
        if path.suffix == ".safetensors":
            return _tensors(data)
        if ".jsonl" in path.suffixes:
            return self._by_identity(self._json(line) for line in data.splitlines())
        return data

    def _json(self, data: bytes) -> Any:
        text = data.decode()
        for pattern, placeholder in self._replaced:
            text = re.sub(pattern, placeholder, text)
        return self._without_times(json.loads(text))

    def _without_times(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._without_times(item) for item in value]
        if not isinstance(value, dict):
            return value
        kept = {key: self._without_times(item) for key, item in value.items() if key not in self._new_keys}
        kept |= dict.fromkeys(TIMES & kept.keys(), "<time>")
        if kept.get("output_dir") == self._output_dir:
            kept["output_dir"] = "<run>"
        if isinstance(kept.get("sizes"), dict):  # the compressed size of a line depends on its times
            kept["sizes"] = sorted(kept["sizes"])
        if isinstance(kept.get("target_modules"), list):  # a set, which peft writes in any order
            kept["target_modules"] = sorted(kept["target_modules"])
        kept.pop("adapter_config.json", None)  # its digest
        if isinstance(kept.get("blocks"), dict):
            kept["blocks"] = {name: self._episodes_at(name, *place) for name, place in kept["blocks"].items()}
        return kept

    def _episodes_at(self, name: str, offset: int, size: int) -> list[str]:
        """The episodes of the lines of a gzip member."""
        member = (self._folder / name).read_bytes()[offset : offset + size]
        try:
            lines = gzip.decompress(member).splitlines()
        except (OSError, EOFError, zlib.error) as error:
            return [f"no gzip member: {error}"]
        return sorted({str(self._json(line).get("episode")) for line in lines})

    @staticmethod
    def _by_identity(records: Iterator[dict[str, Any]]) -> dict[str, Any]:
        """Records by what they are about; those about the same thing are numbered."""
        lines: dict[str, Any] = {}
        numbers: Counter[str] = Counter()
        for record in records:
            episode = record.get("episode")
            parts = [episode] if isinstance(episode, str) else []
            if isinstance(episode, dict):  # a line of journal.jsonl
                parts.append(episode["episode"])
            parts += [f"{key} {record[key]}" for key in IDENTITY if record.get(key) is not None]
            about = ", ".join(parts) or "line"
            numbers[about] += 1
            lines[f"{about} ({numbers[about]})" if numbers[about] > 1 else about] = record
        return lines


def _tensors(data: bytes) -> dict[str, Any]:
    """The tensors of a safetensors file by name, each as its type, shape and bytes."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    tensors: dict[str, Any] = {"metadata": header.pop("__metadata__", None)}
    for name, of in header.items():
        begin, end = (start + offset for offset in of["data_offsets"])
        tensors[name] = {"dtype": of["dtype"], "shape": of["shape"], "data": data[begin:end]}
    return tensors


def compare_values(where: str, one: Any, other: Any) -> Iterator[str]:
    """What differs between two JSON values, each line beginning with `where`."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from compare_values(f"{where}{key}: ", one.get(key, MISSING), other.get(key, MISSING))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, items in enumerate(zip(one, other, strict=True)):
            yield from compare_values(f"{where}[{number}]: ", *items)
    elif isinstance(one, bytes) and isinstance(other, bytes):
        if one != other:
            changed = sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))
            yield f"{where}{changed} of {len(one)} bytes differ"
    elif type(one) is not type(other) or (one != other and one == one):  # NaN is not itself
        yield f"{where}{_shown(one)} in one, {_shown(other)} in other"


def _shown(value: Any) -> str:
    if value is MISSING:
        return "missing"
    if isinstance(value, list):
        return f"{len(value)} items {_shortened(value)}"
    return _shortened(value)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
