"""Files of statistics and of arrays that somebody else wrote: read as they were meant, or refused with the reason."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nets import data, mlp
from safetensors.numpy import load_file, save
from tolerances import distance

import cmrc
from cmrc.errors import CmrcError, InputError, StatsError
from cmrc.statistics import arrays as array_files
from cmrc.statistics.arrays import read_arrays
from cmrc.statistics.site_stats import NEEDS
from cmrc.statistics.stats import Stats
from cmrc.statistics.stats_file import AXES, BROUGHT, FIX, OPTIONAL

EVERYTHING = ("range", "scatter", "curvature", "coupling", "rows")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (x, y), path = data(30, 5), tmp_path_factory.mktemp("stats") / "stats.safetensors"
    cmrc.calibrate(mlp(), [(x, y)], sites="acts.*", need=EVERYTHING).save(path)
    return path


def parts_of(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["stats"]), load_file(path)


Edit = Callable[[dict[str, Any], dict[str, np.ndarray]], object]


def first(header: dict[str, Any]) -> dict[str, Any]:
    return next(iter(header["sites"].values()))


def put(array: np.ndarray, value: float) -> None:
    array.reshape(-1)[0] = value


BROKEN: dict[str, tuple[Edit, str]] = {
    "another format": (lambda h, a: h.update(format="cmrc-stats-9"), "the header is wrong at format: Input should be"),
    "missing key": (lambda h, a: h.pop("data"), "the header is wrong at data: Field required"),
    "extra key": (lambda h, a: h.update(x=1), "the header is wrong at x: Extra inputs are not permitted"),
    "negative count": (
        lambda h, a: first(h).update(count=-3.0),
        "the header is wrong at sites.relu.count: Input should be greater than or equal to 0",
    ),
    "count of text": (
        lambda h, a: first(h).update(count="30"),
        "the header is wrong at sites.relu.count: Input should be a valid number",
    ),
    "unknown need": (lambda h, a: first(h).update(needs=["hope"]), "the header is wrong at sites.relu.needs.0: Input should be"),
    "no units": (lambda h, a: first(h)["columns"].update(units=0), "the header is wrong at sites.relu.columns.units"),
    "uneven slots": (lambda h, a: first(h)["columns"].update(slots=2), "1 features cannot be divided into 2 positions"),
    "no rows": (lambda h, a: first(h).update(count=0.0), "there are no rows, but there is an array 'AHA'"),
    "broken fingerprint": (lambda h, a: h.update(model={"a": 1}), "the header is wrong at model.structure: Field required"),
    "missing array": (lambda h, a: a.pop("0.scatter"), "the array 'scatter' is missing"),
    "array of no site": (lambda h, a: a.update({"7.mean": np.zeros(7)}), "the array '7.mean' belongs to no site"),
    "unknown array": (lambda h, a: a.update({"0.hope": np.zeros(7)}), "the array '0.hope' belongs to no site"),
    "unasked array": (lambda h, a: a.update({"0.lost": np.zeros(7)}), "there is an array 'lost', which was not asked for"),
    "extra column": (lambda h, a: a.update({"0.mean": np.zeros(8)}), "the array 'mean' has shape [8], not [7]"),
    "extra row": (lambda h, a: a.update({"0.hash": np.zeros(31)}), "the array 'row_g' has shape [30, 7], not [31, 7]"),
    "wrong rank": (lambda h, a: a.update({"0.mean": np.zeros((7, 1))}), "the array 'mean' has 2 axes, not 1"),
    "wrong dtype": (lambda h, a: a.update({"0.mean": np.zeros(7, "f4")}), "the array '0.mean' has dtype F32, not F64"),
    "NaN": (lambda h, a: put(a["0.H"], np.nan), "the array 'H' holds NaN or infinity"),
    "infinity": (lambda h, a: put(a["0.mean"], np.inf), "the array 'mean' holds NaN or infinity"),
    "negative squares": (lambda h, a: put(a["0.squares"], -1.0), "a sum of squares, or of absolute values, is negative"),
    "low above high": (lambda h, a: put(a["0.low"], 1e9), "the smallest value of a column is above its largest"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_of_statistics_is_refused_with_the_reason(name: str, whole: Path, tmp_path: Path) -> None:
    edit, reason = BROKEN[name]
    header, arrays = parts_of(whole)
    edit(header, arrays)
    path = tmp_path / "stats.safetensors"
    path.write_bytes(save(arrays, {"stats": json.dumps(header)}))
    with pytest.raises(StatsError) as caught:
        Stats.load(path)
    assert caught.value.reason.startswith(reason)
    assert (caught.value.at, caught.value.fix) == (str(path), FIX)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"sites": {}, "sites": {}}', "NaN", "7"])
def test_a_header_that_is_not_json_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "stats.safetensors"
    path.write_bytes(save({"0.mean": np.zeros(2)}, {"stats": text}))
    with pytest.raises(StatsError, match=r"the header is (not JSON|wrong)"):
        Stats.load(path)


@pytest.mark.parametrize("size", [0, 4, 8, 100, 5000, -1])
def test_a_file_of_statistics_that_is_cut_short_is_refused(size: int, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "stats.safetensors"
    path.write_bytes(whole.read_bytes()[:size])
    with pytest.raises(StatsError, match="cannot be read"):
        Stats.load(path)


def test_the_first_files_had_the_format_beside_the_header(whole: Path, tmp_path: Path) -> None:
    header, arrays = parts_of(whole)
    del header["format"]
    (tmp_path / "old").write_bytes(save(arrays, {"format": "cmrc-stats-1", "stats": json.dumps(header)}))
    assert Stats.load(tmp_path / "old").header() == Stats.load(whole).header()


def test_every_need_and_every_array_has_its_shape() -> None:
    assert set(BROUGHT) == set(NEEDS)
    known = {name for names in (*BROUGHT.values(), *OPTIONAL.values()) for name in names}
    assert known == set(AXES)


@given(st.data())
def test_a_mutated_file_of_statistics_is_read_or_refused(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject
) -> None:
    content = bytearray(whole.read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(draw.draw(st.integers(1, 6))):
        place = draw.draw(st.integers(0, header - 1) | st.integers(0, len(content) - 1))
        content[place] = draw.draw(st.integers(0, 255) | st.sampled_from(b'0123456789-.eE"{}[],:'))
    path = tmp_path_factory.mktemp("fuzz") / "stats.safetensors"
    path.write_bytes(bytes(content[: draw.draw(st.just(len(content)) | st.integers(0, len(content)))]))
    with suppress(CmrcError):
        stats = Stats.load(path)
        assert all(np.isfinite(a).all() for site in stats.sites.values() for a in site.arrays.values())


# ---------------------------------------------------------------- arrays


@pytest.mark.parametrize("form", ["npy", "npz", "compressed", "memory", "tuple"])
def test_big_endian_arrays_are_calibrated_on_as_their_numbers(form: str, tmp_path: Path) -> None:
    x, _ = data(24, 5)
    swapped = x.astype(">f8")
    given: Any = tmp_path / f"x.{'npy' if form == 'npy' else 'npz'}"
    if form == "npy":
        np.save(given, swapped)
    elif form in ("npz", "compressed"):
        (np.savez if form == "npz" else np.savez_compressed)(given, x=swapped)
    else:
        given = [swapped] if form == "memory" else [(swapped, np.zeros(24, ">i8"))]
    there, here = (cmrc.calibrate(mlp(), each, sites="acts.0") for each in (given, [x]))
    assert distance(there["acts.0"].mean, here["acts.0"].mean) == 0.0
    assert (there.digest == here.digest) == (form != "tuple")  # labels are data, too


@pytest.mark.parametrize("kind", [">f8", ">f4", ">f2", ">i8", ">u2", "|b1", "|u1"])
def test_every_kind_of_number_is_read_in_native_order(kind: str, tmp_path: Path) -> None:
    expected = np.arange(12).reshape(4, 3).astype(kind)
    np.save(tmp_path / "x.npy", expected)
    np.savez(tmp_path / "x.npz", x=np.asfortranarray(expected), empty=expected[:0])
    plain, zipped = read_arrays(tmp_path / "x.npy"), read_arrays(tmp_path / "x.npz")
    assert isinstance(zipped, dict)
    for array in (plain, zipped["x"]):
        assert np.array_equal(array, expected)
        assert array.dtype.isnative
    assert zipped["empty"].shape == (0, 3)


class Trap:
    """Unpickled, it would write a file."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (open, ("unpickled", "w"))  # type: ignore[return-value]


