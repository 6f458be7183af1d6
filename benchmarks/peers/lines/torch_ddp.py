"""The polynomial with PyTorch DDP, started by `torchrun --nproc-per-node 2 torch_ddp.py`."""

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Polynomial(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.w[0] * x**2 + self.w[1] * x + self.w[2]


torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(Polynomial())
optimizer = torch.optim.Adam(model.parameters(), 0.1)
x = torch.linspace(-10, 10, 100)
dataset = TensorDataset(x, 5 * x**2 + 3)
loader = DataLoader(dataset, batch_size=50, sampler=DistributedSampler(dataset))
for epoch in range(20):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
print(next(iter(model.parameters())).detach().numpy())
torch.distributed.destroy_process_group()
