"""A program that understands what is used of `docker run`, `exec`, `rm` and `build`, and runs commands in namespaces.

An image is a folder below $FAKE_IMAGES with the files that a container has in /app; a container sees the system's
folders but /tmp, the Python environment $FAKE_PYTHON, and its mounts. Its first process is the first of a process
namespace, as with docker. The image `absent` is what a daemon does not have, and a Dockerfile with `FAIL` cannot be
built.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from processes import wait_until

ROOT = """
set -e
mount -t tmpfs none "$NEW"
for each in /*; do
    case "$each" in /app | /insitu | /logs | /proc | /tests | /tmp) continue;; esac
    if [ -L "$each" ]; then cp -P "$each" "$NEW$each"
    elif [ -d "$each" ]; then mkdir "$NEW$each"; mount --rbind "$each" "$NEW$each"; fi
done
mkdir -m 1777 "$NEW/tmp"; mkdir "$NEW/proc" "$NEW/app"
case "$PYTHON" in /tmp/*) mkdir -p "$NEW$PYTHON"; mount --bind "$PYTHON" "$NEW$PYTHON";; esac
mount -t proc proc "$NEW/proc"
cp -R "$IMAGE/." "$NEW/app"
for each in $MOUNTS; do
    from="${each%%:*}" rest="${each#*:}" to="${rest%%:*}"
    mkdir -p "$NEW$to"; mount --bind "$from" "$NEW$to"
    case "$rest" in *:ro) mount -o remount,bind,ro "$NEW$to";; esac
done
exec env -i PATH="$PATH" HOME=/root $VARIABLES chroot "$NEW" /bin/sh -c 'cd /app && exec "$@"' sh "$@"
"""


def build(arguments: list[str]) -> int:
    name, folder = arguments[arguments.index("-t") + 1], Path(arguments[-1])
    with open(images / "builds", "a") as file:
        file.write(name + "\n")
    if "FAIL" in (folder / "Dockerfile").read_text():
        print("the build has failed", file=sys.stderr)
        return 1
    shutil.copytree(folder, images / name)
    return 0


def execute(arguments: list[str]) -> int:
    """`-i NAME COMMAND...`, in a container that runs."""
    place = images / "running" / arguments[1]
    wait_until(place.exists)  # its first process is quicker than `run`
    pid, variables = place.read_text().split("\n", 1)
    inside = ["--user", "--mount", "--pid", "--root", "--wd"]
    command = f'exec env -i PATH="$PATH" HOME=/root {variables} /bin/sh -c \'cd /app && exec "$@"\' sh "$@"'
    return subprocess.call(["nsenter", "--target", pid, *inside, "sh", "-c", command, "sh", *arguments[2:]])


def remove(arguments: list[str]) -> int:
    """`-f NAME`, whatever the container does."""
    place = images / "running" / arguments[1]
    with suppress(OSError):
        pid = place.read_text().split()[0]
        if " 1\n" in Path(f"/proc/{pid}/status").read_text().replace("\t", " ").partition("NSpid:")[2]:
            os.kill(int(pid), signal.SIGKILL)
            wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    return 0


def run(arguments: list[str]) -> int:
    mounts, variables, name = [], "", "none"
    while arguments[0].startswith("-"):
        option = arguments.pop(0)
        if option == "-v":
            mounts.append(arguments.pop(0))
        elif option == "--name":
            name = arguments.pop(0)
        elif option == "--env-file":
            variables = " ".join(Path(arguments.pop(0)).read_text().split("\n"))
    image = images / arguments.pop(0)
    if not image.is_dir():
        print(f"docker: Unable to find image '{image.name}'", file=sys.stderr)
        return 125
    new = tempfile.mkdtemp(dir=images)
    settings = {
        "NEW": new,
        "IMAGE": str(image),
        "MOUNTS": " ".join(mounts),
        "VARIABLES": variables,
        "PYTHON": os.environ["FAKE_PYTHON"],
    }
    namespaces = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
    os.environ.update(settings)
    # As with docker, SIGTERM goes to the first process of the container, which outlives a client that is killed.
    container = subprocess.Popen([*namespaces, "sh", "-c", ROOT, "sh", *arguments], start_new_session=True)
    (images / "running").mkdir(exist_ok=True)
    children = Path(f"/proc/{container.pid}/task/{container.pid}/children")
    wait_until(lambda: container.poll() is not None or children.read_text())
    if container.poll() is None:
        first = children.read_text().split()
        (images / f"{name}.starting").write_text(f"{first[0]}\n{variables}")
        (images / f"{name}.starting").rename(images / "running" / name)
    end = ["pkill", "-TERM", "-P", str(container.pid)]
    signal.signal(signal.SIGTERM, lambda *_: subprocess.run(end))
    return container.wait()


images = Path(os.environ["FAKE_IMAGES"])
sys.exit({"build": build, "exec": execute, "rm": remove, "run": run}[sys.argv[1]](sys.argv[2:]))
