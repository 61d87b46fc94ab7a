"""How foreign exceptions are described: their message, last user frame and root cause."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from insitu.errors import RequestRefused, WorkflowError, describe_error, exception_chain, format_error, memory_problem
from insitu.view.episode_lists import number


class Wordless(Exception):
    def __str__(self) -> str:
        raise KeyError("detail")


def test_the_place_is_in_a_plugin_that_pip_installed_and_not_in_what_it_called(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    plugin, library = packages / "plugin" / "agent.py", packages / "library.py"
    helper: dict[str, object] = {}
    exec(compile("def fail(): raise ValueError('no')", str(library), "exec"), helper)
    names = {"fail": helper["fail"]}
    exec(compile("def run():\n    fail()\n", str(plugin), "exec"), names)
    with pytest.raises(ValueError, match="no") as caught:
        names["run"]()  # type: ignore[operator]
    outside = caught.tb.tb_next  # without this test, which is no library
    assert describe_error(caught.value.with_traceback(outside)) == f"ValueError: no ({plugin}, line 2)"


def test_the_place_is_never_in_the_code_of_insitu() -> None:
    with pytest.raises(AttributeError) as caught:
        describe_error(None)  # type: ignore[arg-type]
    assert describe_error(caught.value).endswith(f"({__file__}, line {caught.traceback[0].lineno + 1})")
    with pytest.raises(SyntaxError) as refused:
        compile("an answer", "<answer>", "eval")  # no file that was to be imported
    assert describe_error(refused.value).endswith(f"({__file__}, line {refused.traceback[0].lineno + 1})")


def test_an_error_of_insitu_has_no_place_unless_code_of_the_user_raised_it() -> None:
    with pytest.raises(RequestRefused) as caught:
        number({"epoch": "one"}, "epoch", int)
    message = "RequestRefused: epoch is 'one'; expected an integer"
    assert describe_error(caught.value.with_traceback(caught.tb.tb_next)) == message  # without this test
    with pytest.raises(WorkflowError) as caught_here:
        raise WorkflowError("no")
    line = caught_here.traceback[0].lineno + 1
    assert describe_error(caught_here.value) == f"WorkflowError: no ({__file__}, line {line})"


def test_the_cause_is_told_where_it_says_more() -> None:
    refused = ConnectionError("port 9 is closed")
    error = RuntimeError("no connection")
    error.__cause__ = refused
    assert format_error(error) == "RuntimeError: no connection, from ConnectionError: port 9 is closed"
    refused.__cause__ = error
    assert exception_chain(error) == [error, refused]
    error.__cause__ = Wordless()
    assert format_error(error).endswith(", from Wordless: (its message cannot be shown: KeyError)")
    error.__cause__ = error
    assert format_error(error) == "RuntimeError: no connection"
    ours = WorkflowError("row 1 is no JSON")
    ours.__cause__ = refused
    assert format_error(ours) == "WorkflowError: row 1 is no JSON"
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    assert format_error(caught.value).startswith("JSONDecodeError: Expecting property name")


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (MemoryError(), "MemoryError: "),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 GB"), "[enforce fail] Default"),
        (ImportError("Importing failed.\n\nOriginal error was: x.so: failed to map segment"), "Original error was"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (ValueError("no"), None),
    ],
)
def test_a_lack_of_memory_is_known_however_it_is_reported(error: Exception, problem: str | None) -> None:
    wrapped = WorkflowError("it failed")
    wrapped.__cause__ = error
    for given in (error, wrapped):
        found = memory_problem(given)
        assert found is problem is None or str(found).startswith(str(problem))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces ulimit -v; `make test` runs it there")
def test_a_backend_without_memory_says_so_in_one_sentence() -> None:
    command = f"ulimit -v 500000; exec {sys.executable} -m insitu backend --model nowhere"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("failed: out of memory: ")
    assert len(done.stderr.splitlines()) == 1
