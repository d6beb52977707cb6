"""``python -m plait.cluster``: detect and measure the hosts that this is started on, as one cluster.

Alone it is about this machine. Start one on each host under the torchrun contract, by torchrun or in
the lab, and every pair of hosts is measured too; rank 0 prints the result.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from plait.cluster.cluster import PARTS, Cluster
from plait.cluster.file import FORMAT
from plait.destination import check_file
from plait.errors import PlaitError
from plait.units import parse_seconds
from plait.worker import Place


def main() -> int:
    """Run the command; the exit code is 2 for what cannot be done as asked, 1 for a host that failed."""
    parser = argparse.ArgumentParser(prog="python -m plait.cluster", description=__doc__)
    parser.add_argument(
        "--cluster", metavar="FILE", help="measure what this file describes, not what is found"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--devices", type=int, help="devices on each host (default: one a core)")
    parser.add_argument("--directory", default=".", help="where spilled files would go (default: here)")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for one figure (default: 0.5)")
    parser.add_argument(
        "--disk-bytes", default="256MiB", metavar="SIZE", help="written to disk (default: 256MiB)"
    )
    parser.add_argument(
        "--at-once", type=int, default=1, help="pairs of hosts measured together (default: 1)"
    )
    parser.add_argument("--timeout", default="60s", help="how long to wait for another host (default: 60s)")
    parser.add_argument("--save", metavar="FILE", help="write the cluster file here, on rank 0")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the cluster file")
    options = parser.parse_args()
    try:
        first = Place.from_environment().rank == 0
        if options.save and first:
            check_file(Path(options.save), setting="--save")
        if options.cluster:
            cluster = Cluster.load(options.cluster)
        else:
            cluster = Cluster.detect(devices=options.devices, directory=options.directory)
        cluster = cluster.measure(
            options.parts,
            seconds=options.seconds,
            disk_bytes=options.disk_bytes,
            at_once=options.at_once,
            timeout=parse_seconds(options.timeout, setting="--timeout"),
        )
        if first:
            sys.stdout.write(as_json(cluster) if options.json else cluster.to_toml())
            if options.save:
                cluster.save(options.save)
    except PlaitError as error:
        print(f"plait.cluster: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


def as_json(cluster: Cluster) -> str:
    """The cluster as one JSON object, with the names and units of the Python classes."""
    return json.dumps({"format": FORMAT, **asdict(cluster)}, indent=2) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
