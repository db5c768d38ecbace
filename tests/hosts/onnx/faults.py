"""Saves that end at every one of their file operations, each in a process of its own: `python faults.py FOLDER kill|fail`.

Prints, for every operation, what became of the save and of the folder. Operations are counted by Python's audit events, and
by calls of `os.fsync`; a failure is the error of a full disk.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from cmrc.errors import FileError
from cmrc.hosts.onnx.host import OnnxHost

REMOVALS = {"os.remove", "os.rmdir", "shutil.rmtree", "os.scandir"}
COUNTED = {"open", "os.rename", "os.mkdir", "os.chmod", "fcntl.flock", *REMOVALS}


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def end_at(number: int, how: str, folder: Path, report: int) -> None:
    """Let the file operation of this number in `folder` kill the process, or fail; its name goes to `report`."""
    count, asking = 0, False

    def operation(name: str) -> None:
        nonlocal count
        count += 1
        if count == number:
            os.write(report, name.encode())
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, "No space left on device")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal asking
        if asking or event not in COUNTED:
            return
        if event == "fcntl.flock" or str(folder) in str(arguments[0]) or isinstance(arguments[0], int):
            asking = True
            try:
                operation(event)
            finally:
                asking = False

    sync = os.fsync

    def counted(handle: int) -> None:
        operation("os.fsync")
        sync(handle)

    os.fsync = counted  # type: ignore[assignment]
    sys.addaudithook(hook)


def save_in_child(host: OnnxHost, target: Path, number: int, how: str) -> tuple[str, str]:
    """What became of the save (saved, refused, killed, crashed), and the operation that ended it."""
    read, report = os.pipe()
    child = os.fork()
    if not child:
        try:
            end_at(number, how, target.parent, report)
            host.save(target)
            os._exit(0)
        except FileError:
            os._exit(3)
        except BaseException as error:
            os.write(2, f"operation {number}: {error!r}\n".encode())
            os._exit(9)
    os.close(report)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        operation = pipe.read()
    ended = {0: "saved", 3: "refused", -signal.SIGKILL: "killed"}
    return ended.get(os.waitstatus_to_exitcode(status), "crashed"), operation


def main(folder: Path, how: str) -> None:
    new, target = OnnxHost.load(folder / "new" / "m.onnx"), folder / "out" / "m.onnx"
    x = np.eye(50, dtype=np.float32)
    answers = {name: OnnxHost.load(folder / name / "m.onnx").run([x])[0] for name in ("old", "new")}
    records: list[dict[str, Any]] = []
    while not records or records[-1]["operation"]:
        for path in target.parent.iterdir():
            path.unlink()
        for path in (folder / "old").iterdir():
            (target.parent / path.name).write_bytes(path.read_bytes())
        ended, operation = save_in_child(new, target, len(records) + 1, how)
        y = OnnxHost.load(target).run([x])[0]
        which = [name for name, answer in answers.items() if np.array_equal(y, answer)]
        record: dict[str, Any] = {
            "ended": ended,
            "operation": operation,
            "which": which,
            "files": listing(target.parent),
        }
        new.save(target)
        y = OnnxHost.load(target).run([x])[0]
        records.append({**record, "then": listing(target.parent), "well": bool(np.array_equal(y, answers["new"]))})
    sys.stdout.write(json.dumps(records))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
