"""Data of any kind as rows: arrays with and without names, pictures, loaders, random numbers; and how they are split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cmrc.errors import InputError
from cmrc.ir.graph import Value
from cmrc.reduction.images import Pictures
from cmrc.reduction.samples import (
    LIMIT,
    MOST,
    WORK,
    Reading,
    Rows,
    Span,
    affordable_rows,
    first_rows,
    held,
    load_function,
    padded_again,
    read_samples,
)
from cmrc.statistics.batches import fixed_batch

IMAGE = (Value("image", ("batch", 1, 2, 2), "float32"),)
TOKENS = (Value("ids", ("batch", "length"), "int64"), Value("mask", ("batch", "length"), "int64"))
DRAWN = np.random.default_rng(0).normal(size=(10, 1, 2, 2)).astype(np.float32)


def everything(samples: Any) -> dict[str, np.ndarray]:
    return Rows(samples, np.arange(len(samples))).all()


def test_one_input_needs_no_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", pictures=DRAWN, labels=np.arange(10), index=np.arange(10))
    samples = read_samples(tmp_path / "a.npz", IMAGE)
    assert samples.remarks == ("the array 'pictures' is taken as input 'image'",)
    rows = everything(samples)
    assert np.array_equal(rows["image"], DRAWN)
    assert np.array_equal(rows["labels"], np.arange(10))


def test_inputs_are_told_apart_by_shape(tmp_path: Path) -> None:
    values = (*IMAGE, Value("size", ("batch", 2), "float32"))
    np.savez(tmp_path / "a.npz", x=DRAWN, z=np.ones((10, 2), np.float32))
    rows = everything(read_samples(tmp_path / "a.npz", values))
    assert rows["image"].shape == (10, 1, 2, 2)
    assert rows["size"].shape == (10, 2)


def test_a_folder_of_arrays_is_one_after_the_other(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", DRAWN[:4].astype(np.float64))
    np.save(tmp_path / "b.npy", DRAWN[4:])
    samples = read_samples(tmp_path, IMAGE)
    assert len(samples) == 10
    rows = samples.take(np.array([9, 0, 4]))["image"]
    assert rows.dtype == np.float32
    assert np.array_equal(rows, DRAWN[[9, 0, 4]])


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (
            {"x": np.ones((3, 5), np.int64), "z": np.ones((3, 5), np.int64)},
            "no array is called 'ids', and several fit its shape ['batch', 'length'] (there are x [3, 5], z [3, 5])",
        ),
        (
            {"ids": np.ones((3, 5), np.int64)},
            "no array is called 'mask', and none fits its shape ['batch', 'length'] (there are ids [3, 5])",
        ),
        (
            {"ids": np.ones((3, 5), np.int64), "mask": np.ones((4, 5), np.int64)},
            "the arrays do not have one row per sample: ids 3, mask 4",
        ),
    ],
)
def test_arrays_that_do_not_fit(arrays: dict[str, np.ndarray], text: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError) as caught:
        read_samples(tmp_path / "a.npz", TOKENS)
    assert caught.value.reason == text


def test_samples_of_another_shape_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((3, 1, 2, 5), np.float32))
    with pytest.raises(InputError) as caught:
        read_samples(tmp_path / "a.npy", IMAGE)
    assert caught.value.reason == "the samples are of shape [1, 2, 5], input 'image' takes [1, 2, 2]"


def test_whole_numbers_for_a_float_input_are_cast_with_a_remark(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full((3, 1, 2, 2), 255, np.uint8))
    samples = read_samples(tmp_path / "a.npy", IMAGE)
    assert samples.remarks == ("input 'image' is uint8, and is given to the model as float32, not scaled",)
    assert everything(samples)["image"].dtype == np.float32


def test_the_split_is_by_seed_and_disjoint(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", DRAWN)
    samples = read_samples(tmp_path / "a.npy", IMAGE)
    (one, other), again = samples.split(0.3, 1, None), samples.split(0.3, 1, None)
    assert (len(one.numbers), len(other.numbers)) == (7, 3)
    assert not set(one.numbers) & set(other.numbers)
    assert np.array_equal(one.numbers, again[0].numbers)
    assert not np.array_equal(one.numbers, samples.split(0.3, 2, None)[0].numbers)
    assert sum(len(part.numbers) for part in samples.split(0.5, 0, 6)) == 6
    with pytest.raises(InputError, match="1 samples cannot be split"):
        samples.split(0.3, 1, 1)


def test_a_fixed_batch_gets_whole_batches(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", DRAWN)
    fixed = (Value("image", (4, 1, 2, 2), "float32"),)
    assert fixed_batch(fixed) == 4
    assert fixed_batch(IMAGE) is None
    samples = read_samples(tmp_path / "a.npy", fixed)
    assert [len(batch["image"]) for batch in Rows(samples, np.arange(10))] == [4, 4]
    assert [len(batch["image"]) for batch in Rows(samples, np.arange(3))] == [4]
    assert [len(batch["image"]) for batch in Rows(read_samples(tmp_path / "a.npy", IMAGE), np.arange(10), 4)] == [
        4,
        4,
        2,
    ]


def test_a_loader_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "data.py"
    script.write_text(
        "import numpy as np\ndef loader():\n    for i in range(5):\n        yield np.full((2, 1, 2, 2), i, 'float32'), np.array([i, i])\n"
        "listed = [{'image': np.ones((3, 1, 2, 2), 'float32')}]\n"
    )
    rows = everything(read_samples(f"{script}:loader", IMAGE))
    assert rows["image"][:, 0, 0, 0].tolist() == rows["labels"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len(read_samples(f"{script}:loader", IMAGE, Reading(limit=3))) == 4  # whole batches
    assert len(read_samples(f"{script}:listed", IMAGE)) == 3
    with pytest.raises(InputError, match="the script has no 'other'"):
        load_function(f"{script}:other")
    with pytest.raises(InputError, match="there is no such script"):
        load_function("nowhere.py:loader")
    script.write_text("1 / 0")
    with pytest.raises(InputError, match="the script failed: ZeroDivisionError: division by zero"):
        load_function(f"{script}:loader")


def test_random_numbers_come_with_a_warning() -> None:
    samples = read_samples(None, TOKENS)
    assert samples.is_random
    assert samples.remarks == ("the data are random numbers: what is measured on them says nothing about real inputs",)
    rows = everything(samples)
    assert rows["ids"].shape == rows["mask"].shape == (256, 16)
    assert len(read_samples(None, (Value("x", (2, 3), "float32"),))) == 256


# ---------------------------------------------------------------- pictures


def folder_of_pictures(folder: Path, *names: str) -> Path:
    image = pytest.importorskip("PIL.Image")
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (20, 10), (255, 51 * i, 0)).save(folder / name)
    return folder


def test_pictures_are_resized_and_normalised(tmp_path: Path) -> None:
    folder = folder_of_pictures(tmp_path, "a.png", "b.jpg")
    colour = (Value("image", ("batch", 3, 4, 4), "float32"),)
    samples = read_samples(folder, colour)
    assert samples.remarks == (
        "pictures are normalised as 'imagenet', guessed from the model's shape: give normalise= if that is wrong",
    )
    rows = everything(samples)["image"]
    assert (rows.shape, rows.dtype) == ((2, 3, 4, 4), np.float32)
    assert rows[0, 0] == pytest.approx((1 - 0.485) / 0.229)
    assert rows[0, 2] == pytest.approx(-0.406 / 0.225)
    for how, red in (("unit", 1.0), ("symmetric", 1.0), ("raw", 255.0)):
        said = read_samples(folder, colour, Reading(pictures=Pictures(how)))
        assert said.remarks == ()
        assert everything(said)["image"][0, 0] == pytest.approx(red)
    last = (Value("image", ("batch", "h", "w", 3), "uint8"),)
    samples = read_samples(folder, last, Reading(pictures=Pictures.of(None, 6)))
    assert everything(samples)["image"].shape == (2, 6, 6, 3)
    assert everything(samples)["image"].dtype == np.uint8
    with pytest.raises(InputError, match="normalise='gamma' is not known"):
        Pictures("gamma")  # type: ignore[arg-type]


def test_folders_are_classes(tmp_path: Path) -> None:
    folder = folder_of_pictures(tmp_path, "cat/1.png", "dog/1.png", "dog/2.png")
    rows = everything(read_samples(folder, (Value("image", ("n", 1, 4, 4), "float32"),)))
    assert rows["labels"].tolist() == [0, 1, 1]
    assert rows["image"].shape == (3, 1, 4, 4)


def test_pictures_for_a_model_that_takes_none(tmp_path: Path) -> None:
    folder = folder_of_pictures(tmp_path, "a.png")
    with pytest.raises(InputError, match="pictures need a model with one input of four axes"):
        read_samples(folder, TOKENS)
    with pytest.raises(InputError, match="has no axis of 1 or 3 colours"):
        read_samples(folder, (Value("image", ("n", 7, 4, 4), "float32"),))
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match="is not a picture that can be read"):
        everything(read_samples(folder, (Value("image", ("n", 3, 4, 4), "float32"),)))


def test_a_light_model_uses_more_rows() -> None:
    assert [affordable_rows(IMAGE, macs) for macs in (0, 1000, WORK // 3000, WORK)] == [MOST, MOST, 3000, LIMIT]
    assert affordable_rows(TOKENS, 1000) == LIMIT  # what a row costs is not known before it is read


def test_a_loader_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import numpy as np\ndef loader():\n    yield np.zeros((2, 1, 2, 2), 'f')\n    raise OSError('no disk')\n"
    )
    with pytest.raises(InputError) as caught:
        read_samples(f"{tmp_path / 's.py'}:loader", IMAGE)
    assert str(caught.value).startswith(
        f"input: the loader failed: OSError: no disk\n  at {tmp_path / 's.py'}:loader\n"
    )


def test_a_sample_that_is_not_finite_is_named_by_its_place(tmp_path: Path) -> None:
    drawn = DRAWN.copy()
    drawn[7, 0, 1, 1] = np.nan
    np.save(tmp_path / "a.npy", drawn)
    rows = Rows(read_samples(tmp_path / "a.npy", IMAGE), np.array([2, 7, 9]), size=2)
    with pytest.raises(InputError) as caught:
        list(rows)
    assert str(caught.value) == (
        "input: sample 7 has a NaN or infinite number in input 'image'\n  at a.npy\n  fix: leave out samples that are not finite"
    )


def test_what_was_read_is_held_as_far_as_it_fits() -> None:
    asked: list[int] = []

    def take(numbers: np.ndarray) -> dict[str, np.ndarray]:
        asked.extend(numbers.tolist())
        return {"image": DRAWN[numbers], "labels": numbers}

    taken = held(take, budget=4 * (16 + 8))
    for numbers in ([3, 1, 2], [1, 4, 5], [5, 3, 4, 1]):
        rows = taken(np.array(numbers))
        assert np.array_equal(rows["image"], DRAWN[numbers])
        assert np.array_equal(rows["labels"], numbers)
    assert asked == [3, 1, 2, 4, 5, 5]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((), "input 'state' is a single number: it has no axis that counts the samples"),
        ((2, "batch", 8), "input 'state' has the shape [2, batch, 8]: it has no axis that counts the samples"),
    ],
)
def test_an_input_that_no_sample_has_is_refused_with_the_way_out(shape: tuple[int | str, ...], reason: str) -> None:
    """A rate, or a state that is carried on: random numbers for it met an IndexError."""
    inputs = (*IMAGE, Value("state", shape, "float32"))
    with pytest.raises(InputError) as caught:
        read_samples(None, inputs)
    assert caught.value.reason == reason
    assert caught.value.fix == (
        "fix its value first, and reduce that model: `cmrc assume MODEL state=VALUE -o fixed.onnx`"
    )


def test_batches_of_texts_end_with_their_longest() -> None:
    lengths = np.array([3, 6, 2, 5, 1, 4])
    mask = (np.arange(8) < lengths[:, None]).astype(np.int64)
    given = {"ids": np.arange(48).reshape(6, 8), "mask": mask, "labels": np.arange(6)}
    samples = replace(read_samples([given], TOKENS), mask="mask")
    rows = Rows(samples, np.arange(6), 2).trimmed()
    assert [batch["mask"].sum(axis=1).tolist() for batch in rows] == [[3, 6], [1, 2], [4, 5]]  # the first as it was
    assert [batch["ids"].shape for batch in rows] == [(2, 6), (2, 2), (2, 5)]
    assert [batch["labels"].tolist() for batch in rows] == [[0, 1], [4, 2], [5, 3]]
    for span, batch in rows.with_spans():
        whole = padded_again(batch["mask"], span)
        assert whole.shape == (2, 8)
        assert np.array_equal(whole, mask[batch["labels"]])
    assert np.array_equal(padded_again(np.ones((2, 3)), Span(0, 5, 8)), np.ones((2, 3)))  # no column for each token
    assert first_rows(rows, 1)["ids"].shape == (1, 8)
    left = replace(read_samples([{**given, "mask": mask[:, ::-1]}], TOKENS), mask="mask")
    assert next(iter(Rows(left, np.array([2]), 1).trimmed()))["ids"].tolist() == [[22, 23]]
