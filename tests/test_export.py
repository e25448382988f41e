"""What is exported, full and slim, for batches of any size: probabilities and their uncertainty, as of the ensemble."""

import onnxruntime
import pytest
import torch
from test_slim_networks import bert, masked, timm
from torch import nn
from torch.testing import assert_close

from sigmaens import SigmaEnsemble, SlimEnsemble, backbones, decompose, with_uncertainty

pytestmark = pytest.mark.usefixtures("one_thread")
OUTPUTS = ["probabilities", "total", "aleatoric", "modulation"]


def images(rows, size=8):
    return {"images": torch.randn(rows, 3, size, size)}


def tokens(rows, length=9):
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, 5:] = 0
    return {"input_ids": torch.randint(5, 50, (rows, length)), "attention_mask": mask}


# Network, head, inputs, and whether they are given by their names.
CASES = {
    "convolutions": (lambda: backbones.narrow_resnet(5, width=4), "fc", images, False),
    "norms inside": (
        timm("vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=24, num_heads=2, depth=2),
        "head",
        images,
        False,
    ),
    "a tokenizer's batch": (bert, "classifier", tokens, True),
}


def prepared(case, slim):
    build, head, inputs, named = CASES[case]
    ens = masked(SigmaEnsemble(build(), 2, head=head), 0.6)
    example = inputs(3)
    if slim:
        ens = ens.slim(**example) if named else ens.slim(*example.values())
        assert isinstance(ens, SlimEnsemble)
    args, kwargs = ((), example) if named else (tuple(example.values()), {})
    free = {"input_ids": {0: "batch", 1: "tokens"}, "attention_mask": {0: "batch", 1: "tokens"}}
    return ens, args, kwargs, free if named else {"args": ({0: "batch"},)}


def assert_alike(got, ens, inputs, named):
    """Outputs are what `decompose` says of the ensemble's own probabilities."""
    with torch.no_grad():
        probs = (ens(**inputs) if named else ens(*inputs.values())).double().softmax(-1)
    for value, expected in zip(got, (probs.mean(1), *decompose(probs)), strict=True):
        assert_close(torch.as_tensor(value).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("slim", [False, True], ids=["full", "slim"])
@pytest.mark.parametrize("case", CASES)
def test_torch_export(case, slim):
    ens, args, kwargs, _ = prepared(case, slim)
    _, _, inputs, named = CASES[case]
    free = {0: torch.export.Dim.DYNAMIC}
    shapes = dict.fromkeys(kwargs, free) if named else {"args": (free,)}
    program = torch.export.export(with_uncertainty(ens), args, kwargs, dynamic_shapes=shapes).module()
    for rows in (1, 2, 7):
        given = inputs(rows)
        with torch.no_grad():
            got = program(**given) if named else program(*given.values())
        assert_alike(got, ens, given, named)


@pytest.mark.parametrize("slim", [False, True], ids=["full", "slim"])
@pytest.mark.parametrize("case", CASES)
# Both inputs have as many tokens, which the exporter finds out by itself.
@pytest.mark.filterwarnings("ignore:# The axis name. tokens will not be used:UserWarning")
def test_onnx(case, slim, tmp_path):
    ens, args, kwargs, shapes = prepared(case, slim)
    _, _, inputs, named = CASES[case]
    program = torch.onnx.export(
        with_uncertainty(ens),
        args,
        kwargs=kwargs,
        dynamo=True,
        dynamic_shapes=shapes,
        input_names=list(inputs(1)),
        output_names=OUTPUTS,
        verbose=False,
    )
    program.save(tmp_path / "ens.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "ens.onnx", providers=["CPUExecutionProvider"])
    assert [(y.name, y.shape) for y in session.get_outputs()] == [
        (name, ["batch", 5] if name == "probabilities" else ["batch"]) for name in OUTPUTS
    ]
    assert [x.shape[0] for x in session.get_inputs()] == ["batch"] * len(inputs(1))
    for rows in (1, 2, 7):
        given = inputs(rows)
        assert_alike(session.run(OUTPUTS, {name: x.numpy() for name, x in given.items()}), ens, given, named)


@pytest.mark.parametrize("slim", [False, True], ids=["full", "slim"])
def test_an_ensemble_with_a_sigmoid_is_refused(slim):
    ens = masked(SigmaEnsemble(backbones.narrow_resnet(5, width=4), 2, head="fc", link="sigmoid"), 0.6)
    with pytest.raises(ValueError, match="needs an ensemble with link=\"softmax\", not 'sigmoid'"):
        with_uncertainty(ens.slim(*images(3).values()) if slim else ens)


@pytest.mark.parametrize("shape", [(1,), (3, 4), (3, 2, 2), (1, 4, 3)])
def test_outputs_that_are_no_logits_of_several_classes_are_refused(shape):
    size = torch.Size(shape).numel()
    module = with_uncertainty(SigmaEnsemble(nn.Sequential(nn.LayerNorm(size), nn.Unflatten(1, shape)), 2))
    with pytest.raises(ValueError, match="needs logits of several classes") as error:
        module(torch.randn(5, size))
    assert str(error.value).endswith(f"not outputs of shape {(5, *shape)}")


def test_broken_inputs_are_not_certain():
    ens = SigmaEnsemble(backbones.narrow_resnet(3), 2, head="fc").eval()
    x = images(2)["images"]
    x[0, 0, 0, 0] = torch.nan
    for output in with_uncertainty(ens)(x):
        assert output[0].isnan().all()
        assert output[1].isfinite().all()
