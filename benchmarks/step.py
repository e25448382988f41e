"""Time one training step and one evaluation pass of an ensemble beside its plain backbone, on the CPU.

Three networks built on one narrow ResNet compute M·B rows each: the plain backbone gets M·B distinct images, σN-Ens
Three networks built on one narrow ResNet compute M·B rows each: the plain backbone gets M·B distinct images, σN-Ens and
BatchEnsemble (TorchUncertainty's layers) get B images and repeat them for their M members. A training step is forward
in evaluation mode. Both are timed in NCHW and in channels-last.

All are timed in turn within every round, the first one moving on from round to round, so that whatever else the
machine does hits them alike. A ratio is the median over rounds of a network's time over the plain backbone's in
the same round and format, with a 95 % bootstrap interval.

On a machine that others use too, `--clock cpu` leaves out the time in which the process had to wait for a core.

    python benchmarks/step.py [--members 4] [--batch 16] [--width 64] [--size 32] [--rounds 30] [--threads 1]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sigmaens as sn
from sigmaens.backbones import narrow_resnet
from sigmaens.cost import machine, median_interval, paired_times
from sigmaens.peers import BatchEnsemble

CLASSES = 10
FORMATS = {"NCHW": torch.contiguous_format, "channels-last": torch.channels_last}
PHASES = ("train", "eval")
PLAIN = "plain"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class Contender:
    """A network with its images, its training loss and its optimiser."""

    network: nn.Module
    images: Tensor
    loss: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer

    def train(self) -> None:
        self.network.train()
        self.optimizer.zero_grad()
        self.loss(self.network(self.images)).backward()
        self.optimizer.step()

    @torch.inference_mode()
    def eval(self) -> None:
        self.network.eval()
        self.network(self.images)


def contenders(members: int, batch: int, width: int, size: int, memory_format: torch.memory_format) -> dict:
    """Return the contenders by name: same initial backbone, same images and labels, same optimiser."""
    torch.manual_seed(0)
    images = torch.randn(members * batch, 3, size, size)
    labels = torch.randint(CLASSES, (members * batch,))
    backbone = narrow_resnet(CLASSES, 3, width=width)
    sigma = sn.SigmaEnsemble(backbone, members, head="fc", regularize="*.bn2")
    few = labels[:batch]

    def contend(network: nn.Module, rows: int, loss: Callable[[Tensor], Tensor]) -> Contender:
        network = network.to(memory_format=memory_format)
        x = images[:rows].contiguous(memory_format=memory_format)
        # Slow enough that thousands of steps on one batch leave the network as it was.
        groups = sn.parameter_groups(network, lr=1e-5)
        return Contender(network, x, loss, torch.optim.SGD(groups, momentum=0.9))

    return {
        PLAIN: contend(backbone, members * batch, lambda logits: F.cross_entropy(logits, labels)),
        "σN-Ens": contend(
            sigma, batch, lambda logits: sn.member_cross_entropy(logits, few) + sn.diversity_loss(sigma, 0.1, 1e-2)
        ),
        "BatchEnsemble": contend(
            BatchEnsemble(backbone, members), batch, lambda logits: sn.member_cross_entropy(logits, few)
        ),
    }


def count(text: str) -> int:
    """Read a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer ≥ 1, not {text}")
    return value


def main() -> None:
    """Measure, print a table, and write it to a file if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--members", type=count, default=4, metavar="M", help="members of the ensembles")
    parser.add_argument("--batch", type=count, default=16, metavar="B", help="images a step")
    parser.add_argument("--width", type=count, default=64, help="channels of the first stage")
    parser.add_argument("--size", type=count, default=32, help="height and width of the images, pixels")
    parser.add_argument("--rounds", type=count, default=30, help="timed rounds")
    parser.add_argument("--threads", type=count, default=1, help="threads; the training loop uses one")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="wall time, or processor time of all threads")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the table here too")
    options = vars(parser.parse_args())
    path, rounds, clock = options.pop("markdown"), options.pop("rounds"), options.pop("clock")

    torch.set_num_threads(options.pop("threads"))
    # Gates near zero make denormals, which CPUs crawl on; the training loop flushes them too.
    torch.set_flush_denormal(True)
    networks = {
        (layout, name): contender
        for layout, memory_format in FORMATS.items()
        for name, contender in contenders(**options, memory_format=memory_format).items()
    }
    jobs = {(*key, phase): getattr(contender, phase) for phase in PHASES for key, contender in networks.items()}
    times = paired_times(jobs, rounds, clock=CLOCKS[clock])

    about = machine()
    setting = f"{', '.join(f'{key} {value}' for key, value in options.items())}, {clock} time, n = {rounds} rounds"
    lines = [
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} thread(s), torch {about['torch']}; {setting}:",
        "",
        "| format | network | training step, ms | ratio to plain | evaluation, ms | ratio to plain |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for layout, name in networks:
        cells = [layout, name]
        for phase in PHASES:
            own, plain = times[layout, name, phase], times[layout, PLAIN, phase]
            ratio, low, high = median_interval(own / plain)
            cells += [f"{np.median(own) * 1e3:.1f}", f"{ratio:.3f} [{low:.3f}, {high:.3f}]"]
        lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines))
    if path is not None:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
