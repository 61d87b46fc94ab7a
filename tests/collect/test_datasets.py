"""Dataset files of every format, and every way in which a row can be wrong."""

import asyncio
import gzip
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from processes import HANGS

from insitu.collect.datasets import find_dataset, load_dataset
from insitu.config import Config, load_config, requested_config
from insitu.errors import ConfigError
from insitu.plugin_api import Builder
from insitu.schemas.finetuning import FinetuneRunConfig
from insitu.training.runtime import check_inputs

ROWS: list[dict[str, Any]] = [
    {"id": "a", "question": "1 + 1", "answer": "2", "level": "easy"},
    {"id": "b", "question": "2 + 2", "answer": "4", "level": "hard"},
]


def as_file(folder: Path, form: str, rows: list[dict[str, Any]] = ROWS, suffix: str | None = None) -> Path:
    path = folder / f"data.{suffix or form}"
    if form == "json":
        path.write_bytes(orjson.dumps(rows))
    elif form == "jsonl":
        path.write_bytes(b"\n\n".join(map(orjson.dumps, rows)))
    elif form == "csv":
        lines = [",".join(rows[0]), *(",".join(f'"{v}"' for v in row.values()) for row in rows)]
        path.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    elif form == "xls":
        write_xlsx(path, [list(rows[0]), *(list(row.values()) for row in rows)])
    else:
        pytest.importorskip("polars").DataFrame(rows).write_parquet(path)
    return path


def write_xlsx(path: Path, lines: list[list[str]]) -> None:
    """The least that Excel calls a workbook: one sheet of text."""
    xml = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>'
    main, office = (
        "http://schemas.openxmlformats.org/spreadsheetml/2006/main",
        "application/vnd.openxmlformats-officedocument",
    )
    relations = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006"
    cells = ["".join(f'<c t="inlineStr"><is><t>{text}</t></is></c>' for text in line) for line in lines]
    sheet = "".join(f"<row>{line}</row>" for line in cells)

    def relation(kind: str, target: str) -> str:
        one = f'<Relationship Id="r1" Type="{relations}/{kind}" Target="{target}"/>'
        return f'<Relationships xmlns="{package}/relationships">{one}</Relationships>'

    def part(name: str, kind: str) -> str:
        return f'<Override PartName="/xl/{name}.xml" ContentType="{office}.spreadsheetml.{kind}+xml"/>'

    parts = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f"{part('workbook', 'sheet.main')}{part('sheet', 'worksheet')}</Types>",
        "_rels/.rels": relation("officeDocument", "xl/workbook.xml"),
        "xl/_rels/workbook.xml.rels": relation("worksheet", "sheet.xml"),
        "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{relations}">'
        '<sheets><sheet name="rows" sheetId="1" r:id="r1"/></sheets></workbook>',
        "xl/sheet.xml": f'<worksheet xmlns="{main}"><sheetData>{sheet}</sheetData></worksheet>',
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in parts.items():
            archive.writestr(name, xml + text)


def config_for(write: Any, **dataset: Any) -> Config:
    return load_config(write({"eval": {"general": {"dataset": dataset}}}))


SOURCE = """
from insitu.collect.datasets import DatasetConfig
from insitu.plugin_api import register_dataset_loader

class TasksConfig(DatasetConfig, name="tasks"):
    count: int = 2

    def origin(self, config):
        return {"tasks": "sums", "packages": {"sums": "1.0"}}

@register_dataset_loader(config_type=TasksConfig)
def tasks(block, config):
    for number in range(block.count):
        yield {"question": f"{number} + 1", "answer": number + 1, "seed": config.general.seed}
"""


