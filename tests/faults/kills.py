"""Commands that are killed (SIGKILL) at random moments of their work, over an older output.

A scenario prepares a folder with inputs, an older output and the output that the command writes when nobody disturbs it.
For each kill the older output is put back, the command runs in a process of its own, and is killed at a moment that is drawn
uniformly between the start of its work and the end that undisturbed runs have had. Afterwards

    the output is the old one or the new one, every byte, and beside it lies nothing but what a killed writer leaves: a staging
    folder `.cmrc-*`, or a file of weights or arrays that nothing refers to;
    the same command, run again to its end, gives the new output, every byte, and removes what was left.

A process is forked from one that has imported everything, and enters `cmrc` as the installed command does: all of its time is
work. With `spawn` it is a new interpreter, which spends most of its time on imports.
"""

from __future__ import annotations

import inspect
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent.parent
DIGITS = ROOT / "examples" / "digits.onnx"
TEST = ROOT / "examples" / "digits_test.npz"
EVERY = 0.02  # seconds between checkpoints of a calibration, instead of a minute
LEFT = re.compile(r"\.cmrc-.*|.*\.[0-9a-f]{16}\.onnx\.data|.*\.[0-9a-f]{12}\.safetensors")
Files = dict[str, bytes]


@dataclass(slots=True)
class Scenario:
    """A command that writes into `out`, and what its process may keep in `work`."""

    name: str
    folder: Path
    older: list[str]  # the command that made the older output
    command: list[str]
    old: Files = field(default_factory=dict)
    new: Files = field(default_factory=dict)
    lengths: list[float] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def put_back(self) -> None:
        for place in (self.out, self.work):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        for name, content in self.old.items():
            (self.out / name).write_bytes(content)

    def run(self, *, spawn: bool = False) -> float:
        """Undisturbed, to the end: the seconds that it took."""
        begin = time.monotonic()
        child = start(self.folder, self.command, spawn=spawn)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status):
            raise RuntimeError(f"{self.name}: exit code {os.waitstatus_to_exitcode(status)}: {said(self.folder)}")
        return time.monotonic() - begin

    def prepare(self) -> None:
        """The two outputs, and how long the command takes."""
        self.put_back()
        whole, self.command = self.command, self.older
        self.run()
        self.command = whole
        self.old = contents(self.out)
        for _ in range(3):
            self.put_back()
            self.lengths.append(self.run())
            new = contents(self.out)
            if self.new and new != self.new:
                raise RuntimeError(f"{self.name}: two runs differ")
            self.new = new
        if self.new == self.old or not self.new:
            raise RuntimeError(f"{self.name}: the new output is the old one")


@dataclass(frozen=True, slots=True)
class Kill:
    """One process that was killed, and what there was afterwards."""

    at: float  # of the length of a run
    which: str  # old, new, or what is wrong
    left: tuple[str, ...] = ()
    resumed: bool = False  # there was something to continue from
    wrong: str = ""


def contents(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def said(folder: Path) -> str:
    return (folder / "said").read_text(errors="replace")[-2000:]


def start(folder: Path, command: Sequence[str], *, spawn: bool = False) -> int:
    """The process of a command, in this folder."""
    log = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        if spawn:
            call = [sys.executable, "-c", SPAWNED, str(EVERY), *command]
            return subprocess.Popen(
                call, cwd=folder, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)}
            ).pid
        child = os.fork()
        if child:
            return child
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        enter(command)
        os._exit(70)
    finally:
        os.close(log)


SPAWNED = """
import sys
from tests.faults.kills import enter
enter(sys.argv[2:])
"""


