import pytest
import torch.distributed as dist

from plait.errors import UsageError
from plait.pipeline import compat


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cpu", "2.13.0a0+git1234"])
def test_the_version_it_was_written_for(version):
    compat.check_version(version)


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0", "3.0.0", "2.130.0", "unknown"])
def test_another_version_of_torch_is_refused(version):
    with pytest.raises(UsageError) as caught:
        compat.check_version(version)
    assert f"this is torch {version}" in str(caught.value)
    assert "torch==2.13" in caught.value.works


def backend():
    return compat.cpu_backend(None), compat.cpu_backend(dist.new_group([0]))


def test_the_backend_for_host_memory(ranks):
    assert ranks(1, backend) == [("gloo", "gloo")]
