"""The public names: adding is fine, renaming or losing one is not. And importing needs nothing optional."""

from __future__ import annotations

import ast
import inspect
import logging
import pickle
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from tests import user_program
from tests.truth import DATA


def test_the_names_are_there() -> None:
    expected = {
        "CheckpointError", "CheckpointState", "CheckpointWarning", "NameMap", "OptimizerGroup", "PartitionInfo", "DiffReport",
        "CheckpointManager", "LearningRate", "RunnerConfig", "TrainingRunner", "optimal_checkpoint_period",
        "average", "convert", "detect", "diff", "from_torch", "load", "save", "to_optimizer_state_dict", "to_state_dict", "verify",
        "CorruptFileError", "Entry", "Feed", "ResumableSampler", "Result", "Verification", "summarize",
        "CSVLogger", "JSONLinesLogger", "MLflowLogger", "MetricsLogger", "WandbLogger",
    }  # fmt: skip
    assert expected <= set(toc.__all__)
    assert all(hasattr(toc, name) for name in toc.__all__)
    assert all(inspect.getdoc(getattr(toc, name)) for name in toc.__all__)


def test_the_signatures_are_the_contract() -> None:
    def parameters(function: object) -> list[str]:
        return list(inspect.signature(function).parameters)  # type: ignore[arg-type]

    assert parameters(toc.load)[:3] == ["path", "format", "mmap"]
    assert {"device", "only", "strict"} <= set(parameters(toc.load))
    assert parameters(toc.save)[:7] == ["state", "path", "format", "include_optimizer", "include_mixed_precision", "overwrite", "durable"]
    assert parameters(toc.to_state_dict)[:4] == ["state", "names", "include_mixed_precision", "dtype"]
    assert parameters(toc.to_optimizer_state_dict)[:3] == ["state", "optimizer_or_module", "names"]
    assert parameters(toc.from_torch) == ["module_or_state_dict", "optimizer", "names", "properties", "like"]
    assert parameters(toc.average)[:2] == ["states_or_paths", "weights"]
    assert parameters(toc.convert)[:4] == ["source", "destination", "from_format", "to_format"]
    assert parameters(toc.diff)[:2] == ["a", "b"]
    assert parameters(toc.CheckpointState)[:8] == [
        "trainable", "frozen", "optimizer", "properties", "mixed_precision", "partitions", "nominal", "format_version",
    ]  # fmt: skip
    manager = {"directory", "period", "max_num_checkpoints", "keep_best", "async_save"}
    assert manager <= set(parameters(toc.CheckpointManager))
    assert parameters(toc.TrainingRunner)[:3] == ["model", "optimizer", "config"]
    assert parameters(toc.TrainingRunner.run)[1:] == ["train_loader", "test_loader"]
    assert parameters(toc.OptimizerGroup)[:4] == ["step", "initial_lr", "lr", "states"]


def test_a_name_is_the_class_that_signatures_mention() -> None:
    from torch_ort_ckpt import errors
    from torch_ort_ckpt.training import entry, feed, runner, sampler

    assert toc.Entry is entry.Entry  # the manager's, not that of a NameMap
    assert toc.Feed is feed.Feed
    assert toc.Result is runner.Result
    assert toc.ResumableSampler is sampler.ResumableSampler
    assert toc.CorruptFileError is errors.CorruptFileError


def test_every_public_name_is_listed_once() -> None:
    assert toc.__all__ == sorted(set(toc.__all__))
    assert set(toc._LAZY) <= set(toc.__all__)
    assert not set(toc._RENAMED) & set(toc.__all__)


def test_the_old_name_of_a_diff_report_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="Report is now DiffReport") as caught:
        assert toc.Report is toc.DiffReport
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError, match="no attribute 'Reprot'"):
        _ = toc.Reprot