def test_pickles_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("object.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    np.savez("object.npz", x=np.array([Trap()], dtype=object))
    Path("pickle.npy").write_bytes(pickle.dumps(Trap()))
    for name, reason in (
        ("object.npy", "the array 'array' holds Python objects, not numbers"),
        ("object.npz", "the array 'x' holds Python objects, not numbers"),
        ("pickle.npy", "is not a file of arrays: it does not begin as a .npy file does"),
    ):
        with pytest.raises(InputError) as caught:
            read_arrays(Path(name))
        assert (caught.value.reason, caught.value.at) == (reason, name)
    assert not Path("unpickled").exists()


@pytest.mark.parametrize(("dtype", "what"), [("<U3", "<U3"), ("<M8[s]", "datetime64[s]"), ("<c16", "complex128")])
def test_arrays_that_are_not_numbers_are_refused(dtype: str, what: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3, dtype))
    with pytest.raises(InputError, match=rf"the array 'array' holds {what.replace('[', '.')[:8]}"):
        read_arrays(tmp_path / "x.npy")


def npy_header(shape: str, descr: str = "<f8") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


@pytest.mark.parametrize(
    "shape", ["(1000000000000,)", "(9223372036854775807, 9)", "(-3,)", "(3.5,)", "x", "(" * 100, "()" * 40, "(True,)"]
)
@pytest.mark.parametrize("zipped", [False, True])
def test_headers_that_promise_too_much_are_refused_before_memory_is_taken(
    shape: str, zipped: bool, tmp_path: Path
) -> None:
    path = tmp_path / ("x.npz" if zipped else "x.npy")
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", npy_header(shape) + b"\0" * 64)
    else:
        path.write_bytes(npy_header(shape) + b"\0" * 64)
    with pytest.raises(InputError) as caught:
        read_arrays(path)
    assert caught.value.at == str(path)


