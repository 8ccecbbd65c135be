"""ShardedTrainer next to transformers' own Trainer, which takes the same batches with a replicated model."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers as hf
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from hpcfsdp.errors import UsageError
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from hpcfsdp.integrations.transformers import ShardedTrainer
from tests.programs.loops import copied, shard
from tests.programs.test_accelerate import BATCH, Texts, alone, arguments_for, build, close
from tests.programs.test_transformers import GPT2

TIMES = ("runtime", "per_second", "preparation_time", "step_time")


def arguments(folder, world, kind=hf.TrainingArguments, **changes):
    values = dataclasses.asdict(arguments_for(folder, world.size))
    kept = {"learning_rate", "adam_epsilon", "lr_scheduler_type", "train_sampling_strategy", "logging_steps"}
    plain = {name: values[name] for name in kept}
    fixed = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "num_train_epochs": 1, "save_strategy": "no"}
    sizes = {"per_device_train_batch_size": BATCH // world.size, "per_device_eval_batch_size": BATCH // world.size}
    return kind(output_dir=str(folder), **{**plain, **fixed, **sizes, **changes})


def history(trainer):
    """Everything that was logged, without what depends on the clock or on the order of the last bit."""
    kept = [
        {key: value for key, value in entry.items() if not key.endswith(TIMES)} for entry in trainer.state.log_history
    ]
    return [{key: float(value) for key, value in entry.items()} for entry in kept]


def same_run(sharded, plain):
    torch.testing.assert_close(history(sharded), history(plain), rtol=1e-5, atol=1e-6)
    close(copied(sharded.accelerator.get_state_dict(sharded.model_wrapped)), _of_rank0(plain))


def _of_rank0(plain):
    return copied(plain.model.state_dict()) if plain.args.process_index == 0 else {}


def test_trains_as_one_process(world, shared_path):
    trainer = ShardedTrainer(build(), arguments(shared_path, world), train_dataset=Texts())
    trainer.train()
    assert isinstance(trainer.model_wrapped, FullyShardedDataParallel)
    assert len(trainer.model_wrapped.fsdp_modules(trainer.model_wrapped)) == 3
    losses, state = alone()
    close([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], losses)
    close(copied(trainer.model_wrapped.state_dict()), state)


MANNERS = {
    "accumulation": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "norm without clipping": {"max_grad_norm": 0.0, "lr_scheduler_type": "cosine"},
    "schedule and evaluation": {"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "linear"},
    "own checkpointing": {"gradient_checkpointing": True, "weight_decay": 0.1},
    "sgd": {"optim": "sgd", "learning_rate": 0.1, "label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS)
def test_trains_and_evaluates_as_the_plain_trainer(world, shared_path, manner):
    data = {"train_dataset": Texts(), "eval_dataset": Texts(7)}
    plain = hf.Trainer(build(), arguments(shared_path, world, **manner), **data)
    sharded = ShardedTrainer(build(), arguments(shared_path, world, **manner), **data)
    for trainer in (plain, sharded):
        trainer.train()
        trainer.evaluate()
    same_run(sharded, plain)


def test_evaluates_and_predicts_before_training(world, shared_path):
    """In shards, without an optimizer; training then begins from there."""
    data = {"train_dataset": Texts(), "eval_dataset": Texts(7), "compute_metrics": mean_of_logits}
    plain, sharded = (kind(build(), arguments(shared_path, world), **data) for kind in (Plain, ShardedTrainer))
    for trainer in (plain, sharded):
        trainer.evaluate()
        trainer.first = trainer.predict(Texts(5))
        trainer.train()
        trainer.second = trainer.predict(Texts(5))
    assert isinstance(sharded.model_wrapped, FullyShardedDataParallel)
    for number in ("first", "second"):
        got, expected = getattr(sharded, number), getattr(plain, number)
        np.testing.assert_allclose(got.predictions, expected.predictions, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(got.label_ids, expected.label_ids)
    assert not np.allclose(sharded.first.predictions, sharded.second.predictions)
    same_run(sharded, plain)


def mean_of_logits(prediction):
    return {"mean": float(prediction.predictions.mean())}


class Plain(hf.Trainer):
    """After an evaluation the library takes the model for one that has been prepared for training."""

    def train(self, *given, **named):
        del self.model._is_accelerate_prepared
        return super().train(*given, **named)


SHARDED = {
    "strategy": {"reshard_after_forward": False},
    "names": {
        "fsdp_transformer_layer_cls_to_wrap": "GPT2Block",
        "version": 1,
        "reshard_after_forward": "shard_grad_op",
    },
    "size": {"min_num_params": 1_000_000},
    "no units": {"auto_wrap_policy": "NO_WRAP", "cpu_offload": True},
    "checkpointing": {"activation_checkpointing": True, "forward_prefetch": True, "backward_prefetch": "backward_post"},
}


@pytest.mark.parametrize("kind", SHARDED)
def test_fsdp_config(world, shared_path, kind):
    trainer = ShardedTrainer(
        build(),
        arguments(shared_path, world, fsdp=world.size > 1, fsdp_config=dict(SHARDED[kind])),
        train_dataset=Texts(),
    )
    trainer.train()
    losses, state = alone()
    close([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], losses)
    close(copied(trainer.model_wrapped.state_dict()), state)
    model = trainer.model_wrapped
    units, checkpointed = (
        [module for module in model.modules() if isinstance(module, of)]
        for of in (FullyShardedDataParallel, CheckpointWrapper)
    )
    assert len(units) == {"no units": 1, "size": 1}.get(kind, 3)
    assert len(checkpointed) == (2 if kind == "checkpointing" else 0)
    grad_op = kind in ("strategy", "names")
    strategy = ShardingStrategy.SHARD_GRAD_OP if grad_op else ShardingStrategy.FULL_SHARD
    assert {unit.sharding_strategy for unit in units} == {strategy}


def test_fsdp_options_and_a_file_of_settings(world, shared_path):
    path = shared_path / "fsdp.json"
    if world.rank == 0:
        path.write_text(json.dumps({"fsdp_transformer_layer_cls_to_wrap": ["GPT2Block"]}))
    world.comm.Barrier()
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    args = arguments(shared_path, world, fsdp_config=str(path))
    trainer = ShardedTrainer(build(), args, train_dataset=Texts(), fsdp_options=options)
    trainer.train()
    assert trainer.model_wrapped.sharding_strategy is ShardingStrategy.HYBRID_SHARD
    close(copied(trainer.model_wrapped.state_dict()), alone()[1])


REFUSED = [
    ({"fsdp_config": {"use_orig_params": False}}, {}, "use_orig_params=False is not supported"),
    ({"fsdp_config": {"cpu_ram_efficient_loading": True}}, {}, "meta device"),
    ({"fsdp_config": {"transformer_layer_cls_to_warp": "x"}}, {}, "did you mean 'transformer_layer_cls_to_wrap'"),
    ({"fsdp_config": {"reshard_after_forward": "half"}}, {}, "reshard_after_forward='half': choose one of"),
    ({"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}, {}, "HDF5"),
    ({"fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "min_num_params": 5}}, {}, "does not go with"),
    ({"fsdp_config": {"auto_wrap_policy": "BY_TASTE"}}, {}, "auto_wrap_policy='BY_TASTE': choose one of"),
    ({"fsdp_config": {"forward_prefetch": "maybe"}}, {}, "forward_prefetch='maybe'"),
    (
        {"fsdp_config": {"forward_prefetch": True}},
        {"fsdp_options": {"forward_prefetch": True}},
        "leave one of them out",
    ),
    ({"fsdp_config": {"activation_checkpointing": True}, "gradient_checkpointing": True}, {}, "choose one"),
    ({}, {"fsdp_options": {"use_orig_params": False}}, "use_orig_params=False"),
    ({"auto_find_batch_size": True}, {}, "auto_find_batch_size=True"),
    ({"ddp_find_unused_parameters": True}, {}, "DistributedDataParallel"),
    ({"torch_compile": True}, {}, "torch_compile=True"),
    ({"bf16_full_eval": True}, {}, "bf16_full_eval=True"),
    ({"enable_jit_checkpoint": True}, {}, "give preemption="),
]


@pytest.mark.parametrize(("changes", "given", "message"), REFUSED)
def test_what_cannot_be_had_is_an_error(world, shared_path, changes, given, message):
    args = arguments(shared_path, world, **changes)
    with pytest.raises(UsageError, match=message):
        ShardedTrainer(build(), args, train_dataset=Texts(), **given)


class Reordered(hf.Trainer):
    """With arguments in another order, as TRL's have them."""

    def __init__(self, model, reference=None, args=None, **named):
        super().__init__(model, args, **named)
        self.reference = reference


