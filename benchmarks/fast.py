"""Time faster full passes of σN-Ens: channels-last, bf16 autocast, torch.compile, and what of these goes together.

One narrow ResNet as a σN-Ens of M members, each variant a copy of it: a training step is forward pass, loss, backward
pass and a step of SGD, an evaluation pass the forward pass in evaluation mode. A ratio is the median over rounds of a
variant's time over that of float32, NCHW and eager in the same round, with a 95 % bootstrap interval. What a variant
changes is the largest difference of a logit in evaluation by the largest absolute logit, before any training step.
Compiling, which comes before the timed rounds, is timed by itself: the first step and the first pass.

Also told: into how many graphs `torch.compile` splits the ensemble, and a slim one of it, and why.

    python benchmarks/fast.py [--members 4] [--batch 16] [--width 64] [--size 32] [--rounds 30] [--threads 1]
"""

from __future__ import annotations

import copy
import itertools
import time

import torch
from common import CLASSES, FORMATS, PHASES, cells, conditions, contend, count, measure, options_of, prepare, publish
from common import table as markdown

import sigmaens as sn
from sigmaens.backbones import narrow_resnet
from sigmaens.slim import slim

PLAIN = ("NCHW", "float32", "eager")


def graphs(network: torch.nn.Module, images: torch.Tensor) -> str:
    """Tell into how many graphs `torch.compile` splits a network in training mode."""
    torch._dynamo.reset()
    told = torch._dynamo.explain(network.train())(images)
    torch._dynamo.reset()
    return f"{told.graph_count} graph(s), {told.graph_break_count} break(s)"


def main() -> None:
    """Measure, print a table, and write it to a file if asked to."""
    parser = options_of(__doc__)
    parser.add_argument("--members", type=count, default=4, metavar="M", help="members of the ensemble")
    given = parser.parse_args()
    prepare(given.threads)
    setting = {name: getattr(given, name) for name in ("members", "batch", "width", "size")}
    torch.manual_seed(0)
    images = torch.randn(given.batch, 3, given.size, given.size)
    labels = torch.randint(CLASSES, (given.batch,))
    ens = sn.SigmaEnsemble(narrow_resnet(CLASSES, 3, width=given.width), given.members, head="fc", regularize="*.bn1")
    with torch.no_grad():
        for training in (True, False):
            ens.train(training)(images)  # proves folding, which compiled passes no longer do

    def loss(logits: torch.Tensor, ens: sn.SigmaEnsemble) -> torch.Tensor:
        return sn.member_cross_entropy(logits, labels) + sn.diversity_loss(ens, 0.1, 1e-2)

    variants, seconds = {}, {}
    for key in itertools.product(FORMATS, ("float32", "bf16"), ("eager", "compiled")):
        layout, precision, mode = key
        own = copy.deepcopy(ens)
        contender = contend(own, images, lambda logits, own=own: loss(logits, own), FORMATS[layout])
        if precision == "bf16":
            contender.autocast = torch.bfloat16
        if mode == "compiled":
            contender.network = torch.compile(own)
        variants[key] = contender
    logits, changes = {}, {}
    for key, contender in variants.items():
        start = time.perf_counter()
        logits[key] = contender.eval().float()
        changes[key] = (logits[key] - logits[PLAIN]).abs().max().item() / logits[PLAIN].abs().max().item()
        contender.train()
        seconds[key] = time.perf_counter() - start
    times = measure(variants, given.rounds, given.clock)
    head = ["format", "precision", "mode"]
    head += [f"{what}{unit}" for what in ("training step", "evaluation") for unit in (", ms", ", ratio")]
    head += ["change of the logits", "first step and pass, s"]
    rows = []
    for key in variants:
        timed = [cell for phase in PHASES for cell in cells(times[phase][key], times[phase][PLAIN])]
        rows.append([*key, *timed, f"{changes[key]:.0e}" if changes[key] else "0", f"{seconds[key]:.0f}"])
    splits = [f"{name}: {graphs(net, images)}" for name, net in (("σN-Ens", ens), ("slim", slim(ens, images[:1])))]
    lines = [conditions(setting, given.rounds, given.clock), "", *markdown(head, rows), ""]
    publish([*lines, f"`torch.compile` makes of it: {'; '.join(splits)}."], given.markdown)


if __name__ == "__main__":
    main()
