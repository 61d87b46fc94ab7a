"""Runs the suites of tests/environments.toml, each with its environments: `make test WITH=NAME`.

python scripts/test_with.py list              lists them
python scripts/test_with.py NAME...           makes what they need under .environments/, and runs them
python scripts/test_with.py --install NAME... makes these environments only
"""

import glob
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "tests/environments.toml").read_text())
SUITES = TABLE["suites"]
ENVIRONMENTS = {
    name: entry if isinstance(entry, dict) else {"install": entry} for name, entry in TABLE["environments"].items()
}
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
AT_ONCE = 4
"""pip waits for the network, then unpacks on one core."""


def main(arguments: list[str]) -> int:
    if arguments in ([], ["list"]):
        for name, suite in SUITES.items():
            print(f"make test WITH={name:<13}{suite['tests']} ({suite['minutes']} minutes)")
        return 0
    if arguments[0] == "--install":
        make_environments(arguments[1:])
        return 0
    unknown = [name for name in arguments if name not in SUITES]
    if unknown:
        print(f"WITH={' '.join(unknown)}: there are {', '.join(SUITES)}", file=sys.stderr)
        return 2
    failed = [name for name in arguments if not run_suite(SUITES[name])]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def run_suite(suite: dict[str, Any]) -> bool:
    """Runs all its commands, also after one that fails; returns whether none did."""
    make_environments(suite.get("environments", []))
    home = ROOT / ".environments" / suite["inside"] / "bin" if "inside" in suite else Path(sys.executable).parent
    variables = {**suite.get("variables", {}), **os.environ, "PATH": f"{home}:{os.environ['PATH']}"}

    def passes(command: str) -> bool:
        """If this process is told to end, so is all that the command has started."""
        with subprocess.Popen(command, shell=True, cwd=ROOT, env=variables, process_group=0) as process:
            try:
                return process.wait() == 0
            except (KeyboardInterrupt, SystemExit) as told:
                os.killpg(process.pid, signal.SIGINT if isinstance(told, KeyboardInterrupt) else signal.SIGTERM)
                raise

    if not all(map(passes, suite.get("before", []))):
        return False
    passed = [passes(command) for command in suite["commands"]]
    return all(passed)


def make_environments(names: list[str]) -> None:
    """Makes those that are missing or were made from another entry; `art` stands for all of `art/...`."""
    chosen = [each for each in ENVIRONMENTS if any(f"{each}/".startswith(f"{name}/") for name in names)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(make_environment, chosen):
            pass


def make_environment(name: str) -> None:
    entry, folder = ENVIRONMENTS[name], ROOT / ".environments" / name
    sources = [repr(entry), *((ROOT / file).read_text() for file in ("pyproject.toml", "constraints.txt"))]
    made_from = hashlib.sha256("\n".join(sources).encode()).hexdigest()
    stamp, python = folder / ".installed", folder / "bin/python"
    if stamp.exists() and stamp.read_text() == made_from:
        return
    creator = python_for(entry)
    if creator is None:
        hint = f": name one with {entry['python_variable']}=/path/to/python" if "python_variable" in entry else ""
        print(f"without {name}, which needs Python {entry['python']}{hint}")
        return
    print(f"installing .environments/{name}", flush=True)
    stamp.unlink(missing_ok=True)
    run(creator, "-m", "venv", folder)
    pinned = ["-c", "constraints.txt"] if entry.get("torch") else []
    wanted = [word for line in entry["install"] for word in shlex.split(line)]
    if entry.get("uv"):
        install_with_uv(python, [*pinned, *wanted], entry.get("remove", []))
    else:
        if pinned:
            run(python, *PIP, *pinned, "torch")
        run(python, *PIP, *pinned, *wanted)
    stamp.write_text(made_from)


def install_with_uv(python: Path, wanted: list[str], unwanted: list[str]) -> None:
    """uv is given the folder of packages that pip is configured with."""
    run(python, *PIP, "uv")
    uv = python.with_name("uv")
    asked = [python, "-m", "pip", "config", "get", "global.find-links"]
    links = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    run(uv, "pip", "install", "--quiet", "--python", python, *wanted, UV_FIND_LINKS=links)
    if unwanted:
        run(uv, "pip", "uninstall", "--quiet", "--python", python, *unwanted)


def python_for(entry: dict[str, Any]) -> str | None:
    """The Python that makes an environment: this one, or the first that is found of at least the version it needs.

    Of no other version for `==3.12`.
    """
    if "python" not in entry:
        return sys.executable
    if given := os.environ.get(entry.get("python_variable", "")):
        return given
    least = int(entry["python"].partition(".")[2])
    last = least if entry["python"].startswith("==") else 14
    code = f"import sys; assert (3, {least}) <= sys.version_info < (3, {last + 1}); print(sys.executable)"
    names = [f"python3.{minor}" for minor in range(least, last + 1)]
    for name in [*names, *sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/3.*/bin/python3")))]:
        if shutil.which(name):  # which may be a shim of pyenv that cannot run
            found = subprocess.run([name, "-c", code], capture_output=True, text=True)
            if found.returncode == 0:
                return found.stdout.strip()
    return None


def run(*command: str | Path, **variables: str) -> None:
    subprocess.run(command, cwd=ROOT, env={**variables, **os.environ}, check=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
