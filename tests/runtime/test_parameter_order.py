"""Parameters come in the exported module's order everywhere, so that optimizer states can be moved; with names they are matched by them."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.official import Official, assert_same
from tests.truth import DATA

pytestmark = pytest.mark.ort


class Shuffled(nn.Module):
    """Registered in one order, used in another, sorted in a third. All weights have one shape: shapes can't reveal a wrong order."""

    def __init__(self) -> None:
        super().__init__()
        self.z, self.a, self.m = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)) for _ in range(2)])
        self.register_buffer("scale", torch.full((6,), 0.5))
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.m(torch.tanh(self.a(x * self.scale))))
        return self.z(torch.tanh(self.blocks[0](torch.tanh(self.blocks[1](x))))) * self.gain


def native() -> Shuffled:
    torch.manual_seed(0)
    return Shuffled().train()


def data(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randint(0, 6, (8,), generator=generator)) for _ in range(count)]


def export(folder: Path, exporter: str = "torchscript", *, turned: bool = False, note: bool = True) -> toc.Artifacts:
    """`turned`: the graph has its parameters the other way round. Without `note`, the artifacts are as ORT's own tools make them."""
    artifacts = toc.export_artifacts(native(), (torch.randn(8, 6),), folder, exporter=exporter)
    users = [spec.name for spec in artifacts.inputs]
    for name in ("training_model.onnx", "eval_model.onnx"):
        model = onnx.load(folder / name)
        if turned:
            inputs = [copy.deepcopy(value) for value in model.graph.input]
            changed = [value for value in inputs if value.name in users] + [value for value in inputs[::-1] if value.name not in users]
            del model.graph.input[:]
            model.graph.input.extend(changed)
        if not note:
            del model.metadata_props[:]
        onnx.save(model, folder / name)
    return toc.Artifacts.load(folder)


@pytest.fixture(scope="module", params=["torchscript", "dynamo", "turned"])
def artifacts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> toc.Artifacts:
    turned = request.param == "turned"
    return export(tmp_path_factory.mktemp("shuffled"), "torchscript" if turned else request.param, turned=turned)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> toc.Artifacts:
    return export(tmp_path_factory.mktemp("foreign"), turned=True, note=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    for x, y in batches:
        loss = model(x, y) if isinstance(model, toc.OrtModule) else nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def assert_near(a: nn.Module, b: nn.Module) -> None:
    for (name, left), (other, right) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(left, right, rtol=2e-4, atol=2e-5)


def orders(model: toc.OrtModule) -> list[list[str]]:
    """The trainable parameters' order in every place that has one."""
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer, by_identity = toc.OrtOptimizer(model), {id(value): name for name, value in model.named_parameters()}
    session = toc.TrainingSession(model.artifacts, threads=1)
    return [
        [name for name, _ in model.named_parameters() if name in trainable],
        [name for name in model.state_dict() if name in trainable],
        list(model.named_trainable()),
        [name for name in model.named_tensors() if name in trainable],
        [by_identity[id(value)] for value in optimizer.param_groups[0]["params"]],
        optimizer.param_groups[0]["param_names"],
        optimizer.state_dict()["param_groups"][0]["param_names"],
        list(optimizer.groups()["group0"].states),
        list(session.get_optimizer_state()),
        [name for name in session.get_state_tensors() if name in trainable],
        [name for name in session.get_model_state()["full_precision"] if name in trainable],
        session.optimizer.param_groups[0]["param_names"],
    ]


def test_every_place_has_the_exported_module_s_order(artifacts: toc.Artifacts) -> None:
    module, model = native(), toc.OrtModule(artifacts, threads=1)
    expected = [name for name, _ in module.named_parameters()]
    assert expected != sorted(expected)
    assert all(found == expected for found in orders(model))
    assert list(model.state_dict()) == list(module.state_dict())
    assert [name for name, _ in model.named_parameters()] == expected
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in module.named_buffers()]
    assert [name for name, _ in copy.deepcopy(model).named_parameters()] == expected
    plain = toc.to_torch_module(artifacts)
    assert [name for name, _ in plain.named_parameters()] == expected


