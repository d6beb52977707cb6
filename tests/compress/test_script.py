"""Scripts that know nothing of plait: what is attached, who wins, and what is said."""

import contextlib
import importlib.metadata
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from unknowing import gradients, said_by, small_model

from plait.errors import UsageError
from plait.extras import install

SCRIPTS = Path(__file__).parents[1] / "scripts"
FOUR = "bits=4,decline=false"
RESULT = re.compile(r"result (\d) ([\d.]+) (\w+)")
SENT = re.compile(r"plait: rank 0 sent [\d.]+ KiB in place of [\d.]+ MiB, ([\d.]+) times fewer")


def results(text):
    """Loss and digest of the parameters by rank."""
    return {int(rank): (float(loss), digest) for rank, loss, digest in RESULT.findall(text)}


def torchrun(script, *words, **environment):
    """Run a script on two workers, as a user would."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    kept = {name: value for name, value in os.environ.items() if name != "PLAIT_COMPRESS"}
    return subprocess.run(
        [*command, str(script), *map(str, words)],
        capture_output=True, text=True, check=False, timeout=240,
        env={**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
    )  # fmt: skip


def as_it_is(script, *words):
    """One worker of a script that runs without plait, in a process that has torch already."""
    sys.argv = [script, *words]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runpy.run_path(script, run_name="__main__")
    return text.getvalue()


@pytest.mark.parametrize(
    ("name", "package", "extra", "compressed", "exact"),
    [
        ("ddp.py", "torch", None, 2, 2),
        ("fsdp.py", "torch", None, 3, 3),
        ("trainer_hf.py", "accelerate", "hf", 10, 18),
        ("trainer_lightning.py", "lightning", "lightning", 2, 2),
    ],
)
def test_an_unmodified_script_is_compressed(name, package, extra, compressed, exact, ranks, tmp_path):
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is missing: {install(extra)}")
    words = [] if extra is None else [str(tmp_path)]
    done = torchrun(SCRIPTS / name, *words, PLAIT_COMPRESS=FOUR)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("plait: ")]
    assert len(said) == 2
    assert said[0] == (
        f"plait: gradients of {compressed} parameters in 4 bits, of {exact} exact "
        "(PLAIT_COMPRESS=off switches this off)"
    )
    assert 6 < float(SENT.fullmatch(said[1]).group(1)) < 7.2
    script = str(SCRIPTS / name)
    elastic = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "PLAIT_COMPRESS": "off"}
    plain = results("".join(ranks(2, as_it_is, script, *words, group=False, environment=elastic)))
    ours = results(done.stdout)
    assert sorted(ours) == sorted(plain) == [0, 1]
    assert len({digest for _, digest in ours.values()}) == 1, "the ranks' parameters differ"
    assert ours[0][1] != plain[0][1], "nothing was rounded"
    for rank in (0, 1):
        assert ours[rank][0] == pytest.approx(plain[rank][0], rel=0.02)


# From here on, in one process each: what a script does after `import torch` has run plait's entry point.


def with_own_hook():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    def script():
        ddp = DistributedDataParallel(small_model())
        calls = []

        def own_hook(state, bucket):
            calls.append(state)
            return allreduce_hook(None, bucket)

        ddp.register_comm_hook("mine", own_hook)
        with pytest.raises(RuntimeError, match="can only be called once"):
            ddp.register_comm_hook("again", own_hook)
        return gradients(ddp), calls

    (ours, calls), said = said_by(script)
    os.environ["PLAIT_COMPRESS"] = "off"
    plain = gradients(DistributedDataParallel(small_model()))
    return calls, said, all(a.equal(b) for a, b in zip(ours, plain, strict=True))


def test_a_hook_of_the_scripts_own_wins(ranks):
    (calls, said, equal), (_, other, other_equal) = ranks(
        2, with_own_hook, environment={"PLAIT_COMPRESS": FOUR}
    )
    assert calls == ["mine"]
    assert equal
    assert other_equal
    first, second = said.splitlines()
    assert "in 4 bits" in first
    assert second.startswith("plait: the script's own communication hook with_own_hook")
    assert second.endswith("own_hook takes over: NOT compressed")
    assert other == ""


def mixed_precision():
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.parallel.distributed import _MixedPrecision

    policy = _MixedPrecision(param_dtype=torch.float32)
    return said_by(lambda: DistributedDataParallel(small_model(), mixed_precision=policy) and None)[1]


def test_a_hook_that_torch_registers_while_wrapping_wins(ranks):
    said, _ = ranks(2, mixed_precision, environment={"PLAIT_COMPRESS": FOUR})
    assert said == "plait: DistributedDataParallel has a communication hook of its own: NOT compressed\n"


def made_and_gone():
    import gc
    import weakref

    from torch.nn.parallel import DistributedDataParallel

    def script():
        ddp = DistributedDataParallel(small_model())
        gradients(ddp)
        return weakref.ref(ddp)

    def both():
        dead = script()
        gc.collect()
        return dead() is None

    return said_by(both)


def test_a_model_is_not_kept_alive_and_says_what_it_saved_when_it_goes(ranks):
    (gone, said), _ = ranks(2, made_and_gone, environment={"PLAIT_COMPRESS": FOUR})
    assert gone
    assert re.fullmatch(r"plait: gradients of 2 .*\nplait: rank 0 sent .* KiB in place of .*\n", said)


def mistyped():
    import threading

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as unchanged
    from torch.nn.parallel import DistributedDataParallel

    from plait.compress import script as ours

    def script():
        from torch.distributed.fsdp import fully_shard

        assert fully_shard is not unchanged
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        codes = []
        for make in (DistributedDataParallel, lambda model: fully_shard(model, mesh=mesh)):
            with pytest.raises(SystemExit) as raised:
                make(small_model())
            codes.append(raised.value.code)
        return codes

    def in_a_thread():
        with pytest.raises(UsageError) as raised:
            DistributedDataParallel(small_model())
        errors.append(str(raised.value))

    ours._FIRST_S, errors = 0.0, []  # the first has been waited for, and was not heard
    codes, said = said_by(script)
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    return codes, said, errors


def test_a_mistyped_value_ends_the_script_where_a_model_is_made(ranks):
    wrong = "PLAIT_COMPRESS: bits cannot be 'atuo' (setting: PLAIT_COMPRESS); works: bits=4 or bits=auto"
    for codes, said, errors in ranks(2, mistyped, environment={"PLAIT_COMPRESS": "atuo"}):
        assert codes == [2, 2]
        assert said == f"plait: {wrong}\n" * 2
        assert errors == [wrong], "an exit would end the thread alone"


def refused_by_the_model():
    from torch.nn.parallel import DistributedDataParallel

    from plait.compress import script as ours

    def script():
        with pytest.raises(SystemExit) as raised:
            DistributedDataParallel(small_model())
        return raised.value.code

    ours._FIRST_S = 0.0
    return said_by(script)


def test_so_does_one_that_a_model_cannot_have(ranks):
    for code, said in ranks(2, refused_by_the_model, environment={"PLAIT_COMPRESS": "4,gather_bits=8"}):
        assert code == 2
        assert said.startswith(
            "plait: weights in 8 bits, where each worker has them all (setting: gather_bits)"
        )
        assert said.count("\n") == 1


def test_a_mistyped_value_is_one_line_and_no_traceback_of_the_script():
    done = torchrun(SCRIPTS / "ddp.py", PLAIT_COMPRESS="bist=4")
    assert done.returncode == 1, "torchrun's own"
    assert [line for line in done.stderr.splitlines() if line.startswith("plait: ")] == [
        "plait: PLAIT_COMPRESS='bist=4': there is no field 'bist' (setting: PLAIT_COMPRESS); "
        "works: bits=4 or bits=auto"
    ]
    assert 'ddp.py", line' not in done.stderr
    assert "UsageError" not in done.stderr
    assert re.search(r"exitcode +: 2", done.stderr)


def described(**fields):
    """What is said of a model of two parameters."""
    from plait.compress import script as ours
    from plait.compress.report import Report, Summary

    given = {"bits": {"a": 32, "b": 32}, "declined": (), **fields}
    made = Summary(steps=0, errors={}, exposed_s=0.0, memory_bytes=0, total=Report(), **given)
    return ours._described(made, 3)


@pytest.mark.parametrize("why", [{"left": True}, {"declined": (3,)}])
def test_who_declines_says_how_to_compress_all_the_same(why):
    assert described(**why) == (
        "gradients of all 2 parameters stay uncompressed: that is faster on this network; "
        "PLAIT_COMPRESS=bits=3,decline=false compresses all the same"
    )
    assert "decline" not in described()


def wrapped_twice():
    from torch.nn.parallel import DistributedDataParallel

    import plait_autoload

    plait_autoload.autoload()
    once = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook, list(sys.meta_path)
    plait_autoload.autoload()
    again = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook, list(sys.meta_path)
    return once == again, once[0].__name__, once[0].__wrapped__.__qualname__


def test_torch_is_changed_once(ranks):
    ((same, name, original),) = ranks(1, wrapped_twice, environment={"PLAIT_COMPRESS": FOUR})
    assert same
    assert name == "__init__"
    assert original == "DistributedDataParallel.__init__"


def alone():
    from torch.nn.parallel import DistributedDataParallel

    return said_by(lambda: len(gradients(DistributedDataParallel(small_model()))))


def test_a_worker_that_is_alone_has_nothing_to_compress(ranks):
    assert ranks(1, alone, environment={"PLAIT_COMPRESS": FOUR}) == [(4, "")]


def too_small():
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    return said_by(lambda: DistributedDataParallel(nn.Linear(4, 4)) and None)[1]


def test_a_model_without_large_parameters_is_said_to_stay_uncompressed(ranks):
    said, _ = ranks(2, too_small, environment={"PLAIT_COMPRESS": "auto"})
    assert said == (
        "plait: gradients of all 2 parameters stay uncompressed: none is large enough "
        "(PLAIT_COMPRESS=off switches this off)\n"
    )


def with_own_attach():
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import plait.compress

    def script():
        ddp = DistributedDataParallel(small_model())
        attachment = plait.compress.attach(ddp, bits=8, decline=False)
        gradients(ddp)
        sharded = small_model()
        fully_shard(sharded)
        own = plait.compress.attach(sharded, bits=8, decline=False)
        gradients(sharded)
        return attachment.report(), own.report()

    return said_by(script)[0]


def test_an_attachment_of_the_scripts_own_wins_too(ranks):
    for reports in ranks(2, with_own_attach, environment={"PLAIT_COMPRESS": FOUR}):
        for report in reports:
            assert set(report.bits.values()) == {8, 32}
            assert 3 < report.total.ratio < 4
