"""The names of formats and element types. Imports nothing, so that the command line can list them without importing torch."""

from __future__ import annotations

FORMATS: tuple[str, ...] = ("ort", "safetensors", "runner", "pbseq", "ortcp", "ortpt", "torch", "onnx", "dcp")
"""Names of all formats, in the order in which `detect` asks them."""

WRITABLE: tuple[str, ...] = tuple(name for name in FORMATS if name != "ortpt")
"""Those that can be written as well."""

DTYPES: dict[int, str] = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    14: "complex64",
    15: "complex128",
    16: "bfloat16",
    17: "float8_e4m3fn",
    18: "float8_e4m3fnuz",
    19: "float8_e5m2",
    20: "float8_e5m2fnuz",
}
"""ONNX's number of each element type, and PyTorch's name for it."""

FLOAT_DTYPES: dict[str, str] = {name: name for name in DTYPES.values() if "float" in name}
FLOAT_DTYPES |= {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
"""The floating-point types as a user may call them, and PyTorch's names."""

AVERAGES: tuple[str, ...] = ("mean", "median", "trimmed")
"""What `average(how=)` takes."""
