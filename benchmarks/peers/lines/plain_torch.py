"""The polynomial in PyTorch on one device."""

import torch
from torch.utils.data import DataLoader, TensorDataset


class Polynomial(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.w[0] * x**2 + self.w[1] * x + self.w[2]


model = Polynomial()
optimizer = torch.optim.Adam(model.parameters(), 0.1)
x = torch.linspace(-10, 10, 100)
loader = DataLoader(TensorDataset(x, 5 * x**2 + 3), batch_size=100)
for _ in range(20):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
print(next(iter(model.parameters())).detach().numpy())
