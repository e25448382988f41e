"""Time slim members beside one model, full passes and other ensembles, with what they store, compute and hold.

All are built on one narrow ResNet and get the same B images: one model; Deep Ensembles, which are M networks and M
passes; σN-Ens with its full passes, the M members folded into the batch; the same slimmed; BatchEnsemble; and
Packed-Ensembles of twice the width without groups of their own (α = 2, γ = 1), whose cost hardly depends on M. A
training step is forward pass, loss, backward pass and a step of SGD; an evaluation pass is the forward pass in
evaluation mode. A slim ensemble is made once, before it is timed: slimming is no part of a step.

The gates are set, not trained. Of the first norm of each block, which is the regularised one, every channel is open to
one member, drawn at random, and to each other member with the probability that makes a share `--open` of all gates
open; by default 1/M + 0.03. All other gates are open.

All are timed in turn within every round, the first one moving on from round to round. A ratio is the median over
rounds of the time over that of one model in the same round, with a 95 % bootstrap interval. Memory is the most that a
step or a pass of one network holds at once beyond weights, gradients and the state of the optimiser.

    python benchmarks/slim.py [--members 2 4 8 16] [--open 4=0.28] [--format channels-last] [--batch 16] [--width 64]
"""

from __future__ import annotations

import argparse

import torch
from common import (
    CLASSES,
    FORMATS,
    PHASES,
    Contender,
    cells,
    conditions,
    contend,
    count,
    measure,
    options_of,
    prepare,
    publish,
)
from common import table as markdown
from torch.nn import functional as F

import sigmaens as sn
from sigmaens.backbones import narrow_resnet
from sigmaens.baselines import DeepEnsemble
from sigmaens.cost import peak_memory
from sigmaens.peers import BatchEnsemble, PackedEnsemble
from sigmaens.results import multiply_adds, parameters
from sigmaens.slim import slim

ONE = "one model"
INNER = "*.bn1"
OPEN, CLOSED = 3.0, -12.0  # scale logits: gates of 0.95 and of 6e-6


def ownership(ens: sn.SigmaEnsemble, share: float) -> None:
    """Set the regularised gates: each channel has one owner, and a share in [1/M, 1] of all gates is open."""
    others = (share * ens.members - 1) / (ens.members - 1)
    draw = torch.Generator().manual_seed(0)
    for name in ens.regularized:
        gamma = ens.backbone.get_submodule(name).gamma.detach()
        mask = torch.rand(gamma.shape, generator=draw) < others
        owner = torch.randint(ens.members, gamma.shape[1:], generator=draw)
        mask[owner, torch.arange(gamma.shape[1])] = True
        gamma.copy_(torch.where(mask, OPEN, CLOSED))
    for name in ens.gates().keys() - set(ens.regularized):
        ens.backbone.get_submodule(name).gamma.detach().fill_(OPEN)


def contenders(
    members: int, share: float, batch: int, width: int, size: int, memory_format: torch.memory_format
) -> dict[str, Contender]:
    """Return the contenders by name: same images and labels, same optimiser."""
    torch.manual_seed(0)
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=memory_format)
    labels = torch.randint(CLASSES, (batch,))

    def backbone() -> torch.nn.Module:
        return narrow_resnet(CLASSES, 3, width=width)

    full = sn.SigmaEnsemble(backbone(), members, head="fc", regularize=INNER)
    ownership(full, share)
    full.to(memory_format=memory_format)
    slimmed = slim(full, images[:1])
    networks = {
        ONE: backbone(),
        "Deep Ensembles": DeepEnsemble(backbone() for _ in range(members)),
        "σN-Ens": full,
        "σN-Ens, slim": slimmed,
        "BatchEnsemble": BatchEnsemble(backbone(), members),
        "Packed-Ensembles": PackedEnsemble(backbone(), members, head="fc"),
    }

    def loss(network: torch.nn.Module, logits: torch.Tensor) -> torch.Tensor:
        if network is networks[ONE]:
            return F.cross_entropy(logits, labels)
        penalty = sn.diversity_loss(network, 0.1, 1e-2) if isinstance(network, sn.SigmaEnsemble) else 0
        return sn.member_cross_entropy(logits, labels) + penalty

    return {
        name: contend(network, images, lambda logits, network=network: loss(network, logits), memory_format)
        for name, network in networks.items()
    }


def open_share(network: torch.nn.Module) -> str:
    """The share of the regularised gates that are open, in per cent."""
    if not isinstance(network, sn.SigmaEnsemble):
        return ""
    gates = torch.cat(list(network.regularized_gates().values()), dim=1)
    return f"{100 * (gates > 0.5).float().mean().item():.1f}"


def assignment(text: str) -> tuple[int, float]:
    """Read M=share."""
    members, _, share = text.partition("=")
    if int(members) < 2 or not 1 / int(members) <= float(share) <= 1:
        raise argparse.ArgumentTypeError(f"M must be at least 2 and the share in [1/M, 1], not {text}")
    return int(members), float(share)


def main() -> None:
    """Measure, print a table, and write it to a file if asked to."""
    parser = options_of(__doc__)
    parser.add_argument("--members", type=count, nargs="+", default=[2, 4, 8, 16], metavar="M", help="members, from 2")
    parser.add_argument(
        "--open", type=assignment, nargs="+", default=[], metavar="M=SHARE", help="open gates; 1/M + 0.03 if not given"
    )
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=["channels-last"], help="memory formats")
    given = parser.parse_args()
    if min(given.members) < 2:
        parser.error("--members: slim members are at least 2")
    if unused := dict(given.open).keys() - set(given.members):
        parser.error(f"--open: M = {min(unused)} is none of --members, {given.members}")
    prepare(given.threads)
    setting = {name: getattr(given, name) for name in ("batch", "width", "size")}
    image = torch.randn(1, 3, given.size, given.size)
    rows = []
    for layout in given.format:
        for members in given.members:
            share = dict(given.open).get(members, 1 / members + 0.03)
            networks = contenders(members, share, **setting, memory_format=FORMATS[layout])
            times = measure(networks, given.rounds, given.clock)
            for name, contender in networks.items():
                row = [layout, str(members), name, open_share(contender.network)]
                row += [f"{parameters(contender.network) / 1e6:.2f}"]
                row += [f"{multiply_adds(contender.network, image) / 1e6:.0f}"]
                for phase in PHASES:
                    job = getattr(contender, phase)
                    job()
                    row += [*cells(times[phase][name], times[phase][ONE]), f"{peak_memory(job) / 2**20:.0f}"]
                rows.append(row)
                print(*row, sep=" | ", flush=True)
    head = ["format", "M", "network", "open gates, %", "parameters, 10⁶", "multiply-adds of an image, 10⁶"]
    for what in ("training step", "evaluation"):
        head += [f"{what}, ms", "ratio to one model", "memory, MiB"]
    publish([conditions(setting, given.rounds, given.clock), "", *markdown(head, rows)], given.markdown)


if __name__ == "__main__":
    main()
