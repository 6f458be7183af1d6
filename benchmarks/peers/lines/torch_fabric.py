"""The polynomial with Lightning Fabric, which starts the second process itself."""

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


class Polynomial(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.w[0] * x**2 + self.w[1] * x + self.w[2]


fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model = Polynomial()
optimizer = torch.optim.Adam(model.parameters(), 0.1)
model, optimizer = fabric.setup(model, optimizer)
x = torch.linspace(-10, 10, 100)
loader = DataLoader(TensorDataset(x, 5 * x**2 + 3), batch_size=50)
loader = fabric.setup_dataloaders(loader)
for _ in range(20):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
print(next(iter(model.parameters())).detach().numpy())
