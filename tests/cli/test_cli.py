"""The command line on real files: output, JSON, exit codes, and files that appear whole or not at all."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command import cli
from rich.console import Console

import cmrc
from cmrc.cli import terminal
from cmrc.cli.terminal import columns, shortened

DIGITS = Path(__file__).parents[2] / "examples" / "digits.onnx"


def test_inspect_lists_sites_and_how_they_fold(folder: Path) -> None:
    shown = cli("inspect", "model.onnx")
    assert shown.exit_code == 0
    assert "act3" in shown.stdout
    listing = json.loads(cli("inspect", "model.onnx", "--json").stdout)
    act3 = next(site for site in listing["sites"] if site["name"] == "act3")
    assert (act3["op"], act3["axis"], act3["units"], act3["consumers"], act3["folds"]) == (
        "gelu",
        1,
        128,
        ["fc2"],
        "folds into fc2",
    )
    some = json.loads(cli("inspect", "model.onnx", "--json", "--sites", "act*", "--no-folds").stdout)
    assert [(site["name"], site["folds"]) for site in some["sites"]] == [(f"act{i}", "") for i in (1, 2, 3, 4)]


def test_inspect_prints_the_ir(folder: Path) -> None:
    shown = cli("inspect", "model.onnx", "--ir")
    assert shown.exit_code == 0
    assert shown.stdout.startswith("graph(%image: float32[batch,1,8,8]) -> (%logits)")


def test_no_name_is_cut_in_a_pipe(folder: Path) -> None:
    call = [sys.executable, "-m", "cmrc", "inspect", "model.onnx", "--all"]
    shown = subprocess.run(call, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "20"})
    assert shown.stderr == ""
    sites = cmrc.trace("model.onnx").sites()
    lines = shown.stdout.splitlines()[6:]  # behind what is said of the model, and the head of the table
    assert [line.split()[0] for line in lines] == [site.name for site in sites]
    assert all(line.rstrip().endswith(shortened(site.folds, 100)) for line, site in zip(lines, sites, strict=True))


def test_no_name_is_cut_in_a_narrow_window() -> None:
    """What does not fit goes on in the next line."""
    name = "transformer_layers.11.feed_forward.activation"
    table = columns("site")
    table.add_row(name)
    window = Console(width=20, file=io.StringIO())
    window.print(table)
    assert name in "".join(line.strip() for line in window.file.getvalue().splitlines())  # type: ignore[attr-defined]


def test_lower_then_check_holds(folder: Path) -> None:
    lowered = cli("lower", "model.onnx", "plan.json", "-o", "small.onnx")
    assert lowered.exit_code == 0, lowered.output
    assert "act3" in lowered.stdout
    assert cli("check", "model.onnx", "small.onnx", "plan.json").exit_code == 0
    np.savez("data.npz", image=np.random.default_rng(1).normal(size=(7, 1, 8, 8)).astype(np.float32))
    answer = cli("check", "model.onnx", "small.onnx", "plan.json", "--data", "data.npz", "--json")
    assert answer.exit_code == 0
    assert json.loads(answer.stdout)["holds"] is True
    assert json.loads(answer.stdout)["moved"] > 1000 * json.loads(answer.stdout)["tolerance"]


def test_check_sees_a_wrong_number_that_hardly_moves_the_outputs(folder: Path) -> None:
    assert cli("lower", "model.onnx", "plan.json", "-o", "small.onnx").exit_code == 0
    model = onnx.load("small.onnx")
    weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
    array = onnx.numpy_helper.to_array(weight).copy()
    array[0, 0] += 1e-5 * np.abs(array).max()
    weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
    onnx.save(model, "wrong.onnx")
    answer = cli("check", "model.onnx", "wrong.onnx", "plan.json", "--json")
    document = json.loads(answer.stdout)
    assert (answer.exit_code, document["holds"], document["stored"]) == (1, False, [weight.name])
    assert document["error"] <= document["tolerance"]  # too little for the outputs
    shown = cli("check", "model.onnx", "wrong.onnx", "plan.json")
    assert f"the file's numbers differ from what folding this plan gives, in {weight.name}" in shown.stdout
    assert cli("check", "model.onnx", "wrong.onnx", "plan.json", "--tolerance", "1e-4").exit_code == 0


def test_check_fails_for_a_model_that_is_not_the_lowered_one(folder: Path) -> None:
    answer = cli("check", "model.onnx", "model.onnx", "plan.json", "--size", "batch=5")
    assert answer.exit_code == 1
    assert "NOT equal" in answer.stdout


def test_lower_as_json_and_with_the_passes_printed(folder: Path) -> None:
    answer = cli("lower", "model.onnx", "plan.json", "-o", "small.onnx", "--json", "--print-passes")
    assert answer.exit_code == 0
    report = json.loads(answer.stdout)["report"]
    assert [site["units_after"] for site in report["sites"]] == [14, 64]
    assert answer.stderr.count("; constant_fold") >= 1
    assert answer.stderr.count("; dead_subgraph") >= 1


def test_metadata_says_where_the_result_came_from(folder: Path) -> None:
    import onnx

    cli("lower", "model.onnx", "plan.json", "-o", "small.onnx")
    metadata = {entry.key: entry.value for entry in onnx.load("small.onnx").metadata_props}
    assert metadata["cmrc.version"] == cmrc.__version__
    assert metadata["cmrc.source"] == cmrc.trace("model.onnx").fingerprint.digest
    assert len(metadata["cmrc.plan"]) == 16


def test_annotate_then_lower_gives_the_same_as_lowering(folder: Path) -> None:
    assert cli("annotate", "model.onnx", "plan.json", "-o", "annotated.onnx").exit_code == 0
    cli("lower", "model.onnx", "plan.json", "-o", "small.onnx")
    assert cli("lower", "annotated.onnx", "-o", "other.onnx").exit_code == 0
    image = np.random.default_rng(1).normal(size=(4, 1, 8, 8)).astype(np.float32)
    assert np.array_equal(cmrc.trace("small.onnx").run([image])[0], cmrc.trace("other.onnx").run([image])[0])
    answer = cli("lower", "model.onnx", "-o", "none.onnx")
    assert answer.exit_code == 2
    assert "there is no plan: none was given, and the model has no annotation" in answer.stderr


def test_plan_show(folder: Path) -> None:
    shown = cli("plan", "show", "plan.json")
    assert shown.exit_code == 0
    assert "act1" in shown.stdout
    document = json.loads(cli("plan", "show", "plan.json", "--json").stdout)
    assert [(entry["site"], entry["count"], entry["becomes"]) for entry in document["do"]] == [
        ("act1", 2, "constant"),
        ("act3", 64, "constant"),
    ]
    assert document["model"] == cmrc.trace("model.onnx").fingerprint.digest


def test_plan_show_takes_optimal_constants_apart(folder: Path) -> None:
    plan = cmrc.Plan.load("plan.json")
    units = list(plan.entries[0].units)
    recipe = {"preset": "cmr-const", "objective": "task", "select": "bottom", "replace": "optimal", "seed": 0}
    parts = {"units": units, "lengths": False, "weighted mean": [0.5, 0.75], "gradient part": [0.125, -4.0]}
    site = {"units": 8, "kept": 6, "predicted": 0.1, "c*": parts}
    plan.made = {"recipe": recipe, "data": "d", "samples": 9, "sites": {"act1": site}}
    plan.save("other.json")
    shown = cli("plan", "show", "other.json").stdout
    assert "act1: c* = weighted mean − gradient part" in shown
    (line,) = [line.split() for line in shown.splitlines() if line.split()[:2] == [str(units[1]), "0.75"]]
    assert line[1:4] == ["0.75", "-4", "4.75"]


def test_a_replacement_that_stays_is_exit_code_1_and_leaves_no_file(folder: Path) -> None:
    cmrc.Plan(cmrc.trace("model.onnx")).do("head", units=[0], constant=0.0).save("bad.json")
    Path("small.onnx").write_bytes(b"what was there before")
    answer = cli("lower", "model.onnx", "bad.json", "-o", "small.onnx")
    assert answer.exit_code == 1
    assert answer.stderr == (
        "residue: %output (output): a replacement cannot pass: it is an output of the model\n"
        "  at bad.json: do[0] (head)\n"
        "  fix: leave that site out, choose another, or allow what stays at run time with --residue keep\n"
    )
    assert Path("small.onnx").read_bytes() == b"what was there before"
    assert cli("lower", "model.onnx", "bad.json", "-o", "small.onnx", "--residue", "keep").exit_code == 0
    assert cli("check", "model.onnx", "small.onnx", "bad.json").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("inspect", "nope.onnx"),
            "trace: cannot read nope.onnx: there is no such file\n  fix: give the path of an .onnx file\n",
        ),
        (
            ("inspect", "cut.onnx"),
            "trace: cannot read cut.onnx: it is not an ONNX model, or it is cut off\n"
            "  fix: export or download it again; an .onnx file is a serialised ModelProto\n",
        ),
        (
            ("lower", "model.onnx", "nope.json", "-o", "x.onnx"),
            "plan: cannot be read: No such file or directory\n  at nope.json\n  fix: give the path of a plan file\n",
        ),
        (
            ("lower", "model.onnx", "plan.json", "-o", "x.onnx", "--residue", "maybe"),
            "error: --residue is 'maybe'\n  fix: write --residue error or --residue keep\n",
        ),
        (
            ("inspect", "model.onnx", "--sites", "act9"),
            "site: no site is called 'act9'\n  fix: near matches: act4, act3, act2, act1\n",
        ),
    ],
)
def test_bad_input_is_exit_code_2_with_reason_and_fix(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    Path("cut.onnx").write_bytes(DIGITS.read_bytes()[:1000])
    answer = cli(*arguments)
    assert answer.exit_code == 2
    assert answer.stderr == message
    assert not Path("x.onnx").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("bench", "model.onnx", "--sessions", "0"), "input: --sessions 0 is too few\n  fix: ask for at least one\n"),
        (("bench", "model.onnx", "--rounds", "0"), "input: --rounds 0 is too few\n  fix: ask for at least one\n"),
        (("bench", "model.onnx", "--batch", "0"), "input: --batch 0 is too few\n  fix: ask for at least one\n"),
        (("bench", "."), "host: there is no file .\n  fix: give paths of ONNX files\n"),
        (
            ("check", "model.onnx", "model.onnx", "plan.json", "--size", "batch=0"),
            "input: --size 'batch=0' is not understood\n  fix: write it as name=4\n",
        ),
        (
            ("check", "model.onnx", "model.onnx", "plan.json", "--size", "rows=3"),
            "input: no input has a size 'rows'\n  fix: the dynamic sizes are batch\n",
        ),
        (
            ("bench", "model.onnx", "--size", "rows=3"),
            "input: no input has a size 'rows'\n  fix: the dynamic sizes are batch\n",
        ),
        (
            ("plan", "model.onnx", "-o", "x.json", "--keep", "act1=0.5", "--keep", "0.7"),
            "recipe: --keep 0.7 is given together with other values\n  fix: give one value for all sites, or write each as 'site=0.5'\n",
        ),
        (
            ("plan", "model.onnx", "-o", "x.json", "--keep", "act9=0.5"),
            "site: no site is called 'act9'\n  fix: near matches: act4, act3, act2, act1\n",
        ),
        (
            ("plan", "model.onnx", "-o", "x.json", "--budget", "macs"),
            "recipe: --budget macs needs an amount\n  fix: write --budget macs=0.5\n",
        ),
    ],
)
def test_numbers_that_make_no_sense_are_refused(folder: Path, arguments: tuple[str, ...], reason: str) -> None:
    shown = cli(*arguments)
    assert (shown.exit_code, shown.stderr) == (2, reason)


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "model.onnx", "model.onnx", "plan.json", "--seed", "-1"),
        ("check", "model.onnx", "model.onnx", "plan.json", "--tolerance", "-1"),
        ("verify", "model.onnx", "-", "plan.json", "--data", ".", "--seed", "-1"),
        ("bench", "model.onnx", "--seed", "-1"),
        ("calibrate", "model.onnx", "--data", ".", "-o", "x", "--batch", "0"),
    ],
)
def test_numbers_below_their_range_are_refused_by_the_command(folder: Path, arguments: tuple[str, ...]) -> None:
    shown = cli(*arguments)
    assert shown.exit_code == 2
    assert f"Invalid value for '{arguments[-2]}'" in shown.stderr


def test_an_error_as_json(folder: Path) -> None:
    answer = cli("inspect", "nope.onnx", "--json")
    assert answer.exit_code == 2
    assert json.loads(answer.stdout)["error"]["reason"] == "cannot read nope.onnx: there is no such file"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not a file of arrays: it does not begin as a .npy file does"),
        (b"nothing", "is not a file of arrays: it does not begin as a .npy file does"),
        (b"PK\x03\x04nothing", "is not a file of arrays: a .npz file that is cut short"),
    ],
)
def test_check_refuses_inputs_that_cannot_be_read(folder: Path, content: bytes, reason: str) -> None:
    """That is no verdict on the model: exit code 2."""
    Path("bad.npz").write_bytes(content)
    shown = cli("check", "model.onnx", "model.onnx", "plan.json", "--data", "bad.npz", "--json")
    assert shown.exit_code == 2
    assert json.loads(shown.stdout)["error"]["reason"] == reason


def test_a_single_input_needs_no_name(folder: Path) -> None:
    images = np.random.default_rng(0).normal(size=(5, 1, 8, 8)).astype(np.float32)
    np.savez("data.npz", pictures=images, labels=np.zeros(5, np.int64))
    cli("lower", "model.onnx", "plan.json", "-o", "small.onnx")
    assert cli("check", "model.onnx", "small.onnx", "plan.json", "--data", "data.npz").exit_code == 0
    assert cli("plan", "model.onnx", "--data", "data.npz", "--keep", "0.5", "-o", "new.json").exit_code == 0
    np.savez("data.npz", pictures=images, others=images)
    shown = cli("check", "model.onnx", "small.onnx", "plan.json", "--data", "data.npz")
    assert (shown.exit_code, shown.stderr) == (
        2,
        "stats: a batch has no 'image' (it has pictures, others)\n  fix: give every input of the model: image\n",
    )


def test_check_gives_a_model_of_a_fixed_batch_the_rows_that_it_takes(folder: Path) -> None:
    """Seven rows, three at a time: the last batch repeats its last row."""
    import onnx

    model = onnx.load("model.onnx")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    onnx.save(model, "fixed.onnx")
    cmrc.Plan(cmrc.trace("fixed.onnx")).do("act3", units=[0, 5], constant=0.25).save("fixed.json")
    assert cli("lower", "fixed.onnx", "fixed.json", "-o", "small.onnx").exit_code == 0
    images = np.random.default_rng(0).normal(size=(7, 1, 8, 8)).astype(np.float32)
    np.save("images.npy", images)
    call = ("check", "fixed.onnx", "small.onnx", "fixed.json", "--data")
    assert cli(*call, "images.npy").exit_code == 0
    shown = json.loads(cli(*call, "images.npy", "--json").stdout)
    np.save("last.npy", images[[4, 5, 6, 6]][1:])
    assert shown["moved"] >= json.loads(cli(*call, "last.npy", "--json").stdout)["moved"]


def test_a_model_of_a_fixed_batch_is_calibrated_and_planned_in_batches_of_it(folder: Path) -> None:
    import onnx

    model = onnx.load("model.onnx")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    onnx.save(model, "fixed.onnx")
    np.save("images.npy", np.random.default_rng(0).normal(size=(32, 1, 8, 8)).astype(np.float32))
    shown = json.loads(cli("calibrate", "fixed.onnx", "--data", "images.npy", "-o", "s.safetensors", "--json").stdout)
    assert shown["samples"] == 30
    call = ("plan", "fixed.onnx", "--data", "images.npy", "--sites", "act4", "--keep", "0.5", "-o", "fixed.json")
    assert cli(*call).exit_code == 0
    assert json.loads(cli(*call, "--json").stdout)["samples"] == 30
    assert cli("lower", "fixed.onnx", "fixed.json", "-o", "small.onnx").exit_code == 0
    assert cli("check", "fixed.onnx", "small.onnx", "fixed.json", "--data", "images.npy").exit_code == 0
    np.save("images.npy", np.zeros((2, 1, 8, 8), np.float32))
    assert cli(*call).stderr == (
        "stats: the model takes 3 samples at a time, but no file has that many\n"
        "  fix: give at least 3 samples, or export the model with a dynamic batch\n"
    )


def test_quiet_and_verbose(folder: Path) -> None:
    loud = cli("lower", "model.onnx", "plan.json", "-o", "small.onnx", "-v")
    assert "constant_fold" in loud.stdout
    quiet = cli("lower", "model.onnx", "plan.json", "-o", "small.onnx", "-q")
    assert (quiet.exit_code, quiet.output) == (0, "")
    assert cli("check", "model.onnx", "small.onnx", "plan.json", "--quiet").output == ""
    assert json.loads(cli("check", "model.onnx", "small.onnx", "plan.json", "-q", "--json").stdout)["holds"]
    failed = cli("inspect", "nope.onnx", "-v")
    assert "trace: cannot read nope.onnx: there is no such file" in failed.stderr
    assert "Traceback" in failed.stderr


def test_progress_in_a_pipe_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "err", Console(stderr=True, width=80))
    assert list(terminal.progress(range(3), 3, "sessions")) == [0, 1, 2]
    assert capsys.readouterr().err == ""  # it was quick
    monkeypatch.setattr(terminal, "EVERY", 0.0)
    assert list(terminal.progress(range(3), 3, "sessions")) == [0, 1, 2]
    assert capsys.readouterr().err == "sessions: 1 of 3, about 0 s left\nsessions: 2 of 3, about 0 s left\n"
    assert list(terminal.progress(range(2), None, "batches")) == [0, 1]
    assert capsys.readouterr().err == "batches: 1\nbatches: 2\n"


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "model.onnx", "--data", "x.npy", "-o", "new.json"),
        ("verify", "model.onnx", "-", "plan.json", "--data", "x.npy"),
    ],
    ids=["plan", "verify"],
)
def test_a_picture_without_matplotlib_is_refused_before_the_work(
    folder: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("cmrc.files.find_spec", lambda name: None)
    shown = cli(*command, "--plot", "scores.png")
    assert (shown.exit_code, shown.stderr) == (
        2,
        "file: cannot draw scores.png: matplotlib is not installed\n  fix: pip install 'cmrc[plot]'\n",
    )
    assert not Path("new.json").exists()


OUTPUTS = {
    "lower": ("lower", "model.onnx", "plan.json", "-o"),
    "annotate": ("annotate", "model.onnx", "plan.json", "-o"),
    "calibrate": ("calibrate", "model.onnx", "--data", "held-out.npz", "-o"),
    "plan": ("plan", "model.onnx", "--data", "held-out.npz", "--keep", "0.5", "-o"),
    "plan --plot": ("plan", "model.onnx", "--data", "held-out.npz", "--keep", "0.5", "-o", "new.json", "--plot"),
    "verify --plot": ("verify", "model.onnx", "-", "gentle.json", "--data", "held-out.npz", "--plot"),
}


@pytest.mark.parametrize("command", OUTPUTS.values(), ids=list(OUTPUTS))
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    held_out: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("taken").mkdir()
    before = sorted(held_out.iterdir())
    begins = "lower" if command[0] == "lower" else "trace"
    module = "plan_make" if command[0] == "plan" else command[0]
    monkeypatch.setattr(f"cmrc.cli.{module}.{begins}", lambda *_, **__: pytest.fail("it began to work"))
    for output, reason in (
        ("nowhere/x.png", "file: cannot write nowhere/x.png: there is no folder nowhere\n  fix: mkdir -p nowhere\n"),
        ("taken", "file: cannot write taken: it is a folder\n  fix: give the path of a file\n"),
    ):
        shown = cli(*command, output)
        assert (shown.exit_code, shown.stderr) == (2, reason)
    assert sorted(held_out.iterdir()) == before


def test_a_picture_of_no_known_kind_is_refused(held_out: Path) -> None:
    shown = cli("verify", "model.onnx", "-", "gentle.json", "--data", "held-out.npz", "--plot", "plans.xyz")
    assert shown.exit_code == 2
    assert shown.stderr == "file: cannot draw plans.xyz\n  fix: give a path that ends in .png, .svg, .pdf\n"


def test_a_plan_that_cannot_be_written_leaves_no_arrays_behind(folder: Path) -> None:
    Path("taken").mkdir()
    plan = cmrc.Plan(cmrc.trace("model.onnx")).do("act3", units=range(100), constant=np.linspace(-1, 1, 100))
    before = sorted(folder.iterdir())
    with pytest.raises(cmrc.CmrcError, match="cannot write taken: it is a folder"):
        plan.save("taken")
    assert sorted(folder.iterdir()) == before


def test_calibrate_resumes_from_a_checkpoint(folder: Path) -> None:
    """A finished run leaves no checkpoint behind; a file that is none is refused before the work."""
    np.save("images.npy", np.random.default_rng(0).normal(size=(9, 1, 8, 8)).astype(np.float32))
    call = ("calibrate", "model.onnx", "--data", "images.npy", "-o", "stats.safetensors", "--checkpoint")
    assert cli(*call, "so-far.safetensors").exit_code == 0
    assert not Path("so-far.safetensors").exists()
    shown = cli(*call, "stats.safetensors")
    assert shown.exit_code == 2
    assert "is a complete file of statistics, not a checkpoint" in shown.stderr


def test_a_need_that_does_not_exist_is_named_by_its_flag(folder: Path) -> None:
    np.save("images.npy", np.zeros((2, 1, 8, 8), np.float32))
    shown = cli("calibrate", "model.onnx", "--data", "images.npy", "-o", "x.safetensors", "--need", "sums")
    assert shown.exit_code == 2
    assert shown.stderr.startswith("stats: --need sums is not known\n  fix: use any of ")


@pytest.mark.parametrize(
    "provenance", [{"by": "hand"}, {"recipe": {"preset": 1}}, {"recipe": []}, {"sites": {"a": None}}]
)
def test_a_plan_that_was_made_otherwise_is_shown_with_what_it_says(folder: Path, provenance: dict[str, object]) -> None:
    plan = cmrc.Plan.load("plan.json")
    plan.made = provenance
    plan.save("other.json")
    shown = cli("plan", "show", "other.json")
    assert shown.exit_code == 0
    assert f"made: {json.dumps(provenance)}" in shown.stdout


def test_names_from_files_are_no_markup(folder: Path) -> None:
    text = Path("plan.json").read_text(encoding="utf-8").replace('"site": "act1"', '"site": "[/red] :smile:"')
    Path("odd.json").write_text(text, encoding="utf-8")
    shown = cli("plan", "show", "odd.json")
    assert shown.exit_code == 0
    assert "[/red] :smile:" in shown.stdout


def test_a_plan_that_is_not_saved_keeps_its_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = str(DIGITS.with_name("digits_test.npz"))
    asked = ("--data", data, "--preset", "joint", "--keep", "0.5", "--sites", "act*", "--checkpoint", "unfinished")
    command = ("plan", "model.onnx", *asked)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(cmrc.Plan, "save", fail)
        assert cli(*command, "-o", "plan2.json").exit_code != 0
    assert list((folder / "unfinished").iterdir())
    assert cli(*command, "-o", "plan2.json").exit_code == 0
    assert not (folder / "unfinished").exists()


def test_an_interrupted_plan_resumes_from_its_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = str(DIGITS.with_name("digits_test.npz"))
    command = ("plan", "model.onnx", "--data", data, "--preset", "joint", "--keep", "0.5", "--sites", "act*")
    assert cli(*command, "-o", "whole.json").exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr("cmrc.planning.planner.replace_units", None)  # interrupted once the statistics are there
        assert isinstance(cli(*command, "-o", "resumed.json", "--checkpoint", "unfinished").exception, TypeError)
    assert sorted(path.name for path in Path("unfinished").iterdir()) == ["counts.json", "statistics-0.safetensors"]
    with monkeypatch.context() as patch:
        patch.setattr("cmrc.planning.planner.calibrate", None)  # what is done is not done again
        assert cli(*command, "-o", "resumed.json", "--checkpoint", "unfinished").exit_code == 0
    assert not Path("unfinished").exists()
    whole, resumed = (json.loads(Path(f"{name}.json").read_text()) for name in ("whole", "resumed"))
    assert whole.pop("tensors").split(".")[1] == resumed.pop("tensors").split(".")[1]  # named by their content
    assert whole == resumed
