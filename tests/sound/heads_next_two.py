"""A second head for the token after the next (Gloeckle et al. 2024); rows have one more target."""

from shared import model, nn, np, train


class Windows(train.ShuffledWindows):
    def __getitem__(self, place):
        starts = [self.start_of(number) for number in range(place[0], sum(place))]
        rows = self.tokens[np.array(starts)[:, None] - 1 + np.arange(self.block_size + 2)]
        return rows[:, :-2].astype(np.int64), rows[:, 1:].astype(np.int64)


class GPT(model.GPT):
    def __init__(self, config):
        super().__init__(config)
        self.second = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        nn.init.normal_(self.second.weight, std=0.01)
        self.head.register_forward_pre_hook(self.keep)

    def keep(self, head, args):
        self.last = args[0]

    def forward(self, inputs, targets=None, **options):
        logits = super().forward(inputs, **options)
        if targets is None:
            return logits
        first = model.cross_entropy(logits, targets[:, : inputs.size(1)])
        if not self.training:
            return first
        second = model.cross_entropy(self.second(self.last), targets[:, 1:])
        return first + 0.3 * second, {"first": first.detach(), "second": second.detach()}


def open_dataset(saved, inner=train.open_dataset):
    train_data, *rest = inner(saved)
    return Windows(train_data.tokens[1:], train.block_size, train.seed), *rest


model.GPT, train.open_dataset = GPT, open_dataset
