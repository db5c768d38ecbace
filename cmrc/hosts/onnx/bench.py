"""How fast ONNX files run under onnxruntime, beside each other: what `cmrc bench` does.

Every round runs all files, in random order; sessions are started anew several times, because where memory happens to lie
moves one session against an equal one. Files are compared by the median ratio of their times within a round, with a
bootstrap interval over sessions. With one thread on the CPU the clock is the CPU time of the calling thread, which does all
the work: what else the machine does at the time counts less.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cmrc.errors import HostError, InputError
from cmrc.hosts.inputs import random_inputs, require_known
from cmrc.ir.graph import Array, Value

CPU = "CPUExecutionProvider"
PROVIDERS = {"cpu": CPU, "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
WARNING, FATAL = 2, 4  # levels of onnxruntime's log
BOOTSTRAPS = 5000
LONG_ENOUGH = 0.002  # seconds a timed step lasts at least
WARM_UP = 0.2  # seconds, at most, and five runs
CLOCKS = {"CPU time of the calling thread": time.thread_time, "wall time": time.perf_counter}
DTYPES = {"float": "float32", "double": "float64"}  # onnxruntime's names, where they are not ours
Watch = Callable[[Iterable[int]], Iterable[int]]
Feeds = Mapping[str, Array]


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """One file: seconds per run [sessions, rounds], its size with its weights, where it ran, and its peak memory."""

    path: Path
    seconds: Array
    bytes: int
    providers: tuple[str, ...]
    memory: int | None  # beyond what the process holds after its imports; None where the system does not say

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Bench:
    """Several files on the same inputs."""

    files: tuple[Timed, ...]
    samples: int  # in one run
    threads: int
    clock: str

    def __repr__(self) -> str:
        return str(self)

    def ratio(self, file: Timed) -> tuple[float, float, float]:
        """How the first file's time compares with this one's, from low to high: above 1 the file is faster than the first."""
        return median_ratio(np.stack([self.files[0].seconds, file.seconds], axis=-1))

    def __str__(self) -> str:
        names = [file.path.name for file in self.files]
        rows = [("file", "ms per run", "samples/s", "speed-up", "MB", "peak MB", "ran on")]
        for file, row in zip(self.files, self.to_json()["files"], strict=True):
            faster = row["faster_than_first"]
            rows.append((
                file.path.name if names.count(file.path.name) == 1 else str(file.path),
                f"{1e3 * file.median:.3g} ({1e3 * row['low']:.3g}-{1e3 * row['high']:.3g})",
                f"{row['samples_per_second']:,.4g}",
                f"{faster['ratio']:.2f} ({faster['low']:.2f}-{faster['high']:.2f})",
                f"{file.bytes / 1e6:.4g}",
                "" if file.memory is None else f"{file.memory / 1e6:.4g}",
                file.providers[0].removesuffix("ExecutionProvider"),
            ))  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        sessions, rounds = self.files[0].seconds.shape
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return "\n".join([
            *lines,
            f"batch {self.samples}, {threads}; medians of {sessions} sessions of {rounds} runs, with 95 % intervals; "
            f"{self.clock}; speed-up over the first file",
        ])  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        rows = []
        for file in self.files:
            low, high = median_interval(file.seconds)
            faster = dict(zip(("ratio", "low", "high"), self.ratio(file), strict=True))
            rows.append(
                {"file": str(file.path), "seconds": file.median, "low": low, "high": high,
                 "samples_per_second": self.samples / file.median, "faster_than_first": faster, "bytes": file.bytes,
                 "peak_memory": file.memory, "providers": list(file.providers)}
            )  # fmt: skip
        sessions, rounds = self.files[0].seconds.shape
        settings = {"batch": self.samples, "threads": self.threads, "clock": self.clock}
        return {**settings, "sessions": sessions, "rounds": rounds, "files": rows}


def bench(
    paths: Sequence[str | Path],
    *,
    batch: int = 1,
    sizes: Mapping[str, int] | None = None,
    threads: int = 1,
    provider: str = "cpu",
    sessions: int = 5,
    rounds: int = 15,
    seed: int = 0,
    watch: Watch = lambda rounds: rounds,
) -> Bench:
    """Run the files on random inputs: `batch` samples at a time, other dynamic sizes by name in `sizes`."""
    files = {str(i): Path(path) for i, path in enumerate(paths)}  # by place: a path given twice is run as two
    for path in files.values():
        if not path.is_file():
            raise HostError(f"there is no file {path}", fix="give paths of ONNX files")
    for name, number in (("batch", batch), ("threads", threads), ("sessions", sessions), ("rounds", rounds)):
        if number < 1:
            raise InputError(f"{name}={number} is too few", fix="ask for at least one")
    wanted = PROVIDERS.get(provider.lower(), provider)
    taken = {name: declared(path) for name, path in files.items()}
    require_known(sizes or {}, [value for values in taken.values() for value in values])
    feeds = {name: inputs_for(path, taken[name], batch, sizes or {}, seed) for name, path in files.items()}
    seconds, used = times(
        files, feeds, threads=threads, provider=wanted, sessions=sessions, rounds=rounds, seed=seed, watch=watch
    )
    timed = tuple(
        Timed(path, seconds[name], size_of(path), used[name], peak_memory(path, feeds[name], threads, wanted))
        for name, path in files.items()
    )
    return Bench(timed, batch, threads, clock_for(threads, wanted))


# ---------------------------------------------------------------- sessions and their inputs


def start(path: Path, *, threads: int = 1, provider: str = CPU, optimised: Path | None = None) -> Any:
    """A session on this provider. With `optimised`, the model after the extended optimisations is written to that path."""
    try:
        import onnxruntime
    except ImportError as error:
        raise HostError("onnxruntime is not installed", fix="pip install 'cmrc[cpu]' or 'cmrc[gpu]'") from error
    if provider not in onnxruntime.get_all_providers():
        raise HostError(
            f"onnxruntime has no provider {provider!r}",
            fix=f"use {', '.join(PROVIDERS)}, or a name of onnxruntime's own, such as {PROVIDERS['cuda']}",
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = FATAL  # errors are raised, and reported in our own words
    if optimised is not None:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(optimised)
    try:
        with warnings.catch_warnings(), _without_log(onnxruntime, provider):
            warnings.simplefilter("ignore")  # a provider that is not there: asked of the session itself
            session = onnxruntime.InferenceSession(path, options, providers=[provider])
    except Exception as error:  # onnxruntime has a class for each status
        raise HostError(f"onnxruntime refuses {path}: {str(error).strip().splitlines()[-1]}") from error
    if provider not in session.get_providers():  # it falls back without an error
        is_built = provider in onnxruntime.get_available_providers()
        swap = "" if is_built else "pip install 'cmrc[gpu]' in place of 'cmrc[cpu]', then "
        raise HostError(
            f"onnxruntime cannot run on {provider} here: {why_not(provider)}",
            fix=f"{swap}pip install 'onnxruntime-gpu[cuda,cudnn]' for the libraries; or use provider=\"cpu\"",
        )
    return session


@contextmanager
def _without_log(onnxruntime: Any, provider: str) -> Iterator[None]:
    """Hides onnxruntime's own lines about a provider that does not start: the error says the same."""
    if provider == CPU:
        yield
        return
    onnxruntime.set_default_logger_severity(FATAL)
    try:
        yield
    finally:
        onnxruntime.set_default_logger_severity(WARNING)


