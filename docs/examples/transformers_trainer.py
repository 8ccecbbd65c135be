"""Train a small GPT-2 with transformers' Trainer, sharded over all ranks: mpirun -n 2 python transformers_trainer.py

Run it again and it goes on from the newest checkpoint. A signal (USR2) stops it with a checkpoint and exit code 75.
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import hpcfsdp
from hpcfsdp.integrations.transformers import ShardedTrainer


class Counting(torch.utils.data.Dataset):
    """Rows of numbers, each one more than the number before it."""

    def __init__(self, rows):
        self.first = torch.randint(100, (rows, 1), generator=torch.Generator().manual_seed(rows))

    def __len__(self):
        return len(self.first)

    def __getitem__(self, index):
        row = (self.first[index] + torch.arange(16)) % 100
        return {"input_ids": row, "labels": row}


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
steps = parser.parse_args().steps

with hpcfsdp.preemption() as stop:
    world = hpcfsdp.init()  # before TrainingArguments
    set_seed(0)  # the same initial values on every rank
    sizes = {"vocab_size": 100, "n_positions": 16, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        output_dir="counting",
        use_cpu=world.device.type == "cpu",
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        save_total_limit=2,
        load_best_model_at_end=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["GPT2Block"]},
        report_to=[],
        disable_tqdm=True,
    )
    trainer = ShardedTrainer(model, arguments, train_dataset=Counting(1000), eval_dataset=Counting(64), preemption=stop)
    trainer.train(resume_from_checkpoint=trainer.newest_checkpoint())
    trainer.save_model("counting/model")  # for GPT2LMHeadModel.from_pretrained
hpcfsdp.finalize()