def test_foreign_artifacts_have_one_order_too(foreign: toc.Artifacts) -> None:
    model = toc.OrtModule(foreign, threads=1)
    found = orders(model)
    assert all(one == found[0] for one in found)
    assert found[0][0] == "gain"  # a module's own parameters come before those of its parts
    assert [name for name in found[0] if name[1] == "."] == [name for name in foreign.trainable if name[1] == "."]
    for folder in ("fbv2_ort1_19_2_adamw_full", "fbv1_ort1_16_3_adamw_full"):
        found = orders(toc.OrtModule(DATA / folder, threads=1))
        assert all(one == found[0] for one in found)


def test_what_ort_lays_out_stays_in_the_graph_s_order(artifacts: toc.Artifacts, tmp_path: Path) -> None:
    session, official = toc.TrainingSession(artifacts, threads=1), Official(artifacts, tmp_path)
    assert_same(session.get_contiguous_parameters(trainable_only=True), official.module.get_contiguous_parameters(True).numpy())
    for batch in data(3):
        assert_same(session.train_step(*batch), official.loss(*batch))
        session.optimizer_step()
        official.optimizer.step()
        session.lazy_reset_grad()
        official.module.lazy_reset_grad()
    assert_same(session.get_contiguous_parameters(trainable_only=True), official.module.get_contiguous_parameters(True).numpy())


def moved(source: str, target: str, artifacts: toc.Artifacts) -> tuple[nn.Module, nn.Module]:
    """Four steps in `source`, its states into `target`, four more in both."""

    def make(where: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        if where == "native":
            module = native()
            return module, torch.optim.AdamW(module.parameters(), lr=0.05)
        model = toc.OrtModule(artifacts, threads=1)
        return model, toc.OrtOptimizer(model, lr=0.05) if where == "ort" else torch.optim.AdamW(model.parameters(), lr=0.05)

    (model, optimizer), (other, other_optimizer) = make(source), make(target)
    step(model, optimizer, data(4))
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer, data(8)[4:])
    step(other, other_optimizer, data(8)[4:])
    return model, other


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(["native", "module", "ort"], 2)))
def test_adamw_states_move_between_the_module_ort_module_and_ort_optimizer(source: str, target: str, artifacts: toc.Artifacts) -> None:
    assert_near(*moved(source, target, artifacts))


