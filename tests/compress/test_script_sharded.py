"""Scripts that know nothing of plait, with models that are sharded."""

import contextlib
import sys

from unknowing import gradients, said_by, small_model

FOUR = "bits=4,decline=false"


def sharded():
    def script():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = small_model()
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        gradients(model)
        gradients(model)

    return "torch.distributed.fsdp" in sys.modules, said_by(script)[1]


def test_fully_shard_is_found_where_it_was_imported_before(ranks):
    (was_there, said), _ = ranks(2, sharded, environment={"PLAIT_COMPRESS": "auto,decline=false"})
    assert was_there
    assert said == (
        "plait: gradients of 2 parameters in 4 bits, of 2 exact (PLAIT_COMPRESS=off switches this off)\n"
    )


def run_by_a_method():
    def script():
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        class Network(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

            def loss(self, x):
                return self.second(self.first(x)).square().mean()

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = Network()
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
        register_fsdp_forward_method(model, "loss")
        other = fully_shard(small_model(), mesh=mesh)
        model.loss(torch.ones(1, 32)).backward()
        return [len(module._forward_pre_hooks) for module in (model, model.first, other)]

    return said_by(script)


def test_the_whole_model_is_attached_when_only_a_part_of_it_is_called(ranks):
    (hooks, said), _ = ranks(2, run_by_a_method, environment={"PLAIT_COMPRESS": FOUR})
    assert said.count("\n") == 1
    assert "gradients of 2 parameters in 4 bits" in said
    assert hooks == [1, 1, 2], "torch's own, and ours where a model still waits"


def first_fsdp():
    def script():
        from torch.distributed.fsdp import FullyShardedDataParallel

        for _ in range(2):
            with contextlib.suppress(RuntimeError):  # torch refuses where there is no accelerator
                FullyShardedDataParallel(small_model())

    return said_by(script)[1]


def test_fsdp1_is_said_not_to_be_compressed(ranks):
    said, _ = ranks(2, first_fsdp, environment={"PLAIT_COMPRESS": FOUR})
    assert said == (
        "plait: FullyShardedDataParallel (FSDP1) is NOT compressed; "
        "models made with fully_shard (FSDP2) are\n"
    )


def compiled():
    def script():
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = small_model()
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        shown = torch.compile(model, backend="eager")
        gradients(shown)
        return len(gradients(shown))

    return said_by(script)


def test_a_sharded_model_may_be_compiled(ranks):
    (count, said), _ = ranks(2, compiled, environment={"PLAIT_COMPRESS": FOUR})
    assert count == 4
    assert said.count("plait: ") == 1
    assert "gradients of 2 parameters in 4 bits" in said