def enter(command: Sequence[str]) -> None:
    """Be the process of a command, which ends."""
    from cmrc.__main__ import main
    from cmrc.statistics import calibrate, checkpoint

    inspect.unwrap(calibrate.calibrate).__kwdefaults__["every"] = EVERY
    checkpoint.SHARE = 0
    if "--plot" in command:
        import matplotlib

        matplotlib.rcParams["svg.hashsalt"] = "cmrc"  # without it, the names within a picture are random
    sys.argv = ["cmrc", *command]
    code = 71
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
    except BaseException as error:
        sys.stderr.write(repr(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def kill_once(scenario: Scenario, rng: random.Random, *, spawn: bool = False) -> Kill | None:
    """One kill and the run after it; nothing where the process ended before its moment."""
    scenario.put_back()
    length = statistics.median(scenario.lengths[-5:])
    at = rng.random()
    child = start(scenario.folder, scenario.command, spawn=spawn)
    time.sleep(at * length)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        return None
    after = contents(scenario.out)
    names = {path.name for path in scenario.out.iterdir()}
    which = next(
        (name for name, files in (("old", scenario.old), ("new", scenario.new)) if has(after, files)), "neither"
    )
    expected = scenario.new if which == "new" else scenario.old
    left = tuple(sorted(names - set(expected)))
    wrong = "" if which != "neither" else f"the output is neither the old one nor the new one: {sorted(names)}"
    if unknown := [name for name in left if not LEFT.fullmatch(name)]:
        wrong = f"left behind: {unknown}"
    resumed = any(path.is_file() or any(path.iterdir()) for path in scenario.work.iterdir())
    scenario.lengths.append(scenario.run(spawn=spawn)) if not resumed else scenario.run(spawn=spawn)
    then = {path.name for path in scenario.out.iterdir()}
    if contents(scenario.out) != scenario.new or then != set(scenario.new):
        wrong = wrong or f"the next run gives something else: {sorted(then ^ set(scenario.new)) or 'other bytes'}"
    if any(scenario.work.iterdir()):
        wrong = wrong or f"the next run leaves {[path.name for path in scenario.work.iterdir()]}"
    return Kill(at, which, left, resumed, wrong)


def has(after: Files, files: Files) -> bool:
    """The files are there; others may be beside them."""
    return all(after.get(name) == content for name, content in files.items())


# ---------------------------------------------------------------- scenarios


def scenarios(folder: Path) -> list[Scenario]:
    """Every command that works for long, on the example's model; what they read is made here, in processes of their own."""
    scenarios_of: list[Scenario] = []
    for name, prepare in SCENARIOS.items():
        place = folder / name
        for part in (place, place / "out", place / "work"):
            part.mkdir(parents=True)
        older, command = prepare(place)
        scenarios_of.append(Scenario(name, place, older, command))
    return scenarios_of


def _in_child(work: Callable[[], object]) -> None:
    """Do something that starts threads, which a fork of this process would lack."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(repr(error))
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError("a scenario cannot be prepared")


def _plans(place: Path) -> None:
    import cmrc

    program = cmrc.trace(place / "model.onnx")
    for i, name in enumerate(("first", "second")):
        plan = cmrc.Plan(program)
        for site in ("act1", "act2", "act3"):
            plan.do(site, units=range(i, 16, 2), constant=0.25 + i)
        plan.save(place / f"{name}.json")


def _external(place: Path) -> None:
    import onnx

    model = onnx.load(DIGITS)
    onnx.save(model, place / "model.onnx", save_as_external_data=True, location="model.weights", size_threshold=0)
    _plans(place)


def lower_one_file(place: Path) -> tuple[list[str], list[str]]:
    shutil.copy(DIGITS, place / "model.onnx")
    _in_child(lambda: _plans(place))
    return tuple(["lower", "model.onnx", f"{name}.json", "-o", "out/small.onnx"] for name in ("first", "second"))  # type: ignore[return-value]


def lower_external_data(place: Path) -> tuple[list[str], list[str]]:
    _in_child(lambda: _external(place))
    return tuple(["lower", "model.onnx", f"{name}.json", "-o", "out/small.onnx"] for name in ("first", "second"))  # type: ignore[return-value]


def calibrate(place: Path) -> tuple[list[str], list[str]]:
    shutil.copy(DIGITS, place / "model.onnx")
    command = ["calibrate", "model.onnx", "-o", "out/stats.safetensors", "--need", "scatter", "--data"]
    return [*command, str(_half(place))], [*command, str(TEST), "--batch", "4", "--checkpoint", "work/unfinished"]


def plan(place: Path) -> tuple[list[str], list[str]]:
    shutil.copy(DIGITS, place / "model.onnx")
    text = "preset: joint\nkeep: 0.5\nrecompute: fits\nschedule: [0.75]\nsites: [act1, act2, act3, act4]\n"
    (place / "recipe.yaml").write_text(text)
    command = ["plan", "model.onnx", "-o", "out/plan.json", "--recipe", "recipe.yaml", "--data"]
    return [*command, str(_half(place))], [*command, str(TEST), "--batch", "16", "--checkpoint", "work/unfinished"]


def _half(place: Path) -> Path:
    """Fewer data, for the older output."""
    with np.load(TEST) as arrays:
        np.savez(place / "half.npz", **{name: array[::2] for name, array in arrays.items()})
    return place / "half.npz"


def verify(place: Path) -> tuple[list[str], list[str]]:
    lower_one_file(place)
    command = ["verify", "model.onnx", "-", "first.json", "--data", str(TEST), "--plot", "out/plot.svg", "--swaps"]
    return [*command, "50"], [*command, "400"]


SCENARIOS: dict[str, Callable[[Path], tuple[list[str], list[str]]]] = {
    "lower, one file": lower_one_file,
    "lower, external data": lower_external_data,
    "calibrate": calibrate,
    "plan": plan,
    "verify": verify,
}


def warm_up() -> None:
    """Import what the commands do, and start no thread."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # matplotlib writes the date into a picture
    import matplotlib.backends.backend_svg  # noqa: F401
    import onnxruntime  # noqa: F401
    import scipy.optimize
    import scipy.stats  # noqa: F401

    import cmrc.cli.app
    import cmrc.cli.calibrate
    import cmrc.cli.lower
    import cmrc.cli.plan_make
    import cmrc.cli.verify
    import cmrc.hosts.onnx.host
    import cmrc.hosts.onnx.save
    import cmrc.program.plan_schema  # noqa: F401

    np.ones((4, 4)) @ np.ones((4, 4))
