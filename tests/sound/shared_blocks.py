"""One block, taken three times (Dehghani et al. 2018, "Universal Transformers")."""

import sys

import model
import train


class GPT(model.GPT):
    def __init__(self, config):
        super().__init__(config)
        self.blocks.extend([self.blocks[0]] * 2)


model.GPT = GPT

if __name__ == "__main__":
    sys.exit(train.main())
