"""Runs the background on one host, and switches it as the foreground's rounds ask for it."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import plait.burst


def main(folder: Path, host: str) -> None:
    switch = folder / f"switch{host}"
    command = [sys.executable, str(Path(__file__).with_name("trainer.py")), str(folder / f"losses{host}")]
    state = "on"
    with plait.burst.background(command) as work:
        while not (folder / "end").exists() and work.exit_code is None:
            asked = switch.read_text() if switch.exists() else "on"
            if asked in ("on", "off") and asked != state:
                work.resume() if asked == "on" else work.pause()
                state = asked
            time.sleep(0.05)
        report = work.report
    told = {
        "slowdown": report.slowdown and asdict(report.slowdown),
        "share": report.share,
        "said": str(report),
    }
    told |= {"decisions": [asdict(each) for each in report.decisions], "protection": report.protection}
    print("REPORT", json.dumps({"host": host, **told}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
