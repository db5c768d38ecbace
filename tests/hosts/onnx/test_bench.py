"""Files timed beside each other: what is measured, of what, and where it ran."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import cli
from onnx import TensorProto, helper, save

import cmrc
from cmrc.errors import HostError, InputError
from cmrc.hosts.onnx.bench import Bench, Timed, bench, declared, inputs_for, median_ratio, missing_libraries, size_of

DIGITS = Path(__file__).parents[3] / "examples" / "digits.onnx"


def product(path: Path, repeats: int, shape: tuple[int | str | None, ...] = ("batch", 64)) -> Path:
    """A chain of products with one 64 x 64 matrix; the matrix lies in a file of its own."""
    weight = helper.make_tensor("weight", TensorProto.FLOAT, (64, 64), np.eye(64, dtype=np.float32).tobytes(), raw=True)
    nodes = [
        helper.make_node("MatMul", [f"x{i}" if i else "x", "weight"], [f"x{i + 1}"], name=f"product{i}")
        for i in range(repeats)
    ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(f"x{repeats}", TensorProto.FLOAT, None)],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)
    return path


def test_less_work_is_faster_and_the_files_are_told_apart(tmp_path: Path) -> None:
    paths = [product(tmp_path / "long.onnx", 60), product(tmp_path / "short.onnx", 6)]
    table = bench(paths, batch=256, sessions=3, rounds=5)
    long, short = table.files
    assert (long.path, short.path) == tuple(paths)
    assert long.seconds.shape == (3, 5)
    ratio, low, high = table.ratio(short)
    assert 3 < low <= ratio <= high < 30  # a tenth of the products; the run itself costs something
    assert table.ratio(long) == (1.0, 1.0, 1.0)
    assert long.providers == ("CPUExecutionProvider",)
    assert long.bytes == paths[0].stat().st_size + 64 * 64 * 4 == size_of(paths[0])


def test_a_path_that_is_given_twice_is_run_as_two(tmp_path: Path) -> None:
    """A file beside itself: how far apart equal files come out."""
    path = product(tmp_path / "chain.onnx", 20)
    (tmp_path / "copy").mkdir()
    copy = product(tmp_path / "copy" / "chain.onnx", 20)
    table = bench([path, path, copy], batch=64, sessions=2, rounds=5)
    assert [file.path for file in table.files] == [path, path, copy]
    first, second = table.files[0].seconds, table.files[1].seconds
    assert not np.array_equal(first, second)
    shown = cli("bench", str(path), str(path), str(copy), "--sessions", "1", "--rounds", "2").stdout.splitlines()
    assert [line.split()[0] for line in shown[1:4]] == [str(path), str(path), str(copy)]


def test_memory_is_that_of_the_file_alone(tmp_path: Path) -> None:
    path = product(tmp_path / "chain.onnx", 4)
    small, large = (bench([path], batch=batch, sessions=1, rounds=1).files[0].memory for batch in (1, 100_000))
    assert small is not None
    assert large is not None
    assert large - small > 100_000 * 64 * 4  # one value of the larger batch


def test_the_ratio_is_the_median_of_pairs_and_its_interval_resamples_sessions() -> None:
    base = np.array([[1.0, 2.0, 4.0], [1.0, 3.0, 9.0]])
    assert median_ratio(np.stack([base, base / 2], axis=-1)) == (2.0, 2.0, 2.0)
    sessions = np.array([[1.0, 1.0], [3.0, 3.0], [5.0, 5.0]])
    ratio, low, high = median_ratio(np.stack([sessions, np.ones_like(sessions)], axis=-1))
    assert (ratio, low, high) == (3.0, 1.0, 5.0)


def test_throughput_counts_the_samples_of_a_run() -> None:
    file = Timed(Path("a.onnx"), np.full((2, 3), 0.5), 10, ("CPUExecutionProvider",), None)
    document = Bench((file,), 8, 1, "wall time").to_json()
    assert document["files"][0]["samples_per_second"] == 16
    assert (document["batch"], document["sessions"], document["rounds"]) == (8, 2, 3)


def test_inputs_have_the_declared_types_and_the_sizes_that_are_given(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, ("batch", None, "tokens"))
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ("batch", "tokens"))
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x, ids],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)])  # fmt: skip
    path = tmp_path / "two.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    inputs = inputs_for(path, declared(path), 4, {"tokens": 7, "x.1": 3}, 0)
    assert (inputs["x"].dtype, inputs["x"].shape) == (np.float16, (4, 3, 7))
    assert (inputs["ids"].dtype, inputs["ids"].shape) == (np.int64, (4, 7))
    assert set(np.unique(inputs["ids"])) == {0, 1}
    with pytest.raises(InputError) as caught:
        inputs_for(path, declared(path), 4, {"tokens": 7}, 0)
    assert str(caught.value) == (
        "input: the size 'x.1' of input 'x' is known only at run time\n  fix: give it: sizes={'x.1': 128}"
    )


def test_a_batch_that_the_file_does_not_take_is_refused(tmp_path: Path) -> None:
    path = product(tmp_path / "two.onnx", 1, (2, 64))
    assert bench([path], batch=2, sessions=1, rounds=1).samples == 2
    with pytest.raises(InputError) as caught:
        bench([path], batch=3)
    assert (
        str(caught.value) == f"input: {path} takes 2 samples at a time, but the batch has 3\n  fix: run it with batch=2"
    )


def test_a_provider_that_is_not_there_is_an_error_and_no_silent_fallback() -> None:
    with pytest.raises(
        HostError, match="cannot run on CUDAExecutionProvider here: this build of onnxruntime does not contain it"
    ):
        bench([DIGITS], provider="cuda")


def test_a_file_that_does_not_run_names_its_inputs(tmp_path: Path) -> None:
    path = product(tmp_path / "open.onnx", 1, ("batch", "width"))
    with pytest.raises(HostError, match=r"does not run on inputs x \[1, 63\]"):
        bench([path], sizes={"width": 63})
    with pytest.raises(HostError, match="there is no file"):
        bench([tmp_path / "absent.onnx"])
    (tmp_path / "broken.onnx").write_text("no model")
    with pytest.raises(HostError, match="onnxruntime refuses"):
        bench([tmp_path / "broken.onnx"])


def test_the_command_compares_a_model_with_its_lowered_one(tmp_path: Path) -> None:
    program = cmrc.trace(DIGITS)
    plan = cmrc.Plan(program).do("act3", units=range(0, 128, 2), constant=0.1)
    small = tmp_path / "small.onnx"
    cmrc.lower(program, plan).save(small)
    options = ("--sessions", "2", "--rounds", "3", "--batch", "4")
    document = json.loads(cli("bench", str(DIGITS), str(small), *options, "--json").stdout)
    assert [row["file"] for row in document["files"]] == [str(DIGITS), str(small)]
    assert document["files"][1]["bytes"] == small.stat().st_size
    assert document["files"][1]["providers"] == ["CPUExecutionProvider"]
    assert (document["batch"], document["threads"], document["clock"]) == (4, 1, "CPU time of the calling thread")
    shown = cli("bench", str(DIGITS), str(small), *options)
    assert shown.exit_code == 0
    assert "small.onnx" in shown.stdout
    assert "batch 4, 1 thread; medians of 2 sessions of 3 runs" in shown.stdout
    wrong = cli("bench", str(DIGITS), "--size", "batch")
    assert wrong.exit_code == 2
    assert "--size 'batch' is not understood" in wrong.stderr


def test_missing_libraries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `ldd` lists them; where there is no `ldd`, the loader's own message is all there is."""
    ldd = tmp_path / "ldd"
    ldd.write_text(
        "#!/bin/sh\nprintf '\\tlibcublas.so.13 => not found\\n\\tlibc.so.6 => /lib/libc.so.6 (0x1)\\n\\tlibcuda.so.1 => not found\\n'\n"
    )
    ldd.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert missing_libraries(tmp_path / "provider.so") == ["libcublas.so.13", "libcuda.so.1"]
    monkeypatch.setenv("PATH", "")
    assert missing_libraries(tmp_path / "provider.so") == []
