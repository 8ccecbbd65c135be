"""Models from numbers, files and functions."""

import pytest
import torch

from hpcfsdp.errors import UsageError
from hpcfsdp.examples.gpt.run_config import ModelConfig
from hpcfsdp.examples.gpt.transformer import Block, count_elements
from hpcfsdp.plan import models

HERE = "tests.unit.plan.programs"


@pytest.mark.parametrize(("params", "layers"), [(7e9, 32), (70e9, 80), (1e8, 12), (1e6, 2), (405e9, 126)])
def test_a_decoder_has_as_many_parameters_as_asked_for(params, layers):
    shape = models.shape_of(params, layers, vocabulary=32000 if params > 1e7 else 256)
    assert shape.numel == pytest.approx(params, rel=0.005)
    with torch.device("meta"):
        made = models.Decoder(shape)
    assert sum(param.numel() for param in made.parameters()) == shape.numel


def test_operations_of_a_decoder_are_about_six_for_each_parameter_and_token():
    shape = models.shape_of(1e9, 16)
    found = models.from_numbers(shape, batch=1, sequence=128).step()
    embedding = shape.vocabulary * shape.width  # a look-up
    assert found.flops == pytest.approx(6 * (shape.numel - embedding) * 128, rel=0.01)
    assert found.tokens == 128 and len(found.units) == 17


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": 1e6, "layers": 32, "width": 4096}, "too few for 32 layers of width 4096"),
        ({"params": 1e9, "layers": 0}, "must be positive"),
        ({"params": 1e9, "layers": 8, "width": 1000, "heads": 3}, "must be a multiple of twice --heads 3"),
    ],
)
def test_decoders_that_do_not_exist(arguments, message):
    with pytest.raises(UsageError, match=message):
        models.shape_of(**arguments)


def test_a_run_gives_the_batch_of_a_rank(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {layers: 2, width: 64, heads: 2, context: 32}\ntrain: {batch: 24, accumulation: 2}\n")
    source, found = models.from_run(str(path), 4, 2)
    step = source.step()
    assert (step.tokens, found.train.accumulation) == (3 * 32, 2)
    assert step.numel == count_elements(ModelConfig(layers=2, width=64, heads=2, context=32))
    assert [unit.kind for unit in step.units] == ["Block", "Block", "GPT"]
    with pytest.raises(UsageError, match="less than one for each of 16 rank"):
        models.from_run(str(path), 16, 2)
    path.write_text("mesh: {tensor: 2}\n")
    with pytest.raises(UsageError, match="tensor-parallel layers are not planned"):
        models.from_run(str(path), 4, 2)


def test_a_factory_with_inputs():
    found = models.from_factory(f"{HERE}:with_inputs").step()
    assert (found.tokens, found.truths) == (40, 0)
    assert [unit.name for unit in found.units] == ["layers.0", "layers.1", "layers.2", ""]
    assert found.flops == 2 * 40 * 64 * 64 * (3 * 3 - 1)


def test_a_factory_without_inputs_gives_parameters_alone():
    source = models.from_factory(f"{HERE}:without_inputs", batch=1, sequence=8)
    assert "returns no inputs" in source.note
    found = source.step()
    assert found.numel == 3 * 64 * 65 + 128
    assert found.flops == 0


def test_classes_to_wrap():
    names = ("LayerNorm", "Linear")
    found = models.from_factory(f"{HERE}:with_inputs", wrap=names).step()
    assert len(found.units) == 5
    with pytest.raises(UsageError, match=r"no module of the model is a Attention: there are Linear"):
        models.from_factory(f"{HERE}:with_inputs", wrap=("Attention",)).step()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such_package:make", "cannot import no_such_package"),
        (f"{HERE}:missing", f"{HERE} has no function 'missing'; it has"),
        (f"{HERE}:not_a_function", "has no function 'not_a_function'"),
        ("module", "is not package.module:function"),
        (f"{HERE}:fails", "could not be made on the meta device .KeyError: 'no such dataset'"),
        (f"{HERE}:exits", "could not be made on the meta device .SystemExit: no licence"),
        (f"{HERE}:wrong", "returned a str: it must return a torch.nn.Module"),
    ],
)
def test_factories_that_do_not_work(text, message):
    with pytest.raises(UsageError, match=message):
        models.from_factory(text)


def test_the_size_of_given_inputs_cannot_be_chosen():
    with pytest.raises(UsageError, match="--batch and --sequence have no effect with"):
        models.from_factory(f"{HERE}:with_inputs", batch=2)


def test_inputs_have_the_dtype_of_the_computation():
    """As the engine casts them: images in float32, too, whose convolution refuses another dtype than its weight's."""
    source = models.from_factory(f"{HERE}:images")
    assert source.tokens == 2
    full, half = source.step(), source.step(compute=torch.bfloat16)
    assert half.flops == full.flops > 0
    assert half.saved_bytes < 0.6 * full.saved_bytes


def test_a_model_that_trains_nothing_is_refused():
    with pytest.raises(UsageError, match="requires gradients: there is nothing to train"):
        models.from_factory(f"{HERE}:frozen").step()


def test_operations_of_experts_count():
    """Each token goes through one expert, forward and backward."""
    found = models.from_factory(f"{HERE}:experts").step(compute=torch.bfloat16)
    assert found.flops == 3 * 2 * 48 * 32 * 64


@pytest.mark.parametrize(
    ("tensor", "tokens"),
    [
        (torch.zeros(2, 5, dtype=torch.int64), 10),
        (torch.zeros(2, 5, 8), 10),
        (torch.zeros(2, 3, 16, 16), 2),
        (torch.zeros(4, 8), 4),
    ],
)
def test_tokens_of_inputs(tensor, tokens):
    assert models._tokens_of(tensor) == tokens


def test_a_step_that_reads_values_is_refused():
    with pytest.raises(UsageError, match=r"does not run on the meta device .*--no-activations"):
        models.from_factory(f"{HERE}:reads").step()


def test_a_model_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**shape, vocab_size=100, max_position_embeddings=128)
    config.save_pretrained(tmp_path)
    found = models.from_transformers(str(tmp_path / "config.json"), batch=2, sequence=16).step()
    assert [unit.kind for unit in found.units] == ["LlamaDecoderLayer"] * 3 + ["LlamaForCausalLM"]
    assert found.tokens == 32 and found.flops > 6 * (found.numel - 6400) * 32 * 0.95
    with pytest.raises(UsageError, match="more than the 128 positions"):
        models.from_transformers(str(tmp_path), batch=1, sequence=256)


def test_no_model_of_transformers(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="there is no such file or folder"):
        models.from_transformers(str(tmp_path / "config.json"), batch=1, sequence=16)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="is no configuration of transformers"):
        models.from_transformers(str(tmp_path / "config.json"), batch=1, sequence=16)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(UsageError, match=r"needs transformers .*hpcfsdp\[hf\]"):
        models.from_transformers(str(tmp_path), batch=1, sequence=16)


def test_the_block_of_the_example_is_found():
    with torch.device("meta"):
        from hpcfsdp.examples.gpt.transformer import GPT

        model = GPT(ModelConfig(layers=3))
    assert [type(module) for module in models.units_of(model)] == [Block] * 3