def test_a_zip_bomb_is_refused_before_it_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros((4000, 1000)))
    assert (tmp_path / "bomb.npz").stat().st_size < 60_000
    assert isinstance(read_arrays(tmp_path / "bomb.npz"), dict)  # 32 MB are always allowed
    monkeypatch.setattr(array_files, "ALWAYS", 2**20)
    with pytest.raises(InputError, match=r"expands to 32,000,128 bytes, and \d,\d{3},\d{3} are allowed"):
        read_arrays(tmp_path / "bomb.npz")


@given(st.data())
def test_a_mutated_file_of_arrays_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    x, y = data(12, 5)
    path = folder / draw.draw(st.sampled_from(["x.npy", "x.npz", "compressed.npz"]))
    if path.suffix == ".npy":
        np.save(path, x)
    else:
        (np.savez if path.stem == "x" else np.savez_compressed)(path, x=x, labels=y)
    content = bytearray(path.read_bytes())
    for _ in range(draw.draw(st.integers(1, 6))):
        place = draw.draw(st.integers(0, min(127, len(content) - 1)) | st.integers(0, len(content) - 1))
        content[place] = draw.draw(st.integers(0, 255) | st.sampled_from(b"0123456789-.<>()'{}[],:|OUfib"))
    path.write_bytes(bytes(content[: draw.draw(st.just(len(content)) | st.integers(0, len(content)))]))
    with suppress(CmrcError):
        arrays = read_arrays(path)
        for array in arrays.values() if isinstance(arrays, dict) else [arrays]:
            assert array.dtype.kind in "biuf"
            assert array.dtype.isnative
