"""Teach the model of transformers_trainer.py to count backwards, with LoRA: mpirun -n 2 python lora.py"""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2LMHeadModel, TrainingArguments, set_seed

import hpcfsdp
from hpcfsdp.integrations.transformers import ShardedTrainer

BASE = "counting/model"


class Backwards(torch.utils.data.Dataset):
    """Rows of numbers, each one less than the number before it."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        row = (index - torch.arange(16)) % 100
        return {"input_ids": row, "labels": row}


world = hpcfsdp.init()
set_seed(0)  # the same adapters on every rank
base = GPT2LMHeadModel.from_pretrained(BASE)
lora = LoraConfig(r=16, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM")
model = get_peft_model(base, lora)
if world.rank == 0:
    model.print_trainable_parameters()

arguments = TrainingArguments(
    output_dir="lora",
    use_cpu=world.device.type == "cpu",
    num_train_epochs=8,
    per_device_train_batch_size=16,
    learning_rate=1e-2,
    logging_steps=64,
    save_steps=128,
    report_to=[],
    disable_tqdm=True,
)
trainer = ShardedTrainer(model, arguments, train_dataset=Backwards())
trainer.train(resume_from_checkpoint=trainer.newest_checkpoint())
trainer.save_model("lora/adapter")

if world.rank == 0:  # as anybody would load it, without hpcfsdp
    loaded = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(BASE), "lora/adapter").eval()
    row = Backwards()[7]["input_ids"]
    with torch.no_grad():
        loss = loaded(input_ids=row[None], labels=row[None]).loss
    print(f"loss of the loaded adapter: {loss:.3f}")
hpcfsdp.finalize()
