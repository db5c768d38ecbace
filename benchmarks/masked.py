"""What simplifiers make of a masked model: units clamped at run time, against the same plan lowered.

python -m benchmarks.masked [--quick] [--json OUT]

onnxsim and onnxslim fold constants and remove what nobody reads; whether a clamped unit's weights are ever needed is no question
that they ask.
"""

from __future__ import annotations

import importlib
import io
import tempfile
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

import cmrc
from benchmarks import models
from benchmarks.latency import export, feeds_for, quiet_exporters
from benchmarks.measure import arguments, console, show, use_threads, write_record
from benchmarks.pruners import stored
from benchmarks.section import COLOURS, Record, Section, claim, claims, table
from cmrc.hosts.onnx.bench import start

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILES = ("original", "masked", "masked, onnxsim", "masked, onnxslim", "lowered")


def simplified(tool: str, path: Path, out: Path) -> None:
    library = importlib.import_module(tool)
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = onnx.load(path)
        onnx.save(library.simplify(model)[0] if tool == "onnxsim" else library.slim(model), out)


def measure(case: models.Case, folder: Path) -> dict[str, Any]:
    """Stored numbers of every file, the time that each took, and how far its output lies from the masked one's."""
    files = {"original": export(case.original(), case, folder / "original.onnx")}
    program = cmrc.trace(files["original"])
    plan = case.plan(program)
    files["masked"] = folder / "masked.onnx"
    program.clamped(plan).save(files["masked"])
    seconds: dict[str, float] = {}
    for tool in ("onnxsim", "onnxslim"):
        importlib.import_module(tool)  # not timed
        out, begin = folder / f"{tool}.onnx", time.thread_time()
        simplified(tool, files["masked"], out)
        seconds[f"masked, {tool}"] = time.thread_time() - begin
        files[f"masked, {tool}"] = out
    files["lowered"], begin = folder / "lowered.onnx", time.thread_time()
    cmrc.lower(program, plan).save(files["lowered"])
    seconds["lowered"] = time.thread_time() - begin
    feeds = feeds_for(files, case, 2)
    answers = {name: start(path).run(None, feeds[name])[0] for name, path in files.items()}
    want = answers["masked"]
    return {
        "parameters": {name: stored(onnx.load(path)) for name, path in files.items()},
        "seconds": seconds,
        "apart": {name: float(np.abs(answer - want).max() / np.abs(want).max()) for name, answer in answers.items()},
    }


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    rows = []
    for case, result in record["networks"].items():
        rows.append((case, "parameters", *(f"{result['parameters'][name]:,}" for name in FILES)))
        rows.append(("", "output, from the masked one's", *(f"{result['apart'][name]:.1e}" for name in FILES)))
        rows.append(
            ("", "time", *(show(result["seconds"][name]) if name in result["seconds"] else "" for name in FILES))
        )
    return claims(record["claims"]) + "\n" + table(("network", "", *FILES), rows)


def draw(record: Record, figure: Figure) -> None:
    axes = figure.subplots()
    colours = ("#999999", COLOURS[1], COLOURS[4], COLOURS[3], COLOURS[0])
    for k, (name, colour) in enumerate(zip(FILES, colours, strict=True)):
        values = [
            result["parameters"][name] / result["parameters"]["original"] for result in record["networks"].values()
        ]
        axes.bar([i + (k - 2) * 0.16 for i in range(len(values))], values, 0.15, color=colour, label=name)
    axes.set_xticks(range(len(record["networks"])), list(record["networks"]))
    axes.set_ylabel("stored numbers, of the original's")
    axes.grid(axis="x", visible=False)
    figure.legend(loc="outside upper right", ncols=5, fontsize=8)


SECTIONS = (
    Section(
        "masked",
        "Simplifiers on a masked model",
        """Half of the units of every site clamped to constants in the ONNX file, as training with masks leaves it; then simplified by
onnxsim and onnxslim, or lowered by cmrc from the same plan. The second line is the largest difference of the output, of its scale.
""",
        body,
        draw,
    ),
)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "masked.json")
    use_threads(options.threads)
    quiet_exporters()
    cases = [
        models.mlp(),
        models.convnet(constants="random"),
        models.deit(2, size=64) if options.quick else models.deit(),
    ]
    networks = {}
    for case in cases:
        console.print(case.name)
        with tempfile.TemporaryDirectory() as folder:
            networks[case.name] = measure(case, Path(folder))
    removed = max(
        1 - result["parameters"][name] / result["parameters"]["masked"]
        for result in networks.values()
        for name in FILES[2:4]
    )
    apart = max(result["apart"]["lowered"] for result in networks.values())
    claims = [
        claim("share of the stored numbers that a simplifier removes, at most", removed, "<=", 0.01),
        claim("lowered from masked, of the output's scale", apart, "<=", 1e-5),
    ]
    write_record(options.json, "masked", [], options, networks=networks, claims=claims)


if __name__ == "__main__":
    main()
