"""Model families of transformers and timm, built small from configs: loss and every gradient on "jax" against CPU torch.

    python tests/models/zoo.py                        # all; --help
    python tests/models/zoo.py --models 'qwen|mamba' --shard 1/2 --json build/zoo.json

Exit code 1 if a model fails. test_zoo.py runs the models marked quick.
"""

from __future__ import annotations

import copy
import dataclasses
import json as jsonlib
import re
import time
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import torch
import transformers as hf
import typer
from rich.progress import Progress

import torchax_core  # noqa: F401 - the device

LOSS_RTOL, GRADIENT_ATOL = 1e-5, 2e-5
"""float32: room for summing in another order, at these sizes."""

Inputs = dict[str, torch.Tensor]
Case = Callable[[], tuple[torch.nn.Module, Inputs]]

_IDS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
_TEXT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_VISION: dict[str, Any] = {k: v for k, v in _TEXT.items() if k != "vocab_size"}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
}


def _language(model: Any, config: Any, **settings: Any) -> Case:
    """A model with a loss of its own on tokens."""
    return lambda: (model(config(**settings)), {"input_ids": _IDS, "labels": _IDS})


def _encoder(model: Any, config: Any, **settings: Any) -> Case:
    def make() -> tuple[torch.nn.Module, Inputs]:
        mask = torch.ones_like(_IDS)
        mask[0, 8:] = 0
        return model(config(**settings)), {"input_ids": _IDS, "attention_mask": mask}

    return make


def _other(model: Any, config: Any, inputs: dict[str, tuple[int, ...]], **settings: Any) -> Case:
    """A model of images or sound: `inputs` are the shapes of random tensors."""
    return lambda: (model(config(**settings)), {name: torch.randn(*shape) for name, shape in inputs.items()})


def _timm(name: str, size: int = 64) -> Case:
    def make() -> tuple[torch.nn.Module, Inputs]:
        import timm  # it needs torchvision, which the models of transformers do without (`make setup VISION=`)

        return timm.create_model(name, num_classes=10), {"x": torch.randn(2, 3, size, size)}

    return make


