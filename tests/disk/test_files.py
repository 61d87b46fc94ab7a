"""Files that survive crashes, power failures and full disks, and folders that one process owns."""

import errno
import fcntl
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from factories import disk_space, power_failures

from insitu.disk.files import delete_drafts, delete_folder, new_file, new_folder, writable_folder, write_file
from insitu.disk.folder_lock import LOCK_FILE, FolderLock
from insitu.disk.json_files import Block, LineFile, read_block, read_line, whole_lines
from insitu.errors import ConfigError, InsituError


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def permissions(path: Path) -> int:
    return path.stat().st_mode & 0o777


# whole files and folders


def test_a_record_is_utf_8_in_any_locale(tmp_path: Path) -> None:
    (tmp_path / "training.json").write_bytes('{"step": 1, "version": 1, "started_from": "/größe"}'.encode())
    read = f"from insitu.disk.model_files import read_record; print(ascii(read_record({str(tmp_path)!r}).started_from))"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", read], env=os.environ | ascii_only, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("'/gr\\xf6\\xdfe'\n", "")


def test_too_many_open_files_are_said_with_the_limit_to_raise(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.open(tmp_path, os.O_RDONLY)
    os.close(taken)  # the lowest that is free
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken, limits[1]))
    try:
        with pytest.raises(InsituError, match=r"x cannot be written: Too many open files; raise the .* \(ulimit -n\)$"):
            write_file(tmp_path / "x", b"")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_cannot_be_written_is_named_as_what_it_was_to_become(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(20_000))
    with disk_space(10_000):
        too_large = pytest.raises(InsituError, match=rf"^{tmp_path}/out/weights cannot be written: File too large$")
        with too_large, new_folder(tmp_path / "out") as draft:
            shutil.copyfile(source, draft / "weights")
        too_large = pytest.raises(InsituError, match=rf"^{tmp_path}/rows cannot be written: File too large$")
        with too_large, new_file(tmp_path / "rows") as draft:
            draft.write_bytes(bytes(20_000))
        with pytest.raises(FileNotFoundError), new_folder(tmp_path / "out"):
            (tmp_path / "missing").read_bytes()
    assert [*tmp_path.iterdir()] == [source]


def test_a_replaced_file_survives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survives = power_failures(monkeypatch)
    path = write_file(tmp_path / "best.json", b"new")
    assert survives(path)
    assert survives(tmp_path)
    path.write_bytes(b"behind our back")
    assert not survives(path)


def test_a_file_that_cannot_be_written_keeps_its_content_and_is_named(tmp_path: Path) -> None:
    path = write_file(tmp_path / "best.json", b"old")
    with disk_space(10_000), pytest.raises(InsituError, match=r"best\.json cannot be written: File too large$"):
        write_file(path, b"x" * 100_000)
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_a_folder_is_complete_or_absent_and_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survives = power_failures(monkeypatch)
    target = tmp_path / "step_000001"
    with subprocess.Popen(["true"]) as killed:
        killed.wait()
    (tmp_path / f".step_000001.{killed.pid}-1.draft").mkdir()
    (tmp_path / f".step_000001.{killed.pid}-1.draft/half").write_text("x")
    with new_folder(target) as draft:
        (draft / "deep").mkdir()
        (draft / "deep/weights").write_text("x")
        assert not target.exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["step_000001", "deep", "weights"]
    assert all(survives(path) for path in (target / "deep/weights", target / "deep", tmp_path))
    with pytest.raises(InsituError, match=r"step_000001 exists already; it is not overwritten"), new_folder(target):
        pass
    with suppress(InterruptedError), new_folder(tmp_path / "step_000002") as draft:
        (draft / "half").write_text("x")
        raise InterruptedError
    delete_folder(target)
    assert [*tmp_path.iterdir()] == []


