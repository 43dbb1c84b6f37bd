"""Time series: sensors, forecasting, anomalies; recurrent, convolutional and attention models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .entry import CLASSES, Entry, classes, features, series, values, waves
from .pretrained import Field, wrapped


class Recurrent(nn.Module):
    """Sensors to activities, with any of PyTorch's recurrent layers."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.body = kind(6, 10, batch_first=True, **options)
        self.head = nn.Linear(20 if options.get("bidirectional") else options.get("proj_size", 10), CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[0][:, -1])


class Convolved(nn.Module):
    """DeepConvLSTM: convolutions over time, then an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lstm, self.head = nn.Conv1d(6, 8, 5), nn.LSTM(8, 10, batch_first=True), nn.Linear(10, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.lstm(seen)[1][0][-1])


class Causal(nn.Module):
    """TCN: dilated causal convolutions with weight norm and residuals."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.convs = nn.ModuleList(norm(nn.Conv1d(6 if i == 0 else 8, 8, 3, padding=2 * 2**i, dilation=2**i)) for i in range(3))
        self.first, self.head = nn.Conv1d(6, 8, 1), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, skip = x.shape[2], self.first(x)
        for conv in self.convs:
            x = F.relu(conv(x)[..., :length]) + skip
            skip = x
        return self.head(x[..., -1])


class Cells(nn.Module):
    """A loop over an LSTMCell, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(6, 10), nn.Linear(10, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, memory = x.new_zeros(x.shape[0], 10), x.new_zeros(x.shape[0], 10)
        for step in range(x.shape[1]):
            hidden, memory = self.cell(x[:, step], (hidden, memory))
        return self.head(hidden)


class NBeats(nn.Module):
    """N-BEATS: blocks that explain what the earlier ones left."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 30)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forecast = x.new_zeros(x.shape[0], 6)
        for block in self.blocks:
            back, ahead = block(x).split([24, 6], dim=-1)
            x, forecast = x - back, forecast + ahead
        return forecast


class DLinear(nn.Module):
    """DLinear: a moving average and the rest, each through a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.trend, self.season, self.pool = nn.Linear(24, 6), nn.Linear(24, 6), nn.AvgPool1d(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        trend = self.pool(F.pad(x, (2, 2), mode="replicate"))
        return self.trend(trend) + self.season(x - trend)


def pinball(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Quantile loss for three quantiles."""
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=found.dtype)
    error = target[..., None] - found
    return torch.maximum(levels * error, (levels - 1) * error).mean()


class Quantiles(nn.Module):
    """A gated residual network over a window, three quantiles of the future."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.gate, self.norm, self.out = (
            nn.Linear(24, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 32),
            nn.LayerNorm(16),
            nn.Linear(16, 18),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.elu(self.inner(x))
        return self.out(self.norm(F.glu(self.gate(self.outer(first)), -1) + first)).view(-1, 6, 3)


class Attention(nn.Module):
    """A causal transformer over sensor windows, sinusoidal positions computed in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, 6)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        angles = torch.arange(length, dtype=x.dtype)[:, None] / 10 ** torch.arange(0, 1, 0.125, dtype=x.dtype)
        seen = self.embed(x) + torch.cat([angles.sin(), angles.cos()], -1)
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
        return self.head(self.body(seen, mask=mask))


class Spectral(nn.Module):
    """A state-space layer written as a long convolution: a kernel from decaying exponentials, applied by matmul with its Toeplitz form."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.weight, self.inputs, self.head = (
            nn.Parameter(torch.rand(8, 4)),
            nn.Parameter(torch.randn(8, 4)),
            nn.Linear(6, 8),
            nn.Linear(8, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        steps = torch.arange(length, dtype=x.dtype)
        lag = steps[:, None] - steps
        powers = torch.exp(-self.decay[:, :, None, None].abs() * lag.clamp(min=0)) * (lag >= 0)
        kernel = torch.einsum("cs,cstu->ctu", self.weight, powers)
        return self.head(F.gelu(torch.einsum("ctu,buc->btc", kernel, self.inputs(x))).mean(1))


class Scan(nn.Module):
    """A minimal gated recurrence in log space: cumsum and logcumsumexp instead of a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        log_keep = F.logsigmoid(-self.gate(x)).cumsum(1)
        log_value = F.logsigmoid(self.gate(x)) + torch.log(F.softplus(self.value(x)) + 1e-4)
        return self.head((log_keep + torch.logcumsumexp(log_value - log_keep, 1)).exp()[:, -1])


class FromPastValues(Field):
    def forward(self, past_values: torch.Tensor) -> torch.Tensor:
        return self.call(past_values=past_values)


_PAST = features(32, 3, name="past_values")
_PATCHES = {
    "num_input_channels": 3,
    "context_length": 32,
    "patch_length": 8,
    "patch_stride": 8,
    "prediction_length": 6,
    "num_hidden_layers": 2,
}
_PATCHES |= {"d_model": 16}
_LENGTHS = (12, 17)
_SENSORS: dict[str, Any] = {"batch": series(6), "targets": classes(), "lengths": (12, 12)}
_ANY_LENGTH = _SENSORS | {"lengths": _LENGTHS, "sequence": {"x": (1,)}}

ENTRIES = [
    Entry("lstm_sensors", "series", lambda: Recurrent(nn.LSTM), **_ANY_LENGTH),
    Entry("gru_sensors", "series", lambda: Recurrent(nn.GRU), **_ANY_LENGTH),
    Entry("rnn_sensors", "series", lambda: Recurrent(nn.RNN), **_ANY_LENGTH),
    Entry("lstm_stacked_bidirectional", "series", lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), **_SENSORS),
    Entry("gru_bidirectional", "series", lambda: Recurrent(nn.GRU, bidirectional=True), **_SENSORS),
    Entry("lstm_projected", "series", lambda: Recurrent(nn.LSTM, proj_size=6), **_SENSORS),
    Entry("lstm_cell_loop", "series", Cells, **_SENSORS),
    Entry("deep_conv_lstm", "series", Convolved, **_SENSORS),
    Entry("tcn", "series", Causal, waves(6), classes(), lengths=_LENGTHS, sequence={"x": (2,)}),
    Entry("n_beats", "series", NBeats, features(24), values(6), loss=nn.L1Loss()),
    Entry("dlinear", "series", DLinear, features(3, 24), values(3, 6), loss="mse"),
    Entry("quantile_forecast", "series", Quantiles, features(24), values(6), loss=pinball),
    Entry(
        "causal_transformer",
        "series",
        Attention,
        series(6),
        series(6, "target"),
        loss="mse",
        lengths=_LENGTHS,
        sequence={"x": (1,), "target": (1,)},
    ),
    Entry("state_space_convolution", "series", Spectral, **_ANY_LENGTH),
    Entry("min_gru_scan", "series", Scan, **_ANY_LENGTH),
    Entry(
        "patchtst",
        "series",
        wrapped(
            FromPastValues,
            "PatchTSTForPrediction",
            "PatchTSTConfig",
            output="prediction_outputs",
            ffn_dim=24,
            num_attention_heads=2,
            loss="mse",
            **_PATCHES,
        ),
        _PAST,
        values(6, 3),
        loss="mse",
    ),
    Entry(
        "patchtsmixer",
        "series",
        wrapped(
            FromPastValues,
            "PatchTSMixerForPrediction",
            "PatchTSMixerConfig",
            output="prediction_outputs",
            num_layers=2,
            loss="mse",
            **_PATCHES,
        ),
        _PAST,
        values(6, 3),
        loss="mse",
    ),
]