class Passing(Reordered):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)


@pytest.mark.parametrize("kind", [Reordered, Passing])
def test_arguments_have_the_order_of_the_class_behind(world, shared_path, kind):
    sharded, args = type("Sharded", (ShardedTrainer, kind), {}), arguments(shared_path, world)
    for given, named in (((build(), 7, args), {}), ((build(),), {"args": args, "reference": 7})):
        trainer = sharded(*given, train_dataset=Texts(), **named)
        assert (trainer.reference, trainer.args.learning_rate) == (7, args.learning_rate)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'args'"):
        sharded(build(), 7, args, args=args)
    with pytest.raises(TypeError, match="too many positional arguments"):
        sharded(build(), 7, args, 8)


def generated(prediction):
    return {"sum": float(prediction.predictions.sum())}


def test_generates_during_evaluation_as_the_plain_trainer(world, shared_path):
    """Some rows end early, on one rank and not on the other. Both mean the whole model by ``trainer.model``."""
    given = {"train_dataset": Texts(6), "eval_dataset": Texts(7), "compute_metrics": generated}
    changes = {"predict_with_generate": True, "generation_max_length": 20}
    found = []
    for sharder in ((), (ShardedTrainer,)):
        kind, model = type("Trainer", (*sharder, hf.Seq2SeqTrainer), {}), build()
        model.config.pad_token_id = model.generation_config.pad_token_id = 0
        args = arguments(shared_path, world, kind=hf.Seq2SeqTrainingArguments, **changes)
        found.append(kind(model, args, **given))
        found[-1].evaluate()
        found[-1].model.eval()
        ids = Texts(7)[world.rank]["input_ids"].unsqueeze(0)
        found[-1].scores = found[-1].model(ids).logits.detach()
    plain, sharded = found
    assert history(sharded) == history(plain)
    torch.testing.assert_close(sharded.scores, plain.scores)
    ids = Texts(2)[world.rank]["input_ids"].unsqueeze(0)
    ends = {"max_new_tokens": 15 if world.rank else 2, "do_sample": False}
    assert torch.equal(sharded.model.generate(ids, **ends), plain.model.generate(ids, **ends))
    with FullyShardedDataParallel.summon_full_params(sharded.model_wrapped, recurse=False):
        assert torch.equal(sharded.model.generate(ids, **ends), plain.model.generate(ids, **ends))


