"""Audio: speech models of the package `transformers`, keyword spotting, separation and vocoders as apps have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .entry import CLASSES, VOCABULARY, Entry, both, classes, features, language_loss, nothing, token_labels, tokens, values, waves
from .pretrained import Field, FromWave, plain, wrapped

_LENGTHS = (400, 560)
_WAVE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 12}
_WAVE |= {"conv_dim": [8, 8, 8], "conv_stride": [5, 4, 2], "conv_kernel": [10, 8, 4], "num_feat_extract_layers": 3}
_WAVE |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False, "classifier_proj_size": 16}
_WAVE |= {"num_labels": CLASSES}


def _speech(name: str, model: str, kind: str, **sizes: Any) -> Entry:
    make = wrapped(FromWave, model, kind, **(_WAVE | sizes))
    batch = lambda size, length: {"input_values": torch.randn(size, length)}  # noqa: E731
    return Entry(name, "audio", make, batch, classes(), lengths=_LENGTHS, sequence={"input_values": (1,)})


class FromMelsAndTokens(Field):
    def forward(self, input_features: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        return self.call(input_features=input_features, decoder_input_ids=decoder_input_ids)


_WHISPER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "use_cache": False,
}
_WHISPER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
_WHISPER |= {"max_source_positions": 20, "max_target_positions": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WHISPER |= {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
_MELS = features(8, 40, name="input_features")
_AST: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_length": 32,
    "num_mel_bins": 16,
}
_AST |= {"patch_size": 8, "frequency_stride": 8, "time_stride": 8}

PRETRAINED = [
    _speech("wav2vec2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config"),
    _speech(
        "wav2vec2_layer_norm", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", feat_extract_norm="layer", do_stable_layer_norm=True
    ),
    _speech("hubert", "HubertForSequenceClassification", "HubertConfig"),
    _speech("wavlm", "WavLMForSequenceClassification", "WavLMConfig"),
    _speech("unispeech", "UniSpeechForSequenceClassification", "UniSpeechConfig"),
    _speech("unispeech_sat", "UniSpeechSatForSequenceClassification", "UniSpeechSatConfig"),
    _speech(
        "data2vec_audio", "Data2VecAudioForSequenceClassification", "Data2VecAudioConfig", conv_pos_kernel_size=3, num_conv_pos_embeddings=2
    ),
    _speech("sew", "SEWForSequenceClassification", "SEWConfig", squeeze_factor=2),
    Entry(
        "whisper",
        "audio",
        wrapped(FromMelsAndTokens, "WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER),
        both(_MELS, tokens("decoder_input_ids")),
        token_labels(),
        loss=language_loss,
        lengths=(6, 9),
        sequence={"decoder_input_ids": (1,), "labels": (1,)},
    ),
    Entry(
        "whisper_classifier",
        "audio",
        plain("WhisperForAudioClassification", "WhisperConfig", num_labels=CLASSES, classifier_proj_size=16, **_WHISPER),
        both(_MELS, classes()),
        nothing,
        loss=None,
    ),
    Entry(
        "audio_spectrogram_transformer",
        "audio",
        wrapped(FromWave, "ASTForAudioClassification", "ASTConfig", num_labels=CLASSES, **_AST),
        features(32, 16, name="input_values"),
        classes(),
    ),
    Entry(
        "moonshine",
        "audio",
        lambda: FromWave(_moonshine_encoder(), "last_hidden_state"),
        features(1200, name="input_values"),
        values(1, 32),
        loss="mse",
    ),
]


def _moonshine_encoder() -> nn.Module:
    from .pretrained import build

    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": VOCABULARY, "num_hidden_layers": 1, "num_attention_heads": 4}
    model: Any = build(
        "MoonshineModel",
        "MoonshineConfig",
        encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=1,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        **sizes,
    )
    return model.encoder


class DepthwiseSeparable(nn.Module):
    """DS-CNN for keyword spotting on mel features."""

    def __init__(self, channels: int = 12, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, channels, (10, 4), (2, 2), (5, 1), bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        self.blocks = nn.Sequential(*(self._block(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, CLASSES)

    def _block(self, channels: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


class ResidualKeyword(nn.Module):
    """TC-ResNet: time convolutions over mel channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(16, 12, 3, padding=1, bias=False)
        self.body = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(12, 12, 9, padding=4, bias=False),
                nn.BatchNorm1d(12),
                nn.ReLU(),
                nn.Conv1d(12, 12, 9, padding=4, bias=False),
                nn.BatchNorm1d(12),
            )
            for _ in range(2)
        )
        self.head = nn.Conv1d(12, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.body:
            x = torch.relu(x + block(x))
        return self.head(x.mean(2, keepdim=True)).squeeze(2)


class RecurrentKeyword(nn.Module):
    """CRNN: a convolution, a GRU, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, (5, 5), (2, 4), (2, 2))
        self.gru = nn.GRU(16, 12, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.relu(self.conv(x)).permute(0, 3, 1, 2).flatten(2)
        return self.head(self.gru(seen)[0].mean(1))


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 8, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**layer) for layer in range(layers))
        self.mix = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(layers))
        self.last = nn.Conv1d(8, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        total = torch.zeros_like(x)
        for layer, (conv, mix) in enumerate(zip(self.dilated, self.mix, strict=True)):
            kept, gate = conv(F.pad(x, (2**layer, 0))).chunk(2, dim=1)
            out = mix(torch.tanh(kept) * torch.sigmoid(gate))
            x, total = x + out, total + out
        return self.last(torch.relu(total))


class ConvTasNet(nn.Module):
    """Separation of two speakers: an encoder, masks, a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, 16, 8, 4, bias=False)
        self.norm = nn.GroupNorm(1, 16, eps=1e-8)
        self.body = nn.Sequential(
            nn.Conv1d(16, 12, 1),
            nn.PReLU(),
            nn.GroupNorm(1, 12),
            nn.Conv1d(12, 12, 3, padding=2, dilation=2, groups=12),
            nn.PReLU(),
            nn.Conv1d(12, 32, 1),
        )
        self.decoder = nn.ConvTranspose1d(16, 1, 8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.encoder(x)
        masks = torch.sigmoid(self.body(self.norm(seen))).unflatten(1, (2, 16))
        return torch.stack([self.decoder(seen * masks[:, speaker]).squeeze(1) for speaker in range(2)], dim=1)


def negative_si_snr(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The usual loss of separation, in decibels."""
    found, target = found - found.mean(-1, keepdim=True), target - target.mean(-1, keepdim=True)
    aligned = (found * target).sum(-1, keepdim=True) * target / (target.square().sum(-1, keepdim=True) + 1e-8)
    noise = found - aligned
    return -10 * torch.log10(aligned.square().sum(-1) / (noise.square().sum(-1) + 1e-8) + 1e-8).mean()


class Vocoder(nn.Module):
    """HiFi-GAN's generator: transposed convolutions with weight norm and dilated residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.first = norm(nn.Conv1d(8, 16, 7, padding=3))
        self.up = nn.ModuleList([norm(nn.ConvTranspose1d(16, 8, 8, 4, 2)), norm(nn.ConvTranspose1d(8, 4, 4, 2, 1))])
        self.blocks = nn.ModuleList(norm(nn.Conv1d(c, c, 3, padding=3, dilation=3)) for c in (8, 4))
        self.last = norm(nn.Conv1d(4, 1, 7, padding=3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for up, block in zip(self.up, self.blocks, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = x + block(F.leaky_relu(x, 0.1))
        return torch.tanh(self.last(F.leaky_relu(x)))


class FilterBank(nn.Module):
    """LEAF/SincNet: learned band-pass filters, log compression, PCEN-like smoothing."""

    time: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.low, self.band = nn.Parameter(torch.linspace(0.02, 0.3, 8)), nn.Parameter(torch.full((8,), 0.05))
        self.register_buffer("time", torch.arange(-15, 16, dtype=torch.float32) + 0.5)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self.low.abs()[:, None], (self.low.abs() + self.band.abs())[:, None]
        kernel = (torch.sin(6.2831853 * high * self.time) - torch.sin(6.2831853 * low * self.time)) / (3.1415927 * self.time)
        energy = F.avg_pool1d(F.conv1d(x, kernel[:, None], stride=4).square(), 9, 3)
        return self.head(torch.log1p(100 * energy).mean(2))


PHONES = [
    Entry("ds_cnn_keywords", "audio", DepthwiseSeparable, features(1, 24, 10), classes()),
    Entry("tc_resnet_keywords", "audio", ResidualKeyword, waves(16), classes(), lengths=(24, 31), sequence={"x": (2,)}),
    Entry("crnn_keywords", "audio", RecurrentKeyword, features(1, 8, 24), classes()),
    Entry(
        "wavenet",
        "audio",
        WaveNet,
        waves(),
        lambda size, length: {"target": torch.randn(size, 1, length)},
        loss="mse",
        lengths=(32, 45),
        sequence={"x": (2,), "target": (2,)},
    ),
    Entry("conv_tasnet", "audio", ConvTasNet, waves(), values(2, 64), loss=negative_si_snr, lengths=(64, 64)),
    Entry(
        "hifigan_generator",
        "audio",
        Vocoder,
        waves(8),
        lambda size, length: {"target": torch.randn(size, 1, 8 * length)},
        loss="l1",
        lengths=(6, 6),
    ),
    Entry("sincnet", "audio", FilterBank, waves(), classes(), lengths=(128, 200), sequence={"x": (2,)}),
]

ENTRIES = [*PRETRAINED, *PHONES]
