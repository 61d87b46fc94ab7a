"""The model card of an exported checkpoint, written from the files of its run."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import yaml

from insitu import __version__
from insitu.disk.model_files import TrainingRecord, split_revision
from insitu.runs.files import EVENTS, RUN
from insitu.runs.reader import RunReader
from insitu.runs.records import comparable_validations

_METHODS = {
    "grpo": "GRPO (group-relative policy optimization, arXiv:2402.03300)",
    "dpo": "DPO (direct preference optimization, arXiv:2305.18290)",
    "kto": "KTO (Kahneman-Tversky optimization, arXiv:2402.01306)",
    "sft": "supervised finetuning",
}


class CardSubject(NamedTuple):
    """What a card describes. `is_adapter`: only the adapter's weights, for which the base model is needed."""

    name: str
    record: TrainingRecord
    is_adapter: bool


def model_card(run: Path, subject: CardSubject) -> str:
    """Markdown with YAML metadata. Names files, but no folders of this machine."""
    settings = RunReader(run).settings(required=True)
    before, after = _validations(run, subject)
    lines = ["---", yaml.safe_dump(_metadata(subject, settings, after), sort_keys=False).rstrip(), "---", ""]
    lines += [f"# {subject.name}", "", *_summary(subject), "", "## Training", ""]
    lines += _table(("", ""), _training(subject, settings, RunReader(run).options()))
    if training := settings.get("training"):
        options = orjson.dumps(training, option=orjson.OPT_INDENT_2).decode()
        lines += ["", "Options of each training job:", "", "```json", options, "```"]
    lines += _changes(run)
    lines += ["", "## Evaluation", "", *_evaluation(before, after), "", "## Use", "", *_use(subject), ""]
    return "\n".join(lines)


def _changes(run: Path) -> list[str]:
    """What was changed when the run was continued; the options are those of its last process."""
    resumed = [each for each in RunReader(run).records(EVENTS) if each.get("changes")]
    changes = [f"- after epoch {each['epoch']}: {_named(change)}" for each in resumed for change in each["changes"]]
    return ["", "Changed while it was trained:", "", *changes] if changes else []


def _named(change: str) -> str:
    """The change without folders of this machine: of an absolute path before or after it, the last part is left."""
    sides = re.split("( and is )", change)
    return "".join(re.sub(r"(?<![\w.:/~])/(?:[^'\",/\s][^'\",/]*/)+", "", side) for side in sides)


def _base(record: TrainingRecord) -> tuple[str, bool]:
    """The name of the base model, and whether it is one of the Hub."""
    path = Path(record.started_from)
    return (path.name, False) if path.is_absolute() else (split_revision(record.started_from)[0], True)


def _metadata(subject: CardSubject, settings: dict[str, Any], after: dict[str, Any] | None) -> dict[str, Any]:
    """As the Hub reads it: https://huggingface.co/docs/hub/model-cards#model-card-metadata"""
    base, on_hub = _base(subject.record)
    method = (settings.get("training") or {}).get("method")
    dataset = settings.get("dataset") or {}
    relation = {"base_model": base, "base_model_relation": "adapter" if subject.is_adapter else "finetune"}
    return {
        "library_name": "peft" if subject.is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        **(relation if on_hub else {}),
        **({"datasets": [dataset["path"]]} if dataset.get("commit") else {}),
        "tags": ["insitu", *filter(None, [method]), *(["lora"] if subject.record.lora else [])],
        **({"model-index": [_index(subject, after["avg_reward"])]} if after is not None else {}),
    }


def _index(subject: CardSubject, score: float) -> dict[str, Any]:
    """The score of these weights, as an entry of `model-index`."""
    metric = {"type": "mean_score", "name": "mean score", "value": score}
    rows = {"type": "held-out", "name": "held-out rows"}
    result = {"task": {"type": "text-generation"}, "dataset": rows, "metrics": [metric]}
    return {"name": subject.name, "results": [result]}


