"""The processes that train together: started by torchrun, or one started by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from harness.errors import UserError
from harness.interface import DTYPES

#: What the libraries say when another process has gone, or keeps quiet for longer than the timeout.
_LOST = ("closed by peer", "Connection reset", "Broken pipe", "Timed out", "timed out", "Connection refused", "NCCL")


@dataclass(frozen=True)
class Place:
    """This process among those that train together.

    Attributes:
        group: of these processes; None: all that were started.
    """

    rank: int
    world: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    def mesh(self) -> DeviceMesh:
        """The processes' in one dimension, over which parameters are sharded."""
        if self.group is None:
            return init_device_mesh(self.device.type, (self.world,))
        return DeviceMesh.from_group(self.group, self.device.type)

    def alone(self, timeout_s: float) -> Place:
        """This process by itself: what it does there communicates with no other. Every process calls it."""
        group, _ = dist.new_subgroups(1, timeout=timedelta(seconds=timeout_s))
        return Place(0, 1, self.device, group)


def environment_rank() -> int:
    """This process' rank as torchrun says it; 0 where it started nothing."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def process_group(device: str, timeout_s: float) -> Iterator[Place]:
    """Join the other processes: NCCL between GPUs, gloo between CPUs.

    Args:
        device: ``cuda`` or ``cpu``.
        timeout_s: after which a process that keeps the others waiting counts as lost.

    Raises:
        UserError: fewer GPUs than processes.
    """
    launched = "RANK" in os.environ
    rank, world = environment_rank(), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    here = torch.device("cpu")
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise UserError(
                f"{local + 1} processes or more on a machine with {torch.cuda.device_count()} GPUs: one for each GPU"
            )
        here = torch.device("cuda", local)
        torch.cuda.set_device(here)
    joined = {} if launched else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    device_id = {"device_id": here} if device == "cuda" else {}
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **joined, **device_id)  # type: ignore[arg-type]
    failed = True
    try:
        yield Place(rank, world, here)
        failed = False
    finally:
        # NCCL would wait for processes that are gone.
        if not (failed and world > 1):
            dist.destroy_process_group()


def lost_process(error: BaseException) -> bool:
    """Whether an exception means that another process is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _LOST)


class Sharding:
    """How FSDP-2 divides a module's parameters among the processes: float32 there, in the computation's dtype while it
    runs, gradients summed in float32."""

    def __init__(self, place: Place, dtype: str) -> None:
        self.mesh = place.mesh()
        self.world = place.world
        self.policy = MixedPrecisionPolicy()
        if dtype != "float32":
            self.policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)

    def __call__(self, module: nn.Module) -> None:
        fully_shard(module, mesh=self.mesh, mp_policy=self.policy, shard_placement_fn=self._along)

    def _along(self, parameter: nn.Parameter) -> Shard:
        """Along the first dimension that divides evenly, as experts do on 64 GPUs and do not on 96; else the first
        one, of which some processes then hold more."""
        even = (i for i, size in enumerate(parameter.shape) if size % self.world == 0)
        return Shard(next(even, 0))
