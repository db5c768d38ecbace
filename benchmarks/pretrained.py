"""Networks that others trained, made smaller without fine-tuning by cmrc, Torch-Pruning and onnxsim.

python -m benchmarks.pretrained efficientnet | minilm | smollm | magika | recogniser     [--quick]

Every method cuts the same number of units at the same places, so that what is left has the same shapes; onnxsim chooses its
own places and is matched in parameters where it can get so far. `--quick` takes small networks with random weights.
"""

from __future__ import annotations

import io
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from torch import nn

import cmrc
from benchmarks import models, pruners, subjects
from benchmarks.charts import OURS, PEER, PUBLISHED, bars, digits
from benchmarks.latency import quiet_exporters
from benchmarks.measure import Resumed, console, parser, show, use_threads, write_record
from benchmarks.pruners import sizes_of_module
from benchmarks.section import Record, Section, claim, claims, table
from benchmarks.subjects import BATCH, Run, Subject, torch_run
from cmrc.hosts.onnx.bench import start
from cmrc.planning.recipe import make_recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED_NAME = "ridge folding (CORP, GRAIL): norm, all retained parents"
ZEROS = "zeros by the norm, by our code (what the peers do)"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "joint selection, affine, refitted in order": (OURS, {"preset": "joint", "recompute": "fits"}),
    "joint-task selection, affine, refitted in order": (OURS, {"preset": "joint-task", "recompute": "fits"}),
    "joint selection, constants": (OURS, {"preset": "reconstruction"}),
    "CMR-Logit, constants": (OURS, {"preset": "cmr-logit"}),
    PUBLISHED_NAME: (PUBLISHED, {"preset": "magnitude", "replace": "affine"}),
    ZEROS: (PEER, {"preset": "magnitude", "replace": "zero"}),
}
THIRD = 1 / 3


def chosen(subject: Subject) -> Iterator[str]:
    """The methods of our code that make sense for a subject."""
    for name, (kind, options) in METHODS.items():
        affine = options.get("replace") == "affine" or "joint" in options["preset"]
        if affine and not subject.affine:
            continue
        if options["preset"] == "joint-task" and not subject.task:
            continue
        if kind == PEER and isinstance(subject.model, nn.Module):
            continue  # Torch-Pruning itself is there
        yield name


Calibrated = dict[frozenset[str], tuple[cmrc.Stats, float]]


def planned_by(subject: Subject, options: dict[str, Any], calibrated: Calibrated) -> tuple[cmrc.Plan, float]:
    """A plan, and the seconds of all that it took. Methods that need the same statistics share a pass, and each counts it."""
    given = {"sites": subject.sites, "keep": subject.keep, "multiple_of": 1, **subject.recipe, **options}
    recipe = make_recipe(**given)
    if recipe.needs not in calibrated:
        begin = time.perf_counter()
        stats = cmrc.calibrate(
            subject.program, subject.batches, sites=subject.sites, need=recipe.needs, **recipe.calibration
        )
        calibrated[recipe.needs] = stats, time.perf_counter() - begin
    stats, before = calibrated[recipe.needs]
    begin = time.perf_counter()
    plan = cmrc.plan(subject.program, stats, data=subject.batches, recipe=recipe)
    return plan, before + time.perf_counter() - begin


def ours(subject: Subject, name: str, calibrated: Calibrated) -> dict[str, Any]:
    """One method of our code: calibrated, planned, lowered, judged."""
    kind, options = METHODS[name]
    try:
        plan, planned = planned_by(subject, options, calibrated)
    except cmrc.CmrcError as error:  # the norm of what comes in is not defined at every site
        return {"method": name, "kind": kind, "seconds": {}, "onnx": f"cannot be told at {error.node}: {error.reason}"}
    begin = time.perf_counter()
    lowered = cmrc.lower(subject.program, plan, growth="allow")
    seconds = {"calibrate and plan": planned, "lower": time.perf_counter() - begin}
    row = {"method": name, "kind": kind, "seconds": seconds}
    if isinstance(subject.model, nn.Module):
        module = lowered.module.eval()
        return {**row, **sizes_of_module(module, subject.example), **subject.judge(torch_run(module))}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.onnx"
        lowered.save(path)
        return {**row, **sizes_of_file(path, subject), **subject.judge(file_run(path)), "onnx": "runs"}


def torch_pruning(subject: Subject, name: str) -> dict[str, Any]:
    assert isinstance(subject.model, nn.Module)
    begin = time.perf_counter()
    model = pruners.torch_pruned(
        subject.model, subject.example, subject.writers, name, losses=subject.losses, keep=subject.keep
    )
    row = {"method": f"Torch-Pruning, {name}", "kind": PEER, "seconds": {"prune": time.perf_counter() - begin}}
    return {**row, **sizes_of_module(model, subject.example), **subject.judge(torch_run(model))}