def _summary(subject: CardSubject) -> list[str]:
    base, on_hub = _base(subject.record)
    merged = " with a merged LoRA adapter" if subject.record.lora is not None else ""
    what = "A LoRA adapter for {}" if subject.is_adapter else "A finetuned version of {}" + merged
    where = f"[{base}](https://huggingface.co/{base})" if on_hub else f"the local model `{base}`"
    trained = "trained inside the agent workflow that uses it, with insitu"
    return [f"{what.format(where)}, {trained} {__version__}."]


def _training(
    subject: CardSubject, settings: dict[str, Any], options: Iterable[tuple[str, ...]]
) -> Iterator[tuple[str, str]]:
    record, training = subject.record, settings.get("training") or {}
    method = str(training.get("method", "unknown"))
    yield "method", _METHODS.get(method, method)
    lora = record.lora
    yield "trained weights", f"LoRA adapters of rank {lora.rank}, alpha {lora.alpha:g}" if lora is not None else "all"
    if commit := (settings.get("starting_model") or {}).get("commit"):
        yield "base model's commit", f"`{commit}`"
    if (dataset := settings.get("dataset")) is not None:
        yield "data", f"{_data(dataset)} (SHA-256 `{dataset['sha256']}`)"
    yield "training jobs", str(record.step)
    yield "seed", str(settings.get("seed"))
    source = Path(str(settings.get("source")))
    file = f"{source.parent.name}/{source.name}" if (source.parent / RUN).is_file() else source.name
    yield "run", f"`{settings.get('run_id')}`, configured by `{file}`"
    shown = chain(*(each for each in options if each[0] in ("-o", "--dataset")))
    words = [text if not Path(text).is_absolute() else Path(text).name for text in shown]
    yield "command", f"`{shlex.join(['insitu', 'finetune', file, *words])}`"
    yield "insitu", str(settings.get("insitu"))


def _data(dataset: Mapping[str, Any]) -> str:
    """The file of a dataset, or the package that its rows come from."""
    if "file" in dataset:
        return f"`{Path(dataset['file']).name}`"
    return ", ".join(f"{key} `{value}`" for key, value in dataset.items() if key != "sha256")


def _validations(run: Path, subject: CardSubject) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The validation of the exported version, and one before training that it can be compared with."""
    validations = [each for each in RunReader(run).validations() if "error" not in each]
    own = [number for number, each in enumerate(validations) if each["policy_version"] == subject.record.version]
    comparable = comparable_validations(validations[: own[-1] + 1]) if own else []
    before = next((each for each in comparable if each["epoch"] == 0), None)
    return before, comparable[-1] if comparable else None


def _evaluation(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[str]:
    if after is None:
        return ["These weights were not scored on held-out rows."]
    rows, scored = [], [(f"these weights (epoch {after['epoch']})", after)]
    for name, record in [("before training", before), *scored] if before is not None else scored:
        low, high = record["ci95"]
        interval = "unknown" if low is None else f"{low:.3f} to {high:.3f}"
        rows.append((name, f"{record['avg_reward']:.3f}", interval, record["num_examples"]))
    table = _table(("held-out rows", "mean score", "95 % interval", "episodes"), rows)
    return [*table, "", "If these weights were selected by this score, the score is optimistic."]


def _use(subject: CardSubject) -> list[str]:
    base, on_hub = _base(subject.record)
    revision = split_revision(subject.record.started_from)[1] if on_hub else None
    load, serve = 'AutoModelForCausalLM.from_pretrained("PATH_OR_NAME")', "vllm serve PATH_OR_NAME"
    imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    if subject.is_adapter:
        imports = ["from peft import PeftModel", *imports]
        chosen = f'"{base}"' + (f', revision="{revision}"' if revision else "")
        load = f'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({chosen}), "PATH_OR_NAME")'
        at = f" --revision {revision}" if revision else ""
        serve = f"vllm serve {base}{at} --enable-lora --lora-modules {subject.name.rpartition('/')[2]}=PATH_OR_NAME"
    tokenizer = 'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_NAME")'
    code = [*imports, "", f"model = {load}", tokenizer]
    return ["```python", *code, "```", "", "With vLLM:", "", "```bash", serve, "```"]


def _table(head: tuple[str, ...], rows: Any) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in cells)} |" for cells in lines]
