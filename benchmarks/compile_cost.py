"""What lowering costs: DeiT-Tiny-like, half of every FFN, against Torch-Pruning, torch's ONNX exporter and onnxsim.

python -m benchmarks.compile_cost [--quick] [--json OUT]
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import tempfile
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cmrc
from benchmarks import models
from benchmarks.measure import Ratio, arguments, compare, console, show, use_threads, write_record
from benchmarks.section import Record, Section, comparisons, table, verdict
from cmrc.program.program import Program

Prepared = Callable[[], object]


def quietly(step: Prepared) -> Prepared:
    """Without the progress lines and warnings that exporters print."""

    def run() -> object:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return step()

    return run


def torch_pruning(case: models.Case, wide: torch.nn.Module, x: torch.Tensor) -> Callable[[], Prepared]:
    """Build the dependency graph of a fresh copy, then prune the plan's units from every FFN."""
    import torch_pruning as tp

    units = [list(map(int, chosen)) for chosen in case.units()]

    def prepare() -> Prepared:
        model = copy.deepcopy(wide)

        def prune() -> torch.nn.Module:
            graph = tp.DependencyGraph().build_dependency(model, example_inputs=x)
            for block, idxs in zip(model.blocks, units, strict=True):
                graph.get_pruning_group(block.mlp.fc1, tp.prune_linear_out_channels, idxs=idxs).prune()
            return model

        return quietly(prune)

    return prepare


