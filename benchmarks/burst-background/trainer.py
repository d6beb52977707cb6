"""The background: a character model that learns English, and notes the time and the loss of every step."""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from plait.english import LETTERS, english

CONTEXT, ROWS, WIDTH = 32, 8, 96


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.memory(self.letters(text))[0]).transpose(1, 2)


def main(path: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = english(0, context=CONTEXT)
    text = torch.stack([data[place]["input_ids"] for place in range(len(data))])
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with open(path, "w", buffering=1) as log:
        while True:
            rows = text[torch.randint(len(text), (ROWS,))]
            loss = cross_entropy(model(rows[:, :-1]), rows[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.write(f"{time.monotonic():.6f} {loss.item():.4f}\n")


if __name__ == "__main__":
    main(sys.argv[1])
