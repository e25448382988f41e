"""Measure the peak memory of an ensemble against its number of members, all at once and in chunks, on the CPU.

The ensemble is a narrow ResNet with M members and member heads. A training step is forward, loss with regulariser,
backward and the SGD update; in chunks, each chunk is propagated back before the next one runs. An evaluation pass is
one forward in evaluation mode. Peak memory is what torch holds at most beyond what it held before, which is parameters,
gradients and the optimiser's state: its own allocations, the same from run to run.

Times are paired: chunks and all at once run in turn within every round, the first one moving on from round to round. A
ratio is the median over rounds of the time in chunks over the time at once in the same round, with a 95 % bootstrap
interval. On a machine that others use too, `--clock cpu` leaves out the time spent waiting for a core.

    python benchmarks/memory.py [--members 1 2 4 8 16 32] [--at-once 4 1] [--batch 16] [--width 32] [--rounds 20]
"""

from __future__ import annotations

import torch
from common import CLASSES, CLOCKS, conditions, count, options_of, prepare, publish, table
from torch import Tensor

import sigmaens as sn
from sigmaens.backbones import narrow_resnet
from sigmaens.cost import median_interval, paired_times, peak_memory

PHASES = ("training step", "evaluation")


class Job:
    """An ensemble with its images, labels and optimiser, run so many members at once, or all for None."""

    def __init__(self, members: int, at_once: int | None, batch: int, width: int, size: int):
        torch.manual_seed(0)
        backbone = narrow_resnet(CLASSES, 3, width=width)
        self.ens = sn.SigmaEnsemble(backbone, members, head="fc", regularize="*.bn2", at_once=at_once)
        self.images: Tensor = torch.randn(batch, 3, size, size)
        self.labels = torch.randint(CLASSES, (batch,))
        # Slow enough that many steps on one batch leave the network as it was.
        self.optimizer = torch.optim.SGD(sn.parameter_groups(self.ens, lr=1e-5), momentum=0.9)

    def train(self) -> None:
        self.ens.train()
        self.optimizer.zero_grad()
        for logits in self.ens.chunks(self.images):
            share = logits.shape[1] / self.ens.members
            (sn.member_cross_entropy(logits, self.labels) * share).backward()
        sn.diversity_loss(self.ens, 0.1, 1e-2).backward()
        self.optimizer.step()

    @torch.inference_mode()
    def eval(self) -> None:
        self.ens.eval()
        self.ens(self.images)


def measure(members: int, sizes: list[int], rounds: int, clock: str, **setting: int) -> list[list[str]]:
    """Return the rows of the table for one number of members, first all at once, then in chunks of the sizes."""
    jobs = {at_once: Job(members, at_once, **setting) for at_once in (None, *(n for n in sizes if n < members))}
    runs = {(at_once, phase): getattr(job, phase) for phase in ("train", "eval") for at_once, job in jobs.items()}
    # Timed first, so that optimisers have their state when memory is measured.
    times = paired_times(runs, rounds, clock=CLOCKS[clock])
    rows = []
    for at_once in jobs:
        row = [str(members), str(at_once or "all")]
        for phase in ("train", "eval"):
            row.append(f"{peak_memory(runs[at_once, phase]) / 2**20:.1f}")
            ratio, low, high = median_interval(times[at_once, phase] / times[None, phase])
            row.append(f"{ratio:.3f} [{low:.3f}, {high:.3f}]")
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print a table, and write it to a file if asked to."""
    parser = options_of(__doc__)
    parser.set_defaults(width=32, rounds=20)
    parser.add_argument("--members", type=count, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="M", help="members")
    parser.add_argument("--at-once", type=count, nargs="+", default=[4, 1], metavar="N", help="members of a chunk")
    options = vars(parser.parse_args())
    path, sizes, members = (options.pop(name) for name in ("markdown", "at_once", "members"))
    prepare(options.pop("threads"))
    rows = [row for number in members for row in measure(number, sizes, **options)]
    rounds, clock = options.pop("rounds"), options.pop("clock")
    head = ["members", "at once"] + [cell for phase in PHASES for cell in (f"{phase}, MiB", "time, ratio to all")]
    publish([conditions(options, rounds, clock), "", *table(head, rows)], path)


if __name__ == "__main__":
    main()
