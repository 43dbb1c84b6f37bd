"""Models as `onnx-ir` holds them: values that know who produces and who reads them. For passes that are shorter that way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx

from ...errors import CorruptFileError

if TYPE_CHECKING:
    import onnx_ir as ir


def as_ir(model: onnx.ModelProto) -> ir.Model:
    import onnx_ir as ir  # takes a tenth of a second, and few graphs need it

    try:
        return ir.from_proto(model)
    except (ir.serde.SerdeError, ValueError) as error:
        reason = error.__cause__ or error
        raise CorruptFileError(f"not a valid graph ({reason})", remedy="Export it again.") from error


def as_proto(model: ir.Model) -> onnx.ModelProto:
    import onnx_ir as ir

    return ir.to_proto(model)
