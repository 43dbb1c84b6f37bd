"""Operators that ONNX Runtime 1.19.2 runs on the CPU only, also in a session on CUDA.

A node without a CUDA kernel runs on the CPU behind copies that wait for the device, in every step; ONNX Runtime says so only in a log
message below our level. The table is taken from the registrations of kernels in its sources: those of the CPU without those of CUDA, and
ArgMax and ArgMin, whose CUDA kernels end at opset 11. Standard operators count too: PyTorch's gradient graphs are made of them.
"""

from __future__ import annotations

from collections.abc import Iterable

_STANDARD = (
    "Acos Acosh AffineGrid ArgMax ArgMin Asin Asinh Atan Atanh AveragePoolGrad BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor "
    "BlackmanWindow Celu Col2Im ConvInteger Cosh DFT Det DynamicQuantizeLinear GlobalLpPool HammingWindow HannWindow Hardmax "
    "LpNormalization LpPool MaxPoolGrad MaxRoiPool MaxUnpool Mean MeanVarianceNormalization MelWeightMatrix Multinomial "
    "QLinearConv QLinearMatMul STFT Scale Sinh SplitToSequence Tan Unique"
)
_MICROSOFT = (
    "AttnLSTM BroadcastGradientArgs CDist CropAndResize DynamicQuantizeLSTM DynamicQuantizeMatMul ExpandDims FusedGemm GRUGrad GRUTraining "
    "GatherND LSTMGrad LSTMTraining MatMulFpQ4 MatMulInteger16 MatMulIntegerToFloat MaxpoolWithMask MurmurHash3 Pad QGemm QLinearAdd "
    "QLinearAveragePool QLinearConcat QLinearConv QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearSigmoid QLinearSoftmax "
    "QLinearWhere Range SparseToDenseMatMul Unique WordConvEmbedding"
)
CPU_ONLY = frozenset({("", name) for name in _STANDARD.split()} | {("com.microsoft", name) for name in _MICROSOFT.split()})

SHAPES_ONLY = frozenset({"BroadcastGradientArgs"})
"""Runs on the CPU and belongs there: it reads shapes, which the host has, and not the device's results."""


def fallbacks(operators: Iterable[tuple[str, str]]) -> list[str]:
    """Of these operators (domain and name), those that run on the CPU and make the device wait; each once, in order."""
    found = (name for domain, name in operators if ("" if domain == "ai.onnx" else domain, name) in CPU_ONLY and name not in SHAPES_ONLY)
    return list(dict.fromkeys(found))
