"""Time one training step and one evaluation pass of an ensemble beside its plain backbone, on the CPU.

Three networks built on one narrow ResNet compute M·B rows each: the plain backbone gets M·B distinct images, σN-Ens and
BatchEnsemble (TorchUncertainty's layers) get B images and repeat them for their M members. A training step is forward
pass, loss, backward pass and a step of SGD in training mode; an evaluation pass is the forward pass in evaluation mode.
Both are timed in NCHW and in channels-last.

All are timed in turn within every round, the first one moving on from round to round, so that whatever else the
machine does hits them alike. A ratio is the median over rounds of a network's time over the plain backbone's in
the same round and format, with a 95 % bootstrap interval.

On a machine that others use too, `--clock cpu` leaves out the time in which the process had to wait for a core.

    python benchmarks/step.py [--members 4] [--batch 16] [--width 64] [--size 32] [--rounds 30] [--threads 1]
"""

from __future__ import annotations

import torch
from common import CLASSES, FORMATS, PHASES, cells, conditions, contend, count, measure, options_of, prepare, publish
from common import table as markdown
from torch.nn import functional as F

import sigmaens as sn
from sigmaens.backbones import narrow_resnet
from sigmaens.peers import BatchEnsemble

PLAIN = "plain"


def contenders(members: int, batch: int, width: int, size: int, memory_format: torch.memory_format) -> dict:
    """Return the contenders by name: same initial backbone, same images and labels, same optimiser."""
    torch.manual_seed(0)
    images = torch.randn(members * batch, 3, size, size)
    labels = torch.randint(CLASSES, (members * batch,))
    backbone = narrow_resnet(CLASSES, 3, width=width)
    sigma = sn.SigmaEnsemble(backbone, members, head="fc", regularize="*.bn2")
    batch_ensemble = BatchEnsemble(backbone, members)
    few_images, few = images[:batch], labels[:batch]
    losses = {
        PLAIN: lambda logits: F.cross_entropy(logits, labels),
        "σN-Ens": lambda logits: sn.member_cross_entropy(logits, few) + sn.diversity_loss(sigma, 0.1, 1e-2),
        "BatchEnsemble": lambda logits: sn.member_cross_entropy(logits, few),
    }
    networks = zip((backbone, sigma, batch_ensemble), (images, few_images, few_images), losses.items(), strict=True)
    return {name: contend(network, x, loss, memory_format) for network, x, (name, loss) in networks}


def main() -> None:
    """Measure, print a table, and write it to a file if asked to."""
    parser = options_of(__doc__)
    parser.add_argument("--members", type=count, default=4, metavar="M", help="members of the ensembles")
    given = parser.parse_args()
    prepare(given.threads)
    setting = {name: getattr(given, name) for name in ("members", "batch", "width", "size")}
    networks = {
        (layout, name): contender
        for layout, memory_format in FORMATS.items()
        for name, contender in contenders(**setting, memory_format=memory_format).items()
    }
    times = measure(networks, given.rounds, given.clock)
    head = ["format", "network", "training step, ms", "ratio to plain", "evaluation, ms", "ratio to plain"]
    rows = [
        [layout, name, *(cell for p in PHASES for cell in cells(times[p][layout, name], times[p][layout, PLAIN]))]
        for layout, name in networks
    ]
    publish([conditions(setting, given.rounds, given.clock), "", *markdown(head, rows)], given.markdown)


if __name__ == "__main__":
    main()