def complaint(config: Config, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_dataset(config, path)
    return str(caught.value)


@pytest.mark.parametrize(("form", "module"), [("parquet", "polars"), ("xls", "fastexcel")])
def test_a_package_that_is_not_there(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, module: str
) -> None:
    path = as_file(tmp_path, form)
    monkeypatch.setitem(sys.modules, module, None)
    said = complaint(config_for(write, _type=form, file_path=path.name))
    assert said.startswith(
        f"dataset {path} needs the extra tables (pip install -e '.[tables]' in the clone of insitu): "
    )
    assert module in said.partition("): ")[2]


@pytest.mark.parametrize("form", ["json", "jsonl", "csv", "parquet", "xls"])
@pytest.mark.parametrize("given", ["in the file", "by --dataset", "with another suffix"])
def test_every_format(write: Any, tmp_path: Path, form: str, given: str) -> None:
    suffix = "xlsx" if form == "xls" else form
    path = as_file(tmp_path, form, suffix="txt" if given == "with another suffix" else suffix.upper())
    if given == "by --dataset":
        items = load_dataset(config_for(write, _type="json", file_path="elsewhere.json"), path)
    else:
        items = load_dataset(config_for(write, _type=form, file_path=path.name))
    assert [(i.id, i.input_obj, i.expected_output_obj) for i in items] == [("a", "1 + 1", "2"), ("b", "2 + 2", "4")]
    assert [i.full_dataset_entry for i in items] == ROWS
    assert {i.rep for i in items} == {0}


def test_a_dataset_of_the_command_line_needs_no_block(write: Any, tmp_path: Path) -> None:
    config = load_config(write({"general": {}}))
    assert len(load_dataset(config, as_file(tmp_path, "json"))) == 2
    assert "eval.general.dataset is missing" in complaint(config)


def test_rows_of_a_package(write: Any, tmp_path: Path) -> None:
    """They are in no file: run.json has where they come from and the digest of the rows themselves."""
    write(SOURCE, "sums_plugin.py")

    def config(seed: int = 0, **settings: Any) -> Config:
        dataset = {"_type": "tasks", **settings}
        general = {"plugins": ["sums_plugin"], "seed": seed}
        return load_config(write({"general": general, "eval": {"general": {"dataset": dataset}}}))

    items = load_dataset(config())
    assert [(item.id, item.input_obj, item.expected_output_obj) for item in items] == [(0, "0 + 1", 1), (1, "1 + 1", 2)]
    record = find_dataset(config()).record()
    assert record.keys() == {"source", "tasks", "packages", "sha256"}
    assert (record["source"], record["packages"]) == ("tasks", {"sums": "1.0"})
    assert find_dataset(config()).record() == record
    assert find_dataset(config(seed=1)).record()["sha256"] != record["sha256"]
    assert "dataset _type: tasks has no rows" in complaint(config(count=0))
    assert [item.id for item in load_dataset(config(), as_file(tmp_path, "json"))] == ["a", "b"]  # --dataset


def test_a_question_may_be_in_the_column_named_like_the_agents_parameter(write: Any, tmp_path: Path) -> None:
    """Only where there is no `question`."""
    as_file(tmp_path, "jsonl", [{"message": "hi"}, {"message": "ho", "question": "why"}])
    for name in ("message", "text"):
        (tmp_path / f"of_{name}.py").write_text(f"def answer({name}, model, row): return {name}\n")

    def config_of(name: str) -> Config:
        dataset = {"_type": "jsonl", "file_path": "data.jsonl"}
        workflow = {"_type": "python", "function": f"of_{name}.py:answer", "model": "player"}
        llms = {"player": {"_type": "policy"}}
        return load_config(write({"eval": {"general": {"dataset": dataset}}, "llms": llms, "workflow": workflow}))

    assert [item.input_obj for item in load_dataset(config_of("message"))] == ["hi", "why"]
    problem = "row 1: the question key 'question' does not exist; available: message"
    assert problem in complaint(config_of("text"))


def test_columns_may_have_other_names(write: Any, tmp_path: Path) -> None:
    rows = [{"key": 7, "prompt": {"x": 1}, "target": [1, 2], "more": None}, {"key": 8, "prompt": ""}]
    as_file(tmp_path, "jsonl", rows)
    structure = {"question_key": "prompt", "answer_key": "target"}
    config = config_for(write, _type="jsonl", file_path="data.jsonl", id_key="key", structure=structure)
    first, second = load_dataset(config)
    assert (first.id, first.input_obj, first.expected_output_obj) == (7, {"x": 1}, [1, 2])
    assert first.full_dataset_entry == rows[0]
    assert (second.id, second.input_obj, second.expected_output_obj) == (8, "", None)
    other = as_file(tmp_path, "json", [{"key": 1, "prompt": "p", "target": "t"}])
    assert load_dataset(config, other)[0].input_obj == "p"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({"allowlist": {"field": {"level": ["easy"]}}}, ["a"]),
        ({"denylist": {"field": {"level": ["easy", "middle"]}}}, ["b"]),
        ({"allowlist": {"field": {"level": ["easy", "hard"], "answer": [4]}}, "denylist": {}}, ["b"]),
        (
            {"allowlist": {"field": {"level": ["easy"]}}, "denylist": {"field": {"id": ["a"]}}},
            "has no row that it allows",
        ),
        (
            {"allowlist": {"field": {"levels": ["easy"]}}},
            "filter.allowlist: the column 'levels' does not exist (did you",
        ),
        ({"allow": {}}, "allow"),
    ],
)
def test_a_filter_chooses_rows(write: Any, tmp_path: Path, rows: dict[str, Any], expected: Any) -> None:
    """As the toolkit's documents write it; a file that takes the place of the dataset has all of its rows."""
    path = as_file(tmp_path, "jsonl")
    dataset = {"_type": "jsonl", "file_path": str(path), "filter": rows}
    file = write({"eval": {"general": {"dataset": dataset}}})
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            load_dataset(load_config(file))
        return
    config = load_config(file)
    assert [item.id for item in load_dataset(config)] == expected
    assert [item.id for item in load_dataset(config, path)] == ["a", "b"]


