"""A reduction as an MLflow run: parameters, metrics, the plan, the model, the report and the whole document.

with mlflow.start_run():
    result = cmrc.reduce("model.onnx", "train.npz", agreement=0.97)
    log_reduction(result)
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cmrc.reduction.account import account_of
from cmrc.reduction.page import page_of, write_page
from cmrc.reduction.result import Reduction

SHOWN = ("preset", "objective", "select", "replace", "seed", "recompute")


def log_reduction(result: Reduction, *, folder: str = "cmrc", name: str = "model") -> None:
    """Log into the active run. Metrics have one step per size of the table, from the largest; `chosen.` ones are of the result.

    The report, in which the model is called `name`, needs `cmrc[report]`, and is left out without it.
    """
    import mlflow

    mlflow.log_params(_parameters(result))
    for step, size in enumerate(result.sizes):
        mlflow.log_metrics(_metrics(result, size.measures), step=step)
    chosen = {f"chosen.{name}": value for name, value in _metrics(result, result.measures).items()}
    mlflow.log_metrics({**chosen, "ready": float(result.ready), "exact": float(result.check.holds)})
    mlflow.set_tag("cmrc.verdict", result.verdict)
    mlflow.log_dict(result.to_json(), f"{folder}/reduction.json")
    with tempfile.TemporaryDirectory(prefix="cmrc-") as temporary:
        here = Path(temporary)
        result.save(here / "small.onnx")
        result.plan.save(here / "small.plan.json")
        if find_spec("vl_convert") is not None:
            account = account_of(result, name)
            write_page(page_of(account), account, here / "report.html")
        mlflow.log_artifacts(str(here), folder)


def _parameters(result: Reduction) -> dict[str, Any]:
    goals = {f"goal.{i}": judgement.goal for i, judgement in enumerate(result.judgements)}
    recipe = {name: result.recipe[name] for name in SHOWN if name in result.recipe}
    return {**goals, **recipe, "source": result.program.fingerprint.digest, "sizes_are_parts_of": result.of}


def _metrics(result: Reduction, measures: Any) -> dict[str, float]:
    quality, whole = measures.quality, result.whole
    numbers = {
        "parameters": measures.parameters / whole.parameters,
        "macs": measures.macs / max(whole.macs, 1),
        "bytes": measures.bytes / whole.bytes,
        "agreement": quality.agreement.value,
        "agreement.at_least": quality.bound,
    }
    if quality.kl is not None:
        numbers["kl"] = quality.kl
    if quality.accuracy is not None:
        numbers["accuracy"] = quality.accuracy[1]
    if measures.speed is not None:
        numbers["speedup"] = measures.speed.speedup.value
    return {name: float(value) for name, value in numbers.items()}
