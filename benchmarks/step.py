"""Time one training step and one evaluation pass of an ensemble beside its plain backbone, on the CPU.

Networks built on one backbone, a narrow ResNet or torchvision's ResNet-18, compute M·B rows each: the plain backbone
gets M·B distinct images; σN-Ens gets B images, as by default and one member after the other; so does BatchEnsemble
(TorchUncertainty's layers, on the narrow ResNet). A training step is forward pass, loss, backward pass and a step of
SGD in training mode; an evaluation pass is the forward pass in evaluation mode. Both are timed in NCHW and in
channels-last. The default's proof that members may be folded is made in the round before the timed ones.

All are timed in turn within every round, the first one moving on from round to round, so that whatever else the
machine does hits them alike. A ratio is the median over rounds of a network's time over the plain backbone's in
the same round and format, with a 95 % bootstrap interval.

On a machine that others use too, `--clock cpu` leaves out the time in which the process had to wait for a core.

    python benchmarks/step.py [--network narrow_resnet] [--members 4] [--batch 16] [--width 64] [--size 32]
        [--rounds 30] [--threads 1]
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

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
from torchvision.models import resnet18

import sigmaens as sn
from sigmaens.backbones import narrow_resnet
from sigmaens.peers import BatchEnsemble

PLAIN = "plain"


def contenders(
    network: str, members: int, batch: int, width: int, size: int, memory_format: torch.memory_format
) -> dict:
    """Return the contenders by name: same initial backbone, same images and labels, same optimiser."""
    torch.manual_seed(0)
    images = torch.randn(members * batch, 3, size, size)
    labels = torch.randint(CLASSES, (members * batch,))
    narrow = network == "narrow_resnet"
    backbone = narrow_resnet(CLASSES, 3, width=width) if narrow else resnet18(num_classes=CLASSES)
    few_images, few = images[:batch], labels[:batch]

    def ensemble(at_once: int | None) -> Contender:
        ens = sn.SigmaEnsemble(backbone, members, head="fc", regularize="*.bn2", at_once=at_once)

        def loss(logits: torch.Tensor) -> torch.Tensor:
            return sn.member_cross_entropy(logits, few) + sn.diversity_loss(ens, 0.1, 1e-2)

        made = contend(ens, few_images, loss, memory_format)
        return replace(made, whole=True)

    plain = contend(copy.deepcopy(backbone), images, lambda logits: F.cross_entropy(logits, labels), memory_format)
    made = {PLAIN: plain, "σN-Ens": ensemble(None), "σN-Ens, one by one": ensemble(1)}
    if narrow:
        batch_ensemble = BatchEnsemble(backbone, members)
        few_loss = functools.partial(sn.member_cross_entropy, labels=few)
        made["BatchEnsemble"] = contend(batch_ensemble, few_images, few_loss, memory_format)
    return made


def main() -> None:
    """Measure, print a table, and write it to a file if asked to."""
    parser = options_of(__doc__)
    parser.add_argument("--members", type=count, default=4, metavar="M", help="members of the ensembles")
    parser.add_argument(
        "--network", choices=("narrow_resnet", "resnet18"), default="narrow_resnet", help="the backbone"
    )
    given = parser.parse_args()
    prepare(given.threads)
    setting = {name: getattr(given, name) for name in ("network", "members", "batch", "width", "size")}
    if given.network == "resnet18":
        setting["width"] = 64
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
