"""What the benchmarks of training steps and evaluation passes share."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import sigmaens as sn
from sigmaens.cost import machine, median_interval, paired_times

CLASSES = 10
FORMATS = {"NCHW": torch.contiguous_format, "channels-last": torch.channels_last}
PHASES = ("train", "eval")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class Contender:
    """A network with its images, its training loss and its optimiser; `autocast` is the precision it runs in.

    A network with `at_once` members learns chunk by chunk, as in the training loop, but where it is to learn as a
    `whole`: `loss` is then that of a chunk.
    `penalty` is added to it once a step.
    """

    network: nn.Module
    images: Tensor
    loss: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    autocast: torch.dtype | None = None
    penalty: Callable[[], Tensor] | None = None
    whole: bool = False

    def train(self) -> None:
        """Take a training step: forward and backward pass, and a step of the optimiser."""
        self.network.train()
        self.optimizer.zero_grad()
        extra = 0.0 if self.penalty is None else self.penalty()
        passes = self._passes()
        while True:
            with self._precision():
                share, logits = next(passes, (0.0, None))
                if logits is None:
                    break
                loss = share * self.loss(logits) + extra
            loss.backward()
            extra = 0.0
        self.optimizer.step()

    @torch.inference_mode()
    def eval(self) -> Tensor:
        """Make a forward pass in evaluation mode."""
        self.network.eval()
        with self._precision():
            return self.network(self.images)

    def _passes(self) -> Iterator[tuple[float, Tensor]]:
        """Yield logits and the share of the members they are of."""
        if self.whole or getattr(self.network, "at_once", None) is None:
            yield 1.0, self.network(self.images)
        else:
            for logits in self.network.chunks(self.images):
                yield logits.shape[1] / self.network.members, logits

    def _precision(self) -> contextlib.AbstractContextManager:
        return precision_of(self.images.device, self.autocast)


def precision_of(device: torch.device, autocast: torch.dtype | None) -> contextlib.AbstractContextManager:
    """Return a context in which a device computes in a lower precision, or as it is for None."""
    return contextlib.nullcontext() if autocast is None else torch.autocast(device.type, autocast)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was given; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def contend(
    network: nn.Module, images: Tensor, loss: Callable[[Tensor], Tensor], memory_format: torch.memory_format
) -> Contender:
    """Make a network, put into a memory format, a contender."""
    network = network.to(memory_format=memory_format)
    # Slow enough that thousands of steps on one batch leave the network as it was.
    groups = sn.parameter_groups(network, lr=1e-5)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    return Contender(network, images.contiguous(memory_format=memory_format), loss, optimizer)


def measure(contenders: Mapping[object, Contender], rounds: int, clock: str) -> dict[str, dict[object, np.ndarray]]:
    """Return seconds (rounds,) of every contender in both phases, {phase: {name: seconds}}, paired in each phase.

    A time ends when the contender's device has done everything, and so the next one starts on an idle device.
    """

    def job(contender: Contender, phase: str) -> Callable[[], None]:
        def run() -> None:
            getattr(contender, phase)()
            wait_for(contender.images.device)

        return run

    return {
        phase: paired_times({name: job(c, phase) for name, c in contenders.items()}, rounds, clock=CLOCKS[clock])
        for phase in PHASES
    }


def cells(own: np.ndarray, reference: np.ndarray) -> list[str]:
    """Return a network's median time, milliseconds, and its ratio to a reference with the 95 % interval, as text."""
    ratio, low, high = median_interval(own / reference)
    return [f"{np.median(own) * 1e3:.1f}", f"{ratio:.3f} [{low:.3f}, {high:.3f}]"]


def count(text: str) -> int:
    """Read a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer ≥ 1, not {text}")
    return value


def target(text: str) -> Path:
    """Read the path of a file to be written, in a folder that is there: before anything is measured."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def options_of(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch", type=count, default=16, metavar="B", help="images a step")
    parser.add_argument("--width", type=count, default=64, help="channels of the first stage")
    parser.add_argument("--size", type=count, default=32, help="height and width of the images, pixels")
    parser.add_argument("--rounds", type=count, default=30, help="timed rounds")
    parser.add_argument("--threads", type=count, default=1, help="threads; the training loop uses one")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="wall time, or processor time of all threads")
    parser.add_argument("--markdown", type=target, metavar="PATH", help="write the table here too")
    return parser


def prepare(threads: int) -> None:
    """Set torch up as the training loop does, but for the number of threads."""
    torch.set_num_threads(threads)
    # Gates near zero make denormals, which CPUs crawl on; the training loop flushes them too.
    torch.set_flush_denormal(True)


def conditions(setting: Mapping[str, object], rounds: int, clock: str) -> str:
    """Describe the machine and the setting of a table."""
    about = machine()
    # What glibc was told to do with memory decides how long large blocks take.
    told = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    what = ", ".join(f"{name} {value}" for name, value in {**setting, **told}.items())
    return (
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} thread(s), torch {about['torch']}; {what}, "
        f"{clock} time, n = {rounds} rounds:"
    )


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a markdown table."""
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]


def publish(lines: list[str], path: Path | None) -> None:
    """Print lines, and write them to a file if there is a path."""
    print("\n".join(lines))
    if path is not None:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