def onnxsim(subject: Subject, parameters: int) -> dict[str, Any]:
    """On the file, or on what torch exports of the module at a fixed batch: with an open one it mostly finds nothing to cut."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "whole.onnx", Path(folder) / "pruned.onnx"
        source = (
            subject.model
            if isinstance(subject.model, Path)
            else export(subject.model, subject, path, batch=subject.batch)
        )
        begin = time.perf_counter()
        sparsity, removed = pruners.onnxsim_pruned(source, out, parameters, share=1 - subject.keep)
        seconds = {"prune": time.perf_counter() - begin}
        row = {"method": f"onnxsim, sparsity {sparsity:.2f}", "kind": PEER, "seconds": seconds}
        row |= sizes_of_file(out, subject)
        if not removed:
            return {**row, "onnx": "removes nothing"}
        return {**row, **subject.judge(file_run(out)), "onnx": "runs"}


# ---------------------------------------------------------------- sizes and files


def sizes_of_file(path: Path, subject: Subject) -> dict[str, int]:
    """Parameters, and multiply-accumulates of one sample, with every size known."""
    model = onnx.load(path)
    parameters, batch = pruners.stored(model), 1
    for value in model.graph.input:
        array = subject.batches[0].get(value.name)
        if array is not None:
            dims = value.type.tensor_type.shape.dim
            for i, dim in enumerate(dims):
                dim.dim_value = dim.dim_value or (1 if i == 0 else array.shape[i])
            batch = dims[0].dim_value
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    return {"parameters": parameters, "macs": cmrc.trace(inferred).cost().macs // batch}


def file_run(path: Path) -> Run:
    session = start(path)
    names = [value.name for value in session.get_inputs()]
    return lambda *arrays: session.run(None, dict(zip(names, arrays, strict=True)))[0]


def export(model: nn.Module, subject: Subject, path: Path, *, batch: int | None = None) -> Path:
    """By torch's exporter, with the batch left open or fixed."""
    given = subject.example
    if batch is not None:
        given = tuple(tensor[:1].expand(batch, *tensor.shape[1:]).clone() for tensor in given)
    shapes = None if batch is not None else tuple({0: BATCH} for _ in given)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(model, given, path, dynamo=True, verbose=False, dynamic_shapes=shapes, external_data=False)
    return path


def exported_runs(model: nn.Module, subject: Subject, save: Callable[[Path], object]) -> str:
    """Whether the ONNX file that `save` writes runs and computes what the module does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                save(path)
            arrays = [tensor.numpy() for tensor in subject.example]
            want, got = torch_run(model)(*arrays), file_run(path)(*arrays)
        except Exception as error:  # whatever a peer raises is reported
            return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    apart = float(np.abs(want - got).max() / np.abs(want).max())
    return "runs" if apart < 1e-3 else f"differs by {apart:.1e}"


def exports(subject: Subject) -> dict[str, str]:
    """Ours and Torch-Pruning's as ONNX. Constants at zero: the shapes are those of every method."""
    assert isinstance(subject.model, nn.Module)
    plan = cmrc.Plan(subject.program)
    for value in subject.sites:
        site = subject.program.site_of(value, None)
        plan.do(value, units=range(round(subject.keep * site.units), site.units), constant=0.1)
    lowered = cmrc.lower(subject.program, plan)
    pruned = pruners.torch_pruned(subject.model, subject.example, subject.writers, "group norm", keep=subject.keep)
    return {
        OURS: exported_runs(lowered.module.eval(), subject, lowered.save),
        "Torch-Pruning": exported_runs(pruned, subject, lambda path: export(pruned, subject, path)),
    }


# ---------------------------------------------------------------- one network


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "efficientnet": subjects.efficientnet,
    "minilm": lambda: subjects.minilm(2048, spread=True),
    "smollm": subjects.smollm,
    "magika": subjects.magika,
    "recogniser": subjects.recogniser,
}


def stand_in(name: str) -> Subject:
    """A small network with random weights, for `--quick`."""
    case = models.deit(2, width=32, heads=2, size=32)
    model, x = case.original(), case.inputs(24).numpy()
    plain = torch_run(model)(x)

    def judge(run: Run) -> dict[str, float]:
        return {"KL": subjects.divergence(plain, run(x))}

    def losses(module: nn.Module) -> Iterator[torch.Tensor]:
        yield module(torch.from_numpy(x)).square().mean()

    readers, writers = (tuple(f"blocks.{i}.mlp.{layer}" for i in range(2)) for layer in ("fc2", "fc1"))
    return Subject(f"stand-in for {name}", "random weights", model, readers, [{"x": x}], judge, writers, losses,
                   recipe={"loss": "kl"}, task=True, batch=len(x), exported=name == "minilm")  # fmt: skip


