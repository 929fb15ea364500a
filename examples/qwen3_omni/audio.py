"""The audio clip of the first turn, and what the stock feature extractor makes of it."""

from __future__ import annotations

import hashlib
import io
import math
import wave
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

from .tiny_model import NUM_MEL_BINS

SAMPLE_RATE_HZ: Final = 16_000

# First three formants of five vowels in Hz, a male speaker's averages after Peterson and Barney (1952).
_FORMANTS_HZ: Final = ((730, 1090, 2440), (530, 1840, 2480), (270, 2290, 3010), (570, 840, 2410), (300, 870, 2240))
_FORMANT_WIDTHS_HZ: Final = (80, 110, 160)
_SYLLABLE_S: Final = 0.25


@dataclass(frozen=True)
class AudioClip:
    """One clip, ready for the thinker's audio encoder.

    Attributes:
        mel: log-mel features, float32 [NUM_MEL_BINS, frames].
        num_tokens: how many placeholder tokens the clip takes in the prompt.
        content_hash: SHA-256 of the 16-bit samples, hex. The placeholders of any two clips are the same token ids; this
            is what keeps their chunks apart in the cache.
    """

    mel: NDArray[np.float32]
    num_tokens: int
    content_hash: str


def synthesise_speech(*, seconds: float, seed: int = 0) -> NDArray[np.int16]:
    """A deterministic voice that babbles vowels, int16 [seconds * SAMPLE_RATE_HZ]: a source-filter synthesis.

    Args:
        seconds: length of the clip.
        seed: of the sequence of vowels and of the pitch contour.
    """
    rng = np.random.default_rng(seed)
    vowels = rng.integers(len(_FORMANTS_HZ), size=math.ceil(seconds / _SYLLABLE_S))
    voice = np.concatenate([_syllable(_FORMANTS_HZ[vowel], rng.uniform(95, 140, size=2)) for vowel in vowels])
    samples: NDArray[np.int16] = np.round(voice / np.abs(voice).max() * 0.8 * np.iinfo(np.int16).max).astype(np.int16)
    return samples[: round(seconds * SAMPLE_RATE_HZ)]


def to_wav(samples: NDArray[np.int16]) -> bytes:
    """A WAV file: 16 bit, mono, SAMPLE_RATE_HZ."""
    file = io.BytesIO()
    with wave.open(file, "wb") as clip:
        clip.setnchannels(1)
        clip.setsampwidth(2)
        clip.setframerate(SAMPLE_RATE_HZ)
        clip.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def from_wav(content: bytes) -> NDArray[np.int16]:
    """The samples of a WAV file.

    Raises:
        ValueError: it is none, or not 16 bit, mono, SAMPLE_RATE_HZ and of 0.1 s or longer.
    """
    try:
        with wave.open(io.BytesIO(content)) as clip:
            form = (clip.getframerate(), clip.getnchannels(), clip.getsampwidth())
            samples = np.frombuffer(clip.readframes(clip.getnframes()), dtype="u1")
    except (wave.Error, EOFError) as error:
        raise ValueError(f"no WAV file: {error}") from error
    if form != (SAMPLE_RATE_HZ, 1, 2) or len(samples) < 2 * SAMPLE_RATE_HZ // 10:
        raise ValueError("expected a WAV of 16 bit, mono, 16 kHz, of 0.1 s or longer")
    return samples[: len(samples) // 2 * 2].view("<i2").astype(np.int16)


def encode_clip(samples: NDArray[np.int16]) -> AudioClip:
    """Extract features as Qwen3-Omni's processor does: no padding to 30 s, no truncation.

    Args:
        samples: mono PCM at SAMPLE_RATE_HZ.
    """
    extractor: Any = WhisperFeatureExtractor(feature_size=NUM_MEL_BINS)  # type: ignore[no-untyped-call]
    features = extractor(
        samples.astype(np.float32) / 32768.0,
        sampling_rate=SAMPLE_RATE_HZ,
        padding=True,
        truncation=False,
        return_attention_mask=True,
        return_tensors="np",
    )
    frames = int(features["attention_mask"][0].sum())
    return AudioClip(
        mel=np.ascontiguousarray(features["input_features"][0, :, :frames], dtype=np.float32),
        num_tokens=int(_get_feat_extract_output_lengths(frames)),  # type: ignore[no-untyped-call]
        content_hash=hashlib.sha256(samples.tobytes()).hexdigest(),
    )


def _syllable(formants_hz: tuple[int, ...], pitch_hz: NDArray[np.float64]) -> NDArray[np.float64]:
    count = round(_SYLLABLE_S * SAMPLE_RATE_HZ)
    phase = 2 * np.pi * np.cumsum(np.linspace(pitch_hz[0], pitch_hz[1], count)) / SAMPLE_RATE_HZ
    harmonics = np.arange(1, int(4000 / pitch_hz.max()))
    frequencies = harmonics * pitch_hz.mean()
    distances = (frequencies[:, None] - np.array(formants_hz)) / np.array(_FORMANT_WIDTHS_HZ)
    gains = (1 / (1 + distances**2)).sum(axis=1) / harmonics
    syllable: NDArray[np.float64] = np.hanning(count) * (gains @ np.sin(harmonics[:, None] * phase))
    return syllable