_IMAGE = {"pixel_values": (2, 3, 32, 32)}
_MOE = {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

CASES: dict[str, Case] = {
    "albert": _encoder(hf.AlbertModel, hf.AlbertConfig, **_TEXT),
    "bart": _language(hf.BartForConditionalGeneration, hf.BartConfig, **_SEQ2SEQ),
    "bert": _encoder(hf.BertModel, hf.BertConfig, **_TEXT),
    "bloom": _language(hf.BloomForCausalLM, hf.BloomConfig, vocab_size=100, hidden_size=32, n_layer=2, n_head=4),
    "clip": _other(hf.CLIPVisionModel, hf.CLIPVisionConfig, _IMAGE, **_VISION, image_size=32, patch_size=8),
    "convnext": _other(hf.ConvNextModel, hf.ConvNextConfig, _IMAGE, hidden_sizes=[8, 16, 32, 32], depths=[1] * 4),
    "deberta": _encoder(
        hf.DebertaV2Model, hf.DebertaV2Config, **_TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "electra": _encoder(hf.ElectraModel, hf.ElectraConfig, **_TEXT),
    "falcon": _language(hf.FalconForCausalLM, hf.FalconConfig, **_TEXT),
    "gemma2": _language(hf.Gemma2ForCausalLM, hf.Gemma2Config, **_TEXT, num_key_value_heads=2, head_dim=8),
    "gpt_neox": _language(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, **_TEXT),
    "llama": _language(hf.LlamaForCausalLM, hf.LlamaConfig, **_TEXT, num_key_value_heads=2),
    "mamba": _language(
        hf.MambaForCausalLM, hf.MambaConfig, vocab_size=100, hidden_size=32, num_hidden_layers=1, state_size=8
    ),
    "mamba2": _language(
        hf.Mamba2ForCausalLM,
        hf.Mamba2Config,
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=1,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=1,
        chunk_size=8,
    ),
    "mixtral": _language(hf.MixtralForCausalLM, hf.MixtralConfig, **_TEXT, num_key_value_heads=2, num_local_experts=4),
    "opt": _language(hf.OPTForCausalLM, hf.OPTConfig, **_TEXT, ffn_dim=64, word_embed_proj_dim=32),
    "phi": _language(hf.PhiForCausalLM, hf.PhiConfig, **_TEXT),
    "qwen2_moe": _language(
        hf.Qwen2MoeForCausalLM, hf.Qwen2MoeConfig, **_TEXT, **_MOE, shared_expert_intermediate_size=32
    ),
    "resnet": _other(
        hf.ResNetModel, hf.ResNetConfig, _IMAGE, embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1] * 4
    ),
    "segformer": _other(
        hf.SegformerModel,
        hf.SegformerConfig,
        {"pixel_values": (2, 3, 64, 64)},
        hidden_sizes=[8, 16, 32, 32],
        depths=[1] * 4,
        num_attention_heads=[1, 2, 2, 4],
    ),
    "swin": _other(
        hf.SwinModel, hf.SwinConfig, _IMAGE, image_size=32, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4
    ),
    "t5": _language(
        hf.T5ForConditionalGeneration,
        hf.T5Config,
        vocab_size=100,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "vit": _other(hf.ViTModel, hf.ViTConfig, _IMAGE, **_VISION, image_size=32, patch_size=8),
    "wav2vec2": _other(
        hf.Wav2Vec2Model,
        hf.Wav2Vec2Config,
        {"input_values": (2, 400)},
        **_VISION,
        conv_dim=[16, 16],
        conv_stride=[5, 2],
        conv_kernel=[10, 3],
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
    ),
    "whisper": lambda: (
        hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(
                **_SEQ2SEQ, num_mel_bins=8, max_source_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2
            )
        ),
        {"input_features": torch.randn(2, 8, 40), "labels": _IDS},
    ),
    "timm convnext_atto": _timm("convnext_atto"),
    "timm efficientnet_b0": _timm("efficientnet_b0"),
    "timm mobilenetv3": _timm("mobilenetv3_small_050"),
    "timm regnetx_002": _timm("regnetx_002"),
    "timm vit_tiny": _timm("vit_tiny_patch16_224", 224),
}
QUICK = ("electra", "mixtral", "opt")


@dataclasses.dataclass
class Outcome:
    """How a model came off: errors relative to CPU torch's loss, and the largest of any gradient's elements."""

    model: str
    passed: bool
    loss_error: float = float("nan")
    gradient_error: float = float("nan")
    seconds: float = 0.0
    message: str = ""


def compare(name: str) -> Outcome:
    """Loss and gradients of one model in eval mode, on both devices."""
    started = time.perf_counter()
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    ours = copy.deepcopy(model.eval()).to("jax")
    want, got = _loss(model, inputs), _loss(ours, {key: value.to("jax") for key, value in inputs.items()})
    pairs = list(zip(model.parameters(), ours.parameters(), strict=True))
    missing = [p.shape for p, q in pairs if (p.grad is None) != (q.grad is None)]
    if missing:
        raise AssertionError(f"gradients are there on one device only, for parameters of shapes {missing}")
    loss_error = abs(got - want) / max(abs(want), 1e-12)
    errors = [(p.grad - q.grad.cpu()).abs().max().item() for p, q in pairs if p.grad is not None and q.grad is not None]
    passed = loss_error <= LOSS_RTOL and max(errors) <= GRADIENT_ATOL
    return Outcome(name, passed, loss_error, max(errors), time.perf_counter() - started)


def _loss(model: torch.nn.Module, inputs: Inputs) -> float:
    output = model(*inputs.values()) if set(inputs) == {"x"} else model(**inputs)
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = getattr(output, "last_hidden_state", output).pow(2).mean()
    loss.backward()
    return float(loss)


def main(
    models: Annotated[str, typer.Option(help="A regular expression; models whose names it is found in.")] = "",
    shard: Annotated[str, typer.Option(help="i/n: the i-th of n equal parts, from 1.")] = "1/1",
    json: Annotated[str | None, typer.Option(help="Write the outcomes to this file.")] = None,
) -> None:
    """Compare model families of transformers and timm on device "jax" with CPU torch: loss and every gradient."""
    part, parts = map(int, shard.split("/"))
    chosen = [name for name in CASES if re.search(models, name)][part - 1 :: parts]
    if not chosen:
        raise typer.BadParameter(f"no model matches {models!r}; there are {', '.join(CASES)}")
    outcomes = []
    with Progress() as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in progress.track(chosen, description="models"):
            try:
                outcome = compare(name)
            except Exception as error:
                outcome = Outcome(name, False, message=f"{type(error).__name__}: {error}".partition("\n")[0])
            outcomes.append(outcome)
            mark = "ok  " if outcome.passed else "FAIL"
            progress.print(
                f"{mark} {name:22} loss {outcome.loss_error:.1e}  gradients {outcome.gradient_error:.1e}  "
                f"{outcome.seconds:5.1f} s  {outcome.message}"
            )
    if json is not None:
        with open(json, "w") as file:
            jsonlib.dump([dataclasses.asdict(outcome) for outcome in outcomes], file, indent=1)
    failed = [outcome.model for outcome in outcomes if not outcome.passed]
    print(
        f"{len(outcomes) - len(failed)} of {len(outcomes)} models agree"
        + (f"; not {', '.join(failed)}" if failed else "")
    )
    raise typer.Exit(bool(failed))


if __name__ == "__main__":
    typer.run(main)
