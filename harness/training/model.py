"""A decoder-only transformer whose feed-forward layers are mixtures of experts.

    x = embedding[tokens]
    each block:  x = x + attention(norm(x));  x = x + experts(norm(x))
    logits = head(norm(x))

RMSNorm before each part, rotary position embedding, causal attention by PyTorch's scaled_dot_product_attention. The
experts are any registered implementation's (`experts`). Embedding and head are two matrices: tied, they would be one
parameter in two places, which FSDP-2 would have to gather whole for both ends of the model, and at these sizes they are
a few per cent of the parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.interface import Implementation
from harness.training.config import Config
from harness.training.experts import MoE, draw

#: Of embedding and head, as in GPT-2.
EMBEDDING_STD = 0.02


def rotary_table(sequence: int, width: int, base: float, device: torch.device) -> Tensor:
    """(2, sequence, width / 2), fp32: cosines and sines of position · base^(-2i / width) (arXiv 2104.09864)."""
    rates = base ** (-torch.arange(0, width, 2, device=device).float() / width)
    angles = torch.outer(torch.arange(sequence, device=device).float(), rates)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + width/2]) of each head by their position's angles: (B, heads, S, width)."""
    cos, sin = table
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@functools.cache
def fused_rotate() -> Callable[[Tensor, Tensor], Tensor]:
    """`rotate` compiled into one kernel: in bfloat16 it moves 4 bytes an element, written out 48, in nine kernels with
    float32 between them."""
    return torch.compile(rotate, dynamic=False)


class Attention(nn.Module):
    def __init__(self, config: Config, number: int, table: Tensor, device: torch.device) -> None:
        super().__init__()
        self.heads, d = config.heads, config.d
        # Not a buffer: the same for all blocks, never cast, not part of a checkpoint.
        self.table = table

        def weight(name: str, rows: int, std: float) -> nn.Parameter:
            return nn.Parameter(draw(config.seed, f"block {number} {name}", (rows, d), std, device))

        self.query_key_value = weight("query_key_value", 3 * d, d**-0.5)
        self.out = weight("attention", d, (2 * config.layers * d) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, d) -> (B, S, d)."""
        batch, sequence, d = x.shape
        joint = F.linear(x, self.query_key_value).view(batch, sequence, 3, self.heads, d // self.heads)
        query, key, value = joint.permute(2, 0, 3, 1, 4)  # each (B, heads, S, width)
        turn = fused_rotate() if x.is_cuda else rotate
        query, key = turn(query, self.table), turn(key, self.table)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return F.linear(mixed.transpose(1, 2).reshape(batch, sequence, d), self.out)


class Block(nn.Module):
    def __init__(
        self, config: Config, plugin: Implementation, number: int, table: Tensor, device: torch.device
    ) -> None:
        super().__init__()
        self.recompute = config.recompute
        self.attention_norm = nn.RMSNorm(config.d, eps=1e-6, device=device)
        self.attention = Attention(config, number, table, device)
        self.experts_norm = nn.RMSNorm(config.d, eps=1e-6, device=device)
        self.experts = MoE(config, plugin, number, device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, d) -> (B, S, d), and the load-balancing loss."""
        if self.recompute and self.training:
            out, balance = checkpoint(self._forward, x, use_reentrant=False)
            return out, balance
        return self._forward(x)

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        out, balance = self.experts(self.experts_norm(x).flatten(0, 1))
        return x + out.view(x.shape), balance


class Transformer(nn.Module):
    """(B, S) tokens -> losses.

    Args:
        wrap: called with each block as soon as it exists: sharded at once, only one block at a time is whole on a GPU.

    Attributes:
        notes: what the plugin substituted or restricted.
    """

    def __init__(
        self,
        config: Config,
        plugin: Implementation,
        device: torch.device,
        wrap: Callable[[nn.Module], object] = lambda block: block,
    ) -> None:
        super().__init__()
        size = config.vocabulary, config.d
        self.embedding = nn.Parameter(draw(config.seed, "embedding", size, EMBEDDING_STD, device))
        table = rotary_table(config.sequence, config.d // config.heads, config.rotary_base, device)
        self.blocks = nn.ModuleList()
        self.notes: list[str] = []
        for number in range(config.layers):
            block = Block(config, plugin, number, table, device)
            wrap(block)
            self.blocks.append(block)
            self.notes = block.experts.notes
        self.norm = nn.RMSNorm(config.d, eps=1e-6, device=device)
        self.head = nn.Parameter(draw(config.seed, "head", size, EMBEDDING_STD, device))

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy of the targets in nats, and the mean of the blocks' load-balancing losses; fp32.

        Args:
            tokens, targets: (B, S), int64; targets[b, s] is what follows tokens[b, s].
        """
        x = F.embedding(tokens, self.embedding)
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        logits = F.linear(self.norm(x), self.head)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return loss, torch.stack(balances).mean()
