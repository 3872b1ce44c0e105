"""A small zoo of models for tests: each with a batch and a loss, deterministic, and tiny.

`ZOO[name]()` builds a `Sample`; every builder takes `dropout=` (0.0 turns all dropout off).
The loss comes in all the ways that a job allows: a function, the model's own scalar, and a `.loss` field.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES = 4
VOCABULARY = 61
LENGTH = 12

Loss = Callable[[Any, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Sample:
    """A model in train mode, a batch of `SAMPLES` samples, and its loss (None: the model brings its own)."""

    model: nn.Module
    batch: dict[str, Tensor]
    loss: Loss | None = None

    def compute_loss(self, batch: Mapping[str, Tensor] | None = None) -> Tensor:
        """Run the model eagerly, as a user would."""
        fields = self.batch if batch is None else batch
        accepted = inspect.signature(self.model.forward).parameters
        outputs = self.model(**{name: tensor for name, tensor in fields.items() if name in accepted})
        if self.loss is not None:
            return self.loss(outputs, fields)
        if isinstance(outputs, Tensor):
            return outputs
        return outputs["loss"]


def _tokens(*names: str, length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randint(1, VOCABULARY, (SAMPLES, length), generator=generator) for name in names}


def _images(channels: int, size: int) -> Tensor:
    return torch.randn(SAMPLES, channels, size, size, generator=torch.Generator().manual_seed(8))


def _classes(count: int) -> Tensor:
    return torch.randint(0, count, (SAMPLES,), generator=torch.Generator().manual_seed(9))


def _token_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _class_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits, batch["label"])


# A GPT of our own: tied embeddings, dropout, a mask kept as a non-persistent buffer


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(
        self, *, layers: int = 3, width: int = 32, heads: int = 4, dropout: float = 0.1, length: int = LENGTH
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.token(ids) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(dropout: float = 0.1) -> Sample:
    torch.manual_seed(1)
    return Sample(GPT(dropout=dropout), _tokens("ids", "labels"), _token_loss)


class LanguageModel(GPT):
    """The same with its loss inside, as transformers' models have it."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(input_ids).flatten(0, 1), labels.flatten())


def tiny_gpt(dropout: float = 0.1) -> LanguageModel:
    """A model for `input_ids` and `labels` of (B, up to 16), tokens below `VOCABULARY`."""
    torch.manual_seed(1)
    return LanguageModel(layers=2, dropout=dropout, length=16)


# Vision: batch norm, in-place activations, strided shortcuts, long skips


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self, *, width: int = 8, classes: int = 10, dropout: float = 0.1) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        widths = [width, width, 2 * width, 4 * width]
        self.stages = nn.Sequential(*(Residual(a, b, stride=1 if a == b else 2) for a, b in pairwise(widths)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout, inplace=True)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, image: Tensor) -> Tensor:  # (B, 3, 16, 16) -> (B, classes)
        return self.head(self.dropout(self.pool(self.stages(self.stem(image))).flatten(1)))


def resnet(dropout: float = 0.1) -> Sample:
    torch.manual_seed(2)
    return Sample(ResNet(dropout=dropout), {"image": _images(3, 16), "label": _classes(10)}, _class_loss)


def tiny_resnet() -> ResNet:
    """A model from `image` of (B, 3, 8, 8) to 5 classes, without dropout."""
    torch.manual_seed(2)
    return ResNet(classes=5, dropout=0.0)


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(2, outputs),
        nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.SiLU(),
    )


class UNet(nn.Module):
    def __init__(self, *, width: int = 4) -> None:
        super().__init__()
        self.down1, self.down2 = _convolutions(1, width), _convolutions(width, 2 * width)
        self.bottom = _convolutions(2 * width, 4 * width)
        self.up2, self.merge2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), _convolutions(4 * width, 2 * width)
        self.merge1 = _convolutions(3 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, noisy: Tensor) -> Tensor:  # (B, 1, 16, 16), same out
        one = self.down1(noisy)
        two = self.down2(F.max_pool2d(one, 2))
        x = self.bottom(F.avg_pool2d(two, 2))
        x = self.merge2(torch.cat([self.up2(x), two], dim=1))
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.merge1(torch.cat([x, one], dim=1)))