def test_rows_without_id_are_numbered(write: Any, tmp_path: Path) -> None:
    path = as_file(tmp_path, "jsonl", [{"question": "a"}, {"question": "b"}])
    assert [i.id for i in load_dataset(config_for(write, _type="jsonl", file_path=str(path)))] == [0, 1]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("d.jsonl", '{"question": 1}\n{"qestion": 2, "id": 5}\n', ["row 2", "'question'", "'qestion'", "qestion, id"]),
        ("d.jsonl", '{"question": 1}\n\n{"question": \n', ["line 3", "not valid JSON"]),
        ("d.jsonl", '{"question": 1, "id": "x"}\n{"question": 2, "id": "x"}', ["rows 1 and 2", "same id 'x'"]),
        ("d.jsonl", '{"question": 1, "id": "\\ud83d"}', ["row 1", "the id '\\ud83d' has a lone surrogate"]),
        ("d.jsonl", '{"question": 1, "id": 1}\n{"question": 2, "id": "1"}', ["rows 1 and 2", "same id '1'"]),
        ("d.jsonl", '{"question": 1}\n[1, 2]', ["row 2", "must be a mapping of columns, not [1, 2]"]),
        ("d.jsonl", "\n \n", ["has no rows"]),
        ("d.json", "[]", ["has no rows"]),
        ("d.json", '{"rows": []}', ["must hold a list of rows, not dict"]),
        ("d.json", '[{"question": 1}', ["cannot be read"]),
        ("d.csv", "id,question\n1,a,surplus\n", ["row 1", "a different number of fields"]),
        ("d.csv", "id,question\n1,a\n2\n", ["row 2", "a different number of fields"]),
        ("d.csv", "id,query\n1,a\n", ["row 1", "'question' does not exist", "available: id, query"]),
        ("d.csv", "", ["has no rows"]),
        ("d.csv", "id,question,id\n1,a,2\n", ["the column 'id' twice"]),
        ("d.jsonl", '{"question": 1}\n{"question": 2, "question": 3}', ["line 2", "the key 'question' twice"]),
        ("d.jsonl", '{"question": {"a": 1, "a": 2}}', ["line 1", "the key 'a' twice"]),
        ("d.jsonl", '{"question": NaN, "x": "\\ud83d"}', ["line 1", "NaN is not a finite number"]),
        ("d.jsonl", '{"question": 1e999}', ["line 1", "1e999 is not a finite number"]),
        ("d.jsonl", '{"question": %s}' % ("9" * 5000), ["line 1", "4300 digits"]),
        ("d.jsonl", "[" * 100_000, ["line 1", "nested too deeply"]),
        ("d.json", '[{"question": 1, "question": 2}]', ["cannot be read", "the key 'question' twice"]),
        ("d.parquet", "no table", ["cannot be read"]),
        ("d.xlsx", "no table", ["cannot be read"]),
        ("d.xlsx", "PK\x03\x04 cut off", ["cannot be read"]),
    ],
)
def test_what_is_wrong_is_told_with_file_and_row(write: Any, name: str, content: str, parts: list[str]) -> None:
    path = write(content, name)
    message = complaint(load_config(write({"general": {}})), path)
    assert str(path) in message
    for part in parts:
        assert part in message


def test_other_files_that_cannot_be_read(write: Any, tmp_path: Path) -> None:
    config = load_config(write({"general": {}}))
    latin = tmp_path / "latin.csv"
    latin.write_bytes("id,question\n1,ä".encode("latin-1"))
    assert f"{latin} cannot be read" in complaint(config, latin)
    (tmp_path / "folder.json").mkdir()
    assert "cannot be read" in complaint(config, tmp_path / "folder.json")
    assert "the file format '.tsv' does not exist" in complaint(config, tmp_path / "x.tsv")


