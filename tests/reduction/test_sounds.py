"""Audio files as rows: windows, one channel, the model's rate, and clear errors."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest

from cmrc.errors import InputError
from cmrc.ir.graph import Value
from cmrc.reduction.samples import Reading, read_samples
from cmrc.reduction.sounds import Sounds

pytest.importorskip("soundfile", reason="soundfile is not installed: cmrc[audio]")

WAVE = (Value("audio", ("n", "time"), "float32"),)


def write(path: Path, seconds: float, rate: int, *, channels: int = 1, pitch: float = 440.0) -> None:
    """A tone of amplitude 0.5, in 16 bits."""
    tone = 0.5 * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)
    path.parent.mkdir(exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.repeat(np.round(tone * 32767).astype("<i2"), channels).tobytes())


def test_files_are_cut_into_windows_at_the_rate_of_the_model(tmp_path: Path) -> None:
    write(tmp_path / "a.wav", 1.0, 8000)
    write(tmp_path / "b.wav", 2.6, 16000, channels=2)
    samples = read_samples(tmp_path, WAVE, Reading(sounds=Sounds(16000, 1.0)))
    rows = samples.take(np.arange(len(samples)))["audio"]
    assert (rows.shape, rows.dtype) == ((4, 16000), np.float32)  # one of a, two and a half of b
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    assert np.abs(rows[1] - tone).max() < 1e-3
    assert np.abs(rows[0] - tone)[200:-200].max() < 0.01  # resampled
    assert rows[3, 9600:].tolist() == rows[3, :6400].tolist()  # the rest of b is 0.6 s, and is repeated
    assert samples.what == f"4 windows of 2 audio files in {tmp_path.name}, 1 s at 16000 Hz"
    assert samples.remarks == ()


def test_short_files_are_repeated_and_guesses_are_said(tmp_path: Path) -> None:
    write(tmp_path / "hum" / "a.wav", 0.25, 16000)
    write(tmp_path / "beep" / "b.wav", 0.5, 16000)
    samples = read_samples(tmp_path, (Value("audio", ("n", 1, 16000), "float32"),))
    taken = samples.take(np.arange(2))
    assert taken["audio"].shape == (2, 1, 16000)
    assert taken["audio"][1, 0, :4000].tolist() == taken["audio"][1, 0, 4000:8000].tolist()
    assert taken["labels"].tolist() == [0, 1]
    assert samples.remarks == (
        "audio is read at 16,000 samples a second, a guess: say rate= if the model takes another",
        "2 of 2 files are shorter than 1 s, and are repeated to fill it",
        "the 2 folders are used as classes 0 to 1, by name",
    )
    last = read_samples(tmp_path, (Value("audio", ("n", "time", 1), "float32"),))
    assert last.take(np.arange(1))["audio"].shape == (1, 64000, 1)


def test_a_model_of_features_gets_no_audio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("sounds") / "a.wav", 0.25, 16000)
    with pytest.raises(InputError) as caught:
        read_samples("sounds", (Value("mel", ("n", 80, 300), "float32"),))
    assert str(caught.value) == (
        "input: audio files are for a model with one input that is a waveform, [samples, time]; this one takes mel float32 "
        "['n', 80, 300]\n  at sounds\n  fix: compute what it takes (a spectrogram, say), and give arrays (.npz), or a loader: "
        "script.py:loader"
    )


def test_a_file_that_is_no_sound_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"RIFF....")
    with pytest.raises(InputError) as caught:
        read_samples(tmp_path, WAVE)
    assert f"\n  at {tmp_path / 'a.wav'}\n  fix: remove it, or save it as .wav" in str(caught.value)
    assert str(caught.value).startswith("input: is not a sound that can be read: ")