def test_of_two_that_make_a_folder_the_first_to_end_has_made_it(tmp_path: Path) -> None:
    def make(content: str, *others: str) -> None:
        with new_folder(tmp_path / "target") as draft:
            (draft / content).touch()
            if others:
                with ThreadPoolExecutor() as executor:
                    executor.submit(make, *others).result()

    with pytest.raises(InsituError, match="target exists already; it is not overwritten"):
        make("slow", "quick")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["target", "target/quick"]


def test_what_a_killed_process_left_is_deleted_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".step_000001.draft").mkdir()
    (tmp_path / "step_000002").mkdir()
    (tmp_path / ".best.json.123.draft").touch()
    delete_drafts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]
    assert ".step_000001.draft, left by a process that was killed" in caplog.text


@pytest.mark.parametrize(("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path, mask: int, file: int, folder: int) -> None:
    with umask(mask):
        written = write_file(tmp_path / "run.json", b"{}")
        with new_folder(tmp_path / "step") as draft:
            os.close(os.open(draft / "private", os.O_CREAT, 0o600))
        with closing(LineFile(tmp_path / "lines.jsonl")):
            pass
    for path in (written, tmp_path / "step/private", tmp_path / "lines.jsonl"):
        assert permissions(path) == file
    assert permissions(tmp_path / "step") == folder


def test_a_folder_that_cannot_be_written_is_named_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, reason in (
        ("file", "file is a file, not a folder"),
        ("file/below", "cannot write to .*file/below: Not a directory"),
        ("loop", "cannot write to .*loop: "),
    ):
        with pytest.raises(ConfigError, match=f"^output_dir: .*{reason}"):
            writable_folder(tmp_path / path, "output_dir")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert writable_folder(tmp_path / "link", "output_dir") == tmp_path / "elsewhere"
    assert (tmp_path / "link").is_dir()


# lines


def test_lines_survive_a_power_failure_once_they_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survives = power_failures(monkeypatch)
    path = tmp_path / "episodes.jsonl"
    with closing(LineFile(path)) as file:
        assert survives(tmp_path)
        file.append(b'{"a": 1}\n')
        assert path.read_bytes() == b'{"a": 1}\n'
        assert not survives(path)
        file.sync()
        assert survives(path)
        later = [b'{"a": 2}\n', b'{"a": 3}\n']
        file.append(later.pop())
        sync = os.fsync
        monkeypatch.setattr(os, "fsync", lambda of: (sync(of), later and file.append(later.pop())))
        file.sync()
        assert not survives(path), "a line was appended meanwhile"
    assert survives(path)


@pytest.mark.parametrize("torn", [b'{"a": 3', b"\0" * 5000, b"{"])
def test_a_torn_last_line_is_skipped_by_readers_and_removed_by_the_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, torn: bytes
) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n' + torn)
    assert [read_line(path, *line) for line in whole_lines(path)] == [{"a": 1}, {"a": 2}]
    assert f"{path}: skipped an incomplete last line" in caplog.text
    with closing(LineFile(path)) as file:
        assert file.size > 0
        file.append(b'{"a": 4}\n')
    assert f"{path}: removed an incomplete last line ({len(torn)} bytes)" in caplog.text
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n{"a": 4}\n'
    path.write_bytes(torn)
    with closing(LineFile(path)) as file:
        assert file.size == 0


@pytest.mark.parametrize("line", [b"nonsense\n", b"[1]\n", b"[" * 100_000 + b"\n", b"\xff\n"])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    with pytest.raises(InsituError, match=r"^here, line 7 is not "):
        read_line(Path("here"), 7, line)


@pytest.mark.parametrize("block", [Block(0, 10**12), Block(10**15, 10**15), Block(3, 1)])
def test_a_block_beyond_the_end_of_its_file_is_named(tmp_path: Path, block: Block) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"abc")
    with pytest.raises(InsituError, match=f"{path} has 3 bytes, but {block.end} were written: the file is damaged"):
        read_block(path, block)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    with closing(LineFile(path)) as file:
        file.append(b'{"a": 1}\n')
        with disk_space(10_000), pytest.raises(InsituError, match=r"calls\.jsonl cannot be written: File too large"):
            file.append(b"x" * 100_000 + b"\n")
        assert path.read_bytes() == b'{"a": 1}\n'
        file.append(b'{"a": 2}\n')
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'


