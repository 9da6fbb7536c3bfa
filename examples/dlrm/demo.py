"""The whole example in one command: clicks are generated, a sharded DLRM learns them, and its checkpoint travels.

A model trains on 2 processes; its checkpoint is loaded on 4 processes under another plan and in one plain process,
where it must show the same AUC; and the same model trained in one process without any wrapper must come out as good.
Every process is started as a user would start it. The demo ends with exit code 1 and a line for each claim that failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from criteo import HELD_OUT
from generate import CARDINALITIES, GENERATED, GENERATED_LINES, ensure_generated
from resume import command

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(Path(__file__).with_name("train.py"))
ROWS = ",".join(str(min(max(100, 20 * n), 50_000)) for n in CARDINALITIES.tolist())
SAME_AUC = 1e-6  # between places where one checkpoint is loaded
NEAR_AUC = 0.01  # between trainings, sharded and not


def main() -> int:
    started = time.perf_counter()
    data, checkpoint = GENERATED, str(Path(GENERATED).with_name("checkpoint"))

    heading(f"Clicks in the Criteo format: {GENERATED_LINES:,} lines, {HELD_OUT:.0%} of them held out")
    truth = ensure_generated(data, GENERATED_LINES, progress=True)
    say(f"{data}: {truth.click_rate:.1%} clicks")

    common = ["--data", data, "--rows", ROWS]
    heading("Trained on 2 processes, sharded by the planner's plan")
    trained = run(2, *common, "--save", checkpoint)
    heading("The checkpoint on 4 processes, every table split by rows")
    resharded = run(4, *common, "--load", checkpoint, "--eval-only", "--layout", "row_wise")
    heading("The checkpoint in a plain module, in one process")
    plain = run(1, *common, "--load", checkpoint, "--eval-only", "--unsharded")
    heading("Trained in one process, without any wrapper")
    unsharded = run(1, *common, "--unsharded")

    heading("Summary")
    say(f"  best reachable on these lines        AUC {truth.best_auc:.6f}")
    say(f"  trained on 2 processes, sharded      AUC {trained:.6f}")
    say(f"  its checkpoint on 4, row-wise        AUC {resharded:.6f}")
    say(f"  its checkpoint on 1, plain module    AUC {plain:.6f}")
    say(f"  trained on 1, without wrapper        AUC {unsharded:.6f}")
    failed = [
        claim
        for claim, holds in (
            (f"the checkpoint has the same AUC on 4 processes, to {SAME_AUC}", abs(resharded - trained) <= SAME_AUC),
            (f"the checkpoint has the same AUC in a plain module, to {SAME_AUC}", abs(plain - trained) <= SAME_AUC),
            (f"sharded training is as good as unsharded, to {NEAR_AUC}", abs(unsharded - trained) <= NEAR_AUC),
            ("training learned most of the signal", trained > 0.5 + 0.9 * (truth.best_auc - 0.5)),
        )
        if not holds
    ]
    for claim in failed:
        say(f"FAILED: {claim}")
    if not failed:
        say(f"  all as it should be, in {time.perf_counter() - started:.0f} s")
    return 1 if failed else 0


def run(processes: int, *arguments: str) -> float:
    """Runs train.py, shows what it prints, and returns its AUC; ends the demo if it fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    say(f"$ {command([TRAIN, *arguments], processes)}")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    auc = None
    with subprocess.Popen(
        [sys.executable, *launcher, TRAIN, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip("\n"))
            found = re.match(r"held-out: AUC ([0-9.]+)", line)
            auc = float(found[1]) if found else auc
    if process.returncode or auc is None:
        say(f"FAILED: the command above ended with exit code {process.returncode}")
        sys.exit(1)
    return auc


def heading(text: str) -> None:
    say(f"\n== {text}")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