def test_a_missing_file_is_told_with_both_places(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    message = complaint(config_for(write, _type="json", file_path="gone.json"))
    assert "eval.general.dataset.file_path: 'gone.json' does not exist" in message
    assert str(tmp_path / "here" / "gone.json") in message
    assert str(tmp_path / "gone.json") in message


def test_a_file_in_both_places_is_reported_once(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    used, ignored = tmp_path / "here/rows.json", tmp_path / "rows.json"
    for file, question in ((used, "used"), (ignored, "ignored")):
        file.write_bytes(orjson.dumps([{"id": 1, "question": question}]))
    config = config_for(write, _type="json", file_path="rows.json")
    for _ in range(2):
        (row,) = load_dataset(config, None)
        assert row.input_obj == "used"
    (warning,) = [record.message for record in caplog.records]
    key = "eval.general.dataset.file_path"
    assert warning == f"{key}: 'rows.json' names two files: {used} is used, {ignored} beside the YAML file is not"
    caplog.clear()
    used.rename("linked.json")
    (tmp_path / "linked.json").symlink_to("here/linked.json")  # the same file
    load_dataset(config_for(write, _type="json", file_path="linked.json"), None)
    assert not caplog.records


def test_a_finetune_run_takes_its_rows_from_a_file_of_any_format(write: Any, tmp_path: Path) -> None:
    """What the trajectory builder and the check before the run make of --dataset and --validation_dataset."""
    sections = {
        "trajectory_builders": {"b": {"_type": "insitu_traj_builder"}},
        "eval": {"evaluators": {"e": {"_type": "judge"}}},
        "general": {"plugins": ["plain_parts"]},
        "finetuning": {"reward_function": {"name": "e"}},
    }
    file = write(sections)
    for form in ("json", "jsonl", "csv", "parquet", "xls"):
        path = as_file(tmp_path, form, suffix="xlsx" if form == "xls" else form)
        request = FinetuneRunConfig(config_file=file, dataset=path, validation_dataset=path)
        config = requested_config(request)
        asyncio.run(check_inputs(config, request))

        async def rows(config: Config, request: FinetuneRunConfig) -> list[Any]:
            async with Builder(config, request=request) as builder:
                gathering = await builder.get_trajectory_builder("b")
                await gathering.initialize(config.finetuning)
                return [row.id for row in gathering.rows_of_epoch(1)]

        assert sorted(asyncio.run(rows(config, request))) == ["a", "b"]
        path.unlink()
        with pytest.raises(ConfigError, match=f"{path.name}' does not exist"):
            asyncio.run(check_inputs(config, request))


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_json_may_begin_with_a_byte_order_mark_and_hold_half_a_character(write: Any, tmp_path: Path, name: str) -> None:
    row = r'{"id": "a", "question": "1", "answer": "\ud83d"}'
    path = tmp_path / name
    path.write_text(row if path.suffix == ".jsonl" else f"[{row}]", encoding="utf-8-sig")
    (item,) = load_dataset(config_for(write, _type="json", file_path=str(path)), path)
    assert (item.id, item.expected_output_obj) == ("a", "\ud83d")


@pytest.mark.parametrize("name", ["d.json", "d.jsonl", "d.csv"])
def test_a_file_that_is_no_text_is_said_to_be_what_it_is(write: Any, tmp_path: Path, name: str) -> None:
    config = load_config(write({"general": {}}))
    text = '{"question": 1}\n'
    (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    assert f"{name} is compressed by gzip: decompress it" in complaint(config, tmp_path / name)
    for encoding in ("utf-16", "utf-16-be"):
        (tmp_path / name).write_bytes(("\ufeff" * (encoding == "utf-16-be") + text).encode(encoding))
        assert f"{name} is UTF-16: write it in UTF-8" in complaint(config, tmp_path / name)


def test_integers_beyond_64_bits_are_exact(write: Any) -> None:
    """Two ids that are the same number as floats are two rows."""
    ids = [2**64 + 1, 2**64 + 2, -(2**70)]
    path = write([{"id": number, "question": number} for number in ids], "d.jsonl")
    items = load_dataset(load_config(write({"general": {}})), path)
    assert [item.id for item in items] == [item.input_obj for item in items] == ids


def test_numbers_of_a_table_that_are_not_finite_are_refused(write: Any, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    config = load_config(write({"general": {}}))
    for value in (float("nan"), [0.5, float("inf")], {"deep": float("nan")}):
        polars.DataFrame({"question": ["a", "b"], "number": [None, value]}).write_parquet(tmp_path / "d.parquet")
        assert "row 2: number has a number that is not finite" in complaint(config, tmp_path / "d.parquet")


def test_many_rows_are_read_in_seconds_and_little_memory(write: Any, tmp_path: Path) -> None:
    """200,000 rows of 1 KB take less than 30 s and 1 GB; a tenth of them here, in a process of their own."""
    rows = (json.dumps({"id": n, "question": "why? " * 200, "answer": n}) + "\n" for n in range(20_000))
    (tmp_path / "d.jsonl").write_text("".join(rows))
    write({"general": {}})
    code = (
        "import resource, time; from insitu.config import load_config;"
        "from insitu.collect.datasets import find_dataset, load_dataset;"
        "before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time();"
        "items = load_dataset(load_config('config.yml'), 'd.jsonl');"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "print(len(items), time.process_time() - start, (after - before) / 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS)
    count, seconds, megabytes = map(float, done.stdout.split())
    assert (count, seconds < 3, megabytes < 100) == (20_000, True, True), done.stdout