class TestNames:
    def trained(self, artifacts: toc.Artifacts, order: int = 1) -> tuple[toc.OrtModule, torch.optim.Optimizer]:
        model = toc.OrtModule(artifacts, threads=1)
        optimizer = torch.optim.AdamW([pair for pair in model.named_parameters() if pair[1].requires_grad][::order], lr=0.05)
        step(model, optimizer, data(3))
        return model, optimizer

    def test_a_state_dict_of_another_order_is_matched_by_its_names(self, artifacts: toc.Artifacts) -> None:
        model, reversed_optimizer = self.trained(artifacts, -1)
        ours = toc.OrtOptimizer(model)
        ours.load_state_dict(reversed_optimizer.state_dict())
        for parameter, state in reversed_optimizer.state.items():
            assert torch.equal(ours.state[parameter]["exp_avg"], state["exp_avg"])
        assert ours.param_groups[0]["param_names"] == list(model.named_trainable())
        assert ours.param_groups[0]["lr"] == 0.05

    def test_names_of_wrapped_modules_count_by_the_plain_name(self, artifacts: toc.Artifacts) -> None:
        model, optimizer = self.trained(artifacts)
        content = optimizer.state_dict()
        content["param_groups"][0]["param_names"] = [f"module._orig_mod.{name}" for name in content["param_groups"][0]["param_names"]]
        ours = toc.OrtOptimizer(model)
        ours.load_state_dict(content)
        assert torch.equal(ours.state[model.a.weight]["exp_avg"], optimizer.state[model.a.weight]["exp_avg"])

    def test_strange_missing_and_repeated_names_are_refused(self, artifacts: toc.Artifacts) -> None:
        model, optimizer = self.trained(artifacts)
        for change, message in (("other.weight", "other.weight"), ("a.weight", "a.weight")):
            content = optimizer.state_dict()
            content["param_groups"][0]["param_names"][0] = change
            ours = toc.OrtOptimizer(model, lr=0.7)
            with pytest.raises(toc.CheckpointError, match=message):
                ours.load_state_dict(content)
            assert not ours.state
            assert ours.param_groups[0]["lr"] == 0.7

    def test_without_names_shapes_that_do_not_fit_the_order_are_refused(self, artifacts: toc.Artifacts) -> None:
        model = toc.OrtModule(artifacts, threads=1)
        alphabetical = torch.optim.AdamW([value for _, value in sorted(model.named_trainable().items())])
        step(model, alphabetical, data(1))
        with pytest.raises(toc.CheckpointError, match="param_names"):
            toc.OrtOptimizer(model).load_state_dict(alphabetical.state_dict())

    def test_a_state_dict_of_an_earlier_release_is_refused_unless_the_order_is_given(self, foreign: toc.Artifacts) -> None:
        """0.1.0 had the order of the graph, no names, and none of PyTorch's own switches."""
        model = toc.OrtModule(foreign, threads=1)
        parameters = model.named_trainable()
        assert list(parameters) != foreign.trainable
        earlier = toc.OrtOptimizer(model, params=[parameters[name] for name in foreign.trainable])
        step(model, earlier, data(2))
        content = copy.deepcopy(earlier.state_dict())
        del content["param_groups"][0]["param_names"]
        with pytest.raises(toc.CheckpointError, match="earlier release"):
            toc.OrtOptimizer(model).load_state_dict(content)
        content["param_groups"][0]["param_names"] = foreign.trainable
        ours = toc.OrtOptimizer(model)
        ours.load_state_dict(content)
        assert torch.equal(ours.state[model.z.weight]["exp_avg"], earlier.state[model.z.weight]["exp_avg"])

    def test_groups_that_do_not_fit_are_a_checkpoint_error(self, artifacts: toc.Artifacts) -> None:
        model, optimizer = self.trained(artifacts)
        parameters = list(model.named_trainable().values())
        split = toc.OrtOptimizer(model, params=[{"params": parameters[:2]}, {"params": parameters[2:]}])
        with pytest.raises(toc.CheckpointError, match="group"):
            split.load_state_dict(optimizer.state_dict())
        unnamed = torch.optim.AdamW(parameters[:2])
        with pytest.raises(toc.CheckpointError, match="parameters"):
            toc.OrtOptimizer(model).load_state_dict(unnamed.state_dict())

    def test_groups_added_later_have_names(self, artifacts: toc.Artifacts) -> None:
        model = toc.OrtModule(artifacts, threads=1)
        optimizer = toc.OrtOptimizer(model, params=[model.a.weight, model.a.bias])
        optimizer.add_param_group({"params": model.z.parameters(), "lr": 0.5})
        optimizer.add_param_group({"params": [("whatever", model.m.weight)]})
        assert [group["param_names"] for group in optimizer.param_groups] == [
            ["a.weight", "a.bias"],
            ["z.weight", "z.bias"],
            ["m.weight"],
        ]
        with pytest.raises(toc.CheckpointError, match="only parameters of the model"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    def test_state_dicts_made_from_checkpoints_carry_names(self, artifacts: toc.Artifacts) -> None:
        model, optimizer = self.trained(artifacts)
        state = toc.from_torch(model, optimizer)
        assert toc.to_optimizer_state_dict(state, model)["param_groups"][0]["param_names"] == list(model.named_trainable())
        ours = toc.OrtOptimizer(toc.OrtModule(artifacts, threads=1))
        content = toc.to_optimizer_state_dict(state, ours)
        assert content["param_groups"][0]["param_names"] == list(model.named_trainable())
        ours.load_state_dict(content)
        assert torch.equal(ours.state[ours.model.z.weight]["exp_avg"], optimizer.state[model.z.weight]["exp_avg"])


def test_the_note_of_the_order_is_checked(artifacts: toc.Artifacts, tmp_path: Path) -> None:
    for text in ("nonsense", "[1, 2]", '{"order": "fc"}', "[" * 100_000):
        for path in artifacts.folder.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        model = onnx.load(tmp_path / "training_model.onnx")
        (entry,) = (entry for entry in model.metadata_props if entry.key.startswith("torch_ort_ckpt"))
        entry.value = text
        onnx.save(model, tmp_path / "training_model.onnx")
        with pytest.raises(toc.CheckpointError, match="order"):
            toc.OrtModule(tmp_path)
