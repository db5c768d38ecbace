"""One case to one outcome: the file is read and used, by the library or by the command line."""

from __future__ import annotations

import contextlib
import hashlib
import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import onnx
from typer.testing import CliRunner

from cmrc.cli.app import app
from cmrc.errors import CmrcError
from cmrc.planning.planner import plan as make_plan
from cmrc.planning.recipe import make_recipe
from cmrc.program.lower import lower
from cmrc.program.plan import Plan
from cmrc.program.program import trace
from cmrc.statistics.calibrate import calibrate
from cmrc.statistics.stats import Stats
from tests.loaders.samples import BESIDE, HASH, batch, mlp

MEMORY = 4 << 30  # bytes of address space that a process which reads a file may have, libraries and threads included
SECONDS = 10  # of processor time for one case
NAMES = {"plan": "plan.json", "stats": "stats.safetensors", "recipe": "recipe.yaml", "model": "model.onnx"}
DRAWS = 100  # of a recipe: more are slow, as they should be


@dataclass(frozen=True, slots=True)
class Outcome:
    """`read`, `refused`, or what went wrong; the place of a failure tells one from another."""

    kind: str
    detail: str = ""
    place: str = ""

    @property
    def failed(self) -> bool:
        return self.kind not in ("read", "refused")


class TooLong(BaseException):
    """A case that used up its processor time."""


class Ground:
    """A folder with the model, data and statistics that the other files are used with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = trace(mlp())
        self.data = [batch()]
        self.stats = {
            "scatter": calibrate(self.program, self.data, need=["scatter"]),
        }
        onnx.save(mlp(), folder / "mlp.onnx")
        np.savez(folder / "batch.npz", x=batch()[0], labels=batch()[1])

    def write(self, kind: str, case: bytes) -> Path:
        """The file of a case, and the one beside it."""
        content, sign, beside = case.partition(BESIDE)
        path = self.folder / NAMES.get(kind, "data.npz" if case[:2] == b"PK" else "data.npy")
        if kind == "plan" and sign:
            digest = hashlib.sha256(beside).hexdigest()[:12]
            content = content.replace(HASH, digest.encode())
            (self.folder / f"plan.{digest}.safetensors").write_bytes(beside)
        elif sign:
            (self.folder / "beside").write_bytes(beside)
        path.write_bytes(content)
        return path

    def clear(self) -> None:
        for pattern in ("plan.*", "beside", "stats.*", "recipe.*", "model.*", "data.*", "out.*"):
            for file in self.folder.glob(pattern):
                file.unlink()

    def use(self, kind: str, path: Path) -> None:
        """As the library does."""
        getattr(self, f"use_{kind}")(path)

    def use_plan(self, path: Path) -> None:
        lower(self.program, Plan.load(path), residue="keep")

    def use_stats(self, path: Path) -> None:
        stats = Stats.load(path)
        needs = set.union(set(), *(site.needs for site in stats.sites.values()))
        preset = "cmr-const" if "curvature" in needs else "joint" if "scatter" in needs else "vbp"
        sites = [site.columns.value for site in stats.sites.values()]
        make_plan(self.program, stats, preset=preset, keep=0.5, sites=sites or ["*"])

    def use_recipe(self, path: Path) -> None:
        recipe = make_recipe(path)
        if recipe.draws <= DRAWS and (recipe.budget is None or recipe.budget.of != "latency"):
            make_plan(self.program, data=self.data, recipe=recipe)

    def use_model(self, path: Path) -> None:
        program = trace(path)
        sites = program.sites()
        if sites and isinstance(sites[0].units, int):
            plan = Plan(program).do(sites[0].name, units=[0], constant=0.5)
            lower(program, plan, residue="keep").save(self.folder / "out.onnx")

    def use_data(self, path: Path) -> None:
        calibrate(self.program, path, need=["scatter"], size=16)

    def commands(self, kind: str, path: Path) -> list[list[str]]:
        model, data, file, out = f"{self.folder}/mlp.onnx", f"{self.folder}/batch.npz", str(path), f"{self.folder}/out"
        return {
            "plan": [["plan", "show", file], ["lower", model, file, "-o", f"{out}.onnx", "--residue", "keep"]],
            "stats": [["plan", model, "--stats", file, "--preset", "vbp", "-o", f"{out}.json"]],
            "recipe": [["plan", model, "--data", data, "--recipe", file, "-o", f"{out}.json"]],
            "model": [["inspect", file], ["inspect", file, "--ir"]],
            "data": [["calibrate", model, "--data", file, "-o", f"{out}.safetensors"]],
        }[kind]


def judge(ground: Ground, kind: str, case: bytes, *, command: int | None = None) -> Outcome:
    """What becomes of a case: read by the library, or by one of the commands."""
    path = ground.write(kind, case)
    try:
        with limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if command is None:
                return _outcome(lambda: ground.use(kind, path))
            if kind == "recipe" and _slow(path):
                return Outcome("read")
            commands = ground.commands(kind, path)
            return run_command(commands[command % len(commands)])
    except TooLong as error:
        return Outcome("too long", f"more than {SECONDS} s", _place(error))
    finally:
        ground.clear()


def _slow(path: Path) -> bool:
    try:
        recipe = make_recipe(path)
    except Exception:
        return False
    return recipe.draws > DRAWS or (recipe.budget is not None and recipe.budget.of == "latency")


def _outcome(work: Callable[[], None]) -> Outcome:
    try:
        work()
    except CmrcError as error:
        if "fault of cmrc" in str(error):
            return Outcome("fault", str(error), _place(error))
        return Outcome("refused", error.kind)
    except MemoryError as error:
        return Outcome("memory", f"more than {MEMORY:,} bytes", _place(error))
    except Exception as error:
        return Outcome("raw exception", repr(error)[:500], _place(error))
    return Outcome("read")


def run_command(arguments: list[str]) -> Outcome:
    """In this process, as `cmrc` would run: exit code 0 or 1, or 2 with one message."""
    result = CliRunner().invoke(app, arguments)
    what = arguments[0]
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        if isinstance(result.exception, TooLong):
            raise result.exception
        return Outcome("raw exception", f"{what}: {result.exception!r}"[:500], _place(result.exception))
    if result.exit_code in (0, 1):
        return Outcome("read")
    lines = result.stderr.splitlines()
    if result.exit_code != 2 or not lines or "Traceback" in result.stderr or "fault of cmrc" in result.stderr:
        return Outcome("exit code", f"{what}: {result.exit_code}: {result.stderr[:300]}", what)
    return Outcome("refused", lines[0].partition(":")[0])


def _place(error: BaseException) -> str:
    """The last line of cmrc that was running, and the kind of the error."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "/cmrc/" in f.filename or "/passes/" in f.filename
    ]
    where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].name}:{frames[-1].lineno}" if frames else "outside"
    return f"{type(error).__name__} at {where}"


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Within: the processor time of a case is bounded."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def peak_memory() -> int:
    """Bytes that were resident at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
