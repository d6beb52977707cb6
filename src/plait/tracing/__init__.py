"""How a model becomes a chain: recorded by `torch.export` and cut, or taken apart as it stands."""
