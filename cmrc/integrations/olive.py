"""A pass for Microsoft Olive: `CmrcReduce`, an ONNX model in, a smaller ONNX model out.

    python -m cmrc.integrations.olive recipe.json        runs a recipe with this pass among Olive's own

    {"input_model": {"type": "ONNXModel", "model_path": "model.onnx"},
     "passes": {"reduce": {"type": "CmrcReduce", "data": "train.npz", "agreement": 0.97}},
     "output_dir": "out"}

The pass fails where the goals are not met, unless `accept_unmet` is set: a recipe then stops there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from olive.model import ONNXModelHandler
from olive.model.utils import resolve_onnx_path
from olive.package_config import OlivePackageConfig
from olive.passes import Pass
from olive.passes.pass_config import PassConfigParam

from cmrc.errors import CheckError
from cmrc.reduction.reducer import reduce

NAME = "CmrcReduce"
GOALS = ("agreement", "drop", "speedup", "latency", "size", "macs")  # numbers, as of `cmrc.reduce`


class CmrcReduce(Pass):  # type: ignore[misc]
    """Reduce an ONNX model with cmrc: replace units, fold, verify."""

    @classmethod
    def _default_config(cls, accelerator_spec: Any) -> dict[str, PassConfigParam]:
        goals = {
            name: PassConfigParam(type_=float, default_value=None, description=f"The goal `{name}` of cmrc.reduce.")
            for name in GOALS
        }
        return {
            "data": PassConfigParam(type_=str, required=True, description="Calibration data: .npy, .npz or a folder."),
            "held_out": PassConfigParam(type_=str, default_value=None, description="Held-out data; else a quarter."),
            "frontier": PassConfigParam(type_=list, default_value=None, description="The sizes to try."),
            "preset": PassConfigParam(type_=str, default_value=None, description="How units are chosen."),
            "refit": PassConfigParam(type_=bool, default_value=True, description="Fit each layer after those before it."),
            "seed": PassConfigParam(type_=int, default_value=0, description="Seed for everything that is drawn at random."),
            "accept_unmet": PassConfigParam(type_=bool, default_value=False, description="Go on if goals are not met."),
            **goals,
        }  # fmt: skip

    def _run_for_config(self, model: ONNXModelHandler, config: Any, output_model_path: str) -> ONNXModelHandler:
        options = {
            name: value for name in ("held_out", "frontier", "preset", *GOALS) if (value := getattr(config, name))
        }
        result = reduce(
            model.model_path, config.data, refit=config.refit, seed=config.seed, timed=config.speedup is not None or config.latency is not None,
            **options,
        )  # fmt: skip
        if not result.ready and not config.accept_unmet:
            raise CheckError(result.verdict, fix="ask for less, or set accept_unmet in the recipe")
        path = Path(resolve_onnx_path(output_model_path, Path(model.model_path).name))
        path.parent.mkdir(parents=True, exist_ok=True)
        result.save(path)
        result.plan.save(path.with_suffix(".plan.json"))
        path.with_suffix(".report.json").write_text(json.dumps(result.to_json(), indent=1), encoding="utf-8")
        return ONNXModelHandler(model_path=str(path), model_attributes={"cmrc": result.verdict})


def package() -> dict[str, Any]:
    """Olive's own passes, and this one."""
    config: dict[str, Any] = json.loads(Path(OlivePackageConfig.get_default_config_path()).read_text(encoding="utf-8"))
    everything = {key: ["*"] for key in ("supported_providers", "supported_accelerators", "supported_precisions")}
    config["passes"][NAME] = {"module_path": f"cmrc.integrations.olive.{NAME}", **everything,
                              "supported_algorithms": [], "supported_quantization_encodings": []}  # fmt: skip
    return config


def run(recipe: str | Path) -> Any:
    """Run an Olive recipe that may name the pass."""
    from olive.workflows import run as run_workflow

    return run_workflow(str(recipe), package_config=package())


if __name__ == "__main__":
    run(sys.argv[1])