def against_torch_pruning(case: models.Case, pairs: int, folder: Path) -> tuple[list[Ratio], dict[str, float]]:
    """(a) Module to module. Torch-Pruning has no way to keep a trace, so ours is counted with and without."""
    wide, x = case.original(), case.inputs(1)
    program = cmrc.trace(wide, (x,))
    plan = case.plan(program)
    plan.save(folder / "plan.json")
    exported = torch.export.export(wide, (x,))
    theirs = ("graph + prune", torch_pruning(case, wide, x))

    def lower(model: Any, **options: Any) -> torch.nn.Module:
        return cmrc.lower(model, cmrc.Plan.load(folder / "plan.json"), **options).module

    def traced() -> Prepared:
        return partial(lower, uncached(program))

    same_shapes(lower(program), torch_pruning(case, wide, x)()(), x)
    ratios = [
        compare("plan file and traced program to module", ("load plan + lower", traced), theirs, pairs=pairs),
        compare(
            "plan and traced program to module",
            ("lower", lambda: lambda: cmrc.lower(program, plan).module),
            theirs,
            pairs=pairs,
            target=1 / 3,
        ),
        compare(
            "plan and traced program to lowered graph",
            ("lower", lambda: lambda: cmrc.lower(program, plan)),
            theirs,
            pairs=pairs,
        ),
        compare("ExportedProgram to module", ("read + lower", lambda: lambda: lower(exported)), theirs, pairs=pairs),
        compare(
            "nn.Module to module",
            ("export + read + lower", lambda: quietly(lambda: lower(wide, args=(x,)))),
            theirs,
            pairs=max(3, pairs // 3),
        ),
    ]
    return ratios, parts(program, folder / "plan.json", pairs)


def uncached(program: Program) -> Program:
    """The same traced model; its fingerprint will be taken again."""
    return Program(program.host, program.args, program.options)


def parts(program: Program, path: Path, repeats: int) -> dict[str, float]:
    """Where the time of the first comparison goes: median seconds of each step."""
    seconds_of: dict[str, list[float]] = {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = step()
        seconds_of.setdefault(name, []).append(time.perf_counter() - start)
        return result

    for _ in range(repeats):
        fresh = uncached(program)
        plan = timed("load plan", lambda: cmrc.Plan.load(path))
        timed("fingerprint of the model", lambda fresh=fresh: fresh.fingerprint)
        lowered = timed("lower", lambda fresh=fresh, plan=plan: cmrc.lower(fresh, plan))
        for name, seconds in lowered.report.seconds.items():
            seconds_of.setdefault(f"lower: {name}", []).append(seconds)
        timed("module", lambda lowered=lowered: lowered.module)
    return {name: float(np.median(seconds)) for name, seconds in seconds_of.items()}


def same_shapes(ours: torch.nn.Module, theirs: Any, x: torch.Tensor) -> None:
    """Both tools must have made the same architecture, and both results must run."""
    first = {name: tuple(p.shape) for name, p in ours.named_parameters()}
    second = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    if first != second:
        raise SystemExit(f"the tools cut differently: {sorted(set(first.items()) ^ set(second.items()))[:4]}")
    ours(x), theirs(x)


def against_exporter(case: models.Case, pairs: int, folder: Path) -> list[Ratio]:
    """(b) Module to ONNX file: trace, lower and save, against torch's exporter on the wide module alone."""
    wide, x = case.original(), case.inputs(1)

    def ours() -> Prepared:
        def run() -> None:
            program = cmrc.trace(wide, (x,))
            cmrc.lower(program, case.plan(program)).save(folder / "ours.onnx")

        return quietly(run)

    def theirs() -> Prepared:
        return quietly(lambda: torch.onnx.export(wide, (x,), folder / "theirs.onnx", dynamo=True, verbose=False))

    return [compare("nn.Module to ONNX file", ("trace + lower + save", ours), ("export of the wide model", theirs),
                    pairs=pairs, target=1.15)]  # fmt: skip


def against_onnxsim(case: models.Case, pairs: int, folder: Path) -> list[Ratio]:
    """(c) ONNX file to ONNX file, from load to save: onnxsim's simplify and its L2 pruning of the same share."""
    import onnx
    import onnxsim

    source, small, pruned = folder / "wide.onnx", folder / "small.onnx", folder / "pruned.onnx"
    export_wide(case, source)

    def ours() -> None:
        program = cmrc.trace(source)
        cmrc.lower(program, case.plan(program)).save(small)

    def theirs() -> None:
        simplified, _ = onnxsim.simplify(onnx.load(source))
        onnx.save(onnxsim.apply_structured_pruning(simplified, sparsity=0.5), pruned)

    ours(), theirs()
    first, second = (weights(onnx.load(path)) for path in (small, pruned))
    if first != second:
        raise SystemExit(f"the tools cut differently: {first - second} against {second - first}")
    return [compare("ONNX file to ONNX file", ("trace + plan + lower + save", lambda: ours),
                    ("simplify + apply_structured_pruning", lambda: theirs), pairs=pairs, target=1.0)]  # fmt: skip


def export_wide(case: models.Case, path: Path, *, external: bool = False) -> None:
    step = partial(torch.onnx.export, dynamo=True, verbose=False, external_data=external)
    quietly(lambda: step(case.original(), (case.inputs(1),), path))()


def weights(model: Any) -> Counter[tuple[int, ...]]:
    return Counter(tuple(weight.dims) for weight in model.graph.initializer if len(weight.dims) == 2)


# ---------------------------------------------------------------- memory


def memory(case: models.Case, folder: Path) -> dict[str, dict[str, int | bool]]:
    """Whether unchanged weights are shared with the model, and what lowering allocates at most (Python and numpy)."""
    wide, path = case.original(), folder / "external.onnx"
    program = cmrc.trace(wide, (case.inputs(1),))
    by_host = {"torch": shares(program, case.plan(program), lambda lowered: dict(lowered.module.named_parameters()))}
    export_wide(case, path, external=True)
    program = cmrc.trace(path)
    by_host["onnx"] = shares(program, case.plan(program), lambda lowered: initializers(lowered.host))
    return by_host


def initializers(host: Any) -> dict[str, Any]:
    return {name: value.const_value for name, value in host.model.graph.initializers.items()}


def shares(
    program: Program, plan: cmrc.Plan, tensors: Callable[[cmrc.Lowered], dict[str, Any]]
) -> dict[str, int | bool]:
    before = program.host.state if program.host.kind == "fx" else initializers(program.host)
    gc.collect()
    tracemalloc.start()
    lowered = cmrc.lower(program, plan)
    after = tensors(lowered)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    same = {name: t for name, t in after.items() if name in before and tuple(t.shape) == tuple(before[name].shape)}
    shared = {name for name, t in same.items() if t is before[name] or same_memory(t, before[name])}
    folded = {
        name for name, t in same.items() if name not in shared and not np.array_equal(array(t), array(before[name]))
    }
    copied = sorted(set(same) - set(shared) - folded)
    size = {name: int(array(t).nbytes) for name, t in after.items()}
    return {
        "shared_bytes": sum(size[name] for name in shared),
        "new_bytes": sum(size[name] for name in after if name not in shared),
        "copied_bytes": sum(size[name] for name in copied),
        "peak_bytes": peak,
        "met": not copied,
    }


def same_memory(tensor: Any, other: Any) -> bool:
    """Whether two tensors still have one memory. To read one as an array would part them (copy on write), so this is asked first."""
    tensors = isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and bool(torch._C._data_address(tensor) == torch._C._data_address(other))


def array(tensor: Any) -> np.ndarray:
    return tensor.detach().numpy() if isinstance(tensor, torch.Tensor) else tensor.numpy()


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    return "\n".join((comparisons(record), spent(record["parts"]), copies(record["memory"])))


def spent(seconds_of: Mapping[str, float]) -> str:
    rows = [(name, show(seconds)) for name, seconds in seconds_of.items()]
    return "#### Where the time of the first row goes\n\n" + table(("step", "median"), rows)


def copies(by_host: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        (host, *(f"{numbers[key] / 1e6:.2f}" for key in ("shared_bytes", "new_bytes", "copied_bytes", "peak_bytes")),
         verdict(numbers["met"]))
        for host, numbers in by_host.items()
    ]  # fmt: skip
    head = (
        "host",
        "shared with the model, until written to",
        "new",
        "copied unchanged",
        "allocated at most",
        "no unchanged weight copied",
    )
    return "#### Memory\n\nMegabytes of weights; the peak counts what Python and numpy allocate.\n\n" + table(
        head, rows
    )


SECTIONS = (
    Section(
        "compile_cost",
        "What lowering costs",
        """{model}: half of the units of every FFN are replaced by constants. Torch-Pruning and onnxsim remove the same number of
units (they can only set them to zero), and the resulting shapes are checked to be the same. The first row starts from a
traced program and a plan file, and includes reading the plan, the fingerprint of all weights and the checks. The second
has the plan in memory, made for this very program; the third stops before the `fx.GraphModule` is assembled, which
runs the code that the trace generated, since only parameters differ. The next rows add reading the exported graph, then
`torch.export` itself, to the first.
""",
        body,
    ),
)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "compile_cost.json")
    use_threads(options.threads)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    case = models.deit(3, size=64) if options.quick else models.deit()
    pairs = 3 if options.quick else 21
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        console.print("against Torch-Pruning")
        ratios, spent = against_torch_pruning(case, pairs, folder)
        console.print("against torch.onnx.export")
        ratios += against_exporter(case, max(3, pairs // 2), folder)
        console.print("against onnxsim")
        ratios += against_onnxsim(case, pairs, folder)
        by_host = memory(case, folder)
    for host, numbers in by_host.items():
        console.print(f"memory, {host} host: {numbers}")
    write_record(options.json, "compile cost", ratios, options, model=case.name, parts=spent, memory=by_host)


if __name__ == "__main__":
    main()
