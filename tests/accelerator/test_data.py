"""A loader that moves batches to the device in its threads."""

import pytest
import torch

from hpcfsdp.data import ResumableSampler, ThreadedLoader
from tests.accelerator.programs import SIM


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return {"x": torch.full((256,), float(index)), "name": str(index)}


@pytest.mark.ranks(1)
def test_batches_are_on_the_device_before_a_kernel_reads_them(world, hardware):
    sampler = ResumableSampler(Rows(), global_batch=4, rank=0, ranks=1, shuffle=False)
    loader = ThreadedLoader(Rows(), batch_sampler=sampler, threads=2, device=SIM)
    total = torch.zeros(256, device=SIM)
    for number, batch in enumerate(loader):
        assert batch["x"].device.type == torch.device(SIM).type
        assert batch["name"] == [str(4 * number + place) for place in range(4)]
        total += batch["x"].sum(0)
    assert total.cpu().tolist() == [float(sum(range(48)))] * 256
