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
from harness.training.config import sharded_over

#: What the libraries say when another process has gone, or keeps quiet for longer than the timeout.
_LOST = ("closed by peer", "Connection reset", "Broken pipe", "Timed out", "timed out", "Connection refused", "NCCL")


@dataclass(frozen=True)
class Place:
    """This process among those that train together.

    Attributes:
        mesh: the processes; the last dimension's hold one copy of the parameters between them, those along the first
            of two dimensions hold the same part of one.
        group: of these processes; None: all that were started.
    """

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh
    group: dist.ProcessGroup | None = None

    def alone(self, timeout_s: float) -> Place:
        """This process by itself: what it does there communicates with no other. Every process calls it."""
        group, _ = dist.new_subgroups(1, timeout=timedelta(seconds=timeout_s))
        return Place(0, 1, self.device, DeviceMesh.from_group(group, self.device.type), group)


def environment_rank() -> int:
    """This process' rank as torchrun says it; 0 where it started nothing."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def process_group(device: str, timeout_s: float, shard: int = 0) -> Iterator[Place]:
    """Join the other processes: NCCL between GPUs, gloo between CPUs.

    Args:
        device: ``cuda`` or ``cpu``.
        timeout_s: after which a process that keeps the others waiting counts as lost.
        shard: processes that hold one copy of the parameters between them, each so many with neighbouring ranks, as
            torchrun gives them to one machine; 0: all.

    Raises:
        UserError: fewer GPUs than processes, or processes that ``shard`` does not divide.
    """
    launched = "RANK" in os.environ
    rank, world = environment_rank(), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    over = sharded_over(shard, world)
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
        yield Place(rank, world, here, _mesh(device, world, over, timedelta(seconds=timeout_s)))
        failed = False
    finally:
        # NCCL would wait for processes that are gone.
        if not (failed and world > 1):
            dist.destroy_process_group()


def _mesh(device: str, world: int, over: int, timeout: timedelta) -> DeviceMesh:
    """Of all processes: (world), or (copies, sharded over)."""
    if over == world:
        return init_device_mesh(device, (world,))
    ranks = torch.arange(world).view(-1, over)
    # By hand: the groups that init_device_mesh would make have a timeout of their own.
    groups = [dist.new_subgroups_by_enumeration(its.tolist(), timeout=timeout)[0] for its in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=("copies", "sharded"))


def lost_process(error: BaseException) -> bool:
    """Whether an exception means that another process is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _LOST)


class Sharding:
    """How FSDP-2 divides a module's parameters among the processes that hold one copy of them: float32 there, in the
    computation's dtype while it runs, gradients summed in float32."""

    def __init__(self, place: Place, dtype: str) -> None:
        self.mesh = place.mesh
        self.over = place.mesh.shape[-1]
        self.policy = MixedPrecisionPolicy()
        if dtype != "float32":
            self.policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)

    def __call__(self, module: nn.Module) -> None:
        fully_shard(module, mesh=self.mesh, mp_policy=self.policy, shard_placement_fn=self._along)

    def _along(self, parameter: nn.Parameter) -> Shard:
        """Along the first dimension that divides evenly, as experts do on 64 GPUs and do not on 96; else the first
        one, of which some processes then hold more."""
        even = (i for i, size in enumerate(parameter.shape) if size % self.over == 0)
        return Shard(next(even, 0))
