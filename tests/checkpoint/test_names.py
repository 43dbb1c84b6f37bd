"""`NameMap`: what belongs together is found, what is not certain is reported."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from torch_ort_ckpt.checkpoint.names import Entry, plain_name


def state_of(**tensors: torch.Tensor) -> toc.CheckpointState:
    return toc.CheckpointState({name.replace("__", "."): value.clone() for name, value in tensors.items()})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 3)
        self.fc2 = nn.Linear(3, 3)
        self.fc3 = nn.Linear(3, 3)


def exported(net: nn.Module) -> toc.CheckpointState:
    """As the older exporter with constant folding leaves it: matrices renamed and transposed, vectors under their own names."""
    state = toc.CheckpointState()
    number = 10
    for name, value in net.state_dict().items():
        if value.ndim == 2:
            number += 1
            state.trainable[f"onnx::MatMul_{number}"] = value.T.contiguous()
        else:
            state.trainable[name] = value.clone()
    return state


def test_identity_keeps_names() -> None:
    tensors = {"a": torch.zeros(2, 3)}
    assert toc.NameMap.identity().to_torch(tensors) == tensors
    assert toc.NameMap.identity().to_ort(tensors) == tensors


def test_from_dict_takes_all_spellings_and_round_trips() -> None:
    names = toc.NameMap.from_dict({"a": "x", "b": ("y", True), "c": {"name": "z", "transpose": True}, "t": ["u", {"name": "v"}]})
    tensors = {key: torch.rand(2, 3) for key in ("a", "b", "c", "t")}
    torch_side = names.to_torch(tensors)
    assert torch_side.keys() == {"x", "y", "z", "u", "v"}
    assert torch_side["y"].shape == torch_side["z"].shape == (3, 2)
    assert torch_side["u"] is torch_side["v"]
    back = names.to_ort(torch_side)
    assert all(torch.equal(back[key], value) for key, value in tensors.items())


@pytest.mark.parametrize("bad", [{"a": 3}, {"a": {"transpose": True}}, {"a": "x", "b": "x"}])
def test_from_dict_refuses_nonsense(bad: dict[str, object]) -> None:
    with pytest.raises(toc.CheckpointError):
        toc.NameMap.from_dict(bad)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_wrappers_are_seen_through(prefix: str) -> None:
    net = Net()
    state = toc.from_torch(net)
    wrapped = {prefix + name: value for name, value in net.state_dict().items()}
    names = toc.NameMap.match(state, wrapped)
    assert names.complete
    assert names.entries[f"{prefix}fc1.weight"] == Entry("fc1.weight")
    assert plain_name(f"{prefix}fc1.weight") == "fc1.weight"


def test_a_prefix_on_one_side_is_no_obstacle() -> None:
    net = Net()
    state = toc.CheckpointState({f"model.{name}": value for name, value in net.state_dict().items()})
    names = toc.NameMap.match(state, net)
    assert names.complete
    assert names.ort_name("fc1.weight") == "model.fc1.weight"


def test_renamed_and_transposed_weights_are_found_by_shape_and_value() -> None:
    net = Net()
    names = toc.NameMap.match(exported(net), net)
    assert names.complete, names.report()
    assert names.entries["fc1.weight"] == Entry("onnx::MatMul_11", transpose=True)
    assert names.how["fc1.weight"] == "shape"
    assert names.entries["fc2.weight"] == Entry("onnx::MatMul_12", transpose=True)
    assert names.entries["fc3.weight"] == Entry("onnx::MatMul_13", transpose=True)
    assert names.how["fc2.weight"] == "value"
    loaded = Net()
    loaded.load_state_dict(toc.to_state_dict(exported(net), names))
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in net.state_dict().items())


def test_what_is_ambiguous_is_reported_not_guessed() -> None:
    names = toc.NameMap.match(exported(Net()), Net())  # other values: the two square matrices can't be told apart
    assert names.unmatched_ort == ("onnx::MatMul_12", "onnx::MatMul_13")
    assert names.unmatched_torch == ("fc2.weight", "fc3.weight")
    assert "not matched in the checkpoint: onnx::MatMul_12" in names.report()
    assert "fc1.weight" in names.entries


def test_equal_values_twice_are_not_a_match() -> None:
    net = Net()
    with torch.no_grad():
        net.fc3.weight.copy_(net.fc2.weight)
    assert {"fc2.weight", "fc3.weight"} <= set(toc.NameMap.match(exported(net), net).unmatched_torch)


def test_a_square_matrix_alone_is_settled_by_its_operator() -> None:
    net = nn.Linear(3, 3, bias=False)
    renamed = toc.NameMap.match(state_of(**{"onnx::MatMul_5": torch.rand(3, 3)}), net)
    assert renamed.entries["weight"] == Entry("onnx::MatMul_5", transpose=True)
    unknown = toc.NameMap.match(state_of(**{"onnx::Add_5": torch.rand(3, 3)}), net)
    assert not unknown.complete
    same_name = toc.NameMap.match(state_of(weight=torch.rand(3, 3)), net)
    assert same_name.entries["weight"] == Entry("weight")


def test_the_right_name_with_the_wrong_shape_is_not_a_match() -> None:
    names = toc.NameMap.match(state_of(weight=torch.rand(5, 7), bias=torch.rand(3)), nn.Linear(3, 3))
    assert names.unmatched_torch == ("weight",)
    assert names.unmatched_ort == ("weight",)


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    net = Tied()
    state = state_of(embed__weight=net.embed.weight.detach())
    names = toc.NameMap.match(state, net)
    assert names.complete
    result = toc.to_state_dict(state, names)
    assert result["embed.weight"] is result["head.weight"]
    assert set(toc.from_torch(net, like=state).trainable) == {"embed.weight"}
