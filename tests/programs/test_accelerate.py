"""accelerate and transformers' Trainer, which take the process group that hpcfsdp has made: their DDP over hpcmpi."""

import warnings

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from hpcfsdp.errors import EngineError
from tests.programs.loops import copied, shard
from tests.programs.test_transformers import GPT2, LENGTH, VOCABULARY, gpt2

BATCH, STEPS = 6, 4


class Texts(torch.utils.data.Dataset):
    def __init__(self, rows=BATCH * STEPS):
        self.ids = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
        self.labels = self.ids.clone()
        self.labels[:, 0] = -100  # nothing foretells it; Trainer divides by the labels that count

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def build():
    torch.manual_seed(0)
    model = gpt2()
    for module in model.modules():  # drawn for a batch as a whole in one process
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def alone():
    model = build()
    optimizer, losses = adam(model), []
    for batch in DataLoader(Texts(), batch_size=BATCH):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, copied(model.state_dict())


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)


def train(accelerator, model, optimizer, loader, clip):
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        clip()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_accelerate(world):
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world.size
    model = build()
    loader = DataLoader(Texts(), batch_size=BATCH // world.size)
    model, optimizer, loader = accelerator.prepare(model, adam(model), loader)
    assert isinstance(model, DistributedDataParallel)
    assert dist.get_backend() == "hpcmpi"
    losses = train(accelerator, model, optimizer, loader, lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
    close((losses, copied(accelerator.unwrap_model(model).state_dict())), alone())


def test_accelerate_beside_a_sharded_model(world):
    """It deals the data and steps the optimizer; the model it must not wrap again."""
    accelerator = Accelerator(cpu=True)
    model = shard(GPT2, build(), use_orig_params=True)
    optimizer, loader = accelerator.prepare(adam(model), DataLoader(Texts(), batch_size=BATCH // world.size))
    losses = train(accelerator, model, optimizer, loader, lambda: model.clip_grad_norm_(1.0))
    close((losses, copied(model.state_dict())), alone())


def test_a_sharded_model_is_not_prepared(world):
    accelerator = Accelerator(cpu=True)
    model = shard(GPT2, build(), use_orig_params=True)
    mistake = r"Accelerator\.prepare, was called with a model that .* prepare only the optimizer and the data loader"
    with pytest.raises(EngineError, match=mistake):
        accelerator.prepare(model, adam(model), DataLoader(Texts(), batch_size=1))
    with pytest.raises(EngineError, match=mistake):
        accelerator.prepare_model(model)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model


def test_an_accelerator_that_counts_one_process(world, monkeypatch):
    """As accelerate does on CPUs where it is not asked for them: then it leaves the model as it is, and the data."""
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    accelerator = Accelerator()
    assert accelerator.num_processes == 1
    model = shard(GPT2, build(), use_orig_params=True)
    optimizer = adam(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared, optimizer = accelerator.prepare(model, optimizer)
    assert prepared is model
    text = f"sharded over {world.size} ranks, but accelerate sees only one process and gives every rank the same data"
    assert [text in str(warning.message) for warning in caught] == [True] * (world.size > 1)
    loader = DataLoader(Texts(), batch_size=BATCH)
    losses = train(accelerator, prepared, optimizer, loader, lambda: model.clip_grad_norm_(1.0))
    close((losses, copied(model.state_dict())), alone())


def arguments_for(folder, ranks):
    return hf.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=BATCH // ranks,
        num_train_epochs=1,
        learning_rate=1e-3,
        adam_epsilon=1e-4,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def test_trainer(world, shared_path):
    trainer = hf.Trainer(build(), arguments_for(shared_path, world.size), train_dataset=Texts())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    expected, state = alone()
    close(losses, expected)
    close(copied(trainer.model.state_dict()), state)


def test_trainer_is_given_no_sharded_model(world, shared_path):
    model = shard(GPT2, build(), use_orig_params=True)
    trainer = hf.Trainer(model, arguments_for(shared_path, world.size), train_dataset=Texts())
    with pytest.raises(EngineError, match="transformers' Trainer takes the plain model"):
        trainer.train()