def why_not(provider: str) -> str:
    """Why a provider did not start: it is not in this build, or a library of its own is missing, which the loader names."""
    import onnxruntime

    if provider not in onnxruntime.get_available_providers():
        return "this build of onnxruntime does not contain it"
    name = provider.removesuffix("ExecutionProvider").lower()
    library = Path(onnxruntime.__file__).parent / "capi" / f"libonnxruntime_providers_{name}.so"
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        missing = missing_libraries(library)
        return f"these libraries are missing: {', '.join(missing)}" if missing else str(error)
    return "it did not start; is there a device?"


def missing_libraries(library: Path) -> list[str]:
    """What a shared library needs and the loader does not find, where `ldd` can tell."""
    if shutil.which("ldd") is None:
        return []
    listed = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in listed.splitlines() if line.rstrip().endswith("not found")]


def declared(path: Path) -> list[Value]:
    """The inputs of a file, as onnxruntime reports them. A size without a name is called input.axis."""
    values = []
    for given in start(path).get_inputs():
        kind = given.type.removeprefix("tensor(").removesuffix(")")
        if "(" in kind or kind == "string":
            raise InputError(f"input {given.name!r} of {path} is a {kind}: cmrc cannot make random inputs of that type")
        shape = tuple(
            number if isinstance(number, int) or number not in (None, "?", "") else f"{given.name}.{axis}"
            for axis, number in enumerate(given.shape)
        )
        values.append(Value(given.name, shape, DTYPES.get(kind) or kind))
    return values


def inputs_for(
    path: Path, values: Sequence[Value], batch: int, sizes: Mapping[str, int], seed: int
) -> dict[str, Array]:
    """Random inputs of a file. The first axis of an input is that of the samples."""
    known, samples = dict(sizes), set[int]()
    for value in values:
        first = value.shape[:1]
        known |= {str(n): known.get(str(n), batch) for n in first if isinstance(n, str)}
        samples |= {known[n] if isinstance(n, str) else int(n) for n in first}
    if samples and batch not in samples:
        least = min(samples)
        raise InputError(
            f"{path} takes {least} samples at a time, but the batch has {batch}", fix=f"run it with batch={least}"
        )
    return random_inputs(values, known, seed, default=None)


