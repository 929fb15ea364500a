"""A Qwen3-Omni small enough for two CPU cores: stock transformers classes, a small config, seeded random weights.

The weights mean nothing, but whatever decides if a restored prefix is right is the real thing: rotary attention over a
KV cache, routed experts, the audio encoder, the talker's two input projections, its code predictor and the vocoder.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import transformers
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

# Text is tokenised as UTF-8 bytes, ids 0 to 255; the control tokens follow.
NUM_BYTE_TOKENS: Final = 256
IM_START, IM_END, SYSTEM, USER, ASSISTANT = range(256, 261)
TTS_PAD, TTS_BOS, TTS_EOS = range(261, 264)
AUDIO, IMAGE, VIDEO, AUDIO_START, AUDIO_END, VISION_START = range(264, 270)

ACCEPT_HIDDEN_LAYER: Final = 4
STORED_LAYERS: Final = (0, ACCEPT_HIDDEN_LAYER)
"""What the talker reads: the embeddings for text tokens, one middle layer for audio, image and video tokens."""

NUM_MEL_BINS: Final = 128
SPEAKER: Final = "ethan"

_THINKER_HIDDEN: Final = 512
_TALKER_HIDDEN: Final = 256  # the code predictor must have the same
_CODEBOOK: Final = 512
_CODE_GROUPS: Final = 4
CODEC_EOS, _NOTHINK, _THINK_BOS, _THINK_EOS, CODEC_PAD, _CODEC_BOS, _SPEAKER_ID = range(_CODEBOOK, _CODEBOOK + 7)

_MULTIMODAL_IDS: Final = {
    "audio_token_id": AUDIO,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "audio_start_token_id": AUDIO_START,
    "vision_start_token_id": VISION_START,
}


def build_model(*, dtype: torch.dtype, seed: int = 0, small: bool = False) -> Qwen3OmniMoeForConditionalGeneration:
    """Build thinker, talker and vocoder, about 115M parameters; equal arguments give bit-equal weights in any process.

    The stock initialisation leaves the talker's experts and routers at zero, so it would hardly listen to its input.
    Every matrix is drawn anew with a gain that keeps activations at their scale from layer to layer.

    Args:
        dtype: of the weights; they are drawn in float32 and then rounded.
        seed: of the weights.
        small: a thinker with fewer layers and smaller experts, for runs in float64.
    """
    # the talker's config warns of M-RoPE settings that its own rotary embedding reads
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    config = tiny_config(small=small)
    model: Qwen3OmniMoeForConditionalGeneration = Qwen3OmniMoeForConditionalGeneration._from_config(  # type: ignore[no-untyped-call]
        config, dtype=dtype
    ).eval()
    if dtype is torch.float64:  # the grouped matrix product of the experts doesn't have it
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn * _standard_deviation(name, parameter.shape))
    return model


def tiny_config(*, small: bool = False) -> Qwen3OmniMoeConfig:
    """The config; every control id lies inside its vocabulary, which the stock defaults would not."""
    return Qwen3OmniMoeConfig(
        thinker_config=_thinker_config(small),
        talker_config=_talker_config(),
        code2wav_config=_vocoder_config(),
        im_start_token_id=IM_START,
        im_end_token_id=IM_END,
        system_token_id=SYSTEM,
        user_token_id=USER,
        assistant_token_id=ASSISTANT,
        tts_pad_token_id=TTS_PAD,
        tts_bos_token_id=TTS_BOS,
        tts_eos_token_id=TTS_EOS,
    )


def _thinker_config(small: bool) -> dict[str, Any]:
    return {
        "text_config": {
            "vocab_size": 320,
            "hidden_size": _THINKER_HIDDEN,
            "num_hidden_layers": ACCEPT_HIDDEN_LAYER + 1 if small else 8,
            "moe_intermediate_size": 128 if small else 1024,
            **_attention(heads=8, head_dim=64),
            **_experts(),
        },
        "audio_config": {
            "num_mel_bins": NUM_MEL_BINS,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 64,
            "downsample_hidden_size": 16,
            "output_dim": _THINKER_HIDDEN,
        },
        "vision_config": {  # never run, but the thinker always has one
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": _THINKER_HIDDEN,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        "user_token_id": USER,
        **_MULTIMODAL_IDS,
    }


def _talker_config() -> dict[str, Any]:
    attention = _attention(heads=8, head_dim=32)
    return {
        "accept_hidden_layer": ACCEPT_HIDDEN_LAYER,
        "thinker_hidden_size": _THINKER_HIDDEN,
        "num_code_groups": _CODE_GROUPS,
        "text_config": {
            # generate() suppresses the last 1024 ids, which is where the codec's control tokens have to be
            "vocab_size": _CODEBOOK + 1024,
            "hidden_size": _TALKER_HIDDEN,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            **attention,
            **_experts(),
        },
        "code_predictor_config": {
            "vocab_size": _CODEBOOK,
            "hidden_size": _TALKER_HIDDEN,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_code_groups": _CODE_GROUPS,
            "num_attention_heads": attention["num_attention_heads"],
            "num_key_value_heads": attention["num_key_value_heads"],
            "head_dim": attention["head_dim"],
        },
        "codec_eos_token_id": CODEC_EOS,
        "codec_nothink_id": _NOTHINK,
        "codec_think_bos_id": _THINK_BOS,
        "codec_think_eos_id": _THINK_EOS,
        "codec_pad_id": CODEC_PAD,
        "codec_bos_id": _CODEC_BOS,
        "speaker_id": {SPEAKER: _SPEAKER_ID},
        "spatial_merge_size": 2,
        **_MULTIMODAL_IDS,
    }


def _vocoder_config() -> dict[str, Any]:
    return {
        "codebook_size": _CODEBOOK,
        "num_quantizers": _CODE_GROUPS,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "decoder_dim": 32,
        "upsample_rates": [2, 2],
        "upsampling_ratios": [2, 2],
    }


def _attention(*, heads: int, head_dim: int) -> dict[str, Any]:
    side = head_dim // 6  # M-RoPE splits head_dim / 2 frequencies between time, height and width
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 32768,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [head_dim // 2 - 2 * side, side, side],
            "interleaved": True,
        },
    }


def _experts() -> dict[str, int]:
    return {"num_experts": 8, "num_experts_per_tok": 2}


def _standard_deviation(name: str, shape: torch.Size) -> float:
    if "embed" in name and "patch_embed" not in name:
        return 1.0
    fan_in = math.prod(shape[1:]) if "conv" in name else shape[-1]
    # without the extra gain the talker's codes depend on its input too little for a wrong prefix to be heard
    return (1.3 if name.startswith("talker.") else 1.0) / math.sqrt(fan_in)
