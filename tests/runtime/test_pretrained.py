"""`save_pretrained` and `from_pretrained`: the folder is enough to build the module again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import torch_ort_ckpt as toc
from tests.models import batch, exported
from torch_ort_ckpt import CheckpointError


@pytest.mark.parametrize("name", ["mlp", "cnn", "dropout", "tied"])
def test_the_folder_is_enough(name: str, tmp_path: Path) -> None:
    model = toc.OrtModule(exported(name), engine="torch", seed=3)
    model(*batch(name)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path / "saved")
    assert {"model.safetensors", "config.json", "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"} == {
        place.name for place in (tmp_path / "saved").iterdir()
    }
    again = toc.OrtModule.from_pretrained((tmp_path / "saved").rename(tmp_path / "moved"), engine="torch")
    assert again.checkpoint() == model.checkpoint()
    assert list(again.state_dict()) == list(model.state_dict())
    assert again.eval()(*batch(name)) == model.eval()(*batch(name))
    plain = load_file(tmp_path / "moved" / "model.safetensors")
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in plain.items())
    toc.OrtOptimizer(again.train(), lr=0.1)


def test_options_of_the_folder_and_of_the_call(tmp_path: Path) -> None:
    toc.OrtModule(exported("mlp"), engine="torch", dimensions={"batch": 4}).save_pretrained(tmp_path)
    assert toc.OrtModule.from_pretrained(tmp_path, engine="torch").options.dimensions == {"batch": 4}
    assert toc.OrtModule.from_pretrained(tmp_path, engine="torch", dimensions=None).options.dimensions == {}
    assert isinstance(toc.OrtModule.from_pretrained(tmp_path, engine="torch", dimensions=None, return_dict=True)(*batch("mlp")), dict)


def test_existing_files_are_replaced_only_when_asked(tmp_path: Path) -> None:
    model = toc.OrtModule(exported("mlp"), engine="torch")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        model.get_parameter("fc2.bias").fill_(7)
    with pytest.raises(CheckpointError, match="overwrite=True"):
        model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["fc2.bias"][0] != 7
    model.save_pretrained(tmp_path, overwrite=True)
    assert load_file(tmp_path / "model.safetensors")["fc2.bias"][0] == 7


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"torch_ort_ckpt": 3}', '{"torch_ort_ckpt": {"version": 1, "trainable": 5, "dimensions": {}}}']
)
def test_a_folder_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config.json and model.safetensors"):
        toc.OrtModule.from_pretrained(tmp_path)
    toc.OrtModule(exported("mlp"), engine="torch").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json"):
        toc.OrtModule.from_pretrained(tmp_path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    toc.OrtModule(exported("mlp"), engine="torch").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["torch_ort_ckpt"]["trainable"].append("fc9.weight")
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"fc9\.weight"):
        toc.OrtModule.from_pretrained(tmp_path)
