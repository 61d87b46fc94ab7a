"""`insitu export FILE OUT --as verifiers`: a file's rows and evaluators as a package that verifiers loads as a taskset.

The package has the rows, the file, and the code beside the file; it scores with insitu, by `exported`.
"""

import json
import re
import shutil
from pathlib import Path

import yaml

from insitu.collect.datasets import dataset_config, load_dataset
from insitu.collect.evaluators import unshaped_reward_of
from insitu.config import load_config
from insitu.disk.files import check_free, new_folder
from insitu.errors import ConfigError

_MODULE = '''"""The rows and scores of {source}, exported by insitu."""

from pathlib import Path

from insitu.integrations.environments.verifiers.exported import taskset_of
from insitu.integrations.environments.verifiers.harness import ChatHarness

Rows = taskset_of(Path(__file__).parent / "project/config.yml")

__all__ = ["ChatHarness", "Rows"]
'''
_PACKAGE = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
dependencies = ["insitu[verifiers]"]

[tool.setuptools]
packages = ["{name}"]

[tool.setuptools.package-data]
"*" = ["project/**/*"]
"""


def export_taskset(file: Path, out: Path) -> str:
    """Writes the package into the new folder `out`; returns what to do with it."""
    config = load_config(file)
    unshaped_reward_of(config)
    name = re.sub(r"\W", "_", out.resolve().name, flags=re.ASCII).lower()
    if not name.isidentifier():
        raise ConfigError(f"OUT: {out.name!r} cannot be the name of a Python package")
    check_free(out, "OUT")
    items = load_dataset(config)
    shape = dataset_config(config)
    data = json.loads(json.dumps(dict(config.data or {})))
    dataset = {"_type": "jsonl", "file_path": "rows.jsonl", "id_key": shape.id_key}
    data["eval"]["general"]["dataset"] = {**dataset, "structure": shape.structure.model_dump()}
    with new_folder(out) as draft:
        package, project = draft / name, draft / name / "project"
        project.mkdir(parents=True)
        (draft / "pyproject.toml").write_text(_PACKAGE.format(name=name), "utf-8")
        (package / "__init__.py").write_text(_MODULE.format(source=file.name), "utf-8")
        (project / "config.yml").write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), "utf-8")
        rows = ({**item.full_dataset_entry, dataset["id_key"]: item.id} for item in items)
        (project / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        for code in sorted(config.folder.iterdir()):
            if code.suffix == ".py":
                shutil.copy(code, project)
            elif (code / "__init__.py").is_file() and code.resolve() != out.resolve().parent:
                shutil.copytree(code, project / code.name, ignore=shutil.ignore_patterns("__pycache__"))
    evaluation = f"vf-eval {name} --env.agent.runtime.type subprocess"  # its default is a hosted cloud
    return f"taskset {name} of {len(items)} rows: pip install {out}, then {evaluation}"