def test_a_layer_that_is_not_there_and_an_optimizer_of_matrices(world, shared_path):
    named = arguments(shared_path, world, fsdp_config={"transformer_layer_cls_to_wrap": ["GPT2Blok"]})
    with pytest.raises(UsageError, match="no module of this GPT2LMHeadModel is a 'GPT2Blok'; did you mean 'GPT2Block'"):
        ShardedTrainer(build(), named, train_dataset=Texts()).train()
    with pytest.raises(UsageError, match="optim='adafactor' may look at whole matrices"):
        ShardedTrainer(build(), arguments(shared_path, world, optim="adafactor"), train_dataset=Texts()).train()
    with pytest.raises(UsageError, match="give it the plain one"):
        ShardedTrainer(shard(GPT2, build(), use_orig_params=True), arguments(shared_path, world))


def test_bfloat16(world, shared_path):
    """As the same model that is wrapped by hand, under autocast."""
    trainer = ShardedTrainer(build(), arguments(shared_path, world, bf16=True), train_dataset=Texts())
    trainer.train()
    settings = trainer.model_wrapped.mixed_precision
    assert (settings.param_dtype, settings.reduce_dtype, settings.buffer_dtype) == (torch.bfloat16, torch.float32, None)
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    plain = hf.Trainer(build(), arguments(shared_path, world, bf16=True), train_dataset=Texts())
    plain.train()
    mine, others = (np.array([e["loss"] for e in t.state.log_history if "loss" in e]) for t in (trainer, plain))
    np.testing.assert_allclose(mine, others, rtol=2**-8)  # the relative precision of the dtype
    assert not np.array_equal(mine, np.array(alone()[0]))
