"""Train artifacts with the ONNX Runtime of this environment, which has neither torch nor this library.

    python train.py FOLDER    # prints what held as JSON

A folder holds the artifacts, and in `expected.npz` batches with the losses that PyTorch found.
"""

import importlib.util
import json
import os
import sys
import types
from typing import Any

import numpy as np
import onnxruntime


def training_api() -> Any:
    """`onnxruntime.training.api` alone: the package around it imports torch, which no phone has."""
    package = types.ModuleType("onnxruntime.training")
    package.__path__ = [os.path.join(os.path.dirname(onnxruntime.__file__), "training")]
    sys.modules["onnxruntime.training"] = package
    from onnxruntime.training import api

    return api


def loss_of(found: Any) -> float:
    """The loss comes first; where the graph returns more, the API gives a tuple."""
    return float(found[0] if isinstance(found, (tuple, list)) else found)


def copy_back(module: Any, buffer: Any) -> None:
    """The Python API hands its own wrapper to the extension, which takes only what is inside it."""
    module.copy_buffer_to_parameters(buffer._ortvalue, trainable_only=True)


def main(folder: str) -> None:
    assert importlib.util.find_spec("torch") is None, "the client must do without torch"
    api = training_api()
    expected = np.load(os.path.join(folder, "expected.npz"))
    names = json.loads(str(expected["names"]))
    path = lambda name: os.path.join(folder, name)  # noqa: E731
    state = api.CheckpointState.load_checkpoint(path("checkpoint"))
    module = api.Module(path("training_model.onnx"), state, path("eval_model.onnx"))
    optimizer = api.Optimizer(path("optimizer_model.onnx"), module)
    found: dict[str, Any] = {"release": onnxruntime.__version__, "inputs": list(module.input_names()) == names}
    before = module.get_contiguous_parameters(trainable_only=True).numpy().copy()
    found["contiguous"] = before.size == int(expected["trainable"])
    found["contiguous with frozen"] = module.get_contiguous_parameters().numpy().size == int(expected["floats"])
    losses = []
    for step in range(len(expected["losses"])):
        batch = [expected[f"{name}{step}"] for name in names]
        module.train()
        if step in expected["accumulated"]:  # the same batch twice is twice its gradient
            module(*batch)
        losses.append(loss_of(module(*batch)))
        optimizer.step()
        module.lazy_reset_grad()
    found["loss"] = float(np.abs(np.array(losses) - expected["losses"]).max())
    module.eval()
    found["eval"] = abs(loss_of(module(*[expected[f"{name}0"] for name in names])) - float(expected["eval"]))
    api.CheckpointState.save_checkpoint(state, path("trained"), include_optimizer_state=True)
    found["read again"] = len(api.CheckpointState.load_checkpoint(path("trained")).parameters) == len(state.parameters)
    module.export_model_for_inferencing(path("inference.onnx"), ["output"])
    session = onnxruntime.InferenceSession(path("inference.onnx"), providers=["CPUExecutionProvider"])
    (output,) = session.run(["output"], {names[0]: expected[names[0] + "0"]})
    found["inference"] = float(np.abs(output - expected["output"]).max())
    copy_back(module, onnxruntime.OrtValue.ortvalue_from_numpy(before))
    module.train()
    found["copied back"] = float(np.abs(module.get_contiguous_parameters(trainable_only=True).numpy() - before).max())
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
