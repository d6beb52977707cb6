"""Profiles and clusters that the tests of strategies share; they import this file by name."""

from dataclasses import replace

from plait.cluster import Cluster
from plait.cluster.parts import Tier
from plait.compress.price import Speed
from plait.profile import BlockProfile, Profile, Times
from plait.spill.footprint import likely_bytes
from plait.strategy import Codecs, Demand

MIB = 1 << 20
CODECS = Codecs(
    speeds={
        bits: Speed(pack_s_per_byte=1 / 5e9, add_s_per_byte=1 / 8e9, decode_s_per_byte=1 / 9e9)
        for bits in range(3, 9)
    },
    busy_s_per_byte=0.3e-9,
)
FREE = Codecs(
    speeds={
        bits: Speed(pack_s_per_byte=0.0, add_s_per_byte=0.0, decode_s_per_byte=0.0) for bits in range(3, 9)
    }
)


def chain(blocks=6, *, parameters=4 * MIB, saved=MIB, scale=1.0, fixed=0.5, states=2):
    """Alike blocks: ``fixed`` ms and ``scale`` ms a row in forward, twice that in backward."""
    times = {
        rows: Times(forward=fixed + scale * rows, backward=2 * (fixed + scale * rows)) for rows in (1, 64)
    }
    return Profile(
        model="chain",
        blocks=tuple(
            BlockProfile(
                name=f"b{i}",
                parameter_bytes=parameters,
                optimizer_bytes=states * parameters,
                optimizer_milliseconds=0.2,
                output_bytes_per_sample=64 << 10,
                saved_bytes_per_sample=saved,
                transient_bytes=MIB,
                transient_bytes_per_sample=saved // 4,
                milliseconds=times,
            )
            for i in range(blocks)
        ),
    )


def cluster(devices=4, *, memory="4GiB", bandwidth="1gbit", latency="50us", per_host=1):
    return Cluster.uniform(
        hosts=devices // per_host,
        devices_per_host=per_host,
        memory=memory,
        bandwidth=bandwidth,
        latency=latency,
    )


def spilling(mib, *, devices=1):
    """Memory of a device that leaves so much beside the processes of a run that spills."""
    return mib * MIB + -(-likely_bytes(devices) // devices)


def with_disk(of, *, read=1.5e9, write=1.2e9, capacity=1 << 40):
    tiers = [
        Tier(
            name="disk",
            host=host.name,
            capacity_bytes=capacity,
            read_bytes_per_s=read,
            write_bytes_per_s=write,
        )
        for host in of.hosts
    ]
    return replace(of, tiers=tuple(tiers))


def demand(name="job", profile=None, *, batch=16, **settings):
    return Demand(name=name, profile=profile or chain(), batch=batch, **settings)