# folders of one process


def test_a_folder_belongs_to_one_process_which_the_others_can_name(tmp_path: Path) -> None:
    with FolderLock(tmp_path, "output_dir"):
        us = f"process {os.getpid()} on {socket.gethostname()} (since "
        with pytest.raises(ConfigError) as refused:
            FolderLock(tmp_path, "output_dir")
        assert str(refused.value).startswith(f"output_dir: {tmp_path} is in use by {us}")
    assert [*tmp_path.iterdir()] == []
    FolderLock(tmp_path, "output_dir").release()


def test_the_folder_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = """if True:
        import os, sys
        from pathlib import Path
        from insitu.disk.folder_lock import FolderLock
        lock = FolderLock(Path(sys.argv[1]), "output_dir")
        print("locked", flush=True)
        sys.stdin.read()"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigError, match=f"is in use by process {process.pid} on "):
            FolderLock(tmp_path, "output_dir")
        process.kill()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == process.pid
    with FolderLock(tmp_path, "output_dir"):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_a_lock_moves_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    moved = FolderLock(tmp_path / "run", "output_dir")
    (tmp_path / "run").rename(tmp_path / "run.1")
    (tmp_path / "run").mkdir()
    with FolderLock(tmp_path / "run", "output_dir"):
        with pytest.raises(ConfigError, match=r"run\.1 is in use by"):
            FolderLock(tmp_path / "run.1", "output_dir")
        moved.release()
        assert (tmp_path / "run" / LOCK_FILE).exists()
    FolderLock(tmp_path / "run.1", "output_dir").release()


def test_without_locks_in_the_file_system_the_file_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems: a process elsewhere cannot be seen, so that its user decides."""

    def not_supported(descriptor: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", not_supported)
    with FolderLock(tmp_path, "output_dir"), pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "):
        FolderLock(tmp_path, "output_dir")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = {"pid": ended.pid, "host": socket.gethostname(), "since": "then"}
    (tmp_path / LOCK_FILE).write_text(json.dumps(here))
    FolderLock(tmp_path, "output_dir").release()
    (tmp_path / LOCK_FILE).write_text(json.dumps(here | {"host": "node-7"}))
    with pytest.raises(ConfigError, match=rf"process {ended.pid} on node-7 .* if it does not, delete .*{LOCK_FILE}$"):
        FolderLock(tmp_path, "output_dir")


def test_a_new_file_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survives, target = power_failures(monkeypatch), tmp_path / "records.jsonl"
    (tmp_path / f".records.jsonl.{os.getpid()}.draft").write_text("of a process that was killed")
    with new_file(target) as draft:
        assert not draft.exists()
        draft.write_text("1\n")
        assert not target.exists()
    assert survives(target)
    assert survives(tmp_path)
    with pytest.raises(InsituError, match=r"records\.jsonl exists already; it is not overwritten"):
        with new_file(target) as draft:
            draft.write_text("2\n")
    with suppress(InterruptedError), new_file(target, overwrite=True) as draft:
        draft.write_text("3\n")
        raise InterruptedError
    assert target.read_text() == "1\n"
    with new_file(target, overwrite=True) as draft:
        draft.write_text("4\n")
    assert target.read_text() == "4\n"
    with pytest.raises(InsituError, match=r"x cannot be written: No such file or directory"):
        with new_file(tmp_path / "x"):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


def test_a_block_that_compresses_well_can_be_read_again(tmp_path: Path) -> None:
    """Readers refuse blocks that grow too much, as those of others may be made to fill the memory."""
    with closing(LineFile(tmp_path / "f", 0)) as file:
        small = file.append(b'{"a": 1}\n', compressed=True)
        large = file.append(b'{"a": "%s"}\n' % (b"x" * 2**26), compressed=True)
    assert read_block(tmp_path / "f", small) == [{"a": 1}]
    assert [len(record["a"]) for record in read_block(tmp_path / "f", large)] == [2**26]