def unet(dropout: float = 0.1) -> Sample:
    del dropout
    torch.manual_seed(3)

    def loss(image: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.mse_loss(image, batch["clean"])

    clean = _images(1, 16)
    return Sample(UNet(), {"noisy": clean + 0.1, "clean": clean}, loss)


# A recurrent classifier that returns its own loss, with a frozen embedding


class LSTMClassifier(nn.Module):
    def __init__(self, *, width: int = 12, classes: int = 5, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.embedding.weight.requires_grad_(False)
        self.lstm = nn.LSTM(width, width, num_layers=2, bidirectional=True, batch_first=True, dropout=dropout)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, ids: Tensor, label: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(ids))
        return F.cross_entropy(self.head(hidden.mean(dim=1)), label)


def lstm(dropout: float = 0.1) -> Sample:
    torch.manual_seed(4)
    return Sample(LSTMClassifier(dropout=dropout), {**_tokens("ids"), "label": _classes(5)})


# A sparse mixture of experts: each expert sees only the tokens that chose it, so shapes depend on data


class SparseExperts(nn.Module):
    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (N, C) -> (N, C) and a scalar
        odds = self.gate(x).softmax(dim=-1)
        weights, picks = odds.topk(self.chosen, dim=-1)  # (N, k)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, ranks = torch.where(picks == number)
            y = y.index_add(0, rows, expert(x[rows]) * weights[rows, ranks, None])
        used = F.one_hot(picks, len(self.experts)).float().sum(dim=(0, 1)) / (x.shape[0] * self.chosen)
        return y, (used * odds.mean(dim=0)).sum()


class MoE(nn.Module):
    def __init__(self, *, layers: int = 2, width: int = 16, experts: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(SparseExperts(width, experts, chosen=2) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.token(ids).flatten(0, 1)
        balance = torch.zeros((), device=x.device)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y, uneven = layer(norm(x))
            x, balance = x + self.dropout(y), balance + uneven
        return {"loss": F.cross_entropy(self.head(x), labels.flatten()) + 0.01 * balance}


def moe(dropout: float = 0.1) -> Sample:
    torch.manual_seed(5)
    return Sample(MoE(dropout=dropout), _tokens("ids", "labels"))


# transformers, from tiny configurations (the package is needed only when one of these is built)


def gpt2(dropout: float = 0.1) -> Sample:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(11)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=4, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Sample(GPT2LMHeadModel(config).train(), _tokens("input_ids", "labels"))


def llama(dropout: float = 0.1) -> Sample:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(12)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, attention_dropout=dropout, use_cache=False,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return Sample(LlamaForCausalLM(config).train(), _tokens("input_ids", "labels"))


def bert(dropout: float = 0.1) -> Sample:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(13)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    batch = _tokens("input_ids", "labels")
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][:, -3:] = 0
    batch["labels"][:, ::2] = -100
    return Sample(BertForMaskedLM(config).train(), batch)


def t5(dropout: float = 0.1) -> Sample:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(14)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=dropout,
        use_cache=False, decoder_start_token_id=0, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    return Sample(T5ForConditionalGeneration(config).train(), _tokens("input_ids", "labels"))


def vit(dropout: float = 0.1) -> Sample:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(15)
    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=10,
    )  # fmt: skip
    return Sample(ViTForImageClassification(config).train(), {"pixel_values": _images(3, 16), "labels": _classes(10)})


OWN: dict[str, Callable[..., Sample]] = {"gpt": gpt, "resnet": resnet, "unet": unet, "lstm": lstm, "moe": moe}
TRANSFORMERS: dict[str, Callable[..., Sample]] = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5, "vit": vit}
ZOO: dict[str, Callable[..., Sample]] = {**OWN, **TRANSFORMERS}