def size_of(path: Path) -> int:
    """Bytes of the file, and of the files that hold its weights."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    beside = {
        str(entry.value)
        for weight in model.graph.initializer
        for entry in weight.external_data
        if entry.key == "location"
    }
    return path.stat().st_size + sum((path.parent / name).stat().st_size for name in beside)


# ---------------------------------------------------------------- time


def times(
    files: Mapping[str, Path],
    feeds: Mapping[str, Feeds],
    *,
    threads: int = 1,
    provider: str = CPU,
    sessions: int,
    rounds: int,
    seed: int = 0,
    watch: Watch = lambda rounds: rounds,
) -> tuple[dict[str, Array], dict[str, tuple[str, ...]]]:
    """Seconds per run of every file, [sessions, rounds], and the providers that each really had."""
    names, clock = list(files), CLOCKS[clock_for(threads, provider)]
    taken: dict[str, list[float]] = {name: [] for name in names}
    used: dict[str, tuple[str, ...]] = {}
    order = np.random.default_rng(seed)
    for _ in watch(range(sessions)):
        ready = {name: start(files[name], threads=threads, provider=provider) for name in order.permutation(names)}
        repeats = {name: repeats_for(ready[name], feeds[name], files[name]) for name in names}
        used |= {name: tuple(session.get_providers()) for name, session in ready.items()}
        for _ in range(rounds):
            # At random, because whoever always ran after the widest model would find the caches cold.
            for name in order.permutation(names):
                run, feed = ready[name].run, feeds[name]
                begin = clock()
                for _ in range(repeats[name]):
                    run(None, feed)
                taken[name].append((clock() - begin) / repeats[name])
    return {name: np.array(seconds).reshape(sessions, rounds) for name, seconds in taken.items()}, used


def clock_for(threads: int, provider: str = CPU) -> str:
    return list(CLOCKS)[0 if threads == 1 and provider == CPU else 1]


def repeats_for(session: Any, feed: Feeds, path: Path) -> int:
    """Runs in a timed step, so that it lasts long enough to time; warms the session up."""
    seconds: list[float] = []
    while len(seconds) < 5 and sum(seconds) < WARM_UP:
        begin = time.perf_counter()
        try:
            session.run(None, feed)
        except Exception as error:  # onnxruntime has a class for each status
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
            reason = str(error).strip().splitlines()[-1]
            raise HostError(
                f"{path} does not run on inputs {shapes}: {reason}", fix="give sizes that it accepts: batch=, sizes="
            ) from error
        seconds.append(time.perf_counter() - begin)
    return max(1, round(LONG_ENOUGH / min(seconds)))


def median_ratio(seconds: Array) -> tuple[float, float, float]:
    """The median ratio of paired times, [pairs, 2] or [groups, pairs, 2], and its 95 % interval over pairs or groups."""
    ratios = seconds[..., 0] / seconds[..., 1]
    return (float(np.median(ratios)), *median_interval(ratios))


def median_interval(samples: Array) -> tuple[float, float]:
    """A 95 % bootstrap interval of the median, resampling the first axis (the second, where the first is of one)."""
    samples = samples[0] if len(samples) == 1 and samples.ndim > 1 else samples
    draw = np.random.default_rng(0).integers(0, len(samples), (BOOTSTRAPS, len(samples)))
    low, high = np.percentile(np.median(samples[draw].reshape(BOOTSTRAPS, -1), axis=1), [2.5, 97.5])
    return float(low), float(high)


# ---------------------------------------------------------------- memory


def peak_memory(path: Path, feed: Feeds, threads: int = 1, provider: str = CPU) -> int | None:
    """Bytes that a process of its own holds at most while it loads and runs a file, beyond those after its imports."""
    if not Path("/proc/self/status").exists():
        return None
    shapes = {name: [array.dtype.name, list(array.shape)] for name, array in feed.items()}
    asked = json.dumps({"path": str(path), "shapes": shapes, "threads": threads, "provider": provider})
    done = subprocess.run([sys.executable, "-m", "cmrc.hosts.onnx.bench"], input=asked, capture_output=True, text=True)
    return None if done.returncode else int(done.stdout)


def _memory_in_use(line: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(entry.split()[1]) for entry in status if entry.startswith(line)) * 1024


def _run_alone() -> None:
    import onnxruntime  # noqa: F401  (counts as an import, not as the file's memory)

    asked = json.loads(sys.stdin.read())
    feed = {name: np.ones(shape, dtype=dtype) for name, (dtype, shape) in asked["shapes"].items()}
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew here
    before = _memory_in_use("VmRSS")
    session = start(Path(asked["path"]), threads=asked["threads"], provider=asked["provider"])
    for _ in range(3):
        session.run(None, feed)
    sys.stdout.write(str(_memory_in_use("VmHWM") - before))


if __name__ == "__main__":
    _run_alone()
