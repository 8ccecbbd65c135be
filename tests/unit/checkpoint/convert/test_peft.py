import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint import export_peft
from hpcfsdp.checkpoint.convert.peft import adapter_names
from hpcfsdp.errors import CheckpointError

CONFIG = {"peft_type": "LORA", "r": 1, "target_modules": {"b", "a"}, "bias": "none", "inference_mode": False}
WHERE = "base_model.model.h.0.q"


class Layer(nn.Module):
    """Named as PEFT names a linear layer with an adapter."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(3, 2)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(3, 1, bias=False), "other": nn.Linear(3, 1, bias=False)})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{WHERE}.lora_A.default.weight", f"{WHERE}.lora_A.weight"),
        (f"{WHERE}.lora_embedding_A.default", f"{WHERE}.lora_embedding_A"),
        (f"{WHERE}.lora_magnitude_vector.default.weight", f"{WHERE}.lora_magnitude_vector"),
        ("base_model.model.score.modules_to_save.default.weight", "base_model.model.score.weight"),
        ("h.0.lora_B.default.weight", "base_model.model.h.0.lora_B.weight"),
        ("base_model.model.e.token_adapter.trainable_tokens_delta.default",
         "base_model.model.e.token_adapter.trainable_tokens_delta"),
        (f"{WHERE}.lora_A.other.weight", None),
        (f"{WHERE}.base_layer.weight", None),
        ("base_model.model.score.original_module.weight", None),
        ("base_model.model.default.weight", None),
    ],
)  # fmt: skip
def test_names_in_the_file_are_without_that_of_the_adapter(name, expected):
    assert adapter_names([name], "default") == ({name: expected} if expected else {})


@pytest.fixture
def saved(tmp_path):
    model = nn.Sequential(Layer())
    return model, checkpoint.save(tmp_path / "a.h5", model=model, names=["*lora_*"])


def test_an_adapter_and_its_configuration(saved, tmp_path):
    model, path = saved
    weights, config = export_peft(path, tmp_path / "out", CONFIG).files
    found = load_file(weights)
    assert list(found) == ["base_model.model.0.lora_A.weight"]
    assert torch.equal(found["base_model.model.0.lora_A.weight"], model[0].lora_A["default"].weight)
    assert json.loads(config.read_text()) == {**CONFIG, "target_modules": ["a", "b"], "inference_mode": True}
    other, _ = export_peft(path, tmp_path / "other", config, adapter="other").files
    assert torch.equal(load_file(other)["base_model.model.0.lora_A.weight"], model[0].lora_A["other"].weight)
    with pytest.raises(CheckpointError, match="exists"):
        export_peft(path, tmp_path / "out", CONFIG)
    export_peft(path, tmp_path / "out", CONFIG, force=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**CONFIG, "peft_type": "IA3"}, r"peft_type 'IA3' cannot be exported .*save_pretrained"),
        ({**CONFIG, "bias": "all"}, "bias='all' cannot be exported"),
        (3, "config is a int"),
        ("nowhere.json", "nowhere.json: cannot be read"),
    ],
)
def test_configurations_that_do_not_fit(saved, tmp_path, config, message):
    with pytest.raises(CheckpointError, match=message):
        export_peft(saved[1], tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_the_adapter(saved, tmp_path):
    with pytest.raises(CheckpointError, match="has no LoRA adapter 'third'"):
        export_peft(saved[1], tmp_path / "out", CONFIG, adapter="third")
