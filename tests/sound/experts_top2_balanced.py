"""The two best of four experts for each token, with a loss that balances the router."""

from shared import Experts, F, model, torch


class Balanced(Experts):
    def forward(self, x):
        shares = self.router(x).softmax(-1)
        weights, chosen = shares.topk(2, dim=-1)
        used = F.one_hot(chosen, 4).sum(-2)
        self.balance = 4 * (used.to(x).mean((0, 1)) * shares.mean((0, 1))).sum()
        gates = (shares * used / weights.sum(-1, keepdim=True)).to(x.dtype)
        return sum(gates[..., n, None] * expert(x) for n, expert in enumerate(self.experts))


class GPT(model.GPT):
    def forward(self, inputs, targets=None, **options):
        out = super().forward(inputs, targets, **options)
        if targets is None or not self.training:
            return out
        balance = torch.stack([block.mlp.balance for block in self.blocks]).sum()
        return out + 0.05 * balance, {"balance": balance.detach()}


model.MLP, model.GPT = Balanced, GPT