def test_importing_needs_nothing_optional() -> None:
    code = (
        "import sys; import torch_ort_ckpt, torch_ort_ckpt.cli; "
        "bad = {'onnxruntime', 'h5py', 'lightning', 'pytorch_lightning', 'tensorboard', 'safetensors'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lazy_names_are_all_the_names() -> None:
    assert set(toc._LAZY) <= set(toc.__all__)
    assert all(getattr(toc, name).__module__ == "torch_ort_ckpt.errors" for name in set(toc.__all__) - set(toc._LAZY))  # cheap to import
    for name, module in toc._LAZY.items():
        assert getattr(toc, name).__module__.startswith(f"torch_ort_ckpt{module}"), name  # where it is defined, or below
        assert getattr(toc, name) is getattr(toc, name)


def test_static_names_are_the_lazy_ones() -> None:
    """Type checkers and the documentation read the imports under TYPE_CHECKING; they must say the same."""
    tree = ast.parse(inspect.getsource(toc))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    static = {alias.name: f".{node.module}" for node in imports for alias in node.names}
    assert static == toc._LAZY


FRESH = """
import torch_ort_ckpt as toc
assert set(toc.__all__) <= set(dir(toc))
assert toc.formats.WRITABLE and toc.operations and toc.checkpoint and toc.storage and toc.dtypes and toc.errors
assert not hasattr(toc, "nonsense")
names = {}
exec("from torch_ort_ckpt import *", names)
assert set(toc.__all__) <= set(names)
assert callable(names["diff"]) and names["diff"] is toc.diff
"""


def test_a_fresh_interpreter_finds_every_name() -> None:
    subprocess.run([sys.executable, "-c", FRESH], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = toc.nonsense
    with pytest.raises(ImportError, match="nonsense"):
        exec("from torch_ort_ckpt import nonsense")


def test_help_shows_the_functions() -> None:
    text = pydoc.plain(pydoc.render_doc(toc))
    assert "load(path" in text
    assert "class CheckpointState" in text


def test_the_first_screen_of_help_lists_every_name() -> None:
    text = inspect.getdoc(toc) or ""
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 110
    table = text.partition("\n\n")[2].partition("\n\n")[0]
    listed = [word for line in table.splitlines() for word in re.findall(r"\w+", line[14:])]
    assert {word for word in listed if word in toc.__all__} == set(toc.__all__)
    assert len([word for word in listed if word in toc.__all__]) == len(toc.__all__)


def test_what_users_may_touch_of_a_module_and_an_optimizer() -> None:
    """Everything else has an underscore: it may change with any release."""

    def own(kind: type, base: type) -> list[str]:
        return sorted(name for name in set(dir(kind)) - set(dir(base)) if not name.startswith("_"))

    assert own(toc.OrtModule, torch.nn.Module) == [
        "checkpoint", "device", "draws", "engine", "export_inference", "fix_dimensions", "from_pretrained", "lazy_reset_grad",
        "load_checkpoint",
        "named_tensors", "named_trainable", "nominal", "optimizer_spec", "options", "save_pretrained", "seed", "seed_dropout", "train_step",
    ]  # fmt: skip
    assert own(toc.OrtOptimizer, torch.optim.Optimizer) == [
        "checkpoint_step",
        "create_moments",
        "groups",
        "load_groups",
        "set_step",
        "to_torch",
    ]
    model = toc.OrtModule(DATA / "fbv2_ort1_19_2_adamw_full", engine="torch")
    assert {name for name in vars(model) if not name.startswith("_")} - set(vars(torch.nn.Module())) == {"artifacts"}


def test_classes_pickle() -> None:
    state = toc.CheckpointState(trainable={"w": torch.ones(2)})
    assert pickle.loads(pickle.dumps(state)) == state
    assert all(pickle.loads(pickle.dumps(getattr(toc, name))) is getattr(toc, name) for name in toc.__all__)


def test_a_program_that_type_checks_runs(tmp_path: Path) -> None:
    assert user_program.round_trip(tmp_path).equal
    assert user_program.specification().kind == "AdamW"
    assert [entry.step for entry in user_program.managed(tmp_path / "run", torch.nn.Linear(2, 2))] == [1]


def test_every_public_method_has_a_docstring() -> None:
    for name in toc.__all__:
        public = getattr(toc, name)
        assert public.__doc__, name
        for key, value in vars(public).items() if inspect.isclass(public) else ():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if not key.startswith("_") and callable(function):
                assert inspect.getdoc(function), f"{name}.{key}"


def test_dir_shows_every_public_name() -> None:
    assert set(toc.__all__) <= set(dir(toc))


def test_a_library_leaves_logging_to_the_application() -> None:
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("torch_ort_ckpt").handlers)