def measure(subject: Subject, resumed: Resumed) -> dict[str, Any]:
    module = isinstance(subject.model, nn.Module)
    rows: list[dict[str, Any]] = []
    calibrated: Calibrated = {}
    for name in chosen(subject):
        rows.append(resumed(name, lambda name=name: ours(subject, name, calibrated)))
        console.print(rows[-1])
    for name in pruners.CRITERIA if module else ():
        rows.append(resumed(name, lambda name=name: torch_pruning(subject, name)))
        console.print(rows[-1])
    if subject.exported:
        rows.append(resumed("onnxsim", lambda: onnxsim(subject, rows[0]["parameters"])))
        console.print(rows[-1])
    run = torch_run(subject.model) if module else file_run(subject.model)
    sizes = sizes_of_module(subject.model, subject.example) if module else sizes_of_file(subject.model, subject)
    whole = resumed("whole", lambda: {**sizes, **subject.judge(run)})
    runs = resumed("exports", lambda: exports(subject)) if module and subject.exported else {}
    number = next(key for key in rows[0] if key not in ("method", "kind", "seconds", "parameters", "macs", "onnx"))
    checks = claims_of(rows, number, whole[number])
    if number != "KL" and "KL" in whole:
        checks += claims_of(rows, "KL", 0.0)
    return {"name": subject.name, "setting": subject.what, "number": number, "whole": whole, "rows": rows,
            "exports": runs, "claims": checks}  # fmt: skip


def claims_of(rows: list[dict[str, Any]], number: str, floor: float) -> list[dict[str, Any]]:
    """What our best loses, against what the best of the others loses: perplexity and the like have a floor."""

    def least(kind: str) -> float | None:
        losses = [row[number] for row in rows if row["kind"] == kind and number in row and row["method"] != ZEROS]
        return min(losses) - floor if losses else None

    ours, checks = least(OURS), []
    assert ours is not None
    for kind, target in ((PEER, THIRD), (PUBLISHED, 1.0)):
        if other := least(kind):
            checks.append(claim(f"{number} lost, ours over the best {kind}", ours / other, "<=", target))
    return checks


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    plain = ("method", "kind", "seconds", "parameters", "macs", "onnx")
    numbers = [key for key in record["rows"][0] if key not in plain]
    whole = record["whole"]

    def cells(row: Record) -> list[str]:
        measured = [digits(row[n]) if n in row else "" for n in numbers]
        sizes = [f"{row['parameters'] / 1e6:.3f}", f"{row['macs'] / 1e6:.1f}"] if "parameters" in row else ["", ""]
        return [*measured, *sizes]

    rows = [("the whole network", "", *cells(whole), "")]
    for row in record["rows"]:
        seconds = sum(row["seconds"].values())
        rows.append((row["method"], row["kind"], *cells(row), show(seconds) if numbers[0] in row else row["onnx"]))
    head = ("method", "whose", *numbers, "parameters, M", "MACs, M", "time")
    files = "".join(f"As ONNX, {who}: {outcome}. " for who, outcome in record["exports"].items())
    return "\n".join((claims(record["claims"]), table(head, rows), files + "\n" if files else ""))


def draw(record: Record, figure: Figure) -> None:
    number = record["number"]
    bars(figure, record["rows"], number, f"{number}, {record['name']}", whole=record["whole"][number])


TEXT = """{name}: {setting}. No fine-tuning. Every row but onnxsim's has the same shapes.
"""
TITLES = {
    "efficientnet": "EfficientNet-Lite0 (ImageNet)",
    "minilm": "MiniLM-L6 (sentence embeddings)",
    "smollm": "SmolLM2-135M (language model)",
    "magika": "Magika (types of files, ONNX)",
    "recogniser": "PP-OCRv4 rec (lines of text, ONNX)",
}
NOTES = {
    "efficientnet": """Half of a network that is narrow already is more than any method here makes up for without fine-tuning: the numbers tell who
loses least.
""",
    "magika": """Behind the first layer everything is normalised along the positions: a constant unit leaves only the norm's shift, whichever
constant it is, so that only the selection differs here, and affine maps do not pass. What is left of the units that go is a map by
position of 260,096 numbers, so that the multiply-accumulates fall to half but the parameters by a tenth only. The files are those of the
machine that measures; where onnxsim removes nothing it has no other row.
""",
    "smollm": """Chosen without gradients; Torch-Pruning's Taylor scores do use the gradient of the loss, on the same tokens. Each site is
fitted after those before it, and for what the residual stream has lost by then. That part of a fit follows the sample more than the network,
also with 16 tokens to a parent: its ridge is 1, which was better than 0.1 on chapters between those that are calibrated and judged on.
Weights are those of the 4-bit file, as float32; it is not exported here.
""",
}
SECTIONS = tuple(
    Section(f"pretrained_{name}", title, f"{TEXT}{NOTES.get(name, '')}", body, draw, (name,), (8.0, 3.2))
    for name, title in TITLES.items()
)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], "pretrained_{subject}.json")
    arguments.add_argument("subject", choices=list(SUBJECTS), help="which network")
    options = arguments.parse_args()
    use_threads(options.threads)
    quiet_exporters()
    resumed = Resumed(options.json)
    subject = stand_in(options.subject) if options.quick else SUBJECTS[options.subject]()
    measures = measure(subject, resumed)
    write_record(options.json, f"pretrained, {options.subject}", [], options, **measures, wall_seconds=resumed.seconds)
    resumed.forget()


if __name__ == "__main__":
    main()
