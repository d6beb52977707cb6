"""The fresh process in which ``run_apart`` answers one question."""

import json
import sys

from plait.bench.question import answer

if __name__ == "__main__":
    answer(json.loads(sys.argv[1]))
