"""What scripts that know nothing of plait have in common: a small model, its gradients, what is said."""

import contextlib
import io


def said_by(function, *args):
    """What rank 0 says while a function runs, with plait in the process as an import of torch puts it."""
    import plait_autoload

    plait_autoload.autoload()
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        value = function(*args)
    return value, text.getvalue()


def small_model():
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def gradients(model):
    """Of one step whose data differ from rank to rank."""
    import torch
    import torch.distributed as dist

    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]
