"""The coverage matrix: every model of the zoo, every request, both hosts, and Torch-Pruning beside them.

    bash tests/zoo/run.sh                 what has no record from this code yet, then docs/coverage.md
    bash tests/zoo/run.sh vit gpt2        these models
    bash tests/zoo/run.sh --again vit     although there are records
    bash tests/zoo/run.sh --missing       only what has no record at all, from whatever code
    bash tests/zoo/run.sh --page          only the page, from the records

A model's answers lie in `records/<model>.json`, each with a digest of the code and the model that gave it; a run that is stopped
goes on where it was. Each model is asked in a process of its own: one that dies or takes too long is an answer too, `fails`.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RECORDS = HERE / "records"
sys.path[:0] = [str(HERE), str(ROOT)]

import page  # noqa: E402
from models import Entry, entries  # noqa: E402
from page import PEER, REQUESTS, Ask, asks  # noqa: E402

from cmrc.files import write_whole  # noqa: E402

ANSWER = "@answer "
HOSTS = ("torch", "ONNX", PEER)
Record = dict[str, Any]
ROOMS = ("cmrc/ir", "cmrc/hosts", "cmrc/program", "passes")  # what an answer depends on


# ---------------------------------------------------------------- records


def digest(entry: Entry) -> str:
    """What an answer depends on: the compiler, the questions, the model, and the packages."""
    hashed = hashlib.sha256()
    code = [
        *(path for room in ROOMS for path in ROOT.glob(f"{room}/**/*.py")),
        *(HERE / f"{name}.py" for name in ("asking", "inner", "peer", "stand_ins")),
    ]
    for path in sorted(code):
        hashed.update(path.read_bytes())
    build = entry.build
    hashed.update((inspect.getsource(build) if inspect.isfunction(build) else repr(build)).encode())
    for package in ("torch", "onnx", "onnxruntime", "onnxscript", "transformers", "timm", "torch-pruning"):
        try:
            hashed.update(version(package).encode())
        except PackageNotFoundError:
            hashed.update(b"absent")
    return hashed.hexdigest()[:16]


def read(name: str) -> dict[Ask, Record]:
    path = RECORDS / f"{name}.json"
    return {(r["host"], r["request"]): r for r in json.loads(path.read_text())["answers"]} if path.exists() else {}


def write(entry: Entry, records: dict[Ask, Record]) -> None:
    ordered = [records[ask] for ask in asks(entry) if ask in records]
    document = {"model": entry.name, "family": entry.family, "note": entry.note, "answers": ordered}
    RECORDS.mkdir(exist_ok=True)
    write_whole(RECORDS / f"{entry.name}.json", (json.dumps(document, indent=1) + "\n").encode())


# ---------------------------------------------------------------- asking, in a process of its own


def answer(name: str, wanted: Iterable[Ask]) -> None:
    """Ask one model and print each answer as a line. Runs in the child."""
    import logging
    import warnings

    import peer
    import torch
    from asking import Outcome, Subject, ask

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)

    def found(host: str, request: str, folder: Path) -> Any:
        nonlocal subject
        try:
            subject = subject or Subject.of(entries()[name])
            same = request == "both" and not len(subject.plan("torch" if host == PEER else host, "heads"))
            if same and (host, "inner units") in given:  # without heads it is the same question
                return given[host, "inner units"]
            given[host, request] = peer.ask(subject, request) if host == PEER else ask(subject, host, request, folder)
            return given[host, request]
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}"
            return Outcome("fails", " ".join(problem.split())[:400])

    subject: Subject | None = None
    given: dict[Ask, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for host, request in wanted:
            record = {"host": host, "request": request, **asdict(found(host, request, Path(folder)))}
            sys.stdout.write(ANSWER + json.dumps(record) + "\n")
            sys.stdout.flush()


def answers(name: str, wanted: list[Ask], timeout: float) -> Iterator[Record]:
    """The answers of one model as they come; where the process dies or stalls, that is the answer, and it starts again."""
    while wanted:
        arguments = [f"{host}/{request}" for host, request in wanted]
        command = [sys.executable, str(Path(__file__)), "--child", name, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
            lines: queue.Queue[str | None] = queue.Queue()
            reader = threading.Thread(target=_forward, args=(child, lines), daemon=True)
            reader.start()
            problem = ""
            while wanted and not problem:
                try:
                    line = lines.get(timeout=timeout)
                except queue.Empty:
                    problem = f"no answer in {timeout:.0f} s"
                    break
                if line is None:
                    child.wait()
                    errors.seek(0)
                    problem = f"the process ended with {child.returncode}: {' '.join(errors.read().split())[-300:]}"
                else:
                    answer = json.loads(line)
                    wanted.remove((answer["host"], answer["request"]))
                    yield answer
            child.kill()
            child.wait()
            reader.join()
        if problem:
            host, request = wanted.pop(0)
            yield {"host": host, "request": request, "verdict": "fails", "detail": problem}


def _forward(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert child.stdout is not None
    with child.stdout as printed:
        for line in printed:
            if line.startswith(ANSWER):
                lines.put(line.removeprefix(ANSWER))
    lines.put(None)


# ---------------------------------------------------------------- the run


def run(
    names: Iterable[str], questions: Collection[Ask], *, again: bool, missing: bool, jobs: int, timeout: float
) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    work: list[tuple[Entry, str, list[Ask]]] = []
    for name in names:
        entry = entries()[name]
        if entry.skip:
            continue
        made_by, known = digest(entry), read(name)
        asked = [ask for ask in asks(entry) if ask in questions]
        done = known if missing else {ask for ask, record in known.items() if record.get("digest") == made_by}
        wanted = [ask for ask in asked if again or ask not in done]
        if wanted:
            work.append((entry, made_by, wanted))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress, ThreadPoolExecutor(jobs) as pool:
        bar = progress.add_task("zoo", total=sum(len(wanted) for _, _, wanted in work))

        def one(item: tuple[Entry, str, list[Ask]]) -> None:
            entry, made_by, wanted = item
            for record in answers(entry.name, list(wanted), timeout):
                known = read(entry.name)
                known[record["host"], record["request"]] = {**record, "digest": made_by}
                write(entry, known)
                line = f"{entry.name} · {record['host']} · {record['request']}: {record['verdict']}"
                progress.console.print(f"{line}  {record['detail'][:160]}", markup=False, highlight=False)
                progress.advance(bar)

        list(pool.map(one, work))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names, or all")
    parser.add_argument("--again", action="store_true", help="ask although there are records from this code")
    parser.add_argument("--missing", action="store_true", help="ask only what has no record, from whatever code")
    parser.add_argument("--request", action="append", choices=REQUESTS, help="only this one; may be given again")
    parser.add_argument("--host", action="append", choices=HOSTS, help="only this one; may be given again")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--jobs", type=int, default=1, help="models at once; times are only fair with one")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one answer may take")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        name, *wanted = given.models
        answer(name, [tuple(ask.split("/", 1)) for ask in wanted])  # type: ignore[misc]
        return
    unknown = sorted(set(given.models) - set(entries()))
    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(entries())}")
    if not given.page:
        names, questions = given.models or entries(), set(product(given.host or HOSTS, given.request or REQUESTS))
        run(names, questions, again=given.again, missing=given.missing, jobs=given.jobs, timeout=given.timeout)
    write_whole(page.PAGE, page.text().encode())


if __name__ == "__main__":
    main()
