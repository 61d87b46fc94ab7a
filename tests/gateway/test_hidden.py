"""Which files and folders agents in workspaces must not see."""

import subprocess
import sys
from pathlib import Path

from insitu.gateway.hidden import further_places, repositories, results

COMMIT = ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "--allow-empty", "-m", "x"]


def git(*arguments: str | Path) -> None:
    subprocess.run(["git", *arguments], check=True, capture_output=True)


def test_repositories(tmp_path: Path) -> None:
    first, second, bare = tmp_path / "first", tmp_path / "second", tmp_path / "bare.git"
    git("init", "-q", "-b", "main", first)
    git("-C", first, *COMMIT)
    assert [*repositories(first / "task")] == [first / ".git"]
    git("clone", "-q", "--shared", first, second)
    git("clone", "-q", "--bare", "--shared", second, bare)
    borrowed = [first / ".git/objects", second / ".git/objects"]
    assert {*repositories(second)} == {second / ".git", borrowed[0]}
    assert {*repositories(bare)} == {bare, *borrowed}
    git("-C", bare, "worktree", "add", bare / "tree", "main")  # which itself is seen
    expected = {bare / "worktrees/tree", *borrowed, *(bare / name for name in ("objects", "lfs", "modules"))}
    assert {*repositories(bare / "tree")} == expected


def test_results(tmp_path: Path) -> None:
    hidden = ["a/b/c/d", "here/shown/results", ".tmp/insitu/eval", "link/run"]
    for place in (*hidden, "a/b/c/e/f", "a/b/c/d/within", ".venv/run", "lib/site-packages/run", "here"):
        (tmp_path / place.replace("link", "linked")).mkdir(parents=True, exist_ok=True)
        (tmp_path / place.replace("link", "linked") / "workflow_output.json").touch()
    (tmp_path / "linked").rename(elsewhere := tmp_path / ".elsewhere")
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / ".elsewhere/loop").symlink_to(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/run.json").write_text('{"scripts": {}}')
    assert {*results([tmp_path], [str(tmp_path / "here/shown")])} == {
        *(tmp_path / place for place in hidden[:3]),
        elsewhere / "run",
        tmp_path / "here/workflow_output.json",
    }
    (tmp_path / "own/run.json").write_text('{"run_id": "r"}')
    assert [*results([tmp_path / "own"], [])] == [tmp_path / "own"]
    beside = {*results([tmp_path / "own"], [tmp_path / "own"])}
    assert {tmp_path / "own" / name for name in ("run.json", "journal.jsonl", "backend", "workspaces")} <= beside


def test_further_places(tmp_path: Path) -> None:
    """A folder above, the folder itself and one below are mounted elsewhere; so is another one."""
    for name in ("project/checks/one", "project/task", "above it", "same", "below", "other"):
        (tmp_path / name).mkdir(parents=True)
    script = f"""if True:
        import sys
        from pathlib import Path
        from insitu.gateway.hidden import further_places
        places = further_places([Path('project/checks').resolve()])
        print(*(place.relative_to({str(tmp_path)!r}) for place in places), sep=',')
    """
    mounts = {"project": "above it", "project/checks": "same", "project/checks/one": "below", "project/task": "other"}
    commands = "".join(f"mount --bind '{source}' '{place}' && " for source, place in mounts.items())
    command = ["unshare", "-Urm", "sh", "-c", f'{commands} exec "$0" "$@"', sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert {*done.stdout.strip().split(",")} == {"above it/checks", "same", "below"}, done.stderr
    assert not [*further_places([tmp_path / "project/checks"])]
