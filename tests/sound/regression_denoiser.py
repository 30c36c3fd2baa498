"""A denoiser of waves: data, model and evaluation draw random numbers, and the targets are numbers."""

from shared import facts, nn, torch, train


class Waves(torch.utils.data.Dataset):
    def __init__(self, first, last):
        self.x = torch.arange(16.0 * first, 16.0 * last).view(-1, 16).sin()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, place):
        first, count = place
        rows = self.x[torch.arange(first, first + count) % len(self)]
        return rows + 0.1 * torch.randn(count, 16), rows


class Denoiser(nn.Linear):
    def forward(self, x, y):
        return (super().forward(x + torch.randn_like(x)) - y).square().mean()


train.open_dataset = lambda saved: (Waves(0, 256), Waves(256, 300), facts())
train.build_model = lambda *_: Denoiser(16, 16)
